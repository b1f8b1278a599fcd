"""The operators through which a constant stays a constant: shape and type of each, and its numbers.

Adding a view is one entry of `VIEWS`: `result` answers without reading weights, `apply` makes the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpack.graph.arithmetic_views import ARITHMETIC
from onnxpack.graph.constant import Apply, Constant, Inputs, Result, Shape, Small, View
from onnxpack.graph.view_tools import argument_of, attribute_of, checked_axis, first, present
from onnxpack.types import Array

DOMAINS = ("", "com.microsoft")
"""com.microsoft has QuantizeLinear and DequantizeLinear of its own, with the same meaning."""


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


# -- views that only rename or rearrange: numpy shows them without a copy ------------------------------------------


def _same(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    return first(inputs)


def _transpose(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    return tuple(shape[axis] for axis in _perm(node, len(shape))), dtype


def _perm(node: ir.Node, rank: int) -> list[int]:
    perm = list(attribute_of(node, "perm") or range(rank)[::-1])
    if sorted(perm) != list(range(rank)):
        raise ValueError(f"perm {perm} is not a permutation of {rank} axes")
    return perm


def _reshape(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    target = argument_of(node, inputs, 1, "shape", small)
    if target is None:
        raise ValueError("it has no target shape")
    if not attribute_of(node, "allowzero", 0):
        target = [shape[i] if dim == 0 else dim for i, dim in enumerate(target)]
    count = math.prod(shape)
    rest = math.prod(d for d in target if d != -1)
    if target.count(-1) == 1 and rest:
        target = [count // rest if d == -1 else d for d in target]
    if any(d < 0 for d in target) or math.prod(target) != count:
        raise ValueError(f"{list(shape)} cannot be reshaped to {target}")
    return tuple(target), dtype


def _squeeze(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    axes = argument_of(node, inputs, 1, "axes", small)
    drop = [i for i, d in enumerate(shape) if d == 1] if axes is None else [checked_axis(a, len(shape)) for a in axes]
    if any(shape[axis] != 1 for axis in drop):
        raise ValueError(f"an axis of {axes} is not 1 in {list(shape)}")
    return tuple(d for i, d in enumerate(shape) if i not in drop), dtype


def _unsqueeze(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    axes = argument_of(node, inputs, 1, "axes", small) or []
    rank = len(shape) + len(axes)
    new, dims = {checked_axis(a, rank) for a in axes}, iter(shape)
    return tuple(1 if axis in new else next(dims) for axis in range(rank)), dtype


def _flatten(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    axis = attribute_of(node, "axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return (math.prod(shape[:axis]), math.prod(shape[axis:])), dtype


def _apply_shape(view: Result) -> Apply:
    """Numbers of a view that keeps the order of elements: the stored ones in the new shape."""

    def apply(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
        return present(arrays[0]).reshape(_result_of_arrays(view, node, arrays, index)[0])

    return apply


def _result_of_arrays(
    view: Result, node: ir.Node, arrays: Sequence[Array | None], index: int
) -> tuple[Shape, ir.DataType]:
    inputs, small = _described(arrays)
    return view(node, inputs, index, small)


def _described(arrays: Sequence[Array | None]) -> tuple[Inputs, Small]:
    """Arrays as the constants that the `result` functions take, so that each rule is written once."""
    made = [None if a is None else Constant("", a.shape, ir.DataType.from_numpy(a.dtype)) for a in arrays]
    known = {id(c): a for c, a in zip(made, arrays, strict=True) if c is not None and a is not None}
    return made, lambda constant: known[id(constant)]


# -- views that pick or put together -------------------------------------------------------------------------------


def _cast(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    return first(inputs)[0], _cast_to(node)


def _cast_to(node: ir.Node) -> ir.DataType:
    to = attribute_of(node, "to")
    return ir.DataType[to] if isinstance(to, str) else ir.DataType(to)  # a name, below opset 6


def _apply_cast(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    array, to = present(arrays[0]), _cast_to(node)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(to.numpy(), copy=False)


def _slices(node: ir.Node, inputs: Inputs, shape: Shape, small: Small) -> tuple[slice, ...]:
    starts, ends = argument_of(node, inputs, 1, "starts", small), argument_of(node, inputs, 2, "ends", small)
    if starts is None or ends is None or len(starts) != len(ends):
        raise ValueError("starts and ends do not pair up")
    axes = argument_of(node, inputs, 3, "axes", small) or list(range(len(starts)))
    steps = argument_of(node, inputs, 4, "steps", small) or [1] * len(starts)
    found = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise ValueError("a step is 0")
        dim = shape[checked_axis(axis, len(shape))]
        first, last, stride = slice(start, end, step).indices(dim)
        if step < 0 and last < 0:
            found[checked_axis(axis, len(shape))] = slice(first, None, stride)
        else:
            found[checked_axis(axis, len(shape))] = slice(first, last, stride)
    return tuple(found)


def _slice(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    picked = _slices(node, inputs, shape, small)
    return tuple(len(range(*s.indices(d))) for s, d in zip(picked, shape, strict=True)), dtype


def _apply_slice(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    inputs, small = _described(arrays)
    array = present(arrays[0])
    return array[_slices(node, inputs, array.shape, small)]


def _split_bounds(node: ir.Node, inputs: Inputs, shape: Shape, index: int, small: Small) -> tuple[int, slice]:
    axis = checked_axis(attribute_of(node, "axis", 0), len(shape))
    sizes = argument_of(node, inputs, 1, "split", small)
    if sizes is None:
        count = len(node.outputs)
        step = -(-shape[axis] // count)
        sizes = [min(step, max(0, shape[axis] - i * step)) for i in range(count)]
    if sum(sizes) != shape[axis] or index >= len(sizes) or min(sizes) < 0:
        raise ValueError(f"split {sizes} does not add up to {shape[axis]}")
    start = sum(sizes[:index])
    return axis, slice(start, start + sizes[index])


def _split(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    axis, picked = _split_bounds(node, inputs, shape, index, small)
    return (*shape[:axis], picked.stop - picked.start, *shape[axis + 1 :]), dtype


def _apply_split(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    inputs, small = _described(arrays)
    array = present(arrays[0])
    axis, picked = _split_bounds(node, inputs, array.shape, index, small)
    return array[(slice(None),) * axis + (picked,)]


def _concat(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    axis = checked_axis(attribute_of(node, "axis", 1), len(shape))
    total = 0
    for other in inputs:
        if other is None or len(other.shape) != len(shape) or other.dtype != dtype:
            raise ValueError("its inputs do not fit each other")
        if any(a != b for i, (a, b) in enumerate(zip(shape, other.shape, strict=True)) if i != axis):
            raise ValueError(f"{list(other.shape)} does not fit {list(shape)} along axis {axis}")
        total += other.shape[axis]
    return (*shape[:axis], total, *shape[axis + 1 :]), dtype


def _apply_concat(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    return np.concatenate([present(a) for a in arrays], axis=attribute_of(node, "axis", 1))


def _expand(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    shape, dtype = first(inputs)
    target = argument_of(node, inputs, 1, "shape", small) or []
    return tuple(int(d) for d in np.broadcast_shapes(shape, tuple(target))), dtype


def _apply_expand(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    array = present(arrays[0])
    return np.broadcast_to(array, _result_of_arrays(_expand, node, arrays, index)[0])


def _constant_of_shape(node: ir.Node, inputs: Inputs, index: int, small: Small) -> tuple[Shape, ir.DataType]:
    if not inputs or inputs[0] is None:
        raise ValueError("it has no input")
    shape = tuple(int(d) for d in small(inputs[0]).reshape(-1))
    if any(d < 0 for d in shape) or math.prod(shape) > 2**62:
        raise ValueError(f"shape {list(shape)} cannot be made")
    return shape, ir.DataType.from_numpy(_fill(node).dtype)


def _fill(node: ir.Node) -> Array:
    value = attribute_of(node, "value")
    return np.zeros(1, np.float32) if value is None else np.asarray(value.numpy()).reshape(-1)[:1]


def _apply_constant_of_shape(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    return np.broadcast_to(_fill(node), tuple(int(d) for d in present(arrays[0]).reshape(-1)))


def _identity(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    return present(arrays[0])


def _apply_transpose(node: ir.Node, arrays: Sequence[Array | None], index: int) -> Array:
    array = present(arrays[0])
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
    **ARITHMETIC,
}

WITHOUT_COPY = ("Identity", "Transpose", "Slice", "Split", "Expand", "ConstantOfShape")
"""Views whose numbers never need memory of their own, whatever their size."""

SAME_VALUES = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split")
"""Views that pick and arrange elements of any type, and change none."""
