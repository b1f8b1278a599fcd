"""Quantized products: weights that bring their own codes, and QDQ groups that are one site.

    x_q -DequantizeLinear-> x  \\
                                MatMul or Gemm -> [bias] -> [QuantizeLinear] -> y_q
    w_q -DequantizeLinear-> w  /

`match` says what the group is, or which condition failed at which node: a refusal is a reason of the closed list, the
node, and a sentence. Nothing is guessed: an axis comes from the attribute, never from a length.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxpack.graph.constant import Constant
from onnxpack.graph.constants import ConstantResolver, evaluate
from onnxpack.graph.paths import path_of
from onnxpack.graph.quantized import (
    CODES,
    Activation,
    Bias,
    Group,
    OwnWeight,
    Refusal,
    Requantize,
    count,
)
from onnxpack.graph.tensors import TensorStore
from onnxpack.graph.views import DOMAINS
from onnxpack.quant.bounds import K_LIMIT_FULL_RANGE, K_LIMIT_ZERO_POINT
from onnxpack.reasons import Reason
from onnxpack.types import Array

_NARROW = (*CODES, ir.DataType.INT4, ir.DataType.UINT4)
_SIXTEEN = (ir.DataType.INT16, ir.DataType.UINT16)
_INTEGER_PRODUCTS = 10  # the opset that has MatMulInteger and QLinearMatMul


class QdqMatcher:
    """Looks at one product at a time; remembers constants."""

    def __init__(self, resolver: ConstantResolver, store: TensorStore, opset: int) -> None:
        self._resolver = resolver
        self._store = store
        self._opset = opset

    def match(
        self, node: ir.Node, a: ir.Value | None, a_rank: int | None, b: ir.Value | None, transposed_b: bool
    ) -> Group | Refusal | None:
        """The group around a MatMul or Gemm; a refusal; or None when its weight is not quantized at all."""
        found = self._weight(b, transposed_b)
        if not isinstance(found, OwnWeight):
            return found
        activation = self._activation(node, a, a_rank)
        if isinstance(activation, Refusal):
            return activation
        too_long = self._too_long(node, found, activation)
        if too_long is not None:
            return too_long
        if activation is None:
            return Group(found, None, None, None)
        if self._opset < _INTEGER_PRODUCTS:
            return Refusal(Reason.UNSUPPORTED_OP, path_of(node), f"opset {self._opset} has no integer products")
        bias, requantize = self._tail(node, found, activation)
        return Group(found, activation, bias, requantize)

    # -- the weight ----------------------------------------------------------------------------------------------

    def _weight(self, b: ir.Value | None, transposed: bool) -> OwnWeight | Refusal | None:
        node = None if b is None else b.producer()
        while node is not None and node.domain == "" and node.op_type in ("Identity", "Transpose"):
            if node.op_type == "Transpose":
                perm = node.attributes.get("perm")
                if perm is not None and list(perm.value) != [1, 0]:
                    return None
                transposed = not transposed
            node = None if node.inputs[0] is None else node.inputs[0].producer()
        if node is None or node.op_type != "DequantizeLinear" or node.domain not in DOMAINS:
            return None
        codes = self._resolver.resolve(node.inputs[0])
        if codes is None:
            return None
        return self._checked_weight(node, codes, transposed)

    def _checked_weight(self, node: ir.Node, codes: Constant, transposed: bool) -> OwnWeight | Refusal:
        here = path_of(node)
        if codes.dtype.name.startswith("FLOAT8"):
            return Refusal(Reason.FLOAT8, here, f"the weight is {codes.dtype.name.lower()}")
        if codes.dtype not in _NARROW:
            return Refusal(Reason.UNSUPPORTED_DTYPE, here, f"the weight's codes are {codes.dtype.name.lower()}")
        if len(codes.shape) != 2:
            return Refusal(Reason.BATCHED_WEIGHT, here, f"the weight's codes are {list(codes.shape)}")
        scale, zero_point = self._parameters(node)
        if isinstance(scale, Refusal):
            return scale
        axis = _axis_of(node, scale, zero_point, 2)
        if isinstance(axis, Refusal):
            return axis
        along_k = 1 if transposed else 0
        if axis == along_k:
            what = Reason.SCALE_ALONG_K if count(scale) > 1 else Reason.ZERO_POINT_ALONG_K
            return Refusal(what, here, f"axis {axis} of the weight is K")
        return OwnWeight(codes, scale, zero_point, transposed, node)

    def _parameters(self, node: ir.Node) -> tuple[Constant | Refusal, Constant | None]:
        """Scale and zero point of a Quantize- or DequantizeLinear, as constants."""
        here = path_of(node)
        scale = self._resolver.resolve(node.inputs[1])
        given = node.inputs[2] if len(node.inputs) > 2 else None
        zero_point = self._resolver.resolve(given)
        if scale is None or (given is not None and zero_point is None):
            return Refusal(Reason.SCALE_NOT_CONSTANT, here, "scale or zero point is computed at run time"), None
        overridable = scale.reason or (None if zero_point is None else zero_point.reason)
        if overridable is not None:
            return Refusal(Reason.SCALE_NOT_CONSTANT, here, "scale or zero point is also a graph input"), None
        if scale.dtype != ir.DataType.FLOAT:
            return Refusal(Reason.UNSUPPORTED_DTYPE, here, f"the scale is {scale.dtype.name.lower()}"), None
        return scale, zero_point

    # -- the activation ------------------------------------------------------------------------------------------

    def _activation(self, product: ir.Node, a: ir.Value | None, rank: int | None) -> Activation | Refusal | None:
        node = None if a is None else a.producer()
        while node is not None and node.domain == "" and node.op_type == "Identity":
            a = node.inputs[0]
            node = None if a is None else a.producer()
        if node is None or node.op_type != "DequantizeLinear" or node.domain not in DOMAINS:
            return None
        x, here = node.inputs[0], path_of(node)
        if x is None:
            return Refusal(Reason.UNSUPPORTED_OP, here, "it has no input")
        scale, zero_point = self._parameters(node)
        if isinstance(scale, Refusal):
            return scale
        if not np.isfinite(self.numbers(scale)).all():
            return Refusal(Reason.UNSUPPORTED_OP, here, "the scale is not finite")
        dtype = _quantized_type(x, zero_point)
        if dtype in _SIXTEEN:
            return Refusal(Reason.SIXTEEN_BIT_ACTIVATION, here, f"the activation is {dtype.name.lower()}")
        if dtype is not None and dtype.name.startswith("FLOAT8"):
            return Refusal(Reason.FLOAT8, here, f"the activation is {dtype.name.lower()}")
        if dtype is None or dtype not in CODES:
            return Refusal(Reason.UNSUPPORTED_DTYPE, here, f"the activation is {dtype.name.lower() if dtype else '?'}")
        return self._with_axis(product, node, Activation(x, dtype, scale, zero_point, None), rank)

    def _with_axis(
        self, product: ir.Node, node: ir.Node, activation: Activation, rank: int | None
    ) -> Activation | Refusal:
        scale, zero_point, here = activation.scale, activation.zero_point, path_of(node)
        if max(count(scale), count(zero_point)) == 1 and not _block(node):
            return activation
        transposed = product.op_type == "Gemm" and _int(product, "transA", 0)
        rank = 2 if product.op_type == "Gemm" else rank
        if rank is None:
            return Refusal(Reason.UNSUPPORTED_OP, here, "the rank of the activation is unknown, so is its scale's axis")
        axis = _axis_of(node, scale, zero_point, rank)
        if isinstance(axis, Refusal):
            return axis
        assert axis is not None
        along_k = rank - 2 if transposed else rank - 1
        if axis == along_k:
            what = Reason.SCALE_ALONG_K if count(scale) > 1 else Reason.ZERO_POINT_ALONG_K
            return Refusal(what, here, f"axis {axis} of the activation is K")
        if zero_point is not None and count(scale) != count(zero_point):
            why = f"{count(scale)} scales and {count(zero_point)} zero points"
            return Refusal(Reason.UNSUPPORTED_OP, here, why)
        from_end = -2 if transposed else axis - rank
        return Activation(activation.value, activation.dtype, scale, zero_point, from_end)

    def _too_long(self, node: ir.Node, weight: OwnWeight, activation: Activation | None) -> Refusal | None:
        k = weight.codes.shape[1 if weight.transposed else 0]
        points = (weight.zero_point, None if activation is None else activation.zero_point)
        unsigned = weight.codes.dtype == ir.DataType.UINT8 or (
            activation is not None and activation.dtype == ir.DataType.UINT8
        )
        plain = not unsigned and all(c is None or not self.numbers(c).any() for c in points)
        limit = K_LIMIT_FULL_RANGE if plain else K_LIMIT_ZERO_POINT
        if k > limit:
            return Refusal(Reason.K_TOO_LONG, path_of(node), f"K = {k} is more than {limit}")
        return None

    def numbers(self, constant: Constant) -> Array:
        """The values of a scale, a zero point or a bias."""
        return np.asarray(evaluate(constant, self._store))

    # -- what follows the product --------------------------------------------------------------------------------

    def _tail(self, node: ir.Node, weight: OwnWeight, x: Activation) -> tuple[Bias | None, Requantize | None]:
        """Bias and output QuantizeLinear, as far as they belong to the group; what does not stays in the graph."""
        n = weight.codes.shape[0 if weight.transposed else 1]
        if node.op_type == "Gemm":
            if _float(node, "alpha") != 1 or _float(node, "beta") != 1:
                return None, None
            c = node.inputs[2] if len(node.inputs) > 2 else None
            bias = self._bias(c, None, n, weight, x)
            if c is not None and bias is None:
                return None, None
            return bias, self._requantize(node.outputs[0])
        plain = self._requantize(node.outputs[0])
        if plain is not None:
            return None, plain
        add = _only_user(node.outputs[0], "Add")
        if add is None:
            return None, None
        other = add.inputs[1] if add.inputs[0] is node.outputs[0] else add.inputs[0]
        bias = self._bias(other, add, n, weight, x)
        if bias is None:
            return None, None
        requantize = self._requantize(add.outputs[0])
        if requantize is None and not bias.in_accumulator:
            return None, None  # a float addition after a float result is the graph's own business
        return bias, requantize

    def _bias(
        self, value: ir.Value | None, add: ir.Node | None, n: int, weight: OwnWeight, x: Activation
    ) -> Bias | None:
        constant = self._resolver.resolve(value)
        if constant is None or constant.reason is not None or constant.dtype != ir.DataType.FLOAT:
            return None
        if any(d != 1 for d in constant.shape[:-1]) or (constant.shape and constant.shape[-1] not in (1, n)):
            return None
        codes = self._accumulator_bias(constant, n, weight, x)
        return Bias(constant, False, add) if codes is None else Bias(codes, True, add)

    def _accumulator_bias(self, bias: Constant, n: int, weight: OwnWeight, x: Activation) -> Constant | None:
        """The int32 codes of a bias whose scale is exactly s_x * s_w in float32, and which cannot overflow."""
        node = bias.node
        if node is None or node.op_type != "DequantizeLinear" or count(x.scale) != 1:
            return None
        codes, scale = bias.inputs[0], bias.inputs[1]
        zero_point = bias.inputs[2] if len(bias.inputs) > 2 else None
        if codes is None or scale is None or codes.dtype != ir.DataType.INT32 or codes.shape not in ((n,), (1, n)):
            return None
        if zero_point is not None and self.numbers(zero_point).any():
            return None
        exact = self.numbers(x.scale).reshape(()) * self.numbers(weight.scale).reshape(-1)
        if not np.array_equal(np.broadcast_to(self.numbers(scale).reshape(-1), n), np.broadcast_to(exact, n)):
            return None
        k = weight.codes.shape[1 if weight.transposed else 0]
        room = 2**31 - 1 - k * 255 * 255
        held = np.abs(self.numbers(codes).astype(np.int64)).max(initial=0)
        return codes if held <= max(0, room) else None

    def _requantize(self, value: ir.Value) -> Requantize | None:
        node = _only_user(value, "QuantizeLinear")
        if node is None or node.inputs[0] is not value:
            return None
        scale, zero_point = self._parameters(node)
        if isinstance(scale, Refusal) or count(scale) != 1 or count(zero_point) > 1 or _block(node):
            return None
        step = self.numbers(scale).reshape(())
        if not np.isfinite(step) or not step:
            return None
        given = _int(node, "output_dtype", 0)
        dtype = zero_point.dtype if zero_point is not None else ir.DataType(given) if given else ir.DataType.UINT8
        return Requantize(node, scale, zero_point, dtype) if dtype in CODES else None


def _axis_of(node: ir.Node, scale: Constant, zero_point: Constant | None, rank: int) -> int | Refusal | None:
    """The axis along which scale or zero point vary; None: per tensor. From the attribute, never from a length."""
    if _block(node):
        return Refusal(Reason.BLOCK_SCALES, path_of(node), f"scales per block of {_block(node)}")
    if max(count(scale), count(zero_point)) == 1:
        return None
    axis = _int(node, "axis", 1)
    if not -rank <= axis < rank:
        return Refusal(Reason.UNSUPPORTED_OP, path_of(node), f"axis {axis} does not exist")
    return axis % rank


def _quantized_type(x: ir.Value, zero_point: Constant | None) -> ir.DataType | None:
    if zero_point is not None:
        return zero_point.dtype
    if x.dtype is not None:
        return x.dtype
    node = x.producer()
    if node is None or node.op_type != "QuantizeLinear":
        return None
    given = _int(node, "output_dtype", 0)
    point = node.inputs[2] if len(node.inputs) > 2 else None
    if point is not None:
        return point.dtype
    return ir.DataType(given) if given else ir.DataType.UINT8


def _only_user(value: ir.Value, op: str) -> ir.Node | None:
    """The node that is the only reader of a value, when it is of this operator and in the same graph."""
    uses = list(value.uses())
    if value.is_graph_output() or len(uses) != 1:
        return None
    node, producer = uses[0].node, value.producer()
    same_graph = producer is not None and node.graph is producer.graph
    return node if same_graph and node.op_type == op and node.domain in DOMAINS else None


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None or attribute.is_ref() else int(attribute.value)


def _block(node: ir.Node) -> int:
    return _int(node, "block_size", 0)


def _float(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None or attribute.is_ref() else float(attribute.value)
