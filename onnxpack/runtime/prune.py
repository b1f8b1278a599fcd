"""Remove what nothing reads any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from onnxpack.runtime.graphs import bodies, uses, walk


def prune(model: onnx.ModelProto, values: Iterable[str]) -> None:
    """Remove, in place, whatever computes `values`, back to the initializers, as far as nothing else reads it.

    What a node's bodies read goes with the node. An initializer that a caller may override stays.
    """
    readers, graphs = uses(model), [scope[-1] for scope in walk(model.graph)]
    makers = {out: node for graph in graphs for node in graph.node for out in node.output if out}
    unused, dead = [name for name in values if not readers[name]], set()
    while unused:
        name = unused.pop()
        dead.add(name)
        node = makers.get(name)
        if node is not None and all(out in dead for out in node.output if out):
            for source in _reads(node):
                readers[source] -= 1
                if source and not readers[source]:
                    unused.append(source)
    for graph in graphs:
        _remove(graph, dead, keep_inputs=model.ir_version >= 4)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Every name that a node and its bodies read, as often as they do."""
    yield from node.input
    for body in bodies(node):
        for *_, graph in walk(body):
            for inner in graph.node:
                yield from inner.input
            for value in graph.output:
                yield value.name


def _remove(graph: onnx.GraphProto, dead: set[str], *, keep_inputs: bool) -> None:
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.output and all(out in dead for out in node.output if out):
            del graph.node[index]
    fed = {value.name for value in graph.input}
    gone = {tensor.name for tensor in graph.initializer if tensor.name in dead}
    if keep_inputs:
        gone -= fed
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name in gone:
            del graph.initializer[index]
    for index in reversed(range(len(graph.input))):
        if graph.input[index].name in gone:
            del graph.input[index]
