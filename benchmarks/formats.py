"""Speed of weight formats: gigabytes of float32 per CPU-second, beside gguf-py where it has the format.

    python benchmarks/formats.py [NAME ...] [--rows N]

Process CPU time on one core, best of three. Goals: decoding >= 0.25 GB of float32 output per CPU-second (trellis,
rotated, sparse and additive-codebook formats: 0.05); encoders with a closed form >= 0.2 of input. Searching encoders
(marked) have no goal. gguf-py is used when it is installed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

from onnxpack.formats import get, names  # noqa: E402
from onnxpack.formats.base import Encoded, Format  # noqa: E402

DECODE_GOAL, ENCODE_GOAL = 0.25, 0.2
INVOLVED, INVOLVED_GOAL = {"aqlm", "exl3", "quarot", "quip_sharp_e8p", "spqr"}, 0.05
"""Trellis, rotated, sparse and additive-codebook formats: a goal of their own for decoding, none for encoding."""
SEARCHING = {"aqlm", "quip_sharp_e8p", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq1_s"}
COLUMNS = 4096


def speed(act: Callable[[], object], values: int) -> float:
    """GB of float32 per second of CPU time, best of three."""
    best = 0.0
    for _ in range(3):
        start = time.process_time()
        act()
        best = max(best, 4e-9 * values / max(1e-9, time.process_time() - start))
    return best


def gguf_speeds(name: str, w: np.ndarray, blocks: np.ndarray) -> tuple[float | None, float | None]:
    """gguf-py's decode and encode, where it has them."""
    try:
        gguf = importlib.import_module("gguf")
        quants = importlib.import_module("gguf.quants")
    except ImportError:
        return None, None
    kind = getattr(gguf.GGMLQuantizationType, name.removesuffix("_ggml").upper(), None)
    if kind is None:
        return None, None
    found: list[float | None] = []
    for act in (lambda: quants.dequantize(blocks, kind), lambda: quants.quantize(w, kind)):
        try:
            found.append(speed(act, w.size))
        except NotImplementedError:
            found.append(None)
    return found[0], found[1]


def stored(made: Format, w: np.ndarray, out: dict[str, np.ndarray] | None) -> Encoded:
    """The weight as it was encoded; any bytes where that takes a search: they decode at the same speed."""
    rng = np.random.default_rng(1)
    if out is None:
        out = {
            key: rng.integers(0, 120, spec.nbytes, np.uint8).view(spec.dtype).reshape(spec.shape)
            for key, spec in made.fields(w.shape).items()
        }
    return Encoded(made.name, w.shape, out, made.params)


def measure(name: str, rows: int) -> bool:
    """Print one line; whether the goals are met."""
    made, w = get(name), np.random.default_rng(0).normal(0, 0.02, (rows, COLUMNS)).astype(np.float32)
    searching = name in SEARCHING
    small = w[: max(1, rows // 16)] if searching else w
    encode = 0.0
    if made.encodes:
        out = {key: np.empty(spec.shape, spec.dtype) for key, spec in made.fields(small.shape).items()}
        encode = speed(lambda: made.encode_into(small, out), small.size)
    encoded = stored(made, w, None if searching or not made.encodes else out)
    decode = speed(lambda: made.decode(encoded), w.size)
    blocks = encoded.fields.get("blocks")
    theirs = gguf_speeds(name, small, blocks) if blocks is not None else (None, None)
    wanted, free = (INVOLVED_GOAL, True) if name in INVOLVED else (DECODE_GOAL, searching)
    met = decode >= wanted and (free or encode >= ENCODE_GOAL)
    ratios = [
        f"{ours / other:8.1f}" if other else " " * 8 for ours, other in zip((decode, encode), theirs, strict=True)
    ]
    note = "" if met else "  BELOW THE GOAL"
    print(f"{name:18}{decode:8.2f}{ratios[0]}{encode:8.3f}{ratios[1]}{'  search' if searching else ''}{note}")
    return met


def main() -> int:
    """Measure the named formats, or all that are declared by a profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rows", type=int, default=2048)
    arguments = parser.parse_args()
    chosen = arguments.names or [name for name in names() if get(name).profile is not None]
    print(f"{'format':18}{'decode':>8}{'x gguf':>8}{'encode':>8}{'x gguf':>8}   (GB of float32 per CPU-second)")
    results = [measure(name, arguments.rows) for name in chosen]
    return 0 if all(results) else 4


if __name__ == "__main__":
    sys.exit(main())
