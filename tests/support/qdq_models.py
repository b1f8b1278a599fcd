"""QDQ groups as models, and what they must give: computed here with int64 and one float32 product, nothing of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from model_maker import Array, model, node, tensor, value
from onnx import TensorProto, helper

F32 = np.float32
MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Quantized:
    """A tensor of codes: value = (codes - zero) * scale, along `axis` where scale has one."""

    codes: Array
    scale: Any = 0.02
    zero: Any = None
    """None: no zero point is given, so it is 0."""
    axis: int | None = None

    @property
    def differences(self) -> Array:
        """codes - zero, int64."""
        return self.codes.astype(np.int64) - self.spread(0 if self.zero is None else self.zero, np.int64)

    def spread(self, numbers: Any, dtype: Any) -> Array:
        """Numbers in a shape that broadcasts against the codes."""
        array = np.asarray(numbers, dtype)
        if array.size == 1 or self.axis is None:
            return array.reshape(())
        shape = [1] * self.codes.ndim
        shape[self.axis] = -1
        return array.reshape(shape)


@dataclass(frozen=True)
class Group:
    """x_q, w_q -> MatMul or Gemm -> [bias] -> [QuantizeLinear]."""

    x: Quantized
    w: Quantized
    """[K, N], whatever way it is stored in the model."""
    y_scale: Any = None
    y_zero: Any = None
    """A numpy scalar; its type is that of the result. None beside a y_scale: uint8."""
    bias: Array | None = None
    """int32 codes in the scale of the accumulator, or float32."""
    opset: int = 17
    domain: str = ""
    op: str = "MatMul"
    trans_a: bool = False
    stored: str = "kn"
    """"kn"; "transpose": [N, K] behind a Transpose; "trans_b": [N, K] in a Gemm."""
    ends: str = "codes"
    """"codes": they are the graph's inputs and outputs; "float": a QuantizeLinear before, a DequantizeLinear behind."""
    x_shape: Sequence[int | str] | None = None

    @property
    def a(self) -> Array:
        """The codes as the product sees them, minus zero points, int64 [..., K]."""
        return self.x.differences.T if self.trans_a else self.x.differences

    def accumulators(self) -> Array:
        """acc' with an int32 bias in it, int64."""
        acc = self.a @ self.w.differences
        return acc + self.bias.astype(np.int64) if self.integer_bias else acc

    @property
    def integer_bias(self) -> bool:
        return self.bias is not None and self.bias.dtype == np.int32

    def scale(self) -> Array:
        """f32(s_x * s_w), in a shape that broadcasts against the result."""
        s_x = self.x.spread(self.x.scale, F32)
        s_x = s_x.T if self.trans_a else s_x
        s_w = np.asarray(self.w.scale, F32)
        return np.asarray(s_x * (s_w.reshape(-1) if s_w.size > 1 else s_w.reshape(())))

    def before_rounding(self) -> Array:
        """What is rounded, without the zero point, float32."""
        acc = self.accumulators().astype(F32)
        if self.bias is None or self.integer_bias:
            return np.asarray(acc * np.asarray(self.scale() / F32(self.y_scale)))
        return np.asarray(np.asarray(np.asarray(acc * self.scale()) + self.bias) / F32(self.y_scale))

    def expected(self) -> Array:
        """The specification, on every element."""
        if self.y_scale is None:
            y = np.asarray(self.accumulators().astype(F32) * self.scale())
            return y if self.bias is None or self.integer_bias else np.asarray(y + self.bias)
        zero = np.uint8(0) if self.y_zero is None else self.y_zero
        limits = np.iinfo(zero.dtype)
        rounded = np.rint(self.before_rounding().astype(np.float64)) + int(zero)
        return np.clip(rounded, limits.min, limits.max).astype(zero.dtype)

    def feed(self) -> dict[str, Array]:
        """What the model is fed."""
        if self.ends == "codes":
            return {"x": self.x.codes}
        scale = self.x.spread(self.x.scale, F32)
        return {"x": (self.x.differences * scale).astype(F32)}

    def model(self) -> onnx.ModelProto:
        """The group with its ends."""
        return _Maker(self).model()

    def but(self, **changes: Any) -> Group:
        return replace(self, **changes)


