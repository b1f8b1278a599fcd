"""Find every place where a matrix product happens, and what its weight is.

One function an operator family says what A, B, K and N are; everything else (M, dtype, reasons) is common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from onnxpack.errors import ModelError
from onnxpack.graph.constant import Constant
from onnxpack.graph.constants import MAX_ELEMENTS, ConstantResolver
from onnxpack.graph.infer import Dim, Dims, Shapes
from onnxpack.graph.load import Model
from onnxpack.graph.paths import all_nodes, path_of
from onnxpack.graph.qdq import QdqMatcher
from onnxpack.graph.quantized import Group, Refusal
from onnxpack.graph.tensors import TensorStore
from onnxpack.quant.bounds import K_LIMIT_SYMMETRIC
from onnxpack.reasons import Reason

_MIN_OPSET = 7
"""Below it elementwise operators do not broadcast as a decoder needs, and onnxruntime has no kernels."""

Kind = Literal["weight", "dynamic", "other"]


@dataclass(frozen=True)
class Product:
    """What one operator says about its operands, before anything is judged."""

    a: ir.Value | None
    b: ir.Value | None
    transposed_a: bool = False
    transposed_b: bool = False
    k: Dim = None
    n: Dim = None
    """K and N, where the operator itself states them."""
    reason: Reason | None = None
    """Why this operator is not bound, whatever its operands are."""
    dtype: str | None = None
    """Type of the codes, where the operator packs several into a stored element."""
    other: bool = False
    """Whether it is a product in disguise: its operands have another layout, only K and N are known."""


@dataclass(frozen=True)
class Site:
    """One matrix product of the graph."""

    path: str
    node: ir.Node
    op: str
    kind: Kind
    m: Dim
    k: Dim
    n: Dim
    dtype: str | None
    """As stored: the type of the weight's root tensor."""
    weight: Constant | None
    a: ir.Value | None
    a_rank: int | None
    transposed_a: bool
    transposed_b: bool
    group: Group | None
    """The quantized product around it, or its weight's own codes, when the graph brings them."""
    detail: str | None
    """For a quantized product that is not taken as one: the node and the condition that failed."""
    bindable: bool
    """Whether the product can run on int8 operands at all, on whatever device."""
    reason: Reason | None
    """Why not, or why it stays on the host although it is bindable."""


def find_sites(model: Model) -> list[Site]:
    """Every matrix product of the main graph and its bodies, in order of the file. ModelError on malformed ones."""
    finder = _Finder(model)
    with model.located():
        return [site for node in all_nodes(model.ir.graph) for site in finder.at(node)]


