"""The host's half of a product: codes before the device, results from its int32 accumulators after.

The arithmetic is that of quant.int8 and quant.qdq, bit for bit; here it works in place, on one block of rows and one
range of columns at a time, because that is what launches give.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.pack.manifest import QdqRecord
from onnxpack.quant.int8 import scale_of
from onnxpack.quant.qdq import I64, multiplier, row_sums, signed_zero_points
from onnxpack.runtime.lower_groups import along
from onnxpack.runtime.operands import Operand
from onnxpack.types import F32, I8, I32, Array

_BLOCK_BYTES = 512 * 1024  # of float32 temporary, so that it stays in a core's cache


class Scratch:
    """Memory for temporaries, grown when it is too small and kept: no allocation per call."""

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array with undefined content; the one called `name` before is no longer valid."""
        count = 1
        for size in shape:
            count *= size
        held = self._held.get(name)
        if held is None or held.size < count:
            held = self._held[name] = np.empty(count, dtype)
        return held[:count].reshape(shape)


@dataclass(frozen=True)
class Codes:
    """The left operand of a product: int8 [rows, K], and for float activations the scale of each row."""

    codes: I8
    scale: F32 | None
    serial: int
    """No two that a device sees have the same."""

    @cached_property
    def row_sums(self) -> I64:
        """int64 [rows, 1]; made when first needed."""
        return row_sums(self.codes)


