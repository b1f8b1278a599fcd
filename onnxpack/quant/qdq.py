"""Products of codes that the graph brings itself: exact integers, one float32 multiplication, one rounding.

This file is the QDQ part of the "Numbers" section of the design as code; every device must give the same results on
every element. All codes here are int8: uint8 codes are shifted, with their zero point, which changes no difference.

    acc'  = sum (a - zx) * (w - zw) = acc - zx * colsum(w) - zw * rowsum(a) + K * zx * zw
    y     = f32(acc') * f32(s_x * s_w)
    y_q   = clip(round-half-even(f32(acc') * f32(f32(s_x * s_w) / s_y)) + zp_y)

A tie is a tie of the float32 product: -3090 here is -3.499998, not -3.5.

>>> m = multiplier(np.float32(0.0011326855), np.float32(1), np.float32(1))
>>> requantize(np.array([-3090]), m, 0, "int8").tolist()
[-3]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.types import F32, I8, Array

I64 = npt.NDArray[np.int64]

_SHIFT = 128
_BAND_BYTES = 64 << 20  # of float64 weight at a time


def to_signed(codes: npt.NDArray[Any]) -> I8:
    """int8 or uint8 codes as int8; uint8 minus 128.

    >>> to_signed(np.array([0, 128, 255], np.uint8)).tolist()
    [-128, 0, 127]
    """
    if codes.dtype == np.uint8:
        return np.asarray(np.bitwise_xor(codes, np.uint8(_SHIFT)).view(np.int8))
    if codes.dtype != np.int8:
        raise ValueError(f"codes are {codes.dtype}, not int8 or uint8")
    return np.asarray(codes, np.int8)


def to_unsigned(codes: I8) -> npt.NDArray[np.uint8]:
    """int8 codes as uint8, plus 128: the inverse of `to_signed`.

    >>> to_unsigned(np.array([-128, 0, 127], np.int8)).tolist()
    [0, 128, 255]
    """
    return np.bitwise_xor(codes.view(np.uint8), np.uint8(_SHIFT))


def signed_zero_points(values: npt.ArrayLike, dtype: str) -> I64:
    """Zero points of codes of `dtype` as they are after `to_signed`.

    >>> signed_zero_points([0, 131], "uint8").tolist(), signed_zero_points(-5, "int8").tolist()
    ([-128, 3], -5)
    """
    return np.asarray(values, np.int64) - (_SHIFT if dtype == "uint8" else 0)


def column_sums(w: I8) -> I64:
    """Sum of each column of w [K, N], int64 [N]. Needed once a weight, and only when some zx is not 0.

    >>> column_sums(np.array([[1, 127], [-2, 127]], np.int8)).tolist()
    [-1, 254]
    """
    return np.asarray(w.sum(axis=0, dtype=np.int64))


def row_sums(a: I8) -> I64:
    """Sum of each row of a [M, K], int64 [M, 1]."""
    return np.asarray(a.sum(axis=1, dtype=np.int64, keepdims=True))


def accumulate(a: I8, w: I8) -> I64:
    """Exact product of a [M, K] and w [K, N], int64 [M, N].

    Through float64 BLAS, a band of columns at a time: every partial sum is an integer far below 2**53.
    """
    wide = a.astype(np.float64)
    acc = np.empty((len(a), w.shape[1]), np.int64)
    band = max(1, _BAND_BYTES // (8 * max(1, len(w))))
    for start in range(0, w.shape[1], band):
        acc[:, start : start + band] = wide @ w[:, start : start + band].astype(np.float64)
    return acc


def correct(acc: I64, a: I8, a_zero: I64, w: I8, w_zero: I64, w_sums: I64 | None) -> I64:
    """acc' of the module's head, int64 [M, N], exact.

    `a_zero` is [1] or [M] (per row), `w_zero` is [] or [N] (per column); `w_sums` are the column sums of w, and may be
    missing where all of a_zero are 0.

    >>> a, w = np.array([[-100, 7]], np.int8), np.array([[3], [-128]], np.int8)
    >>> correct(accumulate(a, w), a, np.array([-40]), w, np.array(-25), column_sums(w)).tolist() == [
    ...     [(-100 + 40) * (3 + 25) + (7 + 40) * (-128 + 25)]
    ... ]
    True
    """
    result, zx = acc, a_zero[:, None]
    if zx.any():
        sums = column_sums(w) if w_sums is None else w_sums
        result = result - zx * sums
    if w_zero.any():
        result = result - w_zero * row_sums(a)
        if zx.any():
            result = result + len(w) * (zx * w_zero)
    return result


def multiplier(x_scale: Array, w_scale: Array, y_scale: np.float32 | None = None) -> F32:
    """f32(s_x * s_w), divided by s_y in float32 where there is one. Shapes broadcast."""
    with np.errstate(over="ignore", under="ignore"):
        product = np.asarray(np.asarray(x_scale, np.float32) * np.asarray(w_scale, np.float32))
        return product if y_scale is None else np.asarray(product / np.float32(y_scale))


def dequantize(acc: I64, scale: F32) -> F32:
    """f32(acc') * scale: what a group without output QuantizeLinear gives."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(acc.astype(np.float32) * scale)


def requantize(acc: I64, scale: F32, zero_point: int, dtype: str) -> Array:
    """clip(round-half-even(f32(acc') * scale) + zero_point) as int8 or uint8. The zero point comes after the rounding.

    >>> requantize(np.array([1, 3, -1, -3, 600]), np.float32(0.5), -7, "int8").tolist()
    [-7, -5, -7, -9, 127]
    """
    return _saturate(dequantize(acc, scale), zero_point, dtype)


def quantize(y: F32, scale: np.float32, zero_point: int, dtype: str) -> Array:
    """QuantizeLinear of float32 values, per tensor: clip(round-half-even(y / scale) + zero_point)."""
    with np.errstate(over="ignore", under="ignore"):
        return _saturate(np.asarray(y / np.float32(scale)), zero_point, dtype)


def _saturate(v: F32, zero_point: int, dtype: str) -> Array:
    kind = np.dtype(dtype)
    limits = np.iinfo(kind)
    # Clipped as floats first, because infinity has no integer; NaN, of which nothing is said, goes to the low end.
    low, high = np.float32(limits.min - zero_point), np.float32(limits.max - zero_point)
    known = np.where(np.isnan(v), low, np.clip(v, low, high))
    return np.asarray(np.rint(known).astype(np.int64) + zero_point).astype(kind)
