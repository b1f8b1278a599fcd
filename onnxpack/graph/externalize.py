"""Move what stays float out of the graph file: large tensors, wherever they stand, become one list to be written."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxpack.graph.changes import Change
from onnxpack.graph.paths import all_nodes, path_of
from onnxpack.graph.tensors import shape_of

INLINE_BYTES = 1024
"""Tensors up to this size stay in the graph file."""


def lift_large_constants(model: ir.Model) -> list[Change]:
    """Turn Constant nodes that hold a large tensor into initializers of their graph, under the same name."""
    changes = []
    for node in list(all_nodes(model.graph)):
        attribute = node.attributes.get("value")
        if node.op_type != "Constant" or node.domain or attribute is None or attribute.is_ref():
            continue
        tensor, graph, output = attribute.as_tensor(), node.graph, node.outputs[0]
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


def drop_unused_initializers(model: ir.Model) -> None:
    """Initializers that nobody reads are not carried along."""
    for graph in _graphs(model):
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del graph.initializers[name]


def large_tensors(model: ir.Model, placed: Collection[int]) -> list[ir.Value]:
    """Initializers whose bytes belong in a data file, in order. `placed`: ids of those that have a place."""
    found = []
    for graph in _graphs(model):
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or id(tensor) in placed or tensor.dtype == ir.DataType.STRING:
                continue
            if tensor.nbytes > INLINE_BYTES or isinstance(tensor, ir.ExternalTensor):
                found.append(value)
    return found


def _graphs(model: ir.Model) -> list[ir.Graph]:
    graphs = {id(model.graph): model.graph}
    for node in all_nodes(model.graph):
        if isinstance(node.graph, ir.Graph):
            graphs[id(node.graph)] = node.graph
    return list(graphs.values())
