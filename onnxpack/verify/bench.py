"""Two ways to compute the same thing, timed side by side in one process.

A time alone says little: machines, loads and versions differ more than what is measured. So runs alternate, every pair
gives one ratio, the median ratio is the result, its spread stands beside it, and a result cannot be made without the
conditions it was measured under.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpack.errors import ModelError, UsageError
from onnxpack.pack.read import Pack
from onnxpack.runtime.probe import cpu_level, needs_precision
from onnxpack.types import Array
from onnxpack.verify.accuracy import float_session
from onnxpack.verify.refusal import quiet, refused_as

MIN_RUNS = 5
WARM_UP = 3
_PACKAGES = ("onnxpack", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Conditions:
    """What a ratio depends on beside the code. Never stored in a pack."""

    runs: int
    warm_up: int
    threads: int
    """Threads of each session."""
    load_average: tuple[float, float]
    """Over the last minute, before and after. Above the number of processors the machine was not ours."""
    processors: int
    cpu: str
    """The best int8 instructions onnxruntime finds: amx, vnni, avx2, none."""
    slow_exact_kernel: bool
    """The fast int8 kernel saturates on this CPU, so the exact, slower one ran."""
    versions: dict[str, str]
    inputs: dict[str, str]
    zero_share: dict[str, float]
    """Share of zeros in each operand that was fed, and in the packed codes."""

    def lines(self) -> list[str]:
        """For a person."""
        inputs = ", ".join(f"{name} {what}" for name, what in self.inputs.items()) or "none"
        zeros = ", ".join(f"{name} {share:.4g}" for name, share in self.zero_share.items()) or "none"
        exact = "; the fast int8 kernel saturates here, the exact one ran" if self.slow_exact_kernel else ""
        before, after = self.load_average
        return [
            f"runs: {self.runs} pairs, alternating, after {self.warm_up} to warm up; threads: {self.threads}",
            f"inputs: {inputs}; share of zeros: {zeros}",
            f"int8 on this CPU: {self.cpu}{exact}",
            f"load average: {before:.2f} before, {after:.2f} after, {self.processors} processors",
            f"versions: {', '.join(f'{name} {number}' for name, number in self.versions.items())}",
        ]


@dataclass(frozen=True)
class Spread:
    """Of one figure over all pairs of runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """UsageError when there are too few to say how far they spread.

        >>> Spread.of([1.0, 2.0, 3.0, 2.5, 1.5])
        Spread(median=2.0, low=1.0, high=3.0)
        """
        if len(values) < MIN_RUNS:
            raise UsageError(f"{len(values)} runs have no spread", hint=f"take at least {MIN_RUNS}")
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Pair:
    """One run of each side: seconds on the clock and seconds of this process's processors."""

    baseline_wall: float
    baseline_cpu: float
    pack_wall: float
    pack_cpu: float


@dataclass(frozen=True)
class Result:
    """How much faster the pack is than the baseline: ratios above 1 are in its favour."""

    baseline: str
    ratio: Spread
    """Of times on the clock."""
    cpu_ratio: Spread
    """Of processor time: what other load on the machine disturbs least."""
    baseline_ms: Spread
    pack_ms: Spread
    conditions: Conditions


def interleave(
    baseline: Callable[[], object], ours: Callable[[], object], runs: int, warm_up: int = WARM_UP
) -> list[Pair]:
    """Time both in turn, `runs` times; which goes first alternates, so that drift and cache favour neither."""
    pairs = []
    for index in range(-warm_up, runs):
        if index % 2:
            p_wall, p_cpu = _timed(ours)
            b_wall, b_cpu = _timed(baseline)
        else:
            b_wall, b_cpu = _timed(baseline)
            p_wall, p_cpu = _timed(ours)
        if index >= 0:
            pairs.append(Pair(b_wall, b_cpu, p_wall, p_cpu))
    return pairs


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def result(baseline: str, pairs: Sequence[Pair], conditions: Conditions) -> Result:
    """What pairs of runs say. UsageError for fewer than MIN_RUNS."""
    return Result(
        baseline,
        Spread.of([p.baseline_wall / p.pack_wall for p in pairs]),
        Spread.of([p.baseline_cpu / max(p.pack_cpu, 1e-9) for p in pairs]),
        Spread.of([1e3 * p.baseline_wall for p in pairs]),
        Spread.of([1e3 * p.pack_wall for p in pairs]),
        conditions,
    )