def quantize(x: F32, scratch: Scratch) -> tuple[I8, F32]:
    """As quant.int8.quantize_rows, for x [rows, K]; the codes lie in `scratch`.

    >>> codes, scale = quantize(np.array([[1, -2], [np.inf, 1]], np.float32), Scratch())
    >>> codes.tolist(), [round(float(s), 4) for s in scale]
    ([[64, -127], [0, 0]], [0.0157, nan])
    """
    rows, k = x.shape
    codes = scratch.take("codes", (rows, k), np.int8)
    scale = np.empty(rows, np.float32)
    block = max(1, _BLOCK_BYTES // (4 * k))
    for start in range(0, rows, block):
        part = slice(start, start + block)
        _quantize_block(x[part], codes[part], scale[part], scratch)
    return codes, scale


def _quantize_block(x: F32, codes: I8, scale: F32, scratch: Scratch) -> None:
    # Maximum and minimum pass NaN on, so amax is finite exactly where the whole row is.
    amax = np.maximum(x.max(axis=1), -x.min(axis=1))
    finite = np.isfinite(amax)
    quotient = scratch.take("quotient", x.shape, np.float32)
    if finite.all():
        scale[:] = scale_of(amax)
        np.divide(x, scale[:, None], out=quotient)
        np.rint(quotient, out=quotient)
    else:
        scale[:] = scale_of(np.where(finite, amax, np.float32(np.nan)))
        with np.errstate(invalid="ignore"):
            np.divide(x, scale[:, None], out=quotient)
        np.rint(quotient, out=quotient)
        quotient[~finite] = 0
    # |x| <= amax, so no quotient rounds beyond 127.
    codes[...] = quotient


class FloatFinish:
    """y = (float32(acc) * w_scale[column]) * a_scale[row]; codes that the graph brought may have zero points."""

    def __init__(self, weight: Operand) -> None:
        self._scales = np.broadcast_to(weight.scales, weight.codes.shape[1])
        self._zero_points = weight.zero_points
        if self._zero_points is not None:
            self._zero_points = np.broadcast_to(self._zero_points, weight.codes.shape[1])

    def write(self, acc: I32, rows: slice, columns: slice, codes: Codes, out: F32) -> None:
        """Results of these rows and columns, from their accumulators, into `out` [rows of the call, N]."""
        assert codes.scale is not None
        if self._zero_points is not None:
            acc = (acc - self._zero_points[columns] * codes.row_sums[rows]).astype(np.int32)
        y = out[rows, columns]
        with np.errstate(over="ignore"):
            np.multiply(acc, self._scales[columns], out=y, dtype=np.float32, casting="unsafe")
            np.multiply(y, codes.scale[rows, None], out=y)


@dataclass(frozen=True)
class GroupFinish:
    """A QDQ group: zero points taken out, bias added, scaled, requantized, as its record says."""

    record: QdqRecord
    weight: Operand

    def bind(self, x: Array, codes: Codes, bias: Array | None) -> _BoundGroup:
        """For one call: x [..., K] are its codes, of whatever rank. ValueError when it has not as many rows as the
        record has scales, or the bias is not one number a column."""
        record, n = self.record, self.weight.codes.shape[1]
        if bias is not None and bias.size not in (1, n):
            raise ValueError(f"a bias of shape {list(bias.shape)} for {n} columns")
        count, axis = len(record.x_scale), record.x_axis
        if count > 1 and axis is not None and (x.ndim < -axis or x.shape[axis] != count):
            raise ValueError(f"{count} scales for codes of shape {list(x.shape)} along axis {axis}")
        if count == 1:
            return self._per_tensor if bias is None else self._bound(bias)
        rows = (*x.shape[:-1], 1)
        scales = np.broadcast_to(along(record.x_scale, axis, np.float32), rows).reshape(-1, 1)
        points = self._zero_x
        if points.size > 1:
            points = np.broadcast_to(along(points.tolist(), axis, np.int64), rows).reshape(-1, 1)
        return _BoundGroup(record, self.weight, scales, points, bias)

    @cached_property
    def _zero_x(self) -> I64:
        return signed_zero_points(self.record.x_zero_point, str(self.record.x_dtype)).reshape(-1, 1)

    @cached_property
    def _per_tensor(self) -> _BoundGroup:
        return self._bound(None)

    def _bound(self, bias: Array | None) -> _BoundGroup:
        scales = np.asarray(self.record.x_scale, np.float32).reshape(1, 1)
        return _BoundGroup(self.record, self.weight, scales, self._zero_x, bias)

    @property
    def needs_column_sums(self) -> bool:
        """Whether some zero point of the activation is not 0."""
        return bool(self._zero_x.any())


class _BoundGroup:
    """A group for one call. `scales` and `points` are [1, 1], or [rows, 1] where they differ from row to row."""

    def __init__(self, record: QdqRecord, weight: Operand, scales: F32, points: I64, bias: Array | None) -> None:
        n = weight.codes.shape[1]
        self._weight, self._y = weight, record.requantize
        self._points = points if points.any() else None
        zero_w = weight.zero_points
        self._zero_w = None if zero_w is None else np.broadcast_to(zero_w, n)
        bias = None if bias is None else np.broadcast_to(bias.reshape(-1), n)
        self._int_bias = bias if bias is not None and bias.dtype == np.int32 else None
        self._float_bias = bias if bias is not None and bias.dtype != np.int32 else None
        in_one = self._y is not None and self._float_bias is None
        y_scale = np.float32(self._y.scale) if self._y is not None and in_one else None
        self._by_row = len(scales) > 1
        self._x_scale, self._y_scale = scales, y_scale
        self._scale = None if self._by_row else np.broadcast_to(multiplier(scales, weight.scales, y_scale), (1, n))

    def write(self, acc: I32, rows: slice, columns: slice, codes: Codes, out: Array) -> None:
        """Results of these rows and columns, from their accumulators, into `out` [rows of the call, N]."""
        exact: npt.NDArray[Any] = self._correct(acc, rows, columns, codes)
        if self._int_bias is not None:
            exact = exact + self._int_bias[columns].astype(np.int64)
        if self._scale is not None:
            scale = self._scale[:, columns]
        else:
            weight_scales = np.broadcast_to(self._weight.scales, self._weight.codes.shape[1])
            scale = multiplier(self._x_scale[rows], weight_scales[columns], self._y_scale)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            y = exact.astype(np.float32)
            np.multiply(y, scale, out=y)
            if self._float_bias is not None:
                np.add(y, self._float_bias[columns], out=y)
                if self._y is not None:
                    np.divide(y, np.float32(self._y.scale), out=y)
        if self._y is None:
            out[rows, columns] = y
        else:
            _saturate(y, self._y.zero_point, out[rows, columns])

    def _correct(self, acc: I32, rows: slice, columns: slice, codes: Codes) -> npt.NDArray[Any]:
        """acc' = acc - zx * colsum(w) - zw * rowsum(a) + K * zx * zw, exact."""
        result: npt.NDArray[Any] = acc
        points = self._points
        if points is not None:
            points = points if len(points) == 1 else points[rows]
            result = result - points * self._weight.column_sums[columns]
        if self._zero_w is not None:
            zero_w = self._zero_w[columns]
            result = result - zero_w * codes.row_sums[rows]
            if points is not None:
                result = result + len(self._weight.codes) * (points * zero_w)
        return result


def _saturate(y: F32, zero_point: int, out: Array) -> None:
    """clip(round-half-even(y) + zero_point) into `out`; as quant.qdq, NaN goes to the low end. Overwrites y.

    >>> out = np.empty(4, np.int8)
    >>> _saturate(np.array([0.5, 1.5, 600, np.nan], np.float32), -7, out)
    >>> out.tolist()
    [-7, -5, 127, -128]
    """
    limits = np.iinfo(out.dtype)
    # fmax takes the other one of a NaN and a number.
    np.fmax(y, np.float32(limits.min - zero_point), out=y)
    np.minimum(y, np.float32(limits.max - zero_point), out=y)
    np.rint(y, out=y)
    np.add(y, np.float32(zero_point), out=y)
    out[...] = y
