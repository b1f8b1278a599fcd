"""One MatMul on the host path, activation quantization included, beside onnxruntime's float32 MatMul.

    python benchmarks/matmul.py                   # K=1024 N=3072 at 1, 16, 32, 128, 512 rows
    python benchmarks/matmul.py --all             # the five projection shapes of Qwen3-0.6B
    python benchmarks/matmul.py --rows 1 32 --check

One thread a side. A real pack of a real one-product model, built and loaded as any other; several weights in rotation.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from harness import PROJECTIONS, Report, finish, in_rotation, product_model, spread, weight

import onnxpack
from onnxpack.runtime.probe import cpu_level
from onnxpack.verify.accuracy import float_session
from onnxpack.verify.bench import bench_options, interleave

ROWS = (1, 16, 32, 128, 512)
SHAPE = (1024, 3072)
GOALS = {"amx": {1: 2.1, 32: 3.2, 128: 2.6}, "vnni": {1: 2.0, 32: 2.0, 128: 2.0}}
"""Times as fast as float32 at K=1024 N=3072, by the int8 instructions of the CPU and by rows."""


def measure(report: Report, k: int, n: int, rows: list[int], runs: int, weights: int, folder: Path) -> None:
    """Rows of the table for one shape."""
    floats, packs = [], []
    for index in range(weights):
        model = product_model(folder / f"{k}x{n}_{index}.onnx", weight(k, n, index))
        pack = folder / f"{k}x{n}_{index}.pack"
        onnxpack.build(model, pack, weights="int8")
        floats.append(float_session(model, bench_options(1)))
        packs.append(onnxpack.load(pack, "host", bench_options(1)))
        model.unlink()
    rng = np.random.Generator(np.random.PCG64(99))
    for m in rows:
        x = rng.standard_normal((m, k), np.float32)
        report.fed(f"x of K={k}", x)
        ours = in_rotation([lambda s=session, x=x: s.run(None, {"x": x}) for session in packs])
        theirs = in_rotation([lambda s=session, x=x: s.run(None, {"x": x}) for session in floats])
        pairs = interleave(theirs, ours, runs, 2 * weights)
        goal = GOALS.get(cpu_level(), {}).get(m) if (k, n) == SHAPE else None
        report.add(k, n, m, ratio=spread(pairs), goal=goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="five shapes instead of one")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--runs", type=int, default=48)
    parser.add_argument("--weights", type=int, default=4, help="distinct weights in rotation")
    parser.add_argument("--check", action="store_true", help="exit 4 when a goal is missed")
    arguments = parser.parse_args()
    report = Report(("K", "N", "M"), arguments.runs, warm_up=2 * arguments.weights)
    with tempfile.TemporaryDirectory() as folder:
        for k, n in PROJECTIONS if arguments.all else (SHAPE,):
            measure(report, k, n, arguments.rows, arguments.runs, arguments.weights, Path(folder))
    print(f"host int8 over float32 MatMul, processor time, on a CPU with {cpu_level()}")
    report.print(arguments.check)


if __name__ == "__main__":
    finish(main)
