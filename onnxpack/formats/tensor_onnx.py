"""Views of stored tensors, and what a decoder does after them, as standard ONNX operators; all shapes known.

The same bytes may be seen as several initializers: words that hold codes are seen as bytes, so that no operator on
them is needed that onnxruntime lacks.
"""

from __future__ import annotations

import math

import numpy as np

from onnxpack.formats import hadamard
from onnxpack.formats.arrange import Arrangement
from onnxpack.formats.base import Decoder, FieldSpec, View
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.onnx_ops import Graph, OnnxOps, Tensor
from onnxpack.formats.profiles import OutlierMode, QuantizationProfile, Rotation, Side
from onnxpack.formats.tensor_numpy import steps, without_copies
from onnxpack.formats.tensors import JoinView, Sizes, SumView, TensorField, TensorLayout, TensorView

OUTPUT = "decoded"
"""Checkpoints like to call a stored tensor "weight"."""
_UINT8_ARITHMETIC = 14  # the opset from which Add knows uint8


def input_name(field: TensorField, data_type: DataType) -> str:
    """The decoder's input for a field seen as another type ("qweight.uint8"), or as its own ("scales")."""
    return field.name if data_type is field.data_type else f"{field.name}.{data_type.name.lower()}"


def read_type(view: TensorView, layout: TensorLayout) -> DataType:
    """The element type that a view reads its field as."""
    if view.coded:
        return DataType.UINT8
    return layout.stored(view.field).data_type if view.read_as is DataType.UNDEFINED else view.read_as


def inputs(layout: TensorLayout, specs: dict[str, FieldSpec]) -> dict[str, View]:
    """The initializers that a decoder reads, over the stored bytes."""
    seen: dict[str, View] = {}
    wanted = [(v.field, read_type(v, layout)) for v in layout.views if isinstance(v, TensorView)]
    wanted += [
        (v.index, layout.stored(v.index).data_type) for v in layout.views if isinstance(v, TensorView) and v.index
    ]
    if layout.order:
        wanted.append((layout.order, layout.stored(layout.order).data_type))
    for name, data_type in wanted:
        field, spec = layout.stored(name), specs[name]
        if data_type is not field.data_type:
            ratio = spec.dtype.itemsize // data_type.storage.itemsize
            shape = spec.shape if ratio == 1 else (*spec.shape, ratio)
            spec = FieldSpec(data_type.storage, shape)
        seen[input_name(field, data_type)] = View(name, spec)
    return seen


