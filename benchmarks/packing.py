"""Packing speed of int8 weights: GB of float32 per second of one processor, beside onnxruntime's own quantizers.

    python benchmarks/packing.py            # 1024x3072 and 1024x151936, stored [K, N] and [N, K]
    python benchmarks/packing.py --check    # exit 4 when a goal is missed

What is timed is what a build does with each weight, error figures included; reading files and hashing are not.
onnxruntime's quantizers store blocks of 32 along K, [N, K] codes; they are given [K, N] in both cases, as they want it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Report, finish, weight
from onnxruntime.capi._pybind_state import quantize_matmul_4bits, quantize_matmul_8bits

from onnxpack import formats
from onnxpack.verify.bench import Pair, Spread, interleave

SHAPES = ((1024, 3072), (1024, 151936))
GOALS = {"[K, N]": 2.5, "[N, K]": 1.2}
"""GB of float32 per CPU-second."""

_BLOCK = 32
Array = np.ndarray[Any, Any]


def ours(w: Array) -> Callable[[], object]:
    """int8 with a scale per column, as the builder writes it."""
    form = formats.get("int8")
    out = {name: np.empty(spec.shape, spec.dtype) for name, spec in form.fields(w.shape).items()}
    return lambda: form.encode_into(w, out)


def theirs(bits: int, w: Array) -> Callable[[], object]:
    """onnxruntime's blockwise quantizer of 4 or 8 bits."""
    k, n = w.shape
    blocks = -(-k // _BLOCK)
    packed = np.zeros((n, blocks, _BLOCK * bits // 8), np.uint8)
    scales = np.zeros((n, blocks), np.float32)
    zeros = np.zeros((n, -(-blocks * bits // 8)), np.uint8)
    quantize = quantize_matmul_4bits if bits == 4 else quantize_matmul_8bits
    return lambda: quantize(packed, w, scales, zeros, _BLOCK, n, k, True)


def speed(pairs: list[Pair], nbytes: int) -> tuple[Spread, Spread]:
    """GB per CPU-second of both sides: ours, theirs."""
    return (
        Spread.of([nbytes / 1e9 / pair.pack_cpu for pair in pairs]),
        Spread.of([nbytes / 1e9 / pair.baseline_cpu for pair in pairs]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="exit 4 when a goal is missed")
    arguments = parser.parse_args()
    report = Report(("K", "N", "stored", "beside", "GB/s", "their GB/s"), arguments.runs, warm_up=1)
    for k, n in SHAPES:
        stored = weight(k, n, 0)
        report.fed(f"w {k}x{n}", stored)
        for layout, goal in GOALS.items():
            w = stored if layout == "[K, N]" else np.ascontiguousarray(stored.T).T
            for bits in (8, 4):
                pairs = interleave(theirs(bits, stored), ours(w), arguments.runs, 1)
                mine, other = speed(pairs, w.nbytes)
                ratio = Spread.of([pair.baseline_cpu / pair.pack_cpu for pair in pairs])
                cells = (k, n, layout, f"onnxruntime {bits} bit", mine, f"{other.median:.2f}")
                report.add(*cells, ratio=ratio, goal=goal, value=mine.median)
    print("int8 packing over onnxruntime's quantizers, processor time")
    report.print(arguments.check)


if __name__ == "__main__":
    finish(main)
