"""How one product runs on one kernel: in how many launches, which ones, and what padding wastes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxpack.kernels.target import Target
from onnxpack.planning.costs import Costs, moved
from onnxpack.planning.records import Launch, Range
from onnxpack.shapes import Gemm

LAUNCH_LIMIT = 4096
"""Launches of one product: a kernel that needs more is no kernel for it."""


CANNOT = 2**62
"""Nanoseconds of a kernel that cannot run a unit. Never added up: whatever else there is, is cheaper."""


@dataclass(frozen=True, order=True)
class Unit:
    """One product to be run: a site's at some number of rows, or that of several joined sites, whose columns are never
    cut (a join is for one launch). `shape` is without padding."""

    shape: Gemm
    members: int = 1


def cost_table(units: Sequence[Unit], kernels: Sequence[Gemm], costs: Costs, target: Target) -> npt.NDArray[np.int64]:
    """Predicted nanoseconds of each unit on each kernel [units, kernels]; CANNOT where it cannot run there.

    >>> from onnxpack.kernels.target import NPU2
    >>> units = [Unit(Gemm(200, 2048, 1024)), Unit(Gemm(128, 1024, 4096), members=3)]
    >>> costs = Costs(launch_us=100, kernels={"128x1024x1024": 100, "128x1024x4096": 300})
    >>> table = cost_table(units, [Gemm(128, 1024, 1024), Gemm(128, 1024, 4096)], costs, NPU2)
    >>> [[None if t == CANNOT else t for t in row] for row in table.tolist()]
    [[645760, 1445760], [None, 300000]]
    """
    size = np.array([[k.m, k.k, k.n] for k in kernels], np.int64).reshape(len(kernels), 3)
    launch = np.array([costs.launch(kernel, target) for kernel in kernels], np.int64)
    shape = np.array([[u.shape.m, u.shape.k, u.shape.n] for u in units], np.int64).reshape(len(units), 3)
    summing = np.array([costs.summing(u.shape.m * u.shape.n) for u in units], np.int64)
    joined = np.array([u.members > 1 for u in units], bool)
    pieces = -(-shape[:, None, :] // size)  # blocks of rows, slices of K, pieces of N
    count = pieces.prod(axis=2)
    table = count * launch + (pieces[:, :, 1] - 1) * summing[:, None]
    impossible = (pieces.prod(axis=2, dtype=np.float64) > LAUNCH_LIMIT) | (joined[:, None] & (pieces[:, :, 2] > 1))
    return np.where(impossible, CANNOT, table)


def launches(shape: Gemm, kernel: Gemm) -> list[Launch]:
    """Every launch: rows by rows, columns by columns, the slices of K of one piece of C one after the other."""
    return [
        Launch(rows, k, columns)
        for rows in _ranges(shape.m, kernel.m)
        for columns in _ranges(shape.n, kernel.n)
        for k in _ranges(shape.k, kernel.k)
    ]


def _ranges(size: int, step: int) -> Iterator[Range]:
    for start in range(0, size, step):
        yield start, min(start + step, size)


def wasted_macs(shape: Gemm, kernel: Gemm, count: int) -> int:
    """Products with padding, in `count` launches."""
    return count * kernel.macs - shape.macs


def wasted_bytes(shape: Gemm, kernel: Gemm, count: int) -> int:
    """Bytes that `count` launches move beyond one A, one B and one C: padding, A sent again, partial results."""
    return count * moved(kernel) - moved(shape)
