"""Move what stays float out of the graph file: large tensors, wherever they stand, become one list to be written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import onnx_ir as ir

from onnxpack.graph.changes import Change
from onnxpack.graph.paths import all_graphs, all_nodes, path_of
from onnxpack.graph.tensors import TensorStore, shape_of
from onnxpack.graph.views import constant_tensor

INLINE_BYTES = 1024
"""Tensors up to this size stay in the graph file."""


def lift_large_constants(model: ir.Model) -> list[Change]:
    """Turn Constant nodes that hold a large tensor into initializers of their graph, under the same name."""
    changes = []
    for node in list(all_nodes(model.graph)):
        tensor = constant_tensor(node) if (node.domain, node.op_type) == ("", "Constant") else None
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            continue
        graph, output = node.graph, node.outputs[0]
        if tensor.nbytes <= INLINE_BYTES or not isinstance(graph, ir.Graph):
            continue
        name = output.name
        if output.is_graph_output() or not name:
            continue
        output.name = None
        tensor.name = name
        value = ir.Value(
            name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape_of(tensor))
        )
        graph.register_initializer(value)
        output.replace_all_uses_with(value)
        graph.remove(node, safe=True)
        changes.append(
            Change("removed", node.name or path_of(node), "Constant", "its large tensor became an initializer")
        )
    return changes


def inline_attribute_tensors(model: ir.Model, store: TensorStore) -> None:
    """Tensors in attributes of nodes come into the graph file, wherever they were: they have no place of their own."""
    for node in all_nodes(model.graph):
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref() or attribute.type not in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
                continue
            held = attribute.as_tensors() if attribute.type == ir.AttributeType.TENSORS else [attribute.as_tensor()]
            if any(isinstance(tensor, ir.ExternalTensor) for tensor in held):
                node.attributes[name] = ir.Attr(name, attribute.type, _inlined(held, attribute.type, store))


def _inlined(held: Sequence[ir.TensorProtocol], kind: ir.AttributeType, store: TensorStore) -> Any:
    made = [inlined(tensor, store) if isinstance(tensor, ir.ExternalTensor) else tensor for tensor in held]
    return made if kind == ir.AttributeType.TENSORS else made[0]


def inlined(tensor: ir.TensorProtocol, store: TensorStore) -> ir.TensorProtocol:
    """An external tensor with its bytes in memory."""
    return ir.Tensor(store.array(tensor).copy(), tensor.dtype, name=tensor.name)


def drop_unused_initializers(model: ir.Model) -> None:
    """Initializers that nobody reads are not carried along."""
    for graph in all_graphs(model.graph):
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del graph.initializers[name]


def large_tensors(model: ir.Model, placed: Collection[int]) -> list[ir.Value]:
    """Initializers whose bytes belong in a data file, in order. `placed`: ids of those that have a place."""
    found = []
    for graph in all_graphs(model.graph):
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or id(tensor) in placed or tensor.dtype == ir.DataType.STRING:
                continue
            if tensor.nbytes > INLINE_BYTES or (tensor.nbytes and isinstance(tensor, ir.ExternalTensor)):
                found.append(value)
    return found
