"""The host lowering of QDQ groups, whose activations are uint8 by now; every form gives the same integers.

    codes out, one scale, no bias   QLinearMatMul(a, s_x, zx, w, s_w, zw, s_y, zp_y)
    float out or float bias         MatMulIntegerToFloat(a, w, s_x, s_w, zx, zw) [+ bias, QuantizeLinear(s_y, zp_y)]
    anything else                   MatMulInteger(a, w, zx, zw) + int32 terms, as float32, * m [, + bias]
                                    [, QuantizeLinear(1, zp_y) or, after a bias, QuantizeLinear(s_y, zp_y)]

onnxruntime's products take one zero point for all of A. Zero points per row are corrected by an int32 constant,
(128 - zx) * (colsum(w) - K * zw), beside a product that takes 128 for all; the length of a row's scales is checked by
a DequantizeLinear along their axis, so that A with one row is never spread over many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper

from onnxpack.pack.manifest import QdqRecord
from onnxpack.quant.qdq import multiplier
from onnxpack.runtime.constants import Constants
from onnxpack.runtime.operands import Operand
from onnxpack.runtime.product import Product

MICROSOFT = "com.microsoft"
_CENTRE = 128
_DEQUANTIZE_ALONG_AXIS = 13


@dataclass(frozen=True)
class LoweredWeight:
    """A weight, and the names of its initializers."""

    name: str
    operand: Operand
    codes: str
    zero_points: str | None

    @property
    def k(self) -> int:
        """Rows of the weight."""
        return int(self.operand.codes.shape[0])


class Target(Protocol):
    """Where constants go."""

    constants: Constants
    opset: int

    def array(self, wanted: str, array: npt.NDArray[np.generic]) -> str:
        """A constant that is not in the pack's files; gives its name."""

    def scales(self, weight: LoweredWeight) -> str:
        """Name of the scales of a weight."""


def along(values: list[Any], axis: int | None, dtype: Any) -> npt.NDArray[Any]:
    """Numbers per tensor as [], or along an axis of A (from the end), so that they broadcast against [..., N].

    >>> along([1, 2], -2, np.int32).tolist(), along([5], None, np.int32).tolist()
    ([[1], [2]], 5)
    """
    array = np.asarray(values, dtype)
    return array.reshape(()) if axis is None or array.size == 1 else array.reshape(-1, *[1] * (-axis - 1))


def lower_group(product: Product, record: QdqRecord, weight: LoweredWeight, target: Target) -> Iterator[NodeProto]:
    """The operators that stand in the place of a group."""
    return _Group(product, record, weight, target).nodes()


class _Group:
    def __init__(self, product: Product, record: QdqRecord, weight: LoweredWeight, target: Target) -> None:
        self.product, self.record, self.weight, self.target = product, record, weight, target
        self.constants = target.constants
        self.per_row = len(record.x_scale) > 1
        self.integer_bias = record.bias is not None and record.bias.dtype == "int32"
        self.float_bias = record.bias is not None and not self.integer_bias
        self.last: NodeProto | None = None

    def nodes(self) -> Iterator[NodeProto]:
        made = list(self.steps())
        made[-1].output[0] = self.product.y
        made[0].name = self.product.node
        yield from made

    def steps(self) -> Iterator[NodeProto]:
        y = self.record.requantize
        if self.per_row or self.integer_bias:
            yield from self.integer_steps()
        elif y is not None and not self.float_bias:
            s_y, zero_y = self.constants.scalar(np.float32(y.scale)), self.constants.scalar(np.uint8(y.zero_point))
            zero_w = self.weight.zero_points or self.constants.scalar(np.int8(0))
            x = [self.product.a, self.scale_x, self.zero_x]
            yield self.node(
                "QLinearMatMul", [*x, self.weight.codes, self.target.scales(self.weight), zero_w, s_y, zero_y]
            )
            return
        else:
            inputs = [
                self.product.a,
                self.weight.codes,
                self.scale_x,
                self.target.scales(self.weight),
                self.zero_x,
                *self.zero_w,
            ]
            yield self.node("MatMulIntegerToFloat", inputs, MICROSOFT)
        if self.float_bias:
            yield self.node("Add", [self.before, self.product.bias or ""])
        if y is not None:
            scale = np.float32(y.scale if self.float_bias else 1)
            zero = np.dtype(y.dtype).type(y.zero_point)
            yield self.node("QuantizeLinear", [self.before, self.constants.scalar(scale), self.constants.scalar(zero)])

    def integer_steps(self) -> Iterator[NodeProto]:
        yield self.node("MatMulInteger", [self.product.a, self.weight.codes, self.zero_x, *self.zero_w])
        if self.per_row and (terms := self.row_terms()).any():
            yield self.node("Add", [self.before, self.target.array(f"{self.product.node}/row_terms", terms)])
        if self.integer_bias:
            yield self.node("Add", [self.before, self.product.bias or ""])
        if self.per_row:
            ones = self.constants.tensor(np.ones(len(self.record.x_scale), np.float32), "onnxpack/ones")
            domain = "" if self.target.opset >= _DEQUANTIZE_ALONG_AXIS else MICROSOFT
            yield self.node("DequantizeLinear", [self.before, ones], domain, axis=self.record.x_axis)
        else:
            yield self.node("Cast", [self.before], to=TensorProto.FLOAT)
        yield self.node("Mul", [self.before, self.target.array(f"{self.product.node}/multiplier", self.multiplier())])

    def row_terms(self) -> npt.NDArray[np.int32]:
        found: Operand = self.weight.operand
        zero_w = np.int64(0) if found.zero_points is None else found.zero_points
        zero_x = along(self.record.x_zero_point, self.record.x_axis, np.int64)
        return np.asarray((_CENTRE - zero_x) * (found.column_sums - self.weight.k * zero_w)).astype(np.int32)

    def multiplier(self) -> npt.NDArray[np.float32]:
        y = self.record.requantize
        s_y = None if y is None or self.float_bias else np.float32(y.scale)
        return multiplier(along(self.record.x_scale, self.record.x_axis, np.float32), self.weight.operand.scales, s_y)

    @property
    def scale_x(self) -> str:
        return self.constants.scalar(np.float32(self.record.x_scale[0]))

    @property
    def zero_x(self) -> str:
        return self.constants.scalar(np.uint8(_CENTRE if self.per_row else self.record.x_zero_point[0]))

    @property
    def zero_w(self) -> list[str]:
        return [] if self.weight.zero_points is None else [self.weight.zero_points]

    @property
    def before(self) -> str:
        assert self.last is not None
        name: str = self.last.output[0]
        return name

    def node(self, op: str, inputs: list[str], domain: str = "", **attributes: Any) -> NodeProto:
        name = self.constants.names.fresh(f"{self.product.node}/{op}")
        self.last = helper.make_node(op, inputs, [name], name, domain=domain, **attributes)
        return self.last
