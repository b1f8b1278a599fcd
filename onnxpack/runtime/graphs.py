"""Small walks over onnx protobufs: bodies, captured values, fresh names.

The runtime edits the protobuf itself: whatever it does not know (vendor operators, newer fields) stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import onnx

from onnxpack.errors import PackError

Scope = tuple[onnx.GraphProto, ...]
"""A graph and the graphs around it, outermost first."""


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The If, Loop and Scan bodies (or those of any other operator) of one node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def walk(graph: onnx.GraphProto, outer: Scope = ()) -> Iterator[Scope]:
    """`graph` and every body inside it, each with the graphs around it."""
    scope = (*outer, graph)
    yield scope
    for node in graph.node:
        for body in bodies(node):
            yield from walk(body, scope)


def captured(graph: onnx.GraphProto) -> set[str]:
    """Names that a body takes from the graphs around it."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {tensor.values.name for tensor in graph.sparse_initializer}
    used: set[str] = set()
    for node in graph.node:
        own.update(node.output)
        used |= reads(node)
    used.update(value.name for value in graph.output)
    return used - own


def reads(node: onnx.NodeProto) -> set[str]:
    """Every value a node needs: its inputs and what its bodies capture."""
    found = {name for name in node.input if name}
    for body in bodies(node):
        found |= captured(body)
    return found


def uses(model: onnx.ModelProto) -> Counter[str]:
    """How often each name is read, by nodes and as a graph output, over the main graph and all bodies."""
    count: Counter[str] = Counter()
    for *_, graph in walk(model.graph):
        for node in graph.node:
            count.update(node.input)
        count.update(value.name for value in graph.output)
    return count


def replace_nodes(graph: onnx.GraphProto, expand: Callable[[onnx.NodeProto], Iterable[onnx.NodeProto] | None]) -> None:
    """Put in place of each node what `expand` makes of it; None keeps the node."""
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in graph.node:
        made = expand(node)
        changed |= made is not None
        nodes.extend([node] if made is None else made)
    if changed:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def opset(model: onnx.ModelProto) -> int:
    """Version of ai.onnx. PackError when the model imports none."""
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            return int(entry.version)
    raise PackError("the graph imports no ai.onnx opset", hint="build the pack again")


def import_domain(model: onnx.ModelProto, domain: str, version: int = 1) -> None:
    """Make sure that nodes of `domain` may stand in the model."""
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.add(domain=domain, version=version)


class Names:
    """Names that are still free, over the main graph and all bodies. PackError for a name that is not text."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._taken: set[str] = set()
        for *_, graph in walk(model.graph):
            self._taken.update(value.name for value in graph.input)
            self._taken.update(tensor.name for tensor in graph.initializer)
            self._taken.update(tensor.values.name for tensor in graph.sparse_initializer)
            for node in graph.node:
                self._taken.add(node.name)
                self._taken.update(node.input)
                self._taken.update(node.output)
        # protobuf hands out bytes where a string is not UTF-8.
        if not all(isinstance(name, str) for name in self._taken):
            raise PackError("a name in the graph is not UTF-8", hint="build the pack again")

    def fresh(self, wanted: str) -> str:
        """`wanted`, or `wanted` with the first free number behind it; taken from now on."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name
