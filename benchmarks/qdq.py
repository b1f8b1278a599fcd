"""QDQ models on the host path beside onnxruntime's own QDQ execution: speed, and memory a run needs.

    python benchmarks/qdq.py a8w8_perchannel.onnx a8w8_pertensor.onnx
    python benchmarks/qdq.py a8w8_perchannel.onnx --rows 1 32 128 --runs 20 --check
    python benchmarks/qdq.py --memory             # the group 256x1024x1024, int8 in and out

Speed: one thread a side, onnxruntime at its default level, where it fuses what groups it can. Every symbolic dimension
of the model gets the number of rows.

Memory: a process a side loads one group and runs it once to warm up; then the heap is trimmed, the peak reset, and the
growth of the peak over a second run read. The arena is off, so that what a run allocates is what shows. The CPU
provider stands there twice: at the basic level, which keeps DequantizeLinear, MatMul and QuantizeLinear, and at its
default one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from harness import Report, finish, spread
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack.verify.accuracy import float_session
from onnxpack.verify.bench import bench_options, interleave
from onnxpack.verify.inputs import input_specs
from onnxpack.verify.synthetic import random_feed, table_lengths

GOAL = 0.95
"""Times as fast as onnxruntime's own QDQ execution."""

GROUP = (256, 1024, 1024)
SIDES = ("pack", "CPU provider, basic level", "CPU provider, default level")
_PROCESSES = 5


def speed(report: Report, model: Path, rows: list[int], runs: int, folder: Path) -> None:
    """Rows of the table for one model."""
    pack = folder / f"{model.stem}.pack"
    built = onnxpack.build(model, pack, force=True)
    ours = onnxpack.load(pack, "host", bench_options(1))
    theirs = float_session(model, bench_options(1))
    specs, lengths = input_specs(theirs), table_lengths(onnx.load(model, load_external_data=False))
    groups = sum(site.qdq is not None for site in onnxpack.census(model).sites)
    for m in rows:
        sizes = {dim: m for spec in specs for dim in spec.shape if isinstance(dim, str)}
        feed = random_feed(specs, 0, sizes, lengths)
        pairs = interleave(lambda f=feed: theirs.run(None, f), lambda f=feed: ours.run(None, f), runs)
        bound = f"{groups} of {built.coverage.weight}"
        report.add(model.stem, bound, m, ratio=spread(pairs), goal=GOAL)


def group_model(path: Path, m: int, k: int, n: int) -> Path:
    """int8 in, int8 out: DequantizeLinear twice, MatMul, QuantizeLinear."""
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {
        "w": rng.integers(-127, 128, (k, n)).astype(np.int8),
        "s_x": np.float32(0.02),
        "s_w": np.float32(0.003),
        "s_y": np.float32(0.1),
        "zero": np.int8(0),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s_x", "zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w", "s_w", "zero"], ["w_dq"]),
        helper.make_node("MatMul", ["x_dq", "w_dq"], ["y_float"]),
        helper.make_node("QuantizeLinear", ["y_float", "s_y", "zero"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "group",
        [helper.make_tensor_value_info("x", TensorProto.INT8, [m, k])],
        [helper.make_tensor_value_info("y", TensorProto.INT8, [m, n])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def memory(report: Report, folder: Path) -> None:
    """Growth of the peak in kB, a side at a time."""
    m, k, n = GROUP
    model, pack = group_model(folder / "group.onnx", m, k, n), folder / "group.pack"
    onnxpack.build(model, pack)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(_PROCESSES):
        for side in SIDES:
            command = [sys.executable, __file__, "--one", side, str(pack if side == SIDES[0] else model)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[side].append(json.loads(done.stdout))
    floats = 4 * (m * k + k * n + m * n) / 1024
    print(f"one run of {m}x{k}x{n}: x, w and y as float32 would be {floats:.0f} kB")
    for side in SIDES:
        report.fact(side, "kB of peak", found[side])


def one_run(side: str, path: str) -> int:
    """kB by which the peak of this process grows over its second run."""
    options = bench_options(1)
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    if side == SIDES[1]:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxpack.load(path, "host", options) if side == SIDES[0] else float_session(path, options)
    feed = {"x": np.random.default_rng(1).integers(-127, 128, GROUP[:2]).astype(np.int8)}
    session.run(None, feed)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    session.run(None, feed)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--memory", action="store_true", help="measure the memory of one group")
    parser.add_argument("--check", action="store_true", help="exit 4 when the goal is missed")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(one_run(*arguments.one))
        return
    report = Report(("model", "groups", "rows"), arguments.runs)
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            speed(report, model, arguments.rows, arguments.runs, Path(folder))
        if arguments.memory:
            memory(report, Path(folder))
    report.print(arguments.check)


if __name__ == "__main__":
    finish(main)
