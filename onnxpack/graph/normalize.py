"""Small repairs of the protobuf that change nothing of what the model means.

* Below IR version 4 every initializer has to be a graph input and is constant all the same: the inputs are dropped and
  the version raised, so that "initializer and input" always means "the caller may replace it".
* The domain "ai.onnx" is spelled "".
* External-data keys beyond ONNX's own are dropped (onnx accepts them, onnxruntime does not).
* Sparse initializers become dense ones (the graph library would lose them).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxpack.errors import ModelError
from onnxpack.graph.check import tensors

_FIRST_IR_WITH_CONSTANT_INITIALIZERS = 4
_EXTERNAL_KEYS = ("location", "offset", "length", "checksum")
_DENSE_LIMIT = 1 << 30  # bytes; a hostile model could ask for any amount


def normalize(proto: onnx.ModelProto) -> None:
    """Apply the repairs in place."""
    if proto.ir_version < _FIRST_IR_WITH_CONSTANT_INITIALIZERS:
        proto.ir_version = _FIRST_IR_WITH_CONSTANT_INITIALIZERS
        constant = {tensor.name for tensor in proto.graph.initializer}
        kept = [value for value in proto.graph.input if value.name not in constant]
        del proto.graph.input[:]
        proto.graph.input.extend(kept)
    for tensor in tensors(proto):
        unknown = [entry for entry in tensor.external_data if entry.key not in _EXTERNAL_KEYS]
        for entry in unknown:
            tensor.external_data.remove(entry)
    for scope in _scopes(proto):
        for node in scope.node:
            if node.domain == "ai.onnx":
                node.domain = ""
        if getattr(scope, "sparse_initializer", None):
            scope.initializer.extend(_dense(sparse) for sparse in scope.sparse_initializer)
            del scope.sparse_initializer[:]
    for holder in (proto, *proto.functions):
        for entry in holder.opset_import:
            if entry.domain == "ai.onnx":
                entry.domain = ""


def _scopes(proto: onnx.ModelProto) -> list[Any]:
    stack: list[Any] = [proto.graph, *proto.functions]
    found = []
    while stack:
        scope = stack.pop()
        found.append(scope)
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    stack.append(attribute.g)
                stack.extend(attribute.graphs)
    return found


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name = sparse.values.name
    try:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        count = int(np.prod(sparse.dims, dtype=np.int64))
        if count < 0 or count * values.itemsize > _DENSE_LIMIT:
            raise ModelError("too large to be made dense", where=f"sparse tensor {name}")
        dense = np.zeros(count, values.dtype)
        flat = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
        if len(flat) and (flat.min() < 0 or flat.max() >= count):
            raise ModelError("an index lies outside its shape", where=f"sparse tensor {name}")
        dense[flat] = values
        return numpy_helper.from_array(dense.reshape(sparse.dims), name)
    except (ValueError, TypeError, IndexError) as error:
        raise ModelError(f"cannot be read: {error}", where=f"sparse tensor {name}") from None
