"""Shapes of activations, where the model states them or ONNX's shape inference finds them; weights are never read.

Nothing is written back: the graph stays as it was. What cannot be inferred is unknown, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from onnxpack.graph.paths import all_graphs
from onnxpack.graph.tensors import shape_of

Dim = int | str | None
Dims = tuple[Dim, ...] | None
"""None: not even the rank is known."""

_KEPT_BYTES = 1024


class Shapes:
    """Shapes of values by the value; inference runs once, when the first value without a stated shape is asked for."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._inferred: dict[str, Dims] | None = None

    def of(self, value: ir.Value | None) -> Dims:
        """Dimensions of a value: numbers, symbols, None for an unknown one."""
        if value is None:
            return None
        if value.shape is not None:
            stated = _dims(value.shape)
            if None not in stated:
                return stated
        if self._inferred is None:
            self._inferred = _infer(self._model)
        found = self._inferred.get(value.name or "")
        if found is not None:
            return found
        return None if value.shape is None else _dims(value.shape)


def _dims(shape: ir.Shape) -> tuple[Dim, ...]:
    return tuple(d if isinstance(d, int) else (d.value or None) for d in shape)


def _infer(model: ir.Model) -> dict[str, Dims]:
    try:
        proto = _without_weights(model)
        _plain_quantization(proto.graph)
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # whatever C++ or the protobuf library raises here is a shape that stays unknown
        return {}
    found: dict[str, Dims] = {}
    for graph in _graphs(proto.graph):
        for name, dims in _stated(graph).items():
            # two bodies may each have a value of this name; then the name says nothing
            found[name] = dims if found.get(name, dims) == dims else None
    return found


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies in it."""
    stack = [graph]
    while stack:
        at = stack.pop()
        yield at
        for node in at.node:
            for attribute in node.attribute:
                stack += [*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs]


def _plain_quantization(graph: onnx.GraphProto) -> None:
    """Quantize- and DequantizeLinear of com.microsoft, of which ONNX knows nothing, become Casts: the shape is that."""
    kinds = {"QuantizeLinear": TensorProto.UINT8, "DequantizeLinear": TensorProto.FLOAT}
    for at in _graphs(graph):
        for node in at.node:
            if node.domain == "com.microsoft" and node.op_type in kinds and node.input:
                cast = helper.make_node("Cast", node.input[:1], list(node.output), node.name, to=kinds[node.op_type])
                node.CopyFrom(cast)


def _stated(graph: onnx.GraphProto) -> dict[str, Dims]:
    return {
        info.name: tuple(
            d.dim_value if d.HasField("dim_value") else _symbol(d.dim_param) for d in info.type.tensor_type.shape.dim
        )
        for info in (*graph.value_info, *graph.input, *graph.output)
        if info.type.tensor_type.HasField("shape")
    }


def _symbol(name: str) -> str | None:
    """A symbol of the graph; those that inference makes up say nothing to anybody."""
    return None if not name or name.startswith("unk__") else name


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    """The model as a protobuf in which every large tensor is external data that does not exist."""
    held: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for graph in all_graphs(model.graph):
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes > _KEPT_BYTES and not isinstance(tensor, ir.ExternalTensor):
                held.append((value, tensor))
                shape = ir.Shape(shape_of(tensor))
                value.const_value = ir.ExternalTensor("w", 0, None, tensor.dtype, shape=shape, name=tensor.name or "")
    try:
        return ir.serde.serialize_model(model)
    finally:
        for value, tensor in held:
            value.const_value = tensor
