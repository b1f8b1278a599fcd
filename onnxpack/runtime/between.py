"""What devices that cut the graph share: the door that judges feeds, and the types of what products give."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper

from onnxpack.runtime.carry import tensor_type
from onnxpack.runtime.cut import frame
from onnxpack.runtime.graphs import Names
from onnxpack.runtime.opening import Opened, Opener
from onnxpack.runtime.product import Product


def product_type(a: TypeProto, product: Product, n: int, bias_rank: int) -> TypeProto:
    """The type of a product's result, given that of its input and the rank of its bias."""
    y = None if product.group is None else product.group.requantize
    kind = TensorProto.FLOAT if y is None else helper.np_dtype_to_tensor_dtype(np.dtype(y.dtype))
    if not a.tensor_type.shape.dim or bias_rank > len(a.tensor_type.shape.dim):
        return tensor_type(kind, None)
    made = TypeProto()
    made.CopyFrom(a)
    made.tensor_type.elem_type = kind
    dim = made.tensor_type.shape.dim[-1]
    dim.Clear()
    dim.dim_value = n
    return made


def door(model: onnx.ModelProto, opener: Opener) -> tuple[Opened, str]:
    """A session that computes nothing but takes the graph's inputs, so that onnxruntime itself judges the feeds.

    Its one output, whose name comes back too, is a constant.
    """
    made = frame(model)
    defaults = [tensor for tensor in model.graph.initializer if model.ir_version >= 4]
    fed = {value.name for value in model.graph.input}
    made.graph.initializer.extend(tensor for tensor in defaults if tensor.name in fed)
    held = {tensor.name for tensor in model.graph.initializer} if model.ir_version < 4 else set()
    made.graph.input.extend(value for value in model.graph.input if value.name not in held)
    accepted = Names(model).fresh("onnxpack/accepted")
    made.graph.initializer.add(name=accepted, data_type=TensorProto.BOOL, dims=[], raw_data=b"\1")
    made.graph.output.add(name=accepted)
    return opener(made.SerializeToString()), accepted
