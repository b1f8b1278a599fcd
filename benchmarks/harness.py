"""What the benchmarks share: one-product models, a table that begins with the ratio, and the conditions below it.

No benchmark prints a time of its own. Two ways to do the same thing run in turn, in one process; every pair of runs
gives a ratio; the median stands first, its spread beside it, and after the last table what it was measured under.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxpack.cli.output import print_table
from onnxpack.errors import GateError, OnnxpackError
from onnxpack.verify.bench import WARM_UP, Conditions, Pair, Spread, conditions, load

PROJECTIONS = ((1024, 2048), (1024, 1024), (2048, 1024), (1024, 3072), (3072, 1024))
"""(K, N) of q, k and v, o, gate and up, down in a Qwen3-0.6B layer."""


def weight(k: int, n: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normal weights as trained ones are: no zeros, no outliers, a standard deviation of 0.02."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.standard_normal((k, n), np.float32) * np.float32(0.02)


def product_model(path: Path, w: np.ndarray[Any, Any], opset: int = 21) -> Path:
    """A model that is one MatMul: x [rows, K] times w."""
    k, n = w.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", n])],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def in_rotation(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One call that is each of `calls` in turn, so that weights do not stay in the cache as in no real model."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def spread(pairs: Sequence[Pair]) -> Spread:
    """The ratios of processor time: with one thread a side, what other load on the machine disturbs least."""
    return Spread.of([pair.baseline_cpu / pair.pack_cpu for pair in pairs])


@dataclass(frozen=True)
class Times:
    """One call: seconds on the clock and seconds of this process's processors."""

    clock: float
    cpu: float


def rounds(calls: Mapping[str, Callable[[], object]], runs: int, warm_up: int = WARM_UP) -> dict[str, list[Times]]:
    """Every call once in each round; which is first moves on by one, so that drift and cache favour none."""
    found: dict[str, list[Times]] = {name: [] for name in calls}
    order = list(calls.items())
    for index in range(-warm_up, runs):
        for name, call in order:
            cpu, clock = time.process_time(), time.perf_counter()
            call()
            taken = Times(time.perf_counter() - clock, time.process_time() - cpu)
            if index >= 0:
                found[name].append(taken)
        order.append(order.pop(0))
    return found


def ratios(found: Mapping[str, Sequence[Times]], ours: str, clock: bool = False) -> dict[str, Spread]:
    """How many times as fast `ours` is as each of the others: round by round, processor time or the clock."""
    return {
        name: Spread.of(
            [
                their.clock / mine.clock if clock else their.cpu / max(mine.cpu, 1e-9)
                for their, mine in zip(times, found[ours], strict=True)
            ]
        )
        for name, times in found.items()
        if name != ours
    }


