"""What is in a model: its matrix products by shape, and why each of them will not run on the NPU.

python examples/census.py [MODEL] [KERNELS]     # default: the trained model beside this file, no kernels
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import onnxpack

TRAINED = Path(__file__).resolve().parent / "trained_a" / "trained_a.onnx"


def main(model: str, kernels: str | None = None) -> None:
    census = onnxpack.census(model, kernels)  # reads the graph, no weights
    for group in census.groups:
        print(f"{group.count:4} x  K={group.k} N={group.n}  {group.weights} weights  {group.verdict}")
    print(f"{census.totals.sites} products: {census.totals.weight} with a weight, {census.totals.dynamic} without")
    for reason, count in Counter(site.reason for site in census.sites if site.reason).most_common():
        print(f"{count:4} not on the NPU: {reason}")
    print(f"covered by a kernel: {census.covered_percent:.0f} %")


if __name__ == "__main__":
    try:
        main(*(sys.argv[1:] or [str(TRAINED)]))
    except onnxpack.errors.OnnxpackError as error:
        sys.exit(error.render())
