"""QDQ groups on the reference device: the arithmetic of quant.qdq on arrays of any rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnxpack.pack.manifest import QdqRecord
from onnxpack.quant.qdq import (
    accumulate,
    correct,
    dequantize,
    multiplier,
    quantize,
    requantize,
    signed_zero_points,
    to_signed,
)
from onnxpack.runtime.lower_groups import along
from onnxpack.runtime.operands import Operand
from onnxpack.types import F32, Array


def multiply_codes(x: Array, weight: Operand, group: QdqRecord, bias: Array | None) -> Array:
    """Codes x [..., K] times the weight: codes or float32 [..., N], as the group's record says. Any rank from 1.

    ValueError when the record's scales per row are not as many as x has rows.

    >>> w = Operand(np.array([[2], [-3]], np.int8), np.array(0.5, np.float32))
    >>> group = QdqRecord("x", "uint8", [0.25], [100], None, None, None)
    >>> multiply_codes(np.array([[110, 104]], np.uint8), w, group, None).tolist()
    [[1.0]]
    """
    k, n = weight.codes.shape
    a = to_signed(x).reshape(-1, k)
    zero_w = np.zeros((), np.int64) if weight.zero_points is None else weight.zero_points
    acc = accumulate(a, weight.codes)
    zero_x = signed_zero_points(_per_row(group.x_zero_point, group, x), str(group.x_dtype))
    sums = weight.column_sums if zero_x.any() else None
    acc = correct(acc, a, zero_x, weight.codes, zero_w, sums).reshape(*x.shape[:-1], n)
    if bias is not None and bias.dtype == np.int32:
        acc = np.asarray(acc + bias)
    scale, y = along(group.x_scale, group.x_axis, np.float32), group.requantize
    if bias is None or bias.dtype == np.int32:
        if y is None:
            return dequantize(acc, multiplier(scale, weight.scales))
        m = multiplier(scale, weight.scales, np.float32(y.scale))
        return requantize(acc, m, y.zero_point, y.dtype)
    values = np.asarray(dequantize(acc, multiplier(scale, weight.scales)) + bias)
    return values if y is None else quantize(values, np.float32(y.scale), y.zero_point, y.dtype)


def codes_of(x: F32, group: QdqRecord) -> Array:
    """The codes of activations that a DequantizeLinear made: x [..., K] / scale + zero point."""
    scale, zero = (along(values, group.x_axis, np.float32) for values in (group.x_scale, group.x_zero_point))
    limits = np.iinfo(str(group.x_dtype))
    with np.errstate(all="ignore"):
        codes = np.rint(x / scale) + zero
    return np.asarray(np.clip(np.nan_to_num(codes), limits.min, limits.max), str(group.x_dtype))


def _per_row(values: list[int], group: QdqRecord, x: Array) -> npt.NDArray[np.int64]:
    """Numbers per tensor or along an axis, one a row of x as a matrix; or one for all rows, [1]."""
    count, axis = len(group.x_scale), group.x_axis
    if count > 1 and axis is not None and (x.ndim < -axis or x.shape[axis] != count):
        raise ValueError(f"{count} scales for codes of shape {list(x.shape)} along axis {axis}")
    if len(values) == 1 or axis is None:
        return np.asarray(values, np.int64)
    return np.broadcast_to(along(values, axis, np.int64), (*x.shape[:-1], 1)).reshape(-1)