class Report:
    """Collects ratios, then prints them with the command and the conditions; there is no other way to print one.

    Rows are of one kind: `add` (one ratio), `add_row` (a ratio over each of the `neighbours`), or `add_exact`.
    """

    def __init__(
        self,
        headers: Sequence[str],
        runs: int,
        threads: int = 1,
        warm_up: int = WARM_UP,
        *,
        neighbours: Sequence[str] = (),
        title: str | None = None,
        markdown: bool = False,
        command: str | None = None,
    ) -> None:
        self._headers, self._runs, self._threads, self._warm_up = headers, runs, threads, warm_up
        self._neighbours, self._title, self._markdown, self._command = neighbours, title, markdown, command
        self._load = load()
        self._lead: tuple[str, ...] = ()
        self._rows: list[tuple[Any, ...]] = []
        self._zeros: dict[str, np.ndarray[Any, Any]] = {}
        self._facts: list[tuple[Any, ...]] = []
        self._missed: list[str] = []

    def fed(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """An operand, whose share of zeros belongs to the result."""
        self._zeros[name] = array

    def add(self, *cells: Any, ratio: Spread, goal: float | None = None, value: float | None = None) -> None:
        """A row: what was measured, its ratio, and the goal that the ratio (or another `value`) has."""
        reached = ratio.median if value is None else value
        verdict = self._judge(" ".join(map(str, cells)), reached, goal)
        self._lead = ("ratio", "spread")
        self._rows.append((f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}", *cells, verdict))

    def add_row(self, *cells: Any, over: Mapping[str, Spread], goals: Mapping[str, float] | None = None) -> None:
        """A row: what was measured, and its ratio over each neighbour that took part. `goals`: by neighbour."""
        named = " ".join(map(str, cells))
        verdicts = [
            f"{name} {self._judge(f'{named} over {name}', over[name].median, goal)}"
            for name, goal in (goals or {}).items()
            if name in over
        ]
        shown = [f"{over[name]}" if name in over else "-" for name in self._neighbours]
        self._rows.append((*cells, *shown, "; ".join(verdicts)))

    def add_exact(self, *cells: Any) -> None:
        """A row of figures that are the same on every run: sizes, accuracy, counts."""
        self._rows.append((*cells, ""))

    def _judge(self, what: str, reached: float, goal: float | None) -> str:
        if goal is None:
            return ""
        if reached < goal:
            self._missed.append(f"{what}: {reached:.2f} is below {goal:g}")
        return f"{'met' if reached >= goal else 'MISSED'}: {goal:g}"

    def fact(self, what: str, unit: str, values: Sequence[float], below: float | None = None) -> None:
        """A figure that has nothing to stand beside: its median and spread, and the limit it has."""
        found = Spread.of(values)
        verdict = "" if below is None else f"{'met' if found.median < below else 'MISSED'}: < {below:g}"
        if below is not None and found.median >= below:
            self._missed.append(f"{what}: {found.median:.2f} {unit} is not below {below:g}")
        self._facts.append((what, f"{found.median:.2f}", f"{found.low:.2f} to {found.high:.2f}", unit, verdict))

    def print(self, check: bool = False) -> Conditions:
        """Print everything. With `check`, GateError when a goal was missed."""
        found = conditions(self._runs, self._threads, self._load, self._zeros, warm_up=self._warm_up)
        command = self._command or shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        if self._title is not None:
            print(f"### {self._title}\n" if self._markdown else self._title)
        if not self._markdown:
            print(f"$ python {command}\n")
        for headers, rows in self._tables():
            show(headers, rows, self._markdown)
            print()
        if self._markdown:
            print(f"`python {command}`\n")
        # Of figures that no run changes, the number of runs says nothing.
        lines = found.lines()[0 if self._lead or self._neighbours or self._facts else 1 :]
        print("\n".join(f"{line}  " if self._markdown else line for line in lines), flush=True)
        if check and self._missed:
            raise GateError("; ".join(self._missed))
        return found

    def _tables(self) -> Iterator[tuple[Sequence[str], Sequence[tuple[Any, ...]]]]:
        """What was collected, without columns that stayed empty."""
        if self._rows:
            yield _without_empty((*self._lead, *self._headers, *self._neighbours, "goal"), self._rows)
        if self._facts:
            yield _without_empty(("figure", "median", "spread", "unit", "goal"), self._facts)

    @property
    def missed(self) -> list[str]:
        """Goals that were missed, a line each."""
        return self._missed


def _without_empty(
    headers: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> tuple[Sequence[str], list[tuple[Any, ...]]]:
    kept = [i for i in range(len(headers)) if any(str(row[i]) for row in rows)]
    return [headers[i] for i in kept], [tuple(row[i] for i in kept) for row in rows]


def show(headers: Sequence[str], rows: Sequence[Sequence[Any]], markdown: bool) -> None:
    """A table for a terminal, or for a page."""
    if not markdown:
        print_table(headers, rows)
        return
    for row in (headers, ["---"] * len(headers), *rows):
        print(f"| {' | '.join(str(cell) for cell in row)} |")


def finish(main: Callable[[], None]) -> None:
    """Run a benchmark as a command: errors in one line, with the exit codes of onnxpack."""
    try:
        main()
    except OnnxpackError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
