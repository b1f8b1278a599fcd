"""Small repairs of the protobuf that change nothing of what the model means.

* Below IR version 4 every initializer has to be a graph input and is constant all the same: the inputs are dropped and
  the version raised, so that "initializer and input" always means "the caller may replace it".
* The domain "ai.onnx" is spelled "".
* External-data keys beyond ONNX's own are dropped (onnx accepts them, onnxruntime does not).
* Sparse initializers and constants become dense ones (the graph library would lose them).
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from onnxpack.errors import ModelError
from onnxpack.graph.check import scopes, tensors

_FIRST_IR_WITH_CONSTANT_INITIALIZERS = 4
_EXTERNAL_KEYS = ("location", "offset", "length", "checksum")


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
    for scope in scopes(proto):
        for node in scope.node:
            if node.domain == "ai.onnx":
                node.domain = ""
            if node.op_type == "Constant":
                _make_constant_dense(node)
        if getattr(scope, "sparse_initializer", None):
            scope.initializer.extend(_dense(sparse) for sparse in scope.sparse_initializer)
            del scope.sparse_initializer[:]
    for holder in (proto, *proto.functions):
        for entry in holder.opset_import:
            if entry.domain == "ai.onnx":
                entry.domain = ""


def _make_constant_dense(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.name == "sparse_value" and attribute.HasField("sparse_tensor"):
            dense = _dense(attribute.sparse_tensor)
            attribute.Clear()
            attribute.CopyFrom(onnx.helper.make_attribute("value", dense))


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name = sparse.values.name
    try:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        count = int(np.prod(sparse.dims, dtype=np.int64))
        dense = np.zeros(count, values.dtype)
        flat = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
        if len(flat) and (flat.min() < 0 or flat.max() >= count):
            raise ModelError("an index lies outside its shape", where=f"sparse tensor {name}")
        dense[flat] = values
        return numpy_helper.from_array(dense.reshape(sparse.dims), name)
    except (ValueError, TypeError, IndexError) as error:
        raise ModelError(f"cannot be read: {error}", where=f"sparse tensor {name}") from None
