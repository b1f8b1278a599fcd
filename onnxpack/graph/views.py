"""The operators through which a constant stays a constant: shape and type of each, and its numbers.

Adding a view is one entry of `VIEWS`: `result` answers without reading weights, `apply` makes the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxpack.types import Array

if TYPE_CHECKING:
    from onnxpack.graph.constants import Inputs, Small

DOMAINS = ("", "com.microsoft")
"""com.microsoft has QuantizeLinear and DequantizeLinear of its own, with the same meaning."""

Shape = tuple[int, ...]
Result = Callable[[ir.Node, "Inputs", int, "Small"], tuple[Shape, ir.DataType]]
Apply = Callable[[ir.Node, Sequence[Array | None], int], Array]


@dataclass(frozen=True)
class View:
    """One operator over constants."""

    result: Result
    apply: Apply


def constant_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """The tensor of a Constant node, whichever attribute holds it."""
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return None
        if name == "value":
            return attribute.as_tensor()
        if name in ("value_float", "value_floats"):
            return ir.tensor(np.array(attribute.value, np.float32), name=name)
        if name in ("value_int", "value_ints"):
            return ir.tensor(np.array(attribute.value, np.int64), name=name)
    return None


def _first(inputs: Inputs) -> tuple[Shape, ir.DataType]:
    if not inputs or inputs[0] is None:
        raise ValueError("it has no input")
    return inputs[0].shape, inputs[0].dtype


def _of(array: Array | None) -> Array:
    assert array is not None
    return array


def _attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _argument(node: ir.Node, inputs: Inputs, position: int, name: str, small: Small) -> list[int] | None:
    """An argument that is an attribute in old opsets and an input in new ones."""
    if len(inputs) > position and (given := inputs[position]) is not None:
        return [int(v) for v in small(given).reshape(-1)]
    value = _attribute(node, name)
    return None if value is None else [int(v) for v in ([value] if isinstance(value, int) else value)]


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} does not exist in a tensor of rank {rank}")
    return axis % rank


# -- views that only rename or rearrange: numpy shows them without a copy ------------------------------------------


def _same(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    return _first(inputs)


def _transpose(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    return tuple(shape[axis] for axis in _perm(node, len(shape))), dtype


def _perm(node: ir.Node, rank: int) -> list[int]:
    perm = list(_attribute(node, "perm") or range(rank)[::-1])
    if sorted(perm) != list(range(rank)):
        raise ValueError(f"perm {perm} is not a permutation of {rank} axes")
    return perm


def _reshape(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    target = _argument(node, inputs, 1, "shape", small)
    if target is None:
        raise ValueError("it has no target shape")
    if not _attribute(node, "allowzero", 0):
        target = [shape[i] if dim == 0 else dim for i, dim in enumerate(target)]
    count = math.prod(shape)
    rest = math.prod(d for d in target if d != -1)
    if target.count(-1) == 1 and rest:
        target = [count // rest if d == -1 else d for d in target]
    if any(d < 0 for d in target) or math.prod(target) != count:
        raise ValueError(f"{list(shape)} cannot be reshaped to {target}")
    return tuple(target), dtype


def _squeeze(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    axes = _argument(node, inputs, 1, "axes", small)
    drop = [i for i, d in enumerate(shape) if d == 1] if axes is None else [_axis(a, len(shape)) for a in axes]
    if any(shape[axis] != 1 for axis in drop):
        raise ValueError(f"an axis of {axes} is not 1 in {list(shape)}")
    return tuple(d for i, d in enumerate(shape) if i not in drop), dtype


def _unsqueeze(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    axes = _argument(node, inputs, 1, "axes", small) or []
    rank = len(shape) + len(axes)
    new, dims = {_axis(a, rank) for a in axes}, iter(shape)
    return tuple(1 if axis in new else next(dims) for axis in range(rank)), dtype


def _flatten(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    axis = _attribute(node, "axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return (math.prod(shape[:axis]), math.prod(shape[axis:])), dtype


def _apply_shape(view: Result) -> Apply:
    """Numbers of a view that keeps the order of elements: the stored ones in the new shape."""

    def apply(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
        return _of(arrays[0]).reshape(_result_of_arrays(view, node, arrays, index)[0])

    return apply


def _result_of_arrays(
    view: Result, node: ir.Node, arrays: Sequence[Array | None], index: int
) -> tuple[Shape, ir.DataType]:
    inputs, small = _described(arrays)
    return view(node, inputs, index, small)


def _described(arrays: Sequence[Array | None]) -> tuple[Inputs, Small]:
    """Arrays as the constants that the `result` functions take, so that each rule is written once."""
    from onnxpack.graph.constants import Constant

    made = [None if a is None else Constant("", a.shape, ir.DataType.from_numpy(a.dtype)) for a in arrays]
    known = {id(c): a for c, a in zip(made, arrays, strict=True) if c is not None and a is not None}
    return made, lambda constant: known[id(constant)]


# -- views that pick or put together -------------------------------------------------------------------------------


def _cast(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    return _first(inputs)[0], _cast_to(node)


def _cast_to(node: ir.Node) -> ir.DataType:
    to = _attribute(node, "to")
    return ir.DataType[to] if isinstance(to, str) else ir.DataType(to)  # a name, below opset 6


def _apply_cast(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    array, to = _of(arrays[0]), _cast_to(node)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(to.numpy(), copy=False)


def _slices(node: ir.Node, inputs: Inputs, shape: Shape, small: Small) -> tuple[slice, ...]:
    starts, ends = _argument(node, inputs, 1, "starts", small), _argument(node, inputs, 2, "ends", small)
    if starts is None or ends is None or len(starts) != len(ends):
        raise ValueError("starts and ends do not pair up")
    axes = _argument(node, inputs, 3, "axes", small) or list(range(len(starts)))
    steps = _argument(node, inputs, 4, "steps", small) or [1] * len(starts)
    found = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise ValueError("a step is 0")
        dim = shape[_axis(axis, len(shape))]
        first, last, stride = slice(start, end, step).indices(dim)
        if step < 0 and last < 0:
            found[_axis(axis, len(shape))] = slice(first, None, stride)
        else:
            found[_axis(axis, len(shape))] = slice(first, last, stride)
    return tuple(found)


def _slice(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    picked = _slices(node, inputs, shape, small)
    return tuple(len(range(*s.indices(d))) for s, d in zip(picked, shape, strict=True)), dtype


def _apply_slice(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    inputs, small = _described(arrays)
    array = _of(arrays[0])
    return array[_slices(node, inputs, array.shape, small)]


def _split_bounds(node: ir.Node, inputs: Inputs, shape: Shape, index: int, small: Small) -> tuple[int, slice]:
    axis = _axis(_attribute(node, "axis", 0), len(shape))
    sizes = _argument(node, inputs, 1, "split", small)
    if sizes is None:
        count = len(node.outputs)
        step = -(-shape[axis] // count)
        sizes = [min(step, max(0, shape[axis] - i * step)) for i in range(count)]
    if sum(sizes) != shape[axis] or index >= len(sizes) or min(sizes) < 0:
        raise ValueError(f"split {sizes} does not add up to {shape[axis]}")
    start = sum(sizes[:index])
    return axis, slice(start, start + sizes[index])


def _split(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    axis, picked = _split_bounds(node, inputs, shape, index, small)
    return (*shape[:axis], picked.stop - picked.start, *shape[axis + 1 :]), dtype


def _apply_split(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    inputs, small = _described(arrays)
    array = _of(arrays[0])
    axis, picked = _split_bounds(node, inputs, array.shape, index, small)
    return array[(slice(None),) * axis + (picked,)]


def _concat(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    axis = _axis(_attribute(node, "axis", 1), len(shape))
    total = 0
    for other in inputs:
        if other is None or len(other.shape) != len(shape) or other.dtype != dtype:
            raise ValueError("its inputs do not fit each other")
        if any(a != b for i, (a, b) in enumerate(zip(shape, other.shape, strict=True)) if i != axis):
            raise ValueError(f"{list(other.shape)} does not fit {list(shape)} along axis {axis}")
        total += other.shape[axis]
    return (*shape[:axis], total, *shape[axis + 1 :]), dtype


def _apply_concat(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    return np.concatenate([_of(a) for a in arrays], axis=_attribute(node, "axis", 1))


def _expand(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = _first(inputs)
    target = _argument(node, inputs, 1, "shape", small) or []
    return tuple(int(d) for d in np.broadcast_shapes(shape, tuple(target))), dtype


def _apply_expand(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    array = _of(arrays[0])
    return np.broadcast_to(array, _result_of_arrays(_expand, node, arrays, index)[0])


def _constant_of_shape(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    if not inputs or inputs[0] is None:
        raise ValueError("it has no input")
    shape = tuple(int(d) for d in small(inputs[0]).reshape(-1))
    if any(d < 0 for d in shape) or math.prod(shape) > 2**62:
        raise ValueError(f"shape {list(shape)} cannot be made")
    return shape, ir.DataType.from_numpy(_fill(node).dtype)


def _fill(node: ir.Node) -> Array:
    value = _attribute(node, "value")
    return np.zeros(1, np.float32) if value is None else np.asarray(value.numpy()).reshape(-1)[:1]


def _apply_constant_of_shape(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    return np.broadcast_to(_fill(node), tuple(int(d) for d in _of(arrays[0]).reshape(-1)))


# -- arithmetic on constants ---------------------------------------------------------------------------------------


def _broadcast(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    _, dtype = _first(inputs)
    shapes = [c.shape for c in inputs if c is not None]
    if len(shapes) != 2 or any(c is not None and c.dtype != dtype for c in inputs) or dtype == ir.DataType.STRING:
        raise ValueError("its inputs are not two tensors of one number type")
    return tuple(int(d) for d in np.broadcast_shapes(*shapes)), dtype


def _arithmetic(ufunc: np.ufunc) -> Apply:
    def apply(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
        a, b = _of(arrays[0]), _of(arrays[1])
        with np.errstate(all="ignore"):
            return np.asarray(ufunc(a, b)).astype(a.dtype, copy=False)

    return apply


def _quantization(node: ir.Node, inputs: Inputs) -> None:
    """Scale and zero point must fit the tensor: per tensor, per axis, or per block of one axis."""
    shape, _ = _first(inputs)
    scale = inputs[1] if len(inputs) > 1 else None
    zero_point = inputs[2] if len(inputs) > 2 else None
    if scale is None:
        return
    scalar = zero_point is not None and math.prod(zero_point.shape) == math.prod(scale.shape) == 1
    if zero_point is not None and zero_point.shape != scale.shape and not scalar:
        raise ValueError(f"zero point {list(zero_point.shape)} and scale {list(scale.shape)} differ in shape")
    block = _attribute(node, "block_size", 0)
    if not len(scale.shape) or (scale.shape == (1,) and not block):
        return
    axis = _axis(_attribute(node, "axis", 1), len(shape))
    if not block:
        if len(scale.shape) != 1 or scale.shape[0] != shape[axis]:
            raise ValueError(f"axis {axis} needs {shape[axis]} scales, it has {list(scale.shape)}")
        return
    wanted = (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
    if block < 0 or scale.shape != wanted:
        raise ValueError(f"blocks of {block} along axis {axis} need scales {list(wanted)}, it has {list(scale.shape)}")


def _dequantize(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, _ = _first(inputs)
    _quantization(node, inputs)
    given = _attribute(node, "output_dtype", 0)
    scale = inputs[1] if len(inputs) > 1 else None
    return shape, ir.DataType(given) if given else (scale.dtype if scale is not None else ir.DataType.FLOAT)


def _quantize(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, _ = _first(inputs)
    _quantization(node, inputs)
    given = _attribute(node, "output_dtype", 0)
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
    codes, scale = _of(arrays[0]), _of(arrays[1])
    axis, block = _attribute(node, "axis", 1) % max(1, codes.ndim), _attribute(node, "block_size", 0)
    wide = codes.astype(np.float32)
    if len(arrays) > 2 and arrays[2] is not None:
        wide -= spread(arrays[2].astype(np.float32), codes.shape, axis, block)
    with np.errstate(all="ignore"):
        wide *= spread(scale.astype(np.float32), codes.shape, axis, block)
    given = _attribute(node, "output_dtype", 0)
    return wide.astype(ir.DataType(given).numpy() if given else scale.dtype, copy=False)


def _apply_quantize(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    values, scale = _of(arrays[0]), _of(arrays[1])
    axis, block = _attribute(node, "axis", 1) % max(1, values.ndim), _attribute(node, "block_size", 0)
    given = _attribute(node, "output_dtype", 0)
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


def _identity(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    return _of(arrays[0])


def _apply_transpose(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    array = _of(arrays[0])
    return array.transpose(_perm(node, array.ndim))


VIEWS: dict[str, View] = {
    "Identity": View(_same, _identity),
    "Transpose": View(_transpose, _apply_transpose),
    "Reshape": View(_reshape, _apply_shape(_reshape)),
    "Squeeze": View(_squeeze, _apply_shape(_squeeze)),
    "Unsqueeze": View(_unsqueeze, _apply_shape(_unsqueeze)),
    "Flatten": View(_flatten, _apply_shape(_flatten)),
    "Cast": View(_cast, _apply_cast),
    "Slice": View(_slice, _apply_slice),
    "Split": View(_split, _apply_split),
    "Concat": View(_concat, _apply_concat),
    "Expand": View(_expand, _apply_expand),
    "ConstantOfShape": View(_constant_of_shape, _apply_constant_of_shape),
    "Add": View(_broadcast, _arithmetic(np.add)),
    "Sub": View(_broadcast, _arithmetic(np.subtract)),
    "Mul": View(_broadcast, _arithmetic(np.multiply)),
    "Div": View(_broadcast, _arithmetic(np.divide)),
    "QuantizeLinear": View(_quantize, _apply_quantize),
    "DequantizeLinear": View(_dequantize, _apply_dequantize),
}

WITHOUT_COPY = ("Identity", "Transpose", "Slice", "Split", "Expand", "ConstantOfShape")
"""Views whose numbers never need memory of their own, whatever their size."""

SAME_VALUES = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split")
"""Views that pick and arrange elements of any type, and change none."""
