"""One MatMul on the host path, activation quantization included, beside onnxruntime's float32 MatMul and its own ways.

    python benchmarks/matmul.py                   # K=1024 N=3072 at 1, 16, 32, 128, 512 rows
    python benchmarks/matmul.py --all             # the five projection shapes of Qwen3-0.6B
    python benchmarks/matmul.py --beside all      # MatMulNBits of several kinds, quantize_dynamic
    python benchmarks/matmul.py --rows 1 32 --check

One thread a side. A real pack of a real one-product model, built and loaded as any other; several weights in rotation.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import neighbours
import numpy as np
from harness import PROJECTIONS, Report, finish, in_rotation, product_model, ratios, rounds, weight

import onnxpack
from onnxpack.runtime.probe import cpu_level
from onnxpack.verify.accuracy import float_session
from onnxpack.verify.bench import bench_options

ROWS = (1, 16, 32, 128, 512)
SHAPE = (1024, 3072)
GOALS = {"amx": {1: 2.1, 32: 3.2, 128: 2.6}, "vnni": {1: 2.0, 32: 2.0, 128: 2.0}}
"""Times as fast as float32 at K=1024 N=3072, by the int8 instructions of the CPU and by rows."""


FLOAT = "float32"


def measure(
    report: Report, k: int, n: int, rows: list[int], runs: int, weights: int, folder: Path, beside: Sequence[str] = ()
) -> None:
    """Rows of the table for one shape. `beside`: neighbours, by name."""
    sessions: dict[str, list[Any]] = {name: [] for name in ("pack", FLOAT, *beside)}
    for index in range(weights):
        model = product_model(folder / f"{k}x{n}_{index}.onnx", weight(k, n, index))
        pack = folder / f"{k}x{n}_{index}.pack"
        onnxpack.build(model, pack, weights="int8")
        sessions[FLOAT].append(float_session(model, bench_options(1)))
        sessions["pack"].append(onnxpack.load(pack, "host", bench_options(1)))
        for name in beside:
            made = neighbours.make(name, model, folder / "neighbour.onnx")
            sessions[name].append(float_session(made, bench_options(1)))
        model.unlink()
    rng = np.random.Generator(np.random.PCG64(99))
    for m in rows:
        x = rng.standard_normal((m, k), np.float32)
        report.fed(f"x of K={k}", x)
        calls = {
            name: in_rotation([lambda s=session, x=x: s.run(None, {"x": x}) for session in held])
            for name, held in sessions.items()
        }
        goal = GOALS.get(cpu_level(), {}).get(m) if (k, n) == SHAPE else None
        over = ratios(rounds(calls, runs, 2 * weights), "pack")
        report.add_row(k, n, m, over=over, goals={} if goal is None else {FLOAT: goal})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="five shapes instead of one")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--runs", type=int, default=48)
    parser.add_argument("--weights", type=int, default=4, help="distinct weights in rotation")
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="NAME", help=f"{', '.join(neighbours.NAMES)}, or all"
    )
    parser.add_argument("--check", action="store_true", help="exit 4 when a goal is missed")
    arguments = parser.parse_args()
    beside = list(neighbours.NAMES) if arguments.beside == ["all"] else arguments.beside
    if unknown := set(beside) - set(neighbours.NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: no such neighbour; there are {', '.join(neighbours.NAMES)}")
    report = Report(("K", "N", "M"), arguments.runs, warm_up=2 * arguments.weights, neighbours=(FLOAT, *beside))
    with tempfile.TemporaryDirectory() as folder:
        for k, n in PROJECTIONS if arguments.all else (SHAPE,):
            measure(report, k, n, arguments.rows, arguments.runs, arguments.weights, Path(folder), beside)
    print(f"how many times as fast host int8 is, by processor time, on a CPU with {cpu_level()}")
    report.print(arguments.check)


if __name__ == "__main__":
    finish(main)
