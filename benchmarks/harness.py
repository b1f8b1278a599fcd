"""What the benchmarks share: one-product models, a table that begins with the ratio, and the conditions below it.

No benchmark prints a time of its own. Two ways to do the same thing run in turn, in one process; every pair of runs
gives a ratio; the median stands first, its spread beside it, and after the last table what it was measured under.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
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


class Report:
    """Collects ratios, then prints them with the command and the conditions; there is no other way to print one."""

    def __init__(self, headers: Sequence[str], runs: int, threads: int = 1, warm_up: int = WARM_UP) -> None:
        self._headers, self._runs, self._threads, self._warm_up = headers, runs, threads, warm_up
        self._load = load()
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
        verdict = "" if goal is None else f"{'met' if reached >= goal else 'MISSED'}: {goal:g}"
        if goal is not None and reached < goal:
            self._missed.append(f"{' '.join(map(str, cells))}: {reached:.2f} is below {goal:g}")
        self._rows.append((f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}", *cells, verdict))

    def fact(self, what: str, unit: str, values: Sequence[float], below: float | None = None) -> None:
        """A figure that has nothing to stand beside: its median and spread, and the limit it has."""
        found = Spread.of(values)
        verdict = "" if below is None else f"{'met' if found.median < below else 'MISSED'}: < {below:g}"
        if below is not None and found.median >= below:
            self._missed.append(f"{what}: {found.median:.2f} {unit} is not below {below:g}")
        self._facts.append((what, f"{found.median:.2f}", f"{found.low:.2f} to {found.high:.2f}", unit, verdict))

    def print(self, check: bool = False) -> Conditions:
        """Print everything. With `check`, GateError when a goal was missed."""
        print(f"$ python {shlex.join([f'benchmarks/{Path(sys.argv[0]).name}', *sys.argv[1:]])}\n")
        if self._rows:
            print_table(("ratio", "spread", *self._headers, "goal"), self._rows)
        if self._facts:
            print()
            print_table(("figure", "median", "spread", "unit", "goal"), self._facts)
        found = conditions(self._runs, self._threads, self._load, self._zeros, warm_up=self._warm_up)
        print("\n" + "\n".join(found.lines()), flush=True)
        if check and self._missed:
            raise GateError("; ".join(self._missed))
        return found


def finish(main: Callable[[], None]) -> None:
    """Run a benchmark as a command: errors in one line, with the exit codes of onnxpack."""
    try:
        main()
    except OnnxpackError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
