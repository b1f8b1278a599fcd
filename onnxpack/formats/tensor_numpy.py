"""Views of stored tensors in numpy: codes and numbers for a band of the frame, and back into the stored bytes.

A view whose stored axis goes with the frame's first one is read and written a band at a time; others are unpacked
once, as bytes, and cut afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.formats import bits
from onnxpack.formats.arrange import Arrangement, arrangement, axes, names
from onnxpack.formats.base import Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.layout import BitView, require
from onnxpack.formats.numpy_ops import NumpyOps
from onnxpack.formats.scaling import halved
from onnxpack.formats.tensors import JoinView, Sizes, SumView, TensorLayout, TensorView

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Steps:
    """How a view is read: stored axes, their arrangement into units, and that of the codes into the frame."""

    stored: tuple[int, ...]
    first: Arrangement
    codes: Arrangement | None
    dims: tuple[int, ...]

    @property
    def arranged(self) -> tuple[int, ...]:
        """The shape before surplus elements are dropped."""
        return (self.codes or self.first).merged


def steps(view: TensorView, sizes: Sizes, total: int, frame: tuple[str, ...], cut: int | None = None) -> Steps:
    """The steps of a view over `total` elements (bytes, of codes); with `cut` steps of its cut axis only."""
    extents = sizes.extents(view, total)
    stored = tuple(extents[name] for name in names(view.stages[0]))
    dims = sizes.dims(view.dims or frame)
    if cut is not None:
        dims = (dims[0] * cut // extents[view.cut], *dims[1:])
        extents[view.cut] = cut
    first = arrangement(f"{view.stages[0]} -> {view.stages[1]}", extents)
    if not view.coded:
        return Steps(stored, first, None, dims)
    count = view.bits.count // (2 if view.read_as is DataType.FLOAT16 else 1)
    lead = [name for axis in axes(view.stages[1])[:-1] for name in axis]
    wanted = [name for name in names(view.stages[2]) if name not in lead]
    known = {name: sizes.one(text) for name, text in view.sizes}
    missing = [name for name in wanted if name not in known]
    require(len(missing) <= 1, "sizes", f"{', '.join(missing)}: at most one axis can be inferred")
    have = math.prod(known[name] for name in wanted if name in known)
    if missing:
        known[missing[0]] = count // have
    require(math.prod(known[name] for name in wanted) == count, view.name, f"codes are not {count} a unit")
    inner = {name: extents[name] for name in lead} | {name: known[name] for name in wanted}
    return Steps(stored, first, arrangement(f"{view.stages[2]} -> {view.stages[3]}", inner), dims)


class Tensors:
    """The stored tensors of one weight, read and written through the views of their layout."""

    def __init__(self, layout: TensorLayout, sizes: Sizes, stored: Mapping[str, Array]) -> None:
        self.layout, self.sizes, self.stored = layout, sizes, stored
        self.lead = sizes.one(layout.frame[0])
        self._plans: dict[tuple[str, int | None], Steps] = {}
        self._bits: dict[str, BitView] = {}
        self._whole: dict[str, Array] = {}
        self._written: dict[str, Array] = {}

    def _flat(self, view: TensorView) -> Array:
        array = self.stored[view.field].reshape(-1)
        if view.coded:
            return array.view(np.uint8)
        return array if view.read_as is DataType.UNDEFINED else array.view(view.read_as.storage)

    # Reading ---------------------------------------------------------------------------------------------------------

    def read(self, view: TensorView, start: int, stop: int) -> Array:
        """Steps [start, stop) of the frame's first axis (all, of what stands there once)."""
        if view.cut and (start, stop) != (0, self.lead):
            return self._read(view, (start // view.per, -(-stop // view.per)))
        whole = self.whole(view.name)
        return whole if len(whole) == 1 or view.apart else whole[start:stop]

    def whole(self, name: str) -> Array:
        """A view in full, kept for the next band."""
        if name not in self._whole:
            self._whole[name] = self._read(self._view(name), None)
        return self._whole[name]

    def _window(self, view: TensorView, band: tuple[int, int] | None, flat: Array) -> tuple[Steps, Array]:
        key = (view.name, None if band is None else band[1] - band[0])
        if key not in self._plans:
            self._plans[key] = steps(view, self.sizes, flat.size, self.layout.frame, key[1])
        plan = self._plans[key]
        start = self.sizes.one(view.start)
        part = flat[start : start + math.prod(plan.stored)].reshape(plan.stored)
        if band is not None:
            axis = names(view.stages[0]).index(view.cut)
            part = part[(slice(None),) * axis + (slice(*band),)]
        return plan, part

    def _read(self, view: TensorView, band: tuple[int, int] | None) -> Array:
        plan, part = self._window(view, band, self._flat(view))
        value = plan.first.apply(part)
        if plan.codes is not None:
            value = np.take(value, view.shuffle, axis=-1) if view.shuffle else value
            if view.name not in self._bits:
                self._bits[view.name] = without_copies(view.bits)
            value = bits.read(self._bits[view.name], {view.field: value})
            value = value.view(np.float16) if view.read_as is DataType.FLOAT16 else value
            value = plan.codes.apply(value)
        if view.repeat:
            value = np.repeat(value, view.repeat, axis=-1)
        if view.index:
            value = np.take(value, self.stored[view.index].reshape(-1), axis=-1, mode="clip")
        return cropped(value, plan.dims).reshape(plan.dims)

    # Writing ---------------------------------------------------------------------------------------------------------

    def put(self, name: str, values: Array, start: int, stop: int) -> None:
        """Store a band of a view; the stored bytes were zero before. Of what is repeated or gathered: each once."""
        view = self.layout.find(name)
        if isinstance(view, SumView):
            for term, multiplier in view.terms:
                width = self._view(term).code_bits
                self.put(term, values // multiplier & ((1 << width) - 1), start, stop)
        elif isinstance(view, JoinView):
            at, values = 0, values.reshape(len(values), -1)
            for run, offset in view.runs:
                width = self.sizes.dims(self._view(run).dims)[-1]
                self.put(run, values[..., at : at + width] - values.dtype.type(offset), start, stop)
                at += width
        elif isinstance(view, TensorView) and view.cut:
            self._put(view, values, (start // view.per, -(-stop // view.per)))
        else:
            assert isinstance(view, TensorView)
            dims = self.sizes.dims(view.dims or self.layout.frame)
            if (start, stop) == (0, self.lead) or dims[0] == 1 or view.apart:
                self._put(view, values, None)
                return
            whole = self._written.setdefault(name, np.empty(dims, values.dtype))
            whole[start:stop] = values
            if stop == self.lead:
                self._put(view, self._written.pop(name), None)

    def _view(self, name: str) -> TensorView:
        view = self.layout.find(name)
        assert isinstance(view, TensorView)
        return view

    def _put(self, view: TensorView, values: Array, band: tuple[int, int] | None) -> None:
        flat = self._flat(view)
        assert np.shares_memory(flat, self.stored[view.field])
        plan, part = self._window(view, band, flat)
        assert not view.shuffle, view.name
        spread = bool(view.index or view.repeat)
        values = padded(values if spread else values.reshape(plan.dims), plan.arranged)
        if plan.codes is None:
            part[...] = plan.first.undo(values)
            return
        codes = np.ascontiguousarray(plan.codes.undo(values))
        if view.read_as is DataType.FLOAT16:
            codes = codes.astype(np.float16).view(np.uint8)
        lead = plan.first.merged
        units = np.zeros(lead, np.uint8)
        bits.write(view.bits, codes.reshape(*lead[:-1], -1), {view.field: units})
        part |= plan.first.undo(units)


def cropped(value: Array, dims: tuple[int, ...]) -> Array:
    """Without the elements that fill up stored units: the first ones along every axis (of a line: of all)."""
    if value.ndim == 1:
        return value[: math.prod(dims)]
    if value.shape == dims or value.ndim != len(dims) or value.size == math.prod(dims):
        return value
    return value[tuple(slice(d) for d in dims)]


def padded(value: Array, shape: tuple[int, ...]) -> Array:
    """Inverse of cropped: zeros where the stored units are filled up."""
    if value.size == math.prod(shape):
        return value.reshape(shape)
    full = np.zeros(shape, value.dtype)
    if len(shape) == 1:
        full[: value.size] = value.reshape(-1)
        return full
    full[tuple(slice(d) for d in value.shape)] = value
    return full


def without_copies(view: BitView) -> BitView:
    """Without parts that repeat bits which another part holds too: a second copy is written, never read."""
    seen, kept = set(), []
    for part in view.parts:
        key = (part.start, part.shift, part.bit_width, part.dims)
        if key not in seen:
            seen.add(key)
            kept.append(part)
    return BitView(view.name, tuple(kept), view.digit_parts) if len(kept) < len(view.parts) else view


class TensorNumpyOps(NumpyOps):
    """Computes a decoder's steps for a band of the frame. `given` replaces stored codes by arrays at hand."""

    def __init__(self, tensors: Tensors, start: int, stop: int, given: Mapping[str, Array] | None = None) -> None:
        self.tensors, self.start, self.stop, self.given = tensors, start, stop, given or {}

    def codes(self, name: str) -> Array:
        if name in self.given:
            return self.given[name]
        view = self.tensors.layout.find(name)
        if isinstance(view, SumView):
            return self.index([(self.codes(term), multiplier) for term, multiplier in view.terms])
        if isinstance(view, JoinView):
            runs = [self.codes(run) + np.uint8(offset) for run, offset in view.runs]
            joined = np.concatenate(runs, axis=-1)
            frame = self.tensors.sizes.dims(self.tensors.layout.frame)
            return joined.reshape(len(joined), *frame[1:])
        assert isinstance(view, TensorView), name
        return self.tensors.read(view, self.start, self.stop)

    def numbers(self, name: str) -> F32:
        view = self.tensors.layout.find(name)
        if isinstance(view, TensorView) and view.levels:
            return self.table(np.asarray(view.levels, np.float32), self.codes(name))
        return self.codes(name).astype(np.float32)

    def take(self, table: F32, index: Array) -> F32:
        return np.take(table, index, axis=0, mode="clip")

    def half(self, value: Any) -> Any:
        return halved(value)
