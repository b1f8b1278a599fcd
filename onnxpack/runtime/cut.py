"""Cut a graph at some of its nodes: segments that run in onnxruntime, and between them the nodes that do not.

The plain way: a segment holds everything that can run before the next row of cut nodes, so the number of segments is
the length of the longest chain of cut nodes, plus one. What is computed from constants alone (shapes, scales, decoded
weights) is not carried from segment to segment but stands in each one that needs it, where onnxruntime folds it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx

from onnxpack.errors import PackError
from onnxpack.runtime.graphs import bodies, reads

_DETERMINISTIC_DOMAINS = {"", "ai.onnx", "com.microsoft"}
_RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


@dataclass(frozen=True)
class Segment:
    """A piece of the graph that one session runs."""

    nodes: tuple[int, ...]
    """Positions in the graph's list of nodes, in an order in which they can run."""
    inputs: tuple[str, ...]
    """Values it takes: graph inputs (overridable initializers among them) and results of earlier steps."""
    outputs: tuple[str, ...]
    """Values that later steps or the caller need."""
    initializers: tuple[str, ...]


@dataclass(frozen=True)
class Calls:
    """Cut nodes that need nothing from each other: they may run in any order, or together."""

    nodes: tuple[int, ...]


Step = Segment | Calls


def cut(model: onnx.ModelProto, names: Collection[str]) -> list[Step]:
    """The main graph as steps to run in order, cut at the nodes called `names`.

    Pure: reads the model, changes nothing, touches no file. PackError when the graph has a cycle or reads a value that
    nothing makes.
    """
    return _Cutter(model, frozenset(names)).steps()


