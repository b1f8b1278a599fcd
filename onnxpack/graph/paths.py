"""Names for nodes that a person can follow: ``MatMul_7``, ``If_3/then_branch/MatMul_1``, ``fn:domain.name/MatMul_2``.

The number counts the nodes of that operator in that graph, in the order of the file. Paths are given once, when a model
is read, and stay with the nodes through inlining, sorting and rewriting. A function that is called more than once gives
its nodes one path a call: ``fn:domain.name/MatMul_0``, ``fn:domain.name/MatMul_0#2``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import onnx_ir as ir

_KEY = "onnxpack.path"


def path_of(node: ir.Node) -> str:
    """The path that a node was given when its model was read."""
    return str(node.meta[_KEY])


def name_nodes(nodes: Iterable[ir.Node], prefix: str = "") -> None:
    """Give every node of a graph and of its bodies its path."""
    pending = [(prefix, nodes)]
    while pending:
        prefix, nodes = pending.pop()
        seen = Counter[str]()
        for node in nodes:
            path = f"{prefix}{node.op_type}_{seen[node.op_type]}"
            seen[node.op_type] += 1
            node.meta[_KEY] = path
            pending += [(f"{path}/{label}/", body) for label, body in bodies(node)]


def make_paths_unique(graph: ir.Graph) -> None:
    """Tell the calls of one function apart, after inlining."""
    seen = Counter[str]()
    for node in all_nodes(graph):
        path = path_of(node)
        seen[path] += 1
        if seen[path] > 1:
            node.meta[_KEY] = f"{path}#{seen[path]}"


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node of a graph and of its bodies, in order, a node before what is inside it."""
    stack = [iter(graph)]
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
            continue
        yield node
        stack += [iter(body) for _, body in reversed(bodies(node))]


def all_graphs(graph: ir.Graph) -> list[ir.Graph]:
    """A graph and its bodies, also those that have no nodes, in order."""
    found = [graph]
    for node in all_nodes(graph):
        found += [body for _, body in bodies(node)]
    return found


def foreign_operators(graph: ir.Graph) -> dict[str, list[str]]:
    """Operators outside ai.onnx, by domain."""
    found: dict[str, set[str]] = {}
    for node in all_nodes(graph):
        if node.domain:
            found.setdefault(node.domain, set()).add(node.op_type)
    return {domain: sorted(ops) for domain, ops in sorted(found.items())}


def bodies(node: ir.Node) -> list[tuple[str, ir.Graph]]:
    """The graphs inside a node (If, Loop, Scan), by attribute name."""
    found: list[tuple[str, ir.Graph]] = []
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            found.append((name, attribute.as_graph()))
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += [(f"{name}_{i}", graph) for i, graph in enumerate(attribute.as_graphs())]
    return found
