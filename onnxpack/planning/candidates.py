"""Which kernels are worth thinking about when they can be made: the products' own sizes, and parts of them.

Each size is rounded up to what tiles well. Sizes of different products are crossed, so that one kernel can serve many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxpack.kernels.target import Target
from onnxpack.planning.tiling import Unit
from onnxpack.shapes import Gemm, round_up

LARGEST_B = 2048 * 8192
"""Bytes of the largest B that a public design is known to have run. Larger products are split."""
LARGEST_M = 512
"""Of one kernel."""
CUTS = (1, 2, 3, 4)
"""Parts that a size is cut into, times what LARGEST_B makes necessary."""
MOST_ENTRIES = 1_000_000
"""Units times kernels. Above it sizes are crossed within each unit only, and then no longer cut."""
_COARSE = (1024, 512, 256)


def padded_m(m: int) -> int:
    """Rows: 16 are the least of one core, 64 put all four to work.

    >>> [padded_m(m) for m in (1, 36, 100, 128)]
    [16, 48, 128, 128]
    """
    return round_up(m, 16 if m <= 64 else 64)


def padded_k(k: int) -> int:
    """K: multiples of 8 exist, but short steps along K are slow, so long ones are rounded to 32.

    >>> [padded_k(k) for k in (3, 48, 99, 160, 1000, 2432)]
    [8, 48, 128, 160, 1024, 2432]
    """
    return round_up(k, 8 if k <= 32 else 16 if k <= 64 else 32)


def padded_n(n: int) -> int:
    """N: 32 are the least of two columns, 128 put all eight to work; long ones to the coarsest unit within 1/16.

    >>> [padded_n(n) for n in (10, 160, 1000, 2432, 15194)]
    [32, 160, 1024, 2560, 15360]
    """
    if n <= 512:
        return round_up(n, 32)
    fine = round_up(n, 128)
    return next((size for unit in _COARSE if (size := round_up(n, unit)) <= n + n // 16), fine)


def candidates(units: Iterable[Unit], target: Target) -> list[Gemm]:
    """Kernels that could be made for the units, sorted. Whether the design accepts one is asked when it is chosen."""
    if target.refusal is not None:
        return []
    units = list(units)
    sizes = [_sizes(unit, CUTS) for unit in units]
    ms, ks, ns = (sorted({size for entry in sizes for size in entry[axis]}) for axis in range(3))
    if len(ms) * len(ks) * len(ns) * len(units) <= MOST_ENTRIES:
        return _crossed(ms, ks, ns)
    made = [kernel for entry in sizes for kernel in _crossed(*entry)]
    if len(set(made)) * len(units) > MOST_ENTRIES:
        made = [kernel for unit in units for kernel in _crossed(*_sizes(unit, (1,)))]
    return sorted(set(made))


def _sizes(unit: Unit, cuts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Values of M, K and N worth having for one unit."""
    m, k, n = unit.shape.m, unit.shape.k, unit.shape.n
    blocks = -(-m // LARGEST_M)
    pieces = -(-padded_k(k) * n // LARGEST_B)
    ms = {padded_m(-(-m // (blocks * cut))) for cut in cuts if cut != 3}
    ks = {padded_k(-(-k // cut)) for cut in cuts}
    ns = {padded_n(-(-n // (pieces * cut))) for cut in cuts} if unit.members == 1 else {padded_n(n)}
    return sorted(ms), sorted(ks), sorted(ns)


def _crossed(ms: Sequence[int], ks: Sequence[int], ns: Sequence[int]) -> list[Gemm]:
    return [Gemm(m, k, n) for m in ms for k in ks for n in ns if k * n <= LARGEST_B]


def accepts(kernel: Gemm, target: Target) -> bool:
    """Whether the design has a tiling for a kernel, without looking for the best one."""
    from onnxpack.kernels import designs
    from onnxpack.kernels.recipe import DESIGN

    if target.refusal is not None:
        return False
    design = designs.load(DESIGN)
    shape = design.Shape(kernel.m, kernel.k, kernel.n)
    return any(not design.check_design(shape, p, target) for p in design.candidates(shape, target))