class _Cutter:
    def __init__(self, model: onnx.ModelProto, names: frozenset[str]) -> None:
        graph = model.graph
        self.nodes = list(graph.node)
        self.is_cut = [node.name in names for node in self.nodes]
        self.reads = [reads(node) for node in self.nodes]
        self.fed = {value.name for value in graph.input}
        self.initializers = {tensor.name for tensor in graph.initializer}
        self.initializers |= {tensor.values.name for tensor in graph.sparse_initializer}
        if model.ir_version < 4:  # every initializer is also an input then, and none can be overridden
            self.fed -= self.initializers
        self.outputs = [value.name for value in graph.output]
        self.maker = {out: i for i, node in enumerate(self.nodes) for out in node.output if out}
        self.order = self._sorted()
        self.constant: set[str] = self.initializers - self.fed
        self.depth: dict[str, int] = dict.fromkeys(self.fed, 0)
        self.level: list[int | None] = [None] * len(self.nodes)
        """The row of each node; None for those computed from constants alone."""
        for index in self.order:
            self._place(index)

    def _sorted(self) -> list[int]:
        """Nodes in an order in which each one's inputs come first, as near the given order as that allows."""
        order: list[int] = []
        state = bytearray(len(self.nodes))  # 1: waits for its inputs, 2: placed
        known = self.fed | self.initializers
        for start in range(len(self.nodes)):
            stack = [start]
            while stack:
                index = stack[-1]
                if state[index] == 2:
                    stack.pop()
                    continue
                state[index] = 1
                before = [self._maker(name, index) for name in sorted(self.reads[index] - known)]
                waiting = [other for other in before if state[other] != 2]
                if any(state[other] == 1 for other in waiting):
                    raise PackError(f"the graph has a cycle through node {self.nodes[index].name!r}")
                if not waiting:
                    state[index] = 2
                    order.append(stack.pop())
                stack.extend(waiting)
        return order

    def _maker(self, name: str, reader: int) -> int:
        try:
            return self.maker[name]
        except KeyError:
            raise PackError(f"node {self.nodes[reader].name!r} reads {name!r}, which nothing makes") from None

    def _place(self, index: int) -> None:
        node, inputs = self.nodes[index], self.reads[index]
        made = [out for out in node.output if out]
        if inputs <= self.constant and not self.is_cut[index] and not _may_be_random(node):
            self.constant.update(made)
            return
        level = max((self.depth[name] for name in inputs if name not in self.constant), default=0)
        self.level[index] = level
        self.depth.update(dict.fromkeys(made, level + self.is_cut[index]))

    def steps(self) -> list[Step]:
        rows = max((level for level in self.level if level is not None), default=0)
        needed = self._needed()
        steps: list[Step] = []
        for row in range(rows + 1):
            own = [i for i in self.order if self.level[i] == row]
            segment = self._segment([i for i in own if not self.is_cut[i]], needed.get(row, []))
            if segment.outputs:
                steps.append(segment)
            calls = tuple(i for i in own if self.is_cut[i])
            if calls:
                steps.append(Calls(calls))
        return steps

    def _needed(self) -> dict[int, list[str]]:
        """By row: what its segment must hand out. Constants go to the first row that hands them to anyone."""
        wanted: dict[str, int] = {}
        for name in self.outputs:
            wanted.setdefault(name, 0)
        for index in self.order:
            level = self.level[index]
            if level is None:
                continue
            for name in sorted(self.reads[index]):
                if name in self.constant:
                    if self.is_cut[index]:
                        wanted[name] = min(wanted.get(name, level), level)
                elif self.is_cut[index] or self.depth[name] < level:
                    wanted.setdefault(name, 0)
        found: dict[int, list[str]] = {}
        for name, row in wanted.items():
            if name in self.constant:
                found.setdefault(row, []).append(name)
            elif name not in self.fed and not self._made_by_cut(name):
                found.setdefault(self._depth(name), []).append(name)
        return found

    def _made_by_cut(self, name: str) -> bool:
        maker = self.maker.get(name)
        return maker is not None and self.is_cut[maker]

    def _depth(self, name: str) -> int:
        try:
            return self.depth[name]
        except KeyError:
            raise PackError(f"the graph's output {name!r} is made by nothing") from None

    def _segment(self, own: list[int], outputs: list[str]) -> Segment:
        """Own nodes plus the constants that they and the outputs need."""
        nodes, initializers = set(own), set()
        pending = [name for index in own for name in self.reads[index]] + outputs
        inputs: set[str] = set()
        while pending:
            name = pending.pop()
            maker = self.maker.get(name)
            if name in self.initializers:
                initializers.add(name)
                if name in self.fed:
                    inputs.add(name)
            elif maker is None or (name not in self.constant and maker not in nodes):
                inputs.add(name)
            elif maker not in nodes:
                nodes.add(maker)
                pending.extend(self.reads[maker])
        order = [index for index in self.order if index in nodes]
        return Segment(tuple(order), tuple(sorted(inputs)), tuple(sorted(outputs)), tuple(sorted(initializers)))


def _may_be_random(node: onnx.NodeProto) -> bool:
    if node.op_type in _RANDOM or node.domain not in _DETERMINISTIC_DOMAINS:
        return True
    return any(_may_be_random(inner) for body in bodies(node) for inner in body.node)


def segment_model(model: onnx.ModelProto, segment: Segment, types: Mapping[str, onnx.TypeProto]) -> onnx.ModelProto:
    """The segment as a model of its own. `types` holds the types of its inputs; outputs are left to onnxruntime.

    Weights stay where they are: external initializers keep pointing at their files.
    """
    source, part = model.graph, frame(model)
    for name in segment.inputs:
        part.graph.input.add(name=name, type=types[name])
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in segment.outputs)
    part.graph.node.extend(source.node[index] for index in segment.nodes)
    held = set(segment.initializers)
    part.graph.initializer.extend(tensor for tensor in source.initializer if tensor.name in held)
    part.graph.sparse_initializer.extend(t for t in source.sparse_initializer if t.values.name in held)
    made = {out for index in segment.nodes for out in source.node[index].output}
    part.graph.value_info.extend(value for value in source.value_info if value.name in made)
    return part


def frame(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the versions and functions of `model` and nothing in its graph."""
    # Before version 4 an initializer must also be an input; here inputs are only what is fed.
    made = onnx.ModelProto(ir_version=max(4, model.ir_version))
    made.opset_import.extend(model.opset_import)
    made.functions.extend(model.functions)
    made.graph.name = model.graph.name
    return made