class TensorOnnxOps(OnnxOps):
    """Emits a decoder's steps for a whole weight [N, K]."""

    def __init__(self, layout: TensorLayout, sizes: Sizes, shape: tuple[int, int], opset: int) -> None:
        self.tensors, self.sizes, self.shape = layout, sizes, shape
        self.graph, self.opset = Graph(), opset
        specs = {f.name: FieldSpec(f.data_type.storage, sizes.dims(f.dims)) for f in layout.fields}
        self.inputs = {name: Tensor(name, v.spec.shape, v.spec.dtype) for name, v in inputs(layout, specs).items()}
        self.read: dict[str, Tensor] = {}

    # Views -----------------------------------------------------------------------------------------------------------

    def codes(self, name: str) -> Tensor:
        if name not in self.read:
            self.read[name] = self._codes(name)
        return self.read[name]

    def _codes(self, name: str) -> Tensor:
        view = self.tensors.find(name)
        if isinstance(view, SumView):
            return self.index([(self.codes(term), multiplier) for term, multiplier in view.terms])
        if isinstance(view, JoinView):
            runs = [self._raised(self.codes(run), offset) for run, offset in view.runs]
            same = len({run.dtype for run in runs}) == 1
            joined = self._concat(runs if same else [self._cast(run, np.int32) for run in runs])
            return self._shaped(joined, self.sizes.dims(self.tensors.frame))
        assert isinstance(view, TensorView), name
        return self._one(view)

    def _raised(self, codes: Tensor, offset: int) -> Tensor:
        codes = codes if codes.dtype == np.uint8 and self.opset >= _UINT8_ARITHMETIC else self._cast(codes, np.int32)
        return self._binary("Add", codes, self._const(np.array(offset, codes.dtype))) if offset else codes

    def _one(self, view: TensorView) -> Tensor:
        field = self.tensors.stored(view.field)
        value = self.inputs[input_name(field, read_type(view, self.tensors))]
        total = math.prod(value.shape)
        plan = steps(view, self.sizes, total, self.tensors.frame)
        first, count = self.sizes.one(view.start), math.prod(plan.stored)
        if count < total:
            value = self._slice(self._shaped(value, (total,)), first, first + count)
        value = self._arranged(value, plan.first)
        if plan.codes is not None:
            units = self._shaped(value, (1, math.prod(value.shape[:-1]), value.shape[-1]))
            units = self._along(units, self._const(np.array(view.shuffle, np.int64))) if view.shuffle else units
            value = self._view(without_copies(view.bits), units)
            value = self._float16(value) if view.read_as is DataType.FLOAT16 else value
            value = self._arranged(value, plan.codes)
        if view.repeat:
            value = self._along(value, self._const(np.repeat(np.arange(len(view.repeat)), view.repeat)))
        if view.index:
            value = self._along(value, self.inputs[view.index])
        return self._shaped(self._cropped(value, plan.dims), plan.dims)

    def _cropped(self, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        if math.prod(value.shape) == math.prod(dims):
            return value
        for axis, extent in enumerate(dims if len(value.shape) > 1 else (math.prod(dims),)):
            value = self._slice(value, 0, min(extent, value.shape[axis]), axis)
        return value

    def _arranged(self, value: Tensor, plan: Arrangement) -> Tensor:
        if not plan.moves:
            return self._shaped(value, plan.merged)
        return self._shaped(self._transpose(self._shaped(value, plan.split), plan.perm), plan.merged)

    def _along(self, value: Tensor, index: Tensor, axis: int = -1) -> Tensor:
        axis %= len(value.shape)
        shape = list(value.shape)
        shape[axis] = math.prod(index.shape)
        flat = self._shaped(index, (shape[axis],))
        return Tensor(self.graph.node("Gather", [value.name, flat.name], axis=axis), tuple(shape), value.dtype)

    def numbers(self, name: str) -> Tensor:
        key = f"float32 {name}"
        if key not in self.read:
            view = self.tensors.find(name)
            levels = view.levels if isinstance(view, TensorView) else ()
            codes = self.codes(name)
            self.read[key] = (
                self._gather(np.asarray(levels, np.float32), codes) if levels else self._cast(codes, np.float32)
            )
        return self.read[key]

    def take(self, table: Tensor, index: Tensor) -> Tensor:
        wide = self._cast(index, np.int32)
        name = self.graph.node("Gather", [table.name, wide.name], axis=0)
        return Tensor(name, index.shape + table.shape[1:], table.dtype)

    def half(self, value: Tensor) -> Tensor:
        return self._cast(self._cast(value, np.float16), np.float32)

    # After decoding --------------------------------------------------------------------------------------------------

    def finish_tensors(self, profile: QuantizationProfile, value: Tensor) -> Decoder:
        """Outliers, order, diagonals and rotations; then the weight is complete."""
        layout, (_, k) = self.tensors, self.shape
        value = self._shaped(value, self.shape)
        if profile.sparse is not None and layout.outliers is not None:
            value = self._with_outliers(value, profile)
        if layout.order:
            value = self._along(value, self.inputs[layout.order], axis=1)
        if profile.pre_scaling is not None:
            value = self._binary("Div", value, self._shaped(self.numbers(profile.pre_scaling.field), (1, k)))
        if profile.pre_rotation is not None:
            value = self._turned(value, profile.pre_rotation, inverse=True)
        if profile.post_rotation is not None:
            value = self._turned(value, profile.post_rotation, inverse=False)
        if not self.graph.nodes or self.graph.nodes[-1].output[0] != value.name:
            value = Tensor(self.graph.node("Identity", [value.name]), value.shape, value.dtype)
        return self.graph.decoder(value.name, OUTPUT)

    def _turned(self, value: Tensor, rotation: Rotation, inverse: bool) -> Tensor:
        """Blocks along one side times H / sqrt(n), then times the signs of that side."""
        by_row = rotation.side is Side.N
        value = self._transpose(value, (1, 0)) if by_row else value
        width = value.shape[1]
        size = rotation.block_size or width
        turned = self._shaped(self._hadamard(value, size, inverse), value.shape)
        turned = self._binary("Mul", turned, self._const(np.array(hadamard.root(size), np.float32)))
        if rotation.signs:
            signs = self._shaped(self.numbers(rotation.signs), (1, width))
            turned = self._binary("Mul", turned, signs)
        return self._transpose(turned, (1, 0)) if by_row else turned

    def _hadamard(self, value: Tensor, size: int, inverse: bool) -> Tensor:
        known = hadamard.factors(size)
        assert known is not None
        odd, power = known
        count = math.prod(value.shape) // power
        value = self._shaped(value, (count, power))
        for _ in range(power.bit_length() - 1):
            pairs = self._shaped(value, (count, power // 2, 2))
            first, second = (self._shaped(self._slice(pairs, i, i + 1), (count, power // 2)) for i in (0, 1))
            value = self._concat([self._binary("Add", first, second), self._binary("Sub", first, second)])
        if odd == 1:
            return value
        matrix = hadamard.twelve().T if inverse else hadamard.twelve()
        value = self._shaped(value, (count // odd, odd, power))
        total: Tensor | None = None
        for j in range(odd):
            row = self._const(np.ascontiguousarray(matrix[j])[:, None])
            one = self._binary("Mul", self._slice(value, j, j + 1, axis=1), row)
            total = one if total is None else self._binary("Add", total, one)
        assert total is not None
        return total

    def _filled_with(self, value: int, count: int) -> str:
        """A line of one number, made by a node: as a constant it would stand in the model."""
        from onnx import numpy_helper

        length = self.graph.constant(np.array([count], np.int64))
        filling = numpy_helper.from_array(np.array([value], np.int32))
        return self.graph.node("ConstantOfShape", [length], value=filling)

    def _with_outliers(self, value: Tensor, profile: QuantizationProfile) -> Tensor:
        """Dense values plus the entries of compressed rows, each at row * K + column of the flattened weight."""
        n, k = self.shape
        where = self.tensors.outliers
        assert where is not None
        assert profile.sparse is not None
        assert profile.sparse.mode is OutlierMode.ADD
        offsets, columns, added = (self.codes(name) for name in (where.offsets, where.columns, where.values))
        count = math.prod(columns.shape)
        # The row of an entry is the number of rows that end at or before it: ones where rows end, summed up.
        ends = self._slice(self._cast(self._shaped(offsets, (n + 1,)), np.int64), 1, n)
        ones, zeros = self._filled_with(1, n - 1), self._filled_with(0, count + 1)
        marks = self.graph.node("ScatterElements", [zeros, ends.name, ones], axis=0, reduction="add")
        axis = self._const(np.array(0, np.int64))
        rows = Tensor(self.graph.node("CumSum", [marks, axis.name]), (count + 1,), np.dtype(np.int32))
        at = self._cast(self._slice(rows, 0, count), np.int64)
        at = self._binary("Mul", at, self._const(np.array(k, np.int64)))
        at = self._binary("Add", at, self._cast(self._shaped(columns, (count,)), np.int64))
        added = self._cast(self._shaped(added, (count,)), np.float32)
        flat = self._shaped(value, (n * k,))
        there = Tensor(self.graph.node("Gather", [flat.name, at.name], axis=0), (count,), value.dtype)
        total = self.half(self._binary("Add", there, added))
        scattered = self.graph.node("ScatterElements", [flat.name, at.name, total.name], axis=0)
        return self._shaped(Tensor(scattered, (n * k,), value.dtype), self.shape)
