"""Hadamard transforms of the last axis, not normalized: rows x become x @ H, in an order of additions that is fixed.

Sizes are a power of two, or 12 times one. Powers of two are Sylvester's matrix, in stages that add and subtract
neighbours and put sums into the first half, differences into the second; after log2(n) stages every value is back in
its natural place.

>>> transform(np.eye(4, dtype=np.float32), 4).astype(int).tolist()[1:3]
[[1, -1, 1, -1], [1, 1, -1, -1]]
>>> h = transform(np.eye(24, dtype=np.float32), 24)
>>> bool((h @ h.T == 24 * np.eye(24)).all() and (transform(h, 24, inverse=True) == 24 * np.eye(24)).all())
True
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

_TWELVE = 12
_CORE = (1, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1)


@functools.cache
def twelve() -> F32:
    """The 12 x 12 matrix that tables of Hadamard matrices begin with: first row +1, first column -1, a circulant."""
    table = np.ones((_TWELVE, _TWELVE), np.float32)
    table[1:, 0] = -1
    for i in range(1, _TWELVE):
        table[i, 1:] = np.roll(_CORE, i - 1)
    table.setflags(write=False)
    return table


def factors(size: int) -> tuple[int, int] | None:
    """(1 or 12, power of two) whose product the size is; None where no matrix is known here.

    >>> factors(4096), factors(3072), factors(20)
    ((1, 4096), (12, 256), None)
    """
    for odd in (1, _TWELVE):
        power, rest = divmod(size, odd)
        if rest == 0 and power > 0 and power & (power - 1) == 0:
            return odd, power
    return None


def transform(x: F32, size: int, inverse: bool = False) -> F32:
    """Blocks of `size` along the last axis times H (its transpose, with `inverse`)."""
    known = factors(size)
    assert known is not None, size
    odd, power = known
    y = np.ascontiguousarray(x).reshape(-1, power)
    half = power // 2
    for _ in range(power.bit_length() - 1):
        turned = np.empty_like(y)
        np.add(y[:, 0::2], y[:, 1::2], out=turned[:, :half])
        np.subtract(y[:, 0::2], y[:, 1::2], out=turned[:, half:])
        y = turned
    if odd > 1:
        y = _mixed(y.reshape(-1, odd, power), twelve() if not inverse else twelve().T)
    return y.reshape(x.shape)


def _mixed(x: F32, matrix: F32) -> F32:
    total: F32 = x[:, :1] * matrix[0][:, None]
    for j in range(1, len(matrix)):
        total += x[:, j : j + 1] * matrix[j][:, None]
    return total


def root(size: int) -> float:
    """1 / sqrt(size) as a float32 number: what makes the transform a rotation."""
    return float(np.float32(1) / np.sqrt(np.float32(size)))
