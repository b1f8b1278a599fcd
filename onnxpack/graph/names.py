"""Names that nothing in a model has yet. The same model asked the same way gives the same names."""

from __future__ import annotations

import onnx_ir as ir

from onnxpack.graph.paths import all_graphs, all_nodes, path_of


class Namer:
    """Hands out unused names for nodes and values, unique over the main graph and all bodies."""

    def __init__(self, model: ir.Model) -> None:
        self._values: set[str] = set()
        self._nodes: set[str] = set()
        for node in all_nodes(model.graph):
            self._values.update(value.name for value in node.outputs if value.name)
        for graph in all_graphs(model.graph):
            self._values.update(value.name for value in graph.inputs if value.name)
            self._values.update(graph.initializers)

    def value(self, wanted: str) -> str:
        """`wanted`, or the first of `wanted_1`, `wanted_2`, ... that is free."""
        return _unused(wanted, self._values)

    def node(self, wanted: str) -> str:
        """The same for nodes."""
        return _unused(wanted, self._nodes)

    def settle_node(self, node: ir.Node) -> str:
        """Keep a node's name where it is unique so far; otherwise give it one (onnxruntime refuses duplicates)."""
        node.name = self.node(node.name or path_of(node))
        return node.name


def _unused(wanted: str, taken: set[str]) -> str:
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    taken.add(name)
    return name
