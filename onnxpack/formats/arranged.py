"""Formats that are declarations over whole stored tensors: checkpoint layouts, rotations, outliers, permutations.

As with block formats, the profile says what is stored and what it means; sizes, decoding, the decoder in a graph and
the structure type follow. A format that can encode adds a rule from values to codes (`quantize`, `measure`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxpack.errors import ModelError, UsageError
from onnxpack.formats import hadamard
from onnxpack.formats.base import F32, Array, Decoder, Encoded, ErrorSums, FieldSpec, Format, Orientation, View
from onnxpack.formats.declared import Codes, keep_freed_memory, square_sum
from onnxpack.formats.evaluate import evaluate_tensors
from onnxpack.formats.geometry import is_transposed, matrix
from onnxpack.formats.layout import ProfileError
from onnxpack.formats.profiles import QuantizationProfile, Rotation, Side
from onnxpack.formats.scaling import nonzero
from onnxpack.formats.tensor_numpy import TensorNumpyOps, Tensors, steps
from onnxpack.formats.tensors import Sizes, TensorLayout, TensorView

_CHUNK = 1 << 16  # values: with their temporaries they stay in a core's second-level cache
_TRANSPOSED_ROWS = 64  # of a transposed weight: whole cache lines of it


@dataclass(frozen=True)
class Plan:
    """A profile laid over a weight: its dimensions, and how many steps of the frame's first axis go together."""

    profile: QuantizationProfile
    layout: TensorLayout
    sizes: Sizes
    shape: tuple[int, int]
    frame: tuple[int, ...]
    unit: int
    """Steps that a band is a multiple of."""

    @property
    def inner(self) -> int:
        """Values of one step."""
        return math.prod(self.frame[1:])

    @property
    def by_row(self) -> bool:
        """Whether a step is a whole number of the weight's rows."""
        return self.inner % self.shape[1] == 0

    def bands(self, start: int = 0, stop: int | None = None, rows: int = 1) -> Iterator[tuple[int, int]]:
        """Bands of steps, small enough for a cache but of at least `rows` rows, that cover [start, stop)."""
        stop = self.frame[0] if stop is None else stop
        values = max(_CHUNK, rows * self.shape[1])
        step = max(1, values // (self.inner * self.unit)) * self.unit
        for first in range(start, stop, step):
            yield first, min(stop, first + step)

    @property
    def separable(self) -> bool:
        """Whether whole rows are whole numbers of steps, or the other way round."""
        return self.by_row or self.shape[1] % (self.inner * self.unit) == 0

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of the weight that steps [start, stop) are."""
        return start * self.inner // self.shape[1], stop * self.inner // self.shape[1]

    def steps(self, first: int, last: int) -> tuple[int, int]:
        """The steps that rows [first, last) are."""
        return first * self.shape[1] // self.inner, last * self.shape[1] // self.inner


class Arranged(Format):
    """A format made of a profile with a tensor layout."""

    orientation = Orientation.NK
    min_opset: ClassVar[int] = 13
    takes_any_float = True
    profile: QuantizationProfile

    @property
    def family(self) -> str:  # type: ignore[override]
        """Kinds of the profile from outside in, rotations and diagonals after them: "linear+rotation"."""
        p = self.profile
        rotations = [1 for r in (p.pre_rotation, p.post_rotation) if r is not None]
        extra = ["rotation"] * bool(rotations) + ["diagonal"] * (p.pre_scaling is not None)
        return "+".join([*p.chain, *extra])

    # What a format declares ------------------------------------------------------------------------------------------

    def profile_for(self, shape: tuple[int, ...]) -> QuantizationProfile:
        """The profile for weights of a shape; most do not depend on it."""
        return self.profile

    def fitted(self, encoded: Encoded) -> Arranged:
        """The same format with the parameters that stored tensors show (bits, group, outliers); by default itself."""
        return self

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        """Codes and numbers, by views, for finite values x of a band in the frame; `spans` are those of `measure`."""
        raise UsageError(f"format {self.name} has no encoder", hint="`onnxpack formats` lists those that have one")

    def measure(self, w: Array) -> dict[str, Array]:
        """Numbers by views, in the frame's shape, and indices by fields, from the whole weight."""
        return {}

    # Format ----------------------------------------------------------------------------------------------------------

    def plan(self, shape: tuple[int, ...]) -> Plan:
        """The layout for a shape. UsageError, naming the format, where it does not fit."""
        n, k = matrix(shape, self.name)
        try:
            return _plan(self.profile_for((n, k)), (n, k))
        except ProfileError as error:
            raise UsageError(
                f"format {self.name} cannot store shape {[n, k]}: {error.path} {error.what}",
                hint="store this weight in another format",
            ) from None

    def fields(self, shape: tuple[int, ...]) -> dict[str, FieldSpec]:
        plan = self.plan(shape)
        return {f.name: FieldSpec(f.data_type.storage, plan.sizes.dims(f.dims)) for f in plan.layout.fields}

    def views(self, shape: tuple[int, ...]) -> dict[str, View]:
        from onnxpack.formats.tensor_onnx import inputs

        return inputs(self.plan(shape).layout, self.fields(shape))

    def decoder(self, shape: tuple[int, ...], opset: int) -> Decoder:
        from onnxpack.formats.tensor_onnx import TensorOnnxOps

        if opset < self.min_opset:
            raise UsageError(f"format {self.name} is decoded from opset {self.min_opset} on, not at {opset}")
        plan = self.plan(shape)
        ops = TensorOnnxOps(plan.layout, plan.sizes, plan.shape, opset)
        return ops.finish_tensors(plan.profile, evaluate_tensors(plan.profile, ops))

    # Decoding --------------------------------------------------------------------------------------------------------

    def decode(self, encoded: Encoded) -> F32:
        made = self.fitted(encoded)
        plan = made.plan(encoded.shape)
        made.check_fields(encoded, plan)
        return made.decode_rows(encoded.fields, plan, 0, plan.shape[0])

    def decode_columns(self, encoded: Encoded, start: int, stop: int) -> F32:
        made = self.fitted(encoded)
        plan = made.plan(encoded.shape)
        made.check_fields(encoded, plan)
        first, last = made.row_span(plan, start, stop)
        return made.decode_rows(encoded.fields, plan, first, last)[start - first : stop - first].T

    def row_span(self, plan: Plan, start: int, stop: int) -> tuple[int, int]:
        """Rows around [start, stop) that can be decoded alone."""
        turned = plan.profile.post_rotation
        if not plan.separable or (turned is not None and not turned.block_size):
            return 0, plan.shape[0]
        each = max(1, plan.inner * plan.unit // plan.shape[1])
        each = math.lcm(each, turned.block_size) if turned is not None else each
        return start // each * each, min(plan.shape[0], -(-stop // each) * each)

    def decode_rows(self, fields: Mapping[str, Array], plan: Plan, first: int, last: int) -> F32:
        """Rows [first, last) as float32 [rows, K]; all of them where steps of the frame are not whole rows."""
        keep_freed_memory()
        out = np.empty((last - first, plan.shape[1]), np.float32)
        tensors = Tensors(plan.layout, plan.sizes, fields)
        span = plan.steps(first, last)
        lines = out.reshape(span[1] - span[0], plan.inner)
        with np.errstate(all="ignore"):
            for start, stop in plan.bands(*span):
                value = evaluate_tensors(plan.profile, TensorNumpyOps(tensors, start, stop))
                lines[start - span[0] : stop - span[0]] = value.reshape(stop - start, plan.inner)
                if plan.by_row:
                    rows = plan.rows(start, stop)
                    self.finish(out[rows[0] - first : rows[1] - first], plan, tensors, rows)
            self.finish_columns(out, plan, tensors, (first, last))
        return out

    def finish(self, rows: F32, plan: Plan, tensors: Tensors, span: tuple[int, int]) -> None:
        """Outliers, order, diagonal and rotation along K of decoded rows, in place."""
        p, layout = plan.profile, plan.layout
        if layout.outliers is not None:
            _add_outliers(rows, tensors, span)
        if layout.order:
            rows[...] = np.take(rows, tensors.stored[layout.order], axis=1)
        if p.pre_scaling is not None:
            rows /= _line(tensors, p.pre_scaling.field)
        if p.pre_rotation is not None:
            _turn(rows, p.pre_rotation, tensors, inverse=True)

    def finish_columns(self, out: F32, plan: Plan, tensors: Tensors, span: tuple[int, int]) -> None:
        """The rotation along N of decoded rows, in place, some columns at a time."""
        rotation = plan.profile.post_rotation
        if rotation is None:
            return
        size = rotation.block_size or plan.shape[0]
        signs = _line(tensors, rotation.signs)[slice(*span)] if rotation.signs else None
        width = max(16, _CHUNK // len(out))
        for column in range(0, out.shape[1], width):
            part = hadamard.transform(out[:, column : column + width].T, size) * np.float32(hadamard.root(size))
            out[:, column : column + width] = (part if signs is None else part * signs).T

    def check_fields(self, encoded: Encoded, plan: Plan) -> None:
        """UsageError unless the stored tensors have the types and shapes of the layout, and indices lie inside."""
        for f in plan.layout.fields:
            array, dims = encoded.fields.get(f.name), plan.sizes.dims(f.dims)
            if array is None:
                raise UsageError(f"format {self.name}: field {f.name} is missing")
            if array.dtype != f.data_type.storage or array.shape != dims:
                have = f"{array.dtype} {list(array.shape)}"
                raise UsageError(
                    f"format {self.name}: field {f.name} is {have}, not {f.data_type.storage} {list(dims)}"
                )
        for name, limit in _indices(plan):
            index = encoded.fields[name]
            if index.size and (int(index.min()) < 0 or int(index.max()) >= limit):
                raise UsageError(f"format {self.name}: {name} has indices outside 0 to {limit - 1}")
        if plan.layout.outliers is not None:
            self._check_outliers(encoded, plan)

    def _check_outliers(self, encoded: Encoded, plan: Plan) -> None:
        where = plan.layout.outliers
        assert where is not None
        tensors = Tensors(plan.layout, plan.sizes, encoded.fields)
        offsets, columns = (_read(tensors, name) for name in (where.offsets, where.columns))
        rising = offsets[0] == 0 and offsets[-1] == columns.size and (np.diff(offsets.astype(np.int64)) >= 0).all()
        if not rising or (columns.size and int(columns.max()) >= plan.shape[1]):
            raise UsageError(
                f"format {self.name}: the rows of outliers do not fit {columns.size} entries and the shape"
            )

    # Encoding --------------------------------------------------------------------------------------------------------

    def encode_into(self, w: Array, out: Mapping[str, Array]) -> ErrorSums:
        if not self.encodes:
            self.quantize(np.zeros((0, 0), np.float32), {})
        plan = self.plan(w.shape)
        keep_freed_memory()
        _check_finite(w)
        with np.errstate(all="ignore"):
            return self._encode(w, out, plan)

    def _encode(self, w: Array, out: Mapping[str, Array], plan: Plan) -> ErrorSums:
        for array in out.values():
            array.reshape(-1).view(np.uint8)[...] = 0
        tensors = Tensors(plan.layout, plan.sizes, out)
        spans = self.measure(w)
        for name, value in spans.items():
            if plan.layout.find(name) is None:
                out[name][...] = value.reshape(out[name].shape)
            else:
                tensors.put(name, value, 0, plan.frame[0])
        source = self.prepare_columns(w, plan, tensors)
        source = source if plan.by_row else np.ascontiguousarray(source).reshape(plan.frame[0], plan.inner)
        whole = plan.profile.post_rotation is not None or plan.layout.outliers is not None
        residual = energy = 0.0
        for start, stop in plan.bands(rows=_TRANSPOSED_ROWS if is_transposed(source) else 1):
            rows = plan.rows(start, stop) if plan.by_row else (start, stop)
            x = np.ascontiguousarray(source[slice(*rows)], np.float32)
            turned = self.prepare(x, plan, tensors, rows) if plan.by_row else x
            framed = turned.reshape(stop - start, *plan.frame[1:])
            codes = self.quantize(framed, _cut(spans, plan.layout, start, stop))
            for name, value in codes.items():
                tensors.put(name, value, start, stop)
            if not whole:
                energy += square_sum(x)
                given = _given({**_cut(spans, plan.layout, start, stop), **codes}, plan.layout)
                residual += square_sum(x - self._decoded(plan, tensors, given, start, stop, rows).reshape(x.shape))
        if whole:
            self.add_outliers(w, plan, out)
            residual, energy = _difference(w, self.decode_rows(out, plan, 0, plan.shape[0]))
        if not math.isfinite(residual):
            raise ModelError(f"a weight value is too large for format {self.name}", hint="choose another format")
        return ErrorSums(residual, energy)

    def _decoded(self, plan: Plan, tensors: Tensors, given: Codes, start: int, stop: int, rows: tuple[int, int]) -> F32:
        value: F32 = evaluate_tensors(plan.profile, TensorNumpyOps(tensors, start, stop, given))
        full = np.broadcast_to(value, (stop - start, *value.shape[1:]))
        if not plan.by_row:
            return full
        lines = np.array(full.reshape(rows[1] - rows[0], plan.shape[1]))
        self.finish(lines, plan, tensors, rows)
        return lines

    def prepare(self, x: F32, plan: Plan, tensors: Tensors, rows: tuple[int, int]) -> F32:
        """Rows as they will be quantized: what `finish` undoes, done."""
        p = plan.profile
        if p.pre_rotation is not None:
            size = p.pre_rotation.block_size or plan.shape[1]
            x = x * _line(tensors, p.pre_rotation.signs) if p.pre_rotation.signs else x
            x = hadamard.transform(x, size) * np.float32(hadamard.root(size))
        if p.pre_scaling is not None:
            x = x * _line(tensors, p.pre_scaling.field)
        if plan.layout.order:
            back = np.empty(plan.shape[1], np.int64)
            back[tensors.stored[plan.layout.order]] = np.arange(plan.shape[1])
            x = np.take(x, back, axis=1)
        return x

    def prepare_columns(self, w: Array, plan: Plan, tensors: Tensors) -> Array:
        """The weight with the rotation along N undone; itself where there is none."""
        rotation = plan.profile.post_rotation
        if rotation is None:
            return w
        size = rotation.block_size or plan.shape[0]
        factors = nonzero(_line(tensors, rotation.signs)) if rotation.signs else np.ones(plan.shape[0], np.float32)
        out = np.empty(plan.shape, np.float32)
        width = max(16, _CHUNK // plan.shape[0])
        for column in range(0, plan.shape[1], width):
            part = np.asarray(w[:, column : column + width], np.float32).T / factors
            out[:, column : column + width] = hadamard.transform(part, size, inverse=True).T
        out *= np.float32(hadamard.root(size))
        return out

    def add_outliers(self, w: Array, plan: Plan, out: Mapping[str, Array]) -> None:
        """Store what the dense codes leave over, for formats that have outliers."""


def _plan(profile: QuantizationProfile, shape: tuple[int, int]) -> Plan:
    return _planned(profile, shape)


@functools.lru_cache(maxsize=256)
def _planned(profile: QuantizationProfile, shape: tuple[int, int]) -> Plan:
    layout = profile.tensors
    assert layout is not None
    sizes = layout.at({"N": shape[0], "K": shape[1]})
    frame = sizes.dims(layout.frame)
    unit = 1
    for f in layout.fields:
        if math.prod(sizes.dims(f.dims)) < 1:
            raise ProfileError(f.name, "would be empty")
    for view in layout.views:
        if isinstance(view, TensorView):
            f = layout.stored(view.field)
            itemsize = 1 if view.coded else view.read_as.storage.itemsize if view.read_as.bits else 0
            total = math.prod(sizes.dims(f.dims))
            plan = steps(
                view, sizes, total * f.data_type.storage.itemsize // itemsize if itemsize else total, layout.frame
            )
            if view.cut and plan.dims[0] > 1:
                unit = math.lcm(unit, view.per)
    for rotation in (profile.pre_rotation, profile.post_rotation):
        if rotation is not None:
            _check_rotation(rotation, shape)
    return Plan(profile, layout, sizes, shape, frame, min(unit, frame[0]))


def _check_rotation(rotation: Rotation, shape: tuple[int, int]) -> None:
    width = shape[1] if rotation.side is Side.K else shape[0]
    size = rotation.block_size or width
    if width % size:
        raise ProfileError(rotation.side.value, f"{width} is not a multiple of {size}")
    if hadamard.factors(size) is None:
        raise ProfileError(rotation.side.value, f"{size} is no power of two, nor 12 times one")


def _indices(plan: Plan) -> Iterator[tuple[str, int]]:
    """Fields that hold indices, and how many things they index."""
    if plan.layout.order:
        yield plan.layout.order, plan.shape[1]
    for view in plan.layout.views:
        if isinstance(view, TensorView) and view.index:
            f = plan.layout.stored(view.field)
            total = math.prod(plan.sizes.dims(f.dims)) * (f.data_type.storage.itemsize if view.coded else 1)
            yield view.index, steps(view, plan.sizes, total, plan.layout.frame).arranged[-1]


def _read(tensors: Tensors, name: str) -> Array:
    return tensors.whole(name).reshape(-1)


def _line(tensors: Tensors, name: str) -> F32:
    """A vector of factors."""
    return TensorNumpyOps(tensors, 0, tensors.lead).numbers(name).reshape(-1)


def _turn(rows: F32, rotation: Rotation, tensors: Tensors, inverse: bool) -> None:
    size = rotation.block_size or rows.shape[1]
    rows[...] = hadamard.transform(rows, size, inverse)
    rows *= np.float32(hadamard.root(size))
    if rotation.signs:
        rows *= _line(tensors, rotation.signs)


def _add_outliers(rows: F32, tensors: Tensors, span: tuple[int, int]) -> None:
    where = tensors.layout.outliers
    assert where is not None
    offsets = _read(tensors, where.offsets).astype(np.int64)
    first, last = int(offsets[span[0]]), int(offsets[span[1]])
    columns, added = (_read(tensors, name)[first:last] for name in (where.columns, where.values))
    at = (np.repeat(np.arange(len(rows)), np.diff(offsets[span[0] : span[1] + 1])), columns)
    rows[at] = (rows[at] + added.astype(np.float32)).astype(np.float16).astype(np.float32)


def _cut(spans: Mapping[str, Array], layout: TensorLayout, start: int, stop: int) -> dict[str, Array]:
    """The band of what lies in the frame; indices and vectors as they are."""
    views = {v.name for v in layout.views if isinstance(v, TensorView) and not v.apart}
    return {name: v[start:stop] if name in views and len(v) > 1 else v for name, v in spans.items()}


def _check_finite(w: Array) -> None:
    turned = is_transposed(w)
    lines = w.T if turned else w
    rows = max(1, _CHUNK // lines.shape[1])
    for row in range(0, len(lines), rows):
        x = np.asarray(lines[row : row + rows], np.float32)
        # One pass: the sum of zero times everything is zero unless something is not finite.
        with np.errstate(invalid="ignore"):
            fine = np.isfinite(np.add.reduce(x.reshape(-1) * np.float32(0)))
        if not fine:
            i, j = np.argwhere(~np.isfinite(x))[0]
            place = [row + int(i), int(j)]
            place = place[::-1] if turned else place
            raise ModelError(f"weight value {x[i, j]} at {place} is not finite", hint="repair the checkpoint")


def _given(codes: Codes, layout: TensorLayout) -> Codes:
    """Codes that stand for what would be read: those of views that repeat or gather what is stored do not."""
    spread = {v.name for v in layout.views if isinstance(v, TensorView) and (v.index or v.repeat)}
    return {name: value for name, value in codes.items() if name not in spread}


def _difference(w: Array, decoded: F32) -> tuple[float, float]:
    """Sums of (w - decoded)**2 and of w**2."""
    rows = max(1, _CHUNK // w.shape[1])
    residual = energy = 0.0
    for i in range(0, len(w), rows):
        part = np.asarray(w[i : i + rows], np.float32)
        residual, energy = residual + square_sum(part - decoded[i : i + rows]), energy + square_sum(part)
    return residual, energy