class _Maker:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        g = self.group
        kind = helper.np_dtype_to_tensor_dtype(g.x.codes.dtype)
        shape = g.x.codes.shape if g.x_shape is None else g.x_shape
        codes = "x"
        if g.ends == "float":
            codes, kind = "x_q", TensorProto.FLOAT
            self.linear("QuantizeLinear", "x", g.x, "x", codes)
        inputs = [value("x", shape, kind)]
        self.linear("DequantizeLinear", codes, g.x, "x", "x_dq")
        self.weight()
        result, y = self.product(), self.result_type()
        if g.y_scale is not None:
            last = "y" if g.ends == "codes" else "y_q"
            self.parameters("y", g.y_scale, g.y_zero)
            self.nodes.append(node("QuantizeLinear", [result, *self.names("y")], [last], "q_y", domain=g.domain))
            if g.ends == "float":
                self.nodes.append(node("DequantizeLinear", [last, *self.names("y")], ["y"], "dq_y", domain=g.domain))
        else:
            self.nodes[-1].output[0] = "y"
        return model(
            self.nodes, self.tensors, inputs, ["y"], opset=g.opset, ir_version=8 if g.opset < 19 else 10, types={"y": y}
        )

    def result_type(self) -> int:
        g = self.group
        if g.y_scale is None or g.ends == "float":
            return TensorProto.FLOAT
        return TensorProto.UINT8 if g.y_zero is None else helper.np_dtype_to_tensor_dtype(g.y_zero.dtype)

    def names(self, of: str) -> list[str]:
        known = {t.name for t in self.tensors}
        return [f"{of}_scale", *([f"{of}_zero"] if f"{of}_zero" in known else [])]

    def parameters(self, of: str, scale: Any, zero: Any) -> None:
        if f"{of}_scale" in {t.name for t in self.tensors}:
            return
        self.tensors.append(tensor(f"{of}_scale", np.asarray(scale, F32)))
        if zero is not None:
            self.tensors.append(tensor(f"{of}_zero", np.asarray(zero)))

    def linear(self, op: str, source: str, q: Quantized, of: str, result: str, axis: int | None = None) -> None:
        zero = None if q.zero is None else np.asarray(q.zero, q.codes.dtype)
        if zero is None and op == "QuantizeLinear" and q.codes.dtype == np.int8:
            zero = np.zeros(np.shape(q.scale), np.int8)
        self.parameters(of, q.scale, zero)
        axis = q.axis if axis is None else axis
        attributes = {} if axis is None else {"axis": axis}
        self.nodes.append(
            node(op, [source, *self.names(of)], [result], f"{op}_{of}", domain=self.group.domain, **attributes)
        )

    def weight(self) -> None:
        g, turned = self.group, self.group.stored != "kn"
        codes = np.ascontiguousarray(g.w.codes.T) if turned else g.w.codes
        self.tensors.append(tensor("w", codes))
        axis = None if g.w.axis is None else (0 if turned else 1)
        self.linear("DequantizeLinear", "w", g.w, "w", "w_dq", axis)
        if g.stored == "transpose":
            self.nodes.append(node("Transpose", ["w_dq"], ["w_t"], "turn", perm=[1, 0]))

    def product(self) -> str:
        g = self.group
        b = "w_t" if g.stored == "transpose" else "w_dq"
        inputs, attributes = ["x_dq", b], {}
        if g.op == "Gemm":
            attributes = {"transA": int(g.trans_a), "transB": int(g.stored == "trans_b")}
            inputs += [self.bias()] if g.bias is not None else []
        self.nodes.append(node(g.op, inputs, ["product"], "site", **attributes))
        if g.op == "Gemm" or g.bias is None:
            return "product"
        self.nodes.append(node("Add", ["product", self.bias()], ["sum"], "add"))
        return "sum"

    def bias(self) -> str:
        g = self.group
        assert g.bias is not None
        self.tensors.append(tensor("bias", g.bias))
        if not g.integer_bias:
            return "bias"
        scale = np.asarray(F32(g.x.scale) * np.asarray(g.w.scale, F32))
        self.tensors.append(tensor("bias_scale", scale))
        axis = {"axis": g.bias.ndim - 1} if scale.ndim else {}
        made = node("DequantizeLinear", ["bias", "bias_scale"], ["bias_dq"], "dq_bias", domain=g.domain, **axis)
        self.nodes.insert(0, made)
        return "bias_dq"


def codes(rng: np.random.Generator, shape: Sequence[int], dtype: Any, low: int | None = None) -> Array:
    """Random codes over the whole range of the type, its ends included."""
    limits = np.iinfo(dtype)
    return rng.integers(limits.min if low is None else low, limits.max + 1, shape).astype(dtype)