def conditions(
    runs: int,
    threads: int,
    load_before: float,
    feeds: Mapping[str, Array],
    codes_zero_share: float | None = None,
    warm_up: int = WARM_UP,
) -> Conditions:
    """The conditions of a measurement that has just ended."""
    shares = {name: zero_share(array) for name, array in feeds.items() if array.size}
    if codes_zero_share is not None:
        shares["packed codes"] = round(codes_zero_share, 4)
    return Conditions(
        runs=runs,
        warm_up=warm_up,
        threads=threads,
        load_average=(round(load_before, 2), round(load(), 2)),
        processors=os.cpu_count() or 1,
        cpu=cpu_level(),
        slow_exact_kernel=needs_precision(),
        versions={name: version(name) for name in _PACKAGES},
        inputs={name: f"{array.dtype.name}{list(array.shape)}" for name, array in feeds.items()},
        zero_share=shares,
    )


def load() -> float:
    """Load average over the last minute; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def zero_share(array: Array) -> float:
    """Share of zeros.

    >>> zero_share(np.array([0, 1, 2, 0]))
    0.5
    """
    if array.dtype.kind not in "biuf" or not array.size:
        return 0.0
    return round(1 - int(np.count_nonzero(array)) / array.size, 4)


def codes_zero_share(pack: Pack) -> float | None:
    """Share of zero codes over all weights that are stored as int8; None when there are none. Reads their bytes."""
    zeros, total = 0, 0
    for tensor in pack.tensors.values():
        if tensor.format == "int8" and "codes" in tensor.fields:
            codes = pack.field(tensor.fields["codes"])
            zeros += codes.size - int(np.count_nonzero(codes))
            total += codes.size
    return zeros / total if total else None


def bench_options(threads: int) -> ort.SessionOptions:
    """Options for both sides: onnxruntime's own level, and no thread that spins into the other side's time."""
    options = quiet()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def plain_session(pack: Pack, threads: int) -> ort.InferenceSession:
    """The pack's own model.onnx in stock onnxruntime, weights decoded to float32 when it is loaded.

    The float32 model for whoever no longer has the source. PackError from onnxruntime becomes ModelError.
    """
    options = bench_options(threads)
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    with refused_as(lambda why: ModelError(f"onnxruntime refuses it: {why}", where=str(pack.graph_file))):
        return ort.InferenceSession(str(pack.graph_file), options, providers=["CPUExecutionProvider"])


def bench(
    pack: Pack,
    session: Any,
    model: str | Path | None,
    feed: Mapping[str, Array],
    *,
    runs: int,
    threads: int,
) -> Result:
    """Time `session`, the opened pack, beside the float model (or, without one, the pack's plain graph)."""
    if runs < MIN_RUNS:
        raise UsageError(f"{runs} runs have no spread", hint=f"take at least {MIN_RUNS}")
    before = load()
    if model is None:
        baseline, name = plain_session(pack, threads), "model.onnx of the pack, weights decoded to float32, onnxruntime"
    else:
        baseline, name = float_session(model, bench_options(threads)), f"{Path(model).name}, onnxruntime"
    with refused_as(lambda why: UsageError(f"does not run on these inputs: {why}", hint="choose others with --dim")):
        pairs = interleave(lambda: baseline.run(None, feed), lambda: session.run(None, feed), runs)
    return result(name, pairs, conditions(runs, threads, before, feed, codes_zero_share(pack)))