class _Finder:
    def __init__(self, model: Model) -> None:
        self._main = model.ir.graph
        store = TensorStore(model.regions)
        self._constants = ConstantResolver(store)
        self._qdq = QdqMatcher(self._constants, store, model.opset)
        self._shapes = Shapes(model.ir)
        self._opset_reason = Reason.UNSUPPORTED_OP if model.opset < _MIN_OPSET else None

    def at(self, node: ir.Node) -> Iterator[Site]:
        describe = PRODUCTS.get((node.domain, node.op_type))
        if describe is None:
            return
        try:
            product = describe(node)
            if product is not None:
                yield self._site(node, product)
        except ModelError as error:
            where = f"{path_of(node)}: {error.where}" if error.where else path_of(node)
            raise ModelError(error.what, where=where, hint=error.hint) from None

    def _site(self, node: ir.Node, product: Product) -> Site:
        if product.other:
            return self._other(node, product)
        weight, group, detail = self._constants.resolve(product.b), None, None
        a_dims = self._shapes.of(product.a)
        if weight is None:
            k, n = product.k, product.n
            if k is None and n is None:
                k, n = _kn_of_dims(self._shapes.of(product.b), product.transposed_b)
            kind: Kind = "dynamic"
            dtype = _dtype_name(product.b.dtype) if product.b is not None and product.b.dtype else None
            reason: Reason | None = product.reason or Reason.DYNAMIC_WEIGHT
        else:
            kind, dtype = "weight", product.dtype or _dtype_name(weight.root.dtype)
            if node.op_type == "Gemm" and len(weight.shape) != 2:
                raise ModelError(f"Gemm takes a matrix, the weight is {list(weight.shape)}", where=weight.name)
            k, n = (product.k, product.n) if product.k is not None else _kn(weight, product.transposed_b)
            _check_k(a_dims, k, product.transposed_a)
            reason = product.reason or self._opset_reason or _judge_shape(weight, k, n, a_dims)
            if reason in (None, Reason.SCALE_NOT_CONSTANT):
                found = self._qdq.match(
                    node, product.a, None if a_dims is None else len(a_dims), product.b, product.transposed_b
                )
                if isinstance(found, Refusal):
                    reason, detail = found.reason, f"{found.node}: {found.why}"
                elif reason is None:
                    group = found
                    reason = _judge_float(weight, k) if group is None else None
        bindable = reason is None
        if bindable and node.graph is not self._main:
            reason = Reason.IN_SUBGRAPH
        return Site(
            path_of(node),
            node,
            node.op_type,
            kind,
            _rows(a_dims, product.transposed_a),
            k,
            n,
            dtype,
            weight,
            product.a,
            None if a_dims is None else len(a_dims),
            product.transposed_a,
            product.transposed_b,
            group,
            detail,
            bindable,
            reason,
        )

    def _other(self, node: ir.Node, product: Product) -> Site:
        """A product in disguise: its weight is [N, K, ...], its rows are spread over the other dimensions."""
        weight = self._constants.resolve(product.b)
        shape: Dims = self._shapes.of(product.b) if weight is None else weight.shape
        n, k = shape[:2] if shape and len(shape) >= 2 else (None, None)
        dtype = None if weight is None else _dtype_name(weight.root.dtype)
        return Site(
            path_of(node), node, node.op_type, "other", None, k, n, dtype, weight, product.a, None, False, False, None,
            None, False, product.reason,
        )  # fmt: skip


def _pointwise_conv(node: ir.Node) -> Product | None:
    """A convolution of one point is a matrix product too, over [N, K, 1, 1]; listed, never bound."""
    if len(node.inputs) < 2:
        return None
    shape = node.attributes.get("kernel_shape")
    stated = None if shape is None or shape.is_ref() else list(shape.value)
    weight = node.inputs[1]
    dims = None if weight is None or weight.shape is None else list(weight.shape)[2:]
    if _int_attribute(node, "group", 1) != 1 or not (stated or dims) or any(d != 1 for d in stated or dims or ()):
        return None
    return Product(_input(node, 0), weight, reason=Reason.UNSUPPORTED_OP, other=True)


def _matmul(node: ir.Node) -> Product:
    return Product(node.inputs[0], node.inputs[1])


def _gemm(node: ir.Node) -> Product:
    return Product(
        node.inputs[0], node.inputs[1], bool(_int_attribute(node, "transA")), bool(_int_attribute(node, "transB"))
    )


def _unbound(a: int, b: int) -> Callable[[ir.Node], Product]:
    def describe(node: ir.Node) -> Product:
        turned_a, turned_b = bool(_int_attribute(node, "transA")), bool(_int_attribute(node, "transB"))
        return Product(_input(node, a), _input(node, b), turned_a, turned_b, reason=Reason.UNSUPPORTED_OP)

    return describe


def _matmul_nbits(node: ir.Node) -> Product:
    k, n = _int_attribute(node, "K"), _int_attribute(node, "N")
    bits = _int_attribute(node, "bits", 4)
    if k <= 0 or n <= 0:
        raise ModelError("it does not state its K and N")
    return Product(_input(node, 0), _input(node, 1), k=k, n=n, reason=Reason.PACKED_ELSEWHERE, dtype=f"uint{bits}")


