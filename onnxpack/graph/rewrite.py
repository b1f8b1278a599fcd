"""Rewrite a model so that bound sites read packed weights: decoders in, old views out, everything else as it was.

The result is plain: only ai.onnx operators of the graph's own opset are added, no domain, and no weight bytes; tensors
refer to the files of the pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from onnxpack.formats.base import Decoder, Orientation
from onnxpack.graph.changes import Change
from onnxpack.graph.load import Model
from onnxpack.graph.names import Namer
from onnxpack.graph.paths import all_nodes, path_of
from onnxpack.graph.sites import Site
from onnxpack.graph.tensors import shape_of


@dataclass(frozen=True)
class PackedWeight:
    """A weight as it will stand in the graph: its stored tensors (external) and what decodes them."""

    name: str
    tensors: Mapping[str, ir.ExternalTensor]
    """By the input name of the decoder."""
    decoder: Decoder
    orientation: Orientation


def rewrite(model: Model, weights: Iterable[tuple[PackedWeight, list[Site]]]) -> tuple[list[Change], dict[str, str]]:
    """Bind sites to packed weights, in place. Returns what changed, and the node name of every site by path."""
    rewriter = _Rewriter(model)
    for weight, users in weights:
        rewriter.bind(weight, users)
    rewriter.finish()
    return rewriter.changes, rewriter.node_names


class _Rewriter:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._graph = model.ir.graph
        self._namer = Namer(model.ir)
        self._added: list[ir.Node] = []
        self._orphans: list[ir.Value] = []
        self.changes: list[Change] = []
        self.node_names: dict[str, str] = {}
        for node in all_nodes(self._graph):
            self.node_names[path_of(node)] = self._namer.settle_node(node)

    def bind(self, weight: PackedWeight, users: list[Site]) -> None:
        """Splice in the decoder of one weight and let its sites read it."""
        decoded = self._decoder(weight)
        by_type: dict[ir.DataType, ir.Value] = {ir.DataType.FLOAT: decoded}
        for site in users:
            assert site.weight is not None
            dtype = site.weight.dtype
            if dtype not in by_type:
                by_type[dtype] = self._add("Cast", [decoded], weight.name, f"the site is {dtype}", to=int(dtype))
            self._rebind(site, by_type[dtype])

    def _decoder(self, weight: PackedWeight) -> ir.Value:
        scope: dict[str, ir.Value] = {"": None}  # type: ignore[dict-item]
        for name, tensor in weight.tensors.items():
            scope[name] = self._initializer(f"{weight.name}.{name}", tensor)
        for constant in weight.decoder.constants:
            local, copy = constant.name, onnx.TensorProto()
            copy.CopyFrom(constant)  # the initializer gets a name of its own; the decoder keeps its
            scope[local] = self._initializer(f"{weight.name}.{local}", ir.serde.deserialize_tensor(copy))
        why = f"decodes weight {weight.name!r}"
        for proto in weight.decoder.nodes:
            inputs = [scope[name] for name in proto.input]
            attributes = [ir.serde.deserialize_attribute(attribute) for attribute in proto.attribute]
            node = self._node(proto.op_type, inputs, attributes, len(proto.output), weight.name, why)
            for name, output in zip(proto.output, node.outputs, strict=True):
                output.name = self._namer.value(f"{weight.name}.{name}")
                scope[name] = output
        decoded = scope[weight.decoder.output]
        if weight.orientation is Orientation.NK:
            decoded = self._add("Transpose", [decoded], weight.name, why, perm=[1, 0])
        return decoded

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        unique = self._namer.value(name)
        tensor.name = unique
        value = ir.Value(
            name=unique, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape_of(tensor))
        )
        self._graph.register_initializer(value)
        return value

    def _add(self, op: str, inputs: list[ir.Value], near: str, why: str, **attributes: Any) -> ir.Value:
        made = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
        output = self._node(op, inputs, made, 1, near, why).outputs[0]
        output.name = self._namer.value(f"{near}.{op}")
        return output

    def _node(
        self, op: str, inputs: list[ir.Value], attributes: list[ir.Attr], outputs: int, near: str, why: str
    ) -> ir.Node:
        node = ir.Node("", op, inputs, attributes, num_outputs=outputs, name=self._namer.node(f"{near}.{op}"))
        self._added.append(node)
        self.changes.append(Change("added", node.name or "", op, why))
        return node

    def _rebind(self, site: Site, decoded: ir.Value) -> None:
        node, old = site.node, site.node.inputs[1]
        node.replace_input_with(1, decoded)
        why = "reads the packed weight"
        if site.transposed_b:
            node.attributes.pop("transB")
            why += "; the weight is stored as [K, N], so transB is gone"
        self._lift_rank(site)
        self.changes.append(Change("rewritten", node.name or "", node.op_type, why))
        if old is not None:
            self._orphans.append(old)

    def _lift_rank(self, site: Site) -> None:
        """A weight [1, ..., K, N] gave the result its rank; the packed one is [K, N], so A has to have that rank."""
        assert site.weight is not None
        if site.op != "MatMul" or len(site.weight.shape) == 2 or site.a_rank is None or site.a is None:
            return
        missing = len(site.weight.shape) - site.a_rank - (1 if site.a_rank == 1 else 0)
        if missing <= 0:
            return
        axes = list(range(missing))
        name = f"{site.node.name}.rank"
        if self._model.opset >= 13:
            tensor = ir.tensor(axes, dtype=ir.DataType.INT64, name=name)
            extra, attributes = [self._initializer(name, tensor)], []
        else:
            extra, attributes = [], [ir.convenience.convert_attribute("axes", axes)]
        node = ir.Node("", "Unsqueeze", [site.a, *extra], attributes, name=self._namer.node(f"{name}.Unsqueeze"))
        node.outputs[0].name = self._namer.value(name)
        assert site.node.graph is not None
        site.node.graph.insert_before(site.node, node)
        site.node.replace_input_with(0, node.outputs[0])
        self.changes.append(Change("added", node.name or "", "Unsqueeze", "keeps the rank that the weight gave"))

    def finish(self) -> None:
        """Put the decoders first and drop what nobody reads any more."""
        first = next(iter(self._graph), None)
        if first is not None:
            self._graph.insert_before(first, self._added)
        self._drop(self._orphans)

    def _drop(self, orphans: list[ir.Value]) -> None:
        pending = list(orphans)
        while pending:
            value = pending.pop()
            if value.uses() or value.is_graph_output():
                continue
            node = value.producer()
            if node is None:
                _remove_initializer(value)
                continue
            if node.graph is None or any(o.uses() or o.is_graph_output() for o in node.outputs):
                continue
            pending += [v for v in node.inputs if v is not None]
            node.graph.remove(node, safe=True)
            self.changes.append(Change("removed", node.name or "", node.op_type, "its weight is packed"))


def _remove_initializer(value: ir.Value) -> None:
    graph, name = value.graph, value.name
    if graph is not None and name is not None and name in graph.initializers and not value.is_graph_input():
        del graph.initializers[name]
