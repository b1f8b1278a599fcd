"""How fast weights become Q4NX, beside onnxruntime's own 4-bit quantizer and gguf-py's Q4_0.

    python benchmarks/q4nx_speed.py            # 1024x3072 and 1024x151936
    python benchmarks/q4nx_speed.py 512x512    # other shapes
    python benchmarks/q4nx_speed.py --folding  # what stock onnxruntime needs to load and run them: q4nx_stock.py

Gigabytes of float32 weight per second of CPU time, all in one process, runs of the three in turn; the ratio is what
carries over to another machine. Q4NX includes its error figures (per group, band and tensor), the others make none.
gguf-py is left out, by name, where it is not installed.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median

import numpy as np
import q4nx_stock

from onnxpack.formats.q4nx import Q4NX

RUNS = 5
SHAPES = [(1024, 3072), (1024, 151936)]
Task = Callable[[], object]


def q4nx(w: np.ndarray) -> Task:
    """Ours, into arrays that exist, as the writer's mapped file does."""
    out = {"tiles": np.zeros(Q4NX().fields(w.shape)["tiles"].shape, np.int8)}
    return lambda: Q4NX().encode_into(w, out)


def decode(w: np.ndarray) -> Task:
    """Ours, back to float32."""
    encoded, out = Q4NX().encode(w), np.empty(w.shape, np.float32)
    return lambda: Q4NX().decode_columns(encoded, 0, w.shape[1], out)


def nbits(w: np.ndarray) -> Task:
    """onnxruntime's blockwise quantizer: 4 bits, blocks of 32, asymmetric."""
    from onnxruntime.capi._pybind_state import quantize_matmul_4bits

    k, n = w.shape
    blocks = -(-k // 32)
    codes = np.zeros((n, blocks, 16), np.uint8)
    scales, zeros = np.zeros(n * blocks, np.float32), np.zeros((n * ((blocks + 1) // 2)), np.uint8)
    return lambda: quantize_matmul_4bits(codes, w, scales, zeros, 32, n, k, False)


def gguf_q4_0(w: np.ndarray) -> Task:
    """gguf-py's Q4_0, whose blocks run along rows: it gets the weight as [N, K]."""
    import gguf

    rows = np.ascontiguousarray(w.T)
    return lambda: gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q4_0)


TASKS = {"q4nx": q4nx, "onnxruntime 4-bit": nbits, "gguf-py Q4_0": gguf_q4_0, "q4nx decode": decode}


def cpu_seconds(task: Task) -> float:
    """CPU time of one call, all threads of the process."""
    start = time.process_time()
    task()
    return time.process_time() - start


def measure(k: int, n: int) -> dict[str, list[float]]:
    """Gigabytes per CPU-second of each run, the tasks in turn."""
    w = np.random.default_rng(0).standard_normal((k, n), dtype=np.float32) * np.float32(0.05)
    tasks = {}
    for name, make in TASKS.items():
        try:
            tasks[name] = make(w)
        except ImportError as error:
            print(f"{name}: left out ({error})", file=sys.stderr)
    for task in tasks.values():
        task()
    speeds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(RUNS):
        for name, task in tasks.items():
            speeds[name].append(w.nbytes / 1e9 / cpu_seconds(task))
    return speeds


def main(arguments: list[str]) -> int:
    """Print a table; 1 when Q4NX is not twice as fast as onnxruntime's quantizer."""
    if arguments[:1] == ["--folding"]:
        q4nx_stock.main(arguments[1:])
        return 0
    shapes = [(int(k), int(n)) for k, _, n in (a.partition("x") for a in arguments)] or SHAPES
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "onnxruntime"))
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}")
    print(f"GB of float32 per CPU-second: median of {RUNS} (least to most)")
    slow = False
    for k, n in shapes:
        speeds = measure(k, n)
        for name, runs in speeds.items():
            print(f"{k}x{n}  {name:18} {median(runs):6.2f}  ({min(runs):.2f} to {max(runs):.2f})")
        ratio = median(speeds["q4nx"]) / median(speeds["onnxruntime 4-bit"])
        print(f"{k}x{n}  q4nx / onnxruntime: {ratio:.2f}")
        slow = slow or ratio < 2
    return int(slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