PRODUCTS: dict[tuple[str, str], Callable[[ir.Node], Product | None]] = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Conv"): _pointwise_conv,
    ("", "MatMulInteger"): _unbound(0, 1),
    ("", "QLinearMatMul"): _unbound(0, 3),
    ("com.microsoft", "FusedMatMul"): _unbound(0, 1),
    ("com.microsoft", "FusedGemm"): _unbound(0, 1),
    ("com.microsoft", "MatMulIntegerToFloat"): _unbound(0, 1),
    ("com.microsoft", "DynamicQuantizeMatMul"): _unbound(0, 1),
    ("com.microsoft", "QGemm"): _unbound(0, 3),
    ("com.microsoft", "MatMulNBits"): _matmul_nbits,
}
"""Operators that are matrix products. Adding one is one entry."""


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _int_attribute(node: ir.Node, name: str, default: int = 0) -> int:
    attribute = node.attributes.get(name)
    if attribute is None or attribute.is_ref():
        return default
    if attribute.type != ir.AttributeType.INT:
        raise ModelError(f"attribute {name!r} is not of type INT")
    return int(attribute.value)


def _kn(weight: Constant, transposed: bool) -> tuple[int, int]:
    shape = weight.shape
    if weight.dtype == ir.DataType.STRING:
        raise ModelError("the weight is a tensor of strings", where=weight.name)
    if not shape:
        raise ModelError("the weight is a scalar", where=weight.name)
    if len(shape) == 1:
        return shape[0], 1
    k, n = shape[-2:]
    return (n, k) if transposed else (k, n)


def _kn_of_dims(dims: Dims, transposed: bool) -> tuple[Dim, Dim]:
    if not dims:
        return None, None
    if len(dims) == 1:
        return dims[0], 1
    return (dims[-1], dims[-2]) if transposed else (dims[-2], dims[-1])


def _check_k(a: Dims, k: Dim, transposed: bool) -> None:
    if not a:
        return
    found = a[-2] if transposed and len(a) > 1 else a[-1]
    if isinstance(found, int) and isinstance(k, int) and found != k:
        raise ModelError(f"A has K={found}, the weight has K={k}", hint="the model is inconsistent")


def _rows(a: Dims, transposed: bool) -> Dim:
    """M: the product of all dimensions of A but the last; symbols are joined by '*'."""
    if a is None:
        return None
    dims = (*a[:-2], *a[-1:]) if transposed else a[:-1]
    if any(d is None for d in dims):
        return None
    number, symbols = 1, []
    for dim in dims:
        for factor in str(dim).split("*"):
            if factor.isascii() and factor.isdigit():
                number *= int(factor)
            else:
                symbols.append(factor)
    if number > MAX_ELEMENTS:
        return None  # no such tensor can be: the stated shape says nothing
    if not symbols or not number:
        return number
    return "*".join(([str(number)] if number != 1 else []) + symbols)


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _judge_shape(weight: Constant, k: Dim, n: Dim, a: Dims) -> Reason | None:
    """The first rule that a weight breaks whatever its type."""
    if weight.reason is not None:
        return weight.reason
    if len(weight.shape) == 1:
        return Reason.VECTOR_OPERAND
    stacked = any(d != 1 for d in weight.shape[:-2])
    if stacked or (len(weight.shape) > 2 and a is None):
        return Reason.BATCHED_WEIGHT
    if k == 0:
        return Reason.K_ZERO
    if n == 0:
        return Reason.NOT_TILEABLE
    return None


def _judge_float(weight: Constant, k: Dim) -> Reason | None:
    """Rules for a weight that is to be quantized. One that already has been is not quantized a second time."""
    if isinstance(k, int) and k > K_LIMIT_SYMMETRIC:
        return Reason.K_TOO_LONG
    if weight.dtype not in _FLOATS:
        return Reason.UNSUPPORTED_DTYPE
    if weight.root.dtype.name.startswith("FLOAT8"):
        return Reason.FLOAT8
    if "QuantizeLinear" in weight.chain or "DequantizeLinear" in weight.chain:
        return Reason.UNSUPPORTED_OP
    return None


def _dtype_name(dtype: ir.DataType) -> str:
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())
