"""Steps that many encoders share: absolute maxima, safe quotients, rounding, small-float codes.

All work on float32 blocks [rows, blocks, values] and keep that shape. The figures are those of the reference
implementations to the last bit, so the order of operations matters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from onnxpack.formats.base import Array
from onnxpack.formats.datatypes import FLOAT_NAMES, DataType
from onnxpack.formats.layout import require

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_SLAB = 1 << 16
_TRANSPOSED_ROWS = 128


def amax(x: F32) -> F32:
    """max |x| of each block, [.., 1]."""
    flat = np.abs(x).reshape(-1)
    # A reduction over a short last axis pays for every block; reduceat does not.
    top = np.maximum.reduceat(flat, np.arange(0, flat.size, x.shape[-1])) if flat.size else flat
    return np.asarray(top.reshape(*x.shape[:-1], 1), np.float32)


def nonzero(scale: F32) -> F32:
    """The scale, 1 where it is 0: what codes are divided by."""
    return np.asarray(np.where(scale == 0, np.float32(1), scale), np.float32)


def half_away(x: F32) -> F32:
    """Round half away from zero. Exact: adding 0.5 would round up the float just below a half.

    >>> half_away(np.array([0.5, -1.5, 0.49999997, 2.4], np.float32)).tolist()
    [1.0, -2.0, 0.0, 2.0]
    """
    whole = np.trunc(x)
    return whole + np.copysign((np.abs(x - whole) >= 0.5).astype(np.float32), x)


def require_int(value: object, path: str, low: int, high: int) -> None:
    """ProfileError unless `value` is an integer from `low` to `high`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(whole, path, f"{value!r} is not an integer from {low} to {high}")


def float_dtype(name: str) -> DataType:
    """The type that a parameter `scale_dtype` names."""
    require(
        isinstance(name, str) and name in FLOAT_NAMES, "scale_dtype", f"{name!r} is not one of {', '.join(FLOAT_NAMES)}"
    )
    return FLOAT_NAMES[name]


def rounded(scale: F32, data_type: DataType) -> F32:
    """The scale as it will be read back from its stored type."""
    return scale if data_type is DataType.FLOAT else scale.astype(data_type.storage).astype(np.float32)


_HALF_TOP = np.float32(65520)  # from here on float16 is infinite
_HALF_LEAST = np.float32(2.0**-14)  # below, float16 has fewer digits
_HALF_ANCHOR = np.float32(0.75)  # its last digit is float16's smallest step


def halved(x: F32) -> F32:
    """float32 values rounded to float16 and back, half to even; several times as fast as two casts.

    >>> halved(np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 1e5, 65519], np.float32)).tolist()
    [1.0, 1.001953125, 0.0, inf, 65504.0]
    """
    x = np.asarray(x, np.float32)
    size = np.abs(x)
    if not x.size or not size.max() < _HALF_TOP:
        with np.errstate(over="ignore"):
            wide: F32 = x.astype(np.float16).astype(np.float32)
        return wide
    raw = np.ascontiguousarray(x).view(np.uint32)
    code = raw >> np.uint32(13)
    code &= np.uint32(1)
    code += np.uint32(0xFFF)
    code += raw
    code &= np.uint32(0xFFFFE000)
    value = code.view(np.float32).reshape(x.shape)
    if size.min() < _HALF_LEAST:
        value = np.where(size < _HALF_LEAST, (x + _HALF_ANCHOR) - _HALF_ANCHOR, value)
    return value


def slabs(w: Array) -> Iterator[F32]:
    """A weight as float32 bands of whole rows in C order; of a transposed one, as many rows as fill cache lines."""
    rows = max(1, _SLAB // max(1, w.shape[1]), _TRANSPOSED_ROWS if w.strides[0] < w.strides[1] else 1)
    for i in range(0, len(w), rows):
        yield np.ascontiguousarray(w[i : i + rows], np.float32)


def amax_of(w: Array, axis: int | None = None) -> F32:
    """max |w| of a whole weight [N, K], or along an axis, slab by slab: no float copy of the weight."""
    if axis == 1:
        return np.concatenate([np.abs(slab).max(axis=1) for slab in slabs(w)])
    top = np.zeros(w.shape[1], np.float32)
    for slab in slabs(w):
        np.maximum(top, np.abs(slab).max(axis=0), out=top)
    return top if axis == 0 else np.asarray(top.max(), np.float32)


def mean_abs(w: Array, axis: int | None = None) -> F32:
    """mean |w| of a weight [N, K] or (axis 1) of each row, summed in float64 in a fixed order, as float32."""
    sums = np.concatenate([np.abs(slab).sum(axis=1, dtype=np.float64) for slab in slabs(w)])
    if axis == 1:
        return np.asarray(sums / w.shape[1], np.float32)
    return np.asarray(sums.sum() / (w.shape[0] * w.shape[1]), np.float32)


@functools.cache
def _top_code(exponent: int, mantissa: int, has_nan: bool) -> int:
    return (1 << (exponent + mantissa)) - (2 if has_nan else 1)


def small_float(x: F32, exponent: int, mantissa: int, bias: int, has_nan: bool = False) -> U8:
    """Codes of a small float with sign bit, rounded half to even, saturated at the largest number; -0 is kept.

    >>> small_float(np.array([0.25, 0.75, 2.5, -100], np.float32), 2, 1, 1).tolist()  # E2M1
    [0, 2, 4, 15]
    """
    raw = x.view(np.uint32)
    magnitude = raw & np.uint32(0x7FFFFFFF)
    drop = np.uint32(23 - mantissa)
    odd = (magnitude >> drop) & np.uint32(1)
    normal = (magnitude + odd + np.uint32((1 << (22 - mantissa)) - 1)) >> drop
    normal -= np.uint32((127 - bias) << mantissa)
    # Below the smallest normal number the codes are multiples of the smallest step; adding a power of two whose last
    # bit is that step rounds exactly there.
    least = np.float32(2.0 ** (1 - bias))
    anchor = np.float32(2.0 ** (1 - bias - mantissa + 23))
    a = magnitude.view(np.float32)
    tiny = (a + anchor).view(np.uint32) - anchor.view(np.uint32)
    codes = np.where(a < least, tiny, np.minimum(normal, np.uint32(_top_code(exponent, mantissa, has_nan))))
    signs = raw >> np.uint32(31) << np.uint32(exponent + mantissa)
    return np.asarray(codes | signs, np.uint8)
