"""Groups that take or give int8 take and give uint8 instead: x64 multiplies signed activations 20 times slower.

A code and its zero point shifted together mean the same number, so this is exact. Where a QuantizeLinear or a group
makes the codes, it makes uint8 ones to begin with, and the DequantizeLinears that read them are shifted as well;
whoever needs the int8 ones still gets them. Codes of any other origin (inputs of the graph, above all) are converted,
in integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxpack.pack.manifest import QdqRecord, RequantizeRecord
from onnxpack.runtime.constants import Constants
from onnxpack.runtime.graphs import bodies, captured, replace_nodes
from onnxpack.runtime.product import Product, as_product
from onnxpack.runtime.prune import prune

_SHIFT = 128
_XOR = 18  # the opset that has BitwiseXor
_DOMAINS = ("", "ai.onnx", "com.microsoft")


def make_unsigned(model: onnx.ModelProto, constants: Constants, opset: int) -> None:
    """Rewrite, in place, so that every group of the main graph and of all bodies takes and gives uint8."""
    replaced = set[str]()
    _graph(model.graph, {}, constants, opset, replaced)
    prune(model, sorted(replaced))


def shifted(record: QdqRecord) -> QdqRecord:
    """The record of the same group with uint8 codes all around.

    >>> made = shifted(QdqRecord("x", "int8", [0.5], [-3], None, None, RequantizeRecord("q", 2.0, 7, "int8")))
    >>> made.x_dtype, made.x_zero_point, made.requantize.dtype, made.requantize.zero_point
    ('uint8', [125], 'uint8', 135)
    """
    if record.x_dtype == "int8":
        record = replace(record, x_dtype="uint8", x_zero_point=[point + _SHIFT for point in record.x_zero_point])
    y = record.requantize
    if y is not None and y.dtype == "int8":
        record = replace(record, requantize=RequantizeRecord(y.node, y.scale, y.zero_point + _SHIFT, "uint8"))
    return record


def gives_int8(product: Product) -> bool:
    """Whether the result of a bare product is int8 codes."""
    y = None if product.group is None else product.group.requantize
    return y is not None and y.dtype == "int8"


def _takes_int8(product: Product) -> bool:
    return product.group is not None and product.group.x_dtype == "int8"


Known = Mapping[str, npt.NDArray[Any]]
"""Small constants by name, in scope."""


def _graph(graph: onnx.GraphProto, outer: Known, constants: Constants, opset: int, replaced: set[str]) -> None:
    known = {**outer, **_constants(graph)}
    for node in graph.node:
        for body in bodies(node):
            _graph(body, known, constants, opset, replaced)
    products = [product for node in graph.node if (product := as_product(node)) is not None]
    if any(_takes_int8(product) or gives_int8(product) for product in products):
        _Rewrite(graph, products, known, constants, opset, replaced).run()


def _constants(graph: onnx.GraphProto) -> dict[str, npt.NDArray[Any]]:
    """int8 constants that lie in the graph itself, and the scales beside them: what a zero point may be made of."""
    fed = {value.name for value in graph.input}
    kinds = (TensorProto.INT8, TensorProto.FLOAT)
    tensors = [tensor for tensor in graph.initializer if tensor.name not in fed]
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in _DOMAINS:
            for attribute in node.attribute:
                if attribute.name == "value":
                    tensors.append(onnx.TensorProto.FromString(attribute.t.SerializeToString()))
                    tensors[-1].name = node.output[0]
    small = (t for t in tensors if t.data_type in kinds and t.data_location != TensorProto.EXTERNAL and len(t.dims) < 2)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in small}


@dataclass
class _Rewrite:
    graph: onnx.GraphProto
    products: list[Product]
    known: Known
    constants: Constants
    opset: int
    replaced: set[str]
    """Zero points that have a shifted form now."""
    twins: dict[str, str] = field(default_factory=dict)
    """uint8 value by int8 value."""
    made: set[str] = field(default_factory=set)
    """int8 values that a QuantizeLinear or a group makes: their twins are made, not converted."""
    wanted: set[str] = field(default_factory=set)
    """int8 values that somebody reads who cannot take the twin."""

    def run(self) -> None:
        makers = {out: node for node in self.graph.node for out in node.output if out}
        taken = {product.a for product in self.products if _takes_int8(product)}
        given = {product.y for product in self.products if gives_int8(product)}
        for value in sorted(taken | given):
            self.twins[value] = self.constants.names.fresh(f"{value}/uint8")
            if value in given or (value in makers and self._quantizes(makers[value])):
                self.made.add(value)
        self.wanted.update(value.name for value in self.graph.output)
        for node in self.graph.node:
            self.wanted.update(name for body in bodies(node) for name in captured(body))
            self.wanted.update(node.input if as_product(node) is None and not self._dequantizes(node) else ())
        converted = set[str]()

        def expand(node: NodeProto) -> Iterable[NodeProto] | None:
            product = as_product(node)
            if product is not None:
                return self._product(product, converted)
            if self._dequantizes(node):
                return [self._shifted(node, self.twins[node.input[0]])]
            if node.output and node.output[0] in self.made:
                twin = self._shifted(node, node.input[0])
                twin.output[0] = self.twins[node.output[0]]
                twin.name = self.constants.names.fresh(twin.output[0])
                return [node, twin] if node.output[0] in self.wanted else [twin]
            return None

        replace_nodes(self.graph, expand)

    def _product(self, product: Product, converted: set[str]) -> Iterable[NodeProto]:
        if product.group is None:
            return [product.to_node()]
        nodes: list[NodeProto] = []
        a, y = product.a, product.y
        if _takes_int8(product):
            a = self.twins[a]
            if product.a not in self.made and product.a not in converted:
                converted.add(product.a)
                nodes += self._convert(product.a, a, TensorProto.UINT8)
        if gives_int8(product):
            y = self.twins[y]
        nodes.append(replace(product, a=a, y=y, group=shifted(product.group)).to_node())
        if y != product.y and product.y in self.wanted:
            nodes += self._convert(y, product.y, TensorProto.INT8)
        return nodes

    def _quantizes(self, node: NodeProto) -> bool:
        return node.op_type == "QuantizeLinear" and node.domain in _DOMAINS and self._zero_point(node) is not None

    def _dequantizes(self, node: NodeProto) -> bool:
        """Whether it is a DequantizeLinear that can read the twin of what it reads."""
        if node.op_type != "DequantizeLinear" or node.domain not in _DOMAINS or node.input[0] not in self.made:
            return False
        return self._zero_point(node) is not None

    def _zero_point(self, node: NodeProto) -> npt.NDArray[Any] | None:
        """The zero points of a Quantize- or DequantizeLinear as the twin has them; None where they are not known."""
        if any(attribute.name == "block_size" and attribute.i for attribute in node.attribute):
            return None
        if len(node.input) > 2 and node.input[2]:
            known = self.known.get(node.input[2])
        else:  # zeros, in the shape of the scales
            known = self.known.get(node.input[1])
            known = None if known is None else np.zeros_like(known, np.int8)
        return None if known is None or known.dtype != np.int8 else (known.astype(np.int16) + _SHIFT).astype(np.uint8)

    def _shifted(self, node: NodeProto, source: str) -> NodeProto:
        self.replaced.update(name for name in node.input[2:] if name)
        twin: NodeProto = NodeProto.FromString(node.SerializeToString())
        zero_point = self._zero_point(node)
        assert zero_point is not None
        # `scalar` and `tensor` share what is equal, whatever it is called.
        name = self.constants.tensor(zero_point, f"{node.output[0]}/uint8_zero_point")
        del twin.input[:]
        twin.input.extend([source, node.input[1], name])
        kept = [attribute for attribute in node.attribute if attribute.name != "output_dtype"]
        if node.op_type == "QuantizeLinear":  # the type is that of the zero point now
            del twin.attribute[:]
            twin.attribute.extend(kept)
        return twin

    def _convert(self, source: str, result: str, kind: int) -> list[NodeProto]:
        """int8 to uint8 or back, 128 apart, without a float in between."""
        fresh = self.constants.names.fresh
        cast = fresh(f"{result}/cast")
        if self.opset >= _XOR:
            top = self.constants.scalar(np.uint8(_SHIFT) if kind == TensorProto.UINT8 else np.int8(-_SHIFT))
            return [
                helper.make_node("Cast", [source], [cast], cast, to=kind),
                helper.make_node("BitwiseXor", [cast, top], [result], fresh(result)),
            ]
        moved = fresh(f"{result}/moved")
        by = self.constants.scalar(np.int32(_SHIFT if kind == TensorProto.UINT8 else -_SHIFT))
        return [
            helper.make_node("Cast", [source], [cast], cast, to=TensorProto.INT32),
            helper.make_node("Add", [cast, by], [moved], moved),
            helper.make_node("Cast", [moved], [result], fresh(result), to=kind),
        ]
