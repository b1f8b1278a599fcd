"""Which kernel a product could have: its own shape where a tiling fits, or the next larger shape, by zero padding.

For planning, without a toolchain. Padding is exact: zero rows and columns add nothing to a sum.

>>> fit(Gemm(128, 1024, 2048)).kernel
Gemm(m=128, k=1024, n=2048)
>>> fit(Gemm(128, 1000, 1000)).kernel
Gemm(m=128, k=1024, n=1024)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from onnxpack.kernels import designs
from onnxpack.kernels.recipe import DESIGN
from onnxpack.kernels.target import NPU2, Target
from onnxpack.shapes import Gemm, round_up

M_UNITS = (16, 32, 64)
K_UNITS = (8, 64, 128)
N_UNITS = (32, 256, 512, 1024)
"""What a dimension may be rounded up to; larger units allow larger tiles and more columns."""


@dataclass(frozen=True)
class Fit:
    """A kernel that could compute a product."""

    kernel: Gemm
    parameters: dict[str, int]
    cycles: int
    """Predicted for one launch: to compare fits with each other, not with a clock."""

    def wasted(self, gemm: Gemm) -> float:
        """Share of the kernel's multiplications that padding of `gemm` wastes."""
        return 1 - gemm.macs / self.kernel.macs


def exact(gemm: Gemm, target: Target = NPU2) -> Fit | None:
    """The kernel of exactly this shape, or None when no tiling fits it."""
    return _exact(gemm, target)


@lru_cache(maxsize=4096)
def _exact(gemm: Gemm, target: Target) -> Fit | None:
    design = designs.load(DESIGN)
    shape = design.Shape(gemm.m, gemm.k, gemm.n)
    chosen = design.choose(shape, target)
    if chosen is None:
        return None
    return Fit(gemm, vars(chosen), design.cycles(shape, chosen, target))


@lru_cache(maxsize=4096)
def fit(gemm: Gemm, target: Target = NPU2) -> Fit | None:
    """The cheapest kernel that is at least this large in every dimension, its own shape included; None when even
    padding finds none (then the product has to be split, see `refusal`)."""
    shapes = {
        Gemm(round_up(gemm.m, m), round_up(gemm.k, k), round_up(gemm.n, n))
        for m in M_UNITS
        for k in K_UNITS
        for n in N_UNITS
    }
    fits = [found for shape in sorted({gemm, *shapes}) if (found := _exact(shape, target)) is not None]
    return min(fits, key=lambda f: (f.cycles, f.kernel.macs, f.kernel), default=None)


def refusal(gemm: Gemm, target: Target = NPU2) -> str:
    """Why no kernel of exactly this shape fits: the broken limit, with numbers."""
    design = designs.load(DESIGN)
    return str(design.refusal(design.Shape(gemm.m, gemm.k, gemm.n), target))
