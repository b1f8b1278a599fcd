"""Operators that compute: a weight may be a sum, a product, or dequantized codes of stored tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpack.graph.constant import Apply, Inputs, Shape, Small, View
from onnxpack.graph.view_tools import attribute_of, checked_axis, first, present
from onnxpack.types import Array


def _broadcast(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    _, dtype = first(inputs)
    shapes = [c.shape for c in inputs if c is not None]
    if len(shapes) != 2 or any(c is not None and c.dtype != dtype for c in inputs) or dtype == ir.DataType.STRING:
        raise ValueError("its inputs are not two tensors of one number type")
    return tuple(int(d) for d in np.broadcast_shapes(*shapes)), dtype


def _arithmetic(ufunc: np.ufunc) -> Apply:
    def apply(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
        a, b = present(arrays[0]), present(arrays[1])
        with np.errstate(all="ignore"):
            return np.asarray(ufunc(a, b)).astype(a.dtype, copy=False)

    return apply


def _quantization(node: ir.Node, inputs: Inputs) -> None:
    """Scale and zero point must fit the tensor: per tensor, per axis, or per block of one axis."""
    shape, _ = first(inputs)
    scale = inputs[1] if len(inputs) > 1 else None
    zero_point = inputs[2] if len(inputs) > 2 else None
    if scale is None:
        return
    scalar = zero_point is not None and math.prod(zero_point.shape) == math.prod(scale.shape) == 1
    if zero_point is not None and zero_point.shape != scale.shape and not scalar:
        raise ValueError(f"zero point {list(zero_point.shape)} and scale {list(scale.shape)} differ in shape")
    block = attribute_of(node, "block_size", 0)
    if not len(scale.shape) or (scale.shape == (1,) and not block):
        return
    axis = checked_axis(attribute_of(node, "axis", 1), len(shape))
    if not block:
        if len(scale.shape) != 1 or scale.shape[0] != shape[axis]:
            raise ValueError(f"axis {axis} needs {shape[axis]} scales, it has {list(scale.shape)}")
        return
    wanted = (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
    if block < 0 or scale.shape != wanted:
        raise ValueError(f"blocks of {block} along axis {axis} need scales {list(wanted)}, it has {list(scale.shape)}")


def _dequantize(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, _ = first(inputs)
    _quantization(node, inputs)
    given = attribute_of(node, "output_dtype", 0)
    scale = inputs[1] if len(inputs) > 1 else None
    return shape, ir.DataType(given) if given else (scale.dtype if scale is not None else ir.DataType.FLOAT)


def _quantize(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, _ = first(inputs)
    _quantization(node, inputs)
    given = attribute_of(node, "output_dtype", 0)
    zero_point = inputs[2] if len(inputs) > 2 else None
    if zero_point is not None:
        return shape, zero_point.dtype
    return shape, ir.DataType(given) if given else ir.DataType.UINT8


def spread(array: Array, shape: Shape, axis: int, block: int) -> Array:
    """Scales or zero points in a shape that broadcasts against the tensor they belong to.

    >>> spread(np.array([1, 2]), (2, 3), 0, 0).shape, spread(np.ones((2, 2)), (2, 4), 1, 2).shape
    ((2, 1), (2, 4))
    """
    if array.size == 1 and not block:
        return array.reshape(())
    if block:
        return np.repeat(array, block, axis=axis)[tuple(slice(0, d) for d in shape)]
    return array.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _apply_dequantize(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    codes, scale = present(arrays[0]), present(arrays[1])
    axis, block = attribute_of(node, "axis", 1) % max(1, codes.ndim), attribute_of(node, "block_size", 0)
    wide = codes.astype(np.float32)
    if len(arrays) > 2 and arrays[2] is not None:
        wide -= spread(arrays[2].astype(np.float32), codes.shape, axis, block)
    with np.errstate(all="ignore"):
        wide *= spread(scale.astype(np.float32), codes.shape, axis, block)
    given = attribute_of(node, "output_dtype", 0)
    return wide.astype(ir.DataType(given).numpy() if given else scale.dtype, copy=False)


def _apply_quantize(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    values, scale = present(arrays[0]), present(arrays[1])
    axis, block = attribute_of(node, "axis", 1) % max(1, values.ndim), attribute_of(node, "block_size", 0)
    given = attribute_of(node, "output_dtype", 0)
    zero_point = arrays[2] if len(arrays) > 2 else None
    to = ir.DataType(given).numpy() if given else np.dtype(np.uint8) if zero_point is None else zero_point.dtype
    with np.errstate(all="ignore"):
        codes = np.rint(values.astype(np.float32) / spread(scale.astype(np.float32), values.shape, axis, block))
    if zero_point is not None:
        codes += spread(zero_point.astype(np.float32), values.shape, axis, block)
    low, high = _range(to)
    with np.errstate(invalid="ignore"):  # a NaN has no code; what stands there says nothing
        return np.clip(codes, low, high).astype(to)


def _range(dtype: np.dtype[Any]) -> tuple[float, float]:
    import ml_dtypes

    info: Any = (ml_dtypes.iinfo if "int" in dtype.name else ml_dtypes.finfo)(dtype)
    return float(info.min), float(info.max)


ARITHMETIC: dict[str, View] = {
    "Add": View(_broadcast, _arithmetic(np.add)),
    "Sub": View(_broadcast, _arithmetic(np.subtract)),
    "Mul": View(_broadcast, _arithmetic(np.multiply)),
    "Div": View(_broadcast, _arithmetic(np.divide)),
    "QuantizeLinear": View(_quantize, _apply_quantize),
    "DequantizeLinear": View(_dequantize, _apply_dequantize),
}
