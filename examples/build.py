"""Pack a model: weights to 4 bits (or any other format), one directory, the same bytes every time.

python examples/build.py [MODEL [PACK [WEIGHTS]]]     # default: the trained model, build/trained_a.pack, q4nx
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnxpack

TRAINED = Path(__file__).resolve().parent / "trained_a" / "trained_a.onnx"


def main(model: str = str(TRAINED), pack: str = "build/trained_a.pack", weights: str = "q4nx") -> None:
    Path(pack).parent.mkdir(parents=True, exist_ok=True)
    report = onnxpack.build(model, pack, weights, force=True)  # the old pack stays until the new one is complete
    worst = max(report.weights, key=lambda weight: weight["relative_rms"])
    print(f"{report.pack}: {len(report.weights)} weights, {report.bytes_before} -> {report.bytes_after} bytes")
    print(f"{report.coverage.bound} of {report.coverage.weight} products with a weight are bound to int8")
    print(f"largest loss: {worst['name']}, relative rms {worst['relative_rms']:g}")
    print(f"content digest: {report.content_digest}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except onnxpack.errors.OnnxpackError as error:
        sys.exit(error.render())
