"""Element types of the values of a graph: what is declared, and shape inference only for what is not."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import onnx

from onnxpack.runtime.graphs import Scope, walk


class ElementTypes:
    """Element types (TensorProto.DataType) of tensors, looked up from the inside out."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._tables: dict[int, tuple[onnx.GraphProto, dict[str, int]]] = {}

    def of_any(self, scope: Scope, values: Iterable[str], node: str) -> int | None:
        """The type of the first of `values` that has one. They are all of one type, around the node called `node`."""
        values = list(values)
        found = self._look_up(scope, values)
        if found is None and node in self._inferred:
            found = self._look_up(self._inferred[node], values)
        return found

    def of_main_graph(self) -> dict[str, int]:
        """The types of the main graph's values, declared or inferred, as the graph is now."""
        graphs = [self._inferred_model.graph] if self._inferred_model is not None else []
        return {
            name: kind for graph in (self._model.graph, *graphs) for name, kind in self._table(graph).items() if kind
        }

    def _look_up(self, scope: Scope, values: list[str]) -> int | None:
        tables = [self._table(graph) for graph in reversed(scope)]
        return next((table[value] for value in values for table in tables if table.get(value)), None)

    def _table(self, graph: onnx.GraphProto) -> dict[str, int]:
        # The graph is held beside its table, so that no other object can take its id.
        if id(graph) not in self._tables:
            table = {tensor.name: tensor.data_type for tensor in graph.initializer}
            for value in (*graph.input, *graph.output, *graph.value_info):
                if value.type.HasField("tensor_type"):
                    table.setdefault(value.name, value.type.tensor_type.elem_type)
            self._tables[id(graph)] = (graph, table)
        return self._tables[id(graph)][1]

    @cached_property
    def _inferred_model(self) -> onnx.ModelProto | None:
        try:
            return onnx.shape_inference.infer_shapes(self._model)
        except (onnx.shape_inference.InferenceError, ValueError):
            return None

    @cached_property
    def _inferred(self) -> dict[str, Scope]:
        """The same graph after type inference: the graphs around each named node. Empty when it cannot be inferred."""
        model = self._inferred_model
        if model is None:
            return {}
        return {node.name: scope for scope in walk(model.graph) for node in scope[-1].node if node.name}
