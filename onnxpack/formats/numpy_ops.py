"""Decoding in numpy, a rectangle of blocks at a time; and the fields of a rectangle, to read or to fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.formats import bits
from onnxpack.formats.base import Array
from onnxpack.formats.datatypes import scale_table
from onnxpack.formats.geometry import BLOCKS, Chunk, Geometry, stored_count
from onnxpack.formats.layout import BitView, BlockField, Per, StorageOrder, dense

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class Fields:
    """The stored arrays of a weight, seen one rectangle at a time as [rows or 1, blocks or 1, elements]."""

    def __init__(self, geometry: Geometry, stored: Mapping[str, Array]) -> None:
        self.geometry, self.stored = geometry, stored

    def get(self, f: BlockField, chunk: Chunk) -> Array:
        """Stored elements of a field: its own type where numpy has it, else bytes."""
        if self.geometry.order is StorageOrder.INTERLEAVED:
            blocks = self._tiles(self.stored[BLOCKS], self.geometry.layout.bytes_per_block, chunk)
            raw = blocks[..., f.bit_offset // 8 : f.bit_offset // 8 + f.nbytes]
            return (
                np.ascontiguousarray(raw).view(f.data_type.storage)
                if f.data_type.bits > 8
                else raw.view(f.data_type.storage)
            )
        array = self.stored[f.name]
        if f.per is Per.TENSOR:
            return array.reshape(1, 1, -1)
        if f.per is Per.ROW:
            return array.reshape(self.geometry.shape[0], 1, -1)[chunk.row : chunk.row + chunk.rows]
        if f.per is Per.COLUMN:
            return array[None, chunk.unit : chunk.unit + chunk.units, None]
        if f.per is Per.ROW_TILES:
            return self._row_tiles(f, array, chunk)
        return self._tiles(array, stored_count(f), chunk)

    def put(self, values: Mapping[str, Array], chunk: Chunk) -> None:
        """Store the fields [rows, blocks, elements] of a rectangle; fields per row, column or tensor are not ours."""
        g = self.geometry
        if g.order is StorageOrder.INTERLEAVED:
            target = self._window(self.stored[BLOCKS], g.layout.bytes_per_block)
            at = (slice(chunk.row, chunk.row + chunk.rows), slice(chunk.unit, chunk.unit + chunk.units))
            for f in g.layout.fields:
                raw = np.ascontiguousarray(values[f.name]).view(np.uint8)
                target[(*at, slice(f.bit_offset // 8, f.bit_offset // 8 + f.nbytes))] = raw
            return
        for f in g.layout.fields:
            if f.per is Per.TILE:
                self._put_tiles(self.stored[f.name], stored_count(f), values[f.name], chunk)
            elif f.per is Per.ROW_TILES:
                self._put_row_tiles(f, values[f.name], chunk)

    def _window(self, array: Array, count: int) -> Array:
        g = self.geometry
        return array.reshape(g.rows, g.units, count)

    def _tiles(self, array: Array, count: int, chunk: Chunk) -> Array:
        g = self.geometry
        if not g.flat:
            return self._window(array, count)[chunk.row : chunk.row + chunk.rows, chunk.unit : chunk.unit + chunk.units]
        part = array.reshape(-1)[chunk.unit * count : (chunk.unit + chunk.units) * count]
        missing = chunk.units * count - part.size
        if missing:
            part = np.concatenate([part, np.zeros(missing, part.dtype)])
        return part.reshape(1, chunk.units, count)

    def _put_tiles(self, array: Array, count: int, values: Array, chunk: Chunk) -> None:
        if not self.geometry.flat:
            self._tiles(array, count, chunk)[...] = values
            return
        target = array.reshape(-1)[chunk.unit * count : (chunk.unit + chunk.units) * count]
        target[...] = values.reshape(-1)[: target.size]

    def _row_tiles(self, f: BlockField, array: Array, chunk: Chunk) -> Array:
        rows = array[chunk.row : chunk.row + chunk.rows]
        if not f.data_type.native:
            rows = _row_view(f, rows.shape[1], rows)[:, chunk.unit : chunk.unit + chunk.units]
        return rows[:, chunk.unit : chunk.unit + chunk.units, None] if f.data_type.native else rows[..., None]

    def _put_row_tiles(self, f: BlockField, values: Array, chunk: Chunk) -> None:
        target = self.stored[f.name][chunk.row : chunk.row + chunk.rows]
        if f.data_type.native:
            target[...] = values[..., 0]
            return
        slots = target.shape[1] * 8 // f.bit_width
        full = np.zeros((len(target), slots), np.uint8)
        full[:, : values.shape[1]] = values[..., 0]
        # onnxruntime leaves the value that means "no zero point" in unused slots.
        full[:, values.shape[1] :] = 1 << (f.bit_width - 1)
        target[...] = 0
        bits.write(dense("row", f.name, f.bit_width, slots), full, {f.name: target})


def _row_view(f: BlockField, nbytes: int, rows: U8) -> Array:
    return bits.read(dense("row", f.name, f.bit_width, nbytes * 8 // f.bit_width), {f.name: rows})


class NumpyOps:
    """Computes a decoder's steps. `given` replaces stored codes by arrays at hand (encoders check themselves so)."""

    def __init__(
        self, geometry: Geometry, fields: Fields | None, chunk: Chunk, given: Mapping[str, Array] | None = None
    ) -> None:
        self.layout, self.fields, self.chunk, self.given = geometry.layout, fields, chunk, given or {}

    def _raw(self, f: BlockField) -> Array:
        if f.name in self.given:
            return self.given[f.name]
        assert self.fields is not None
        return self.fields.get(f, self.chunk)

    def codes(self, name: str) -> Array:
        if name in self.given:
            return self.given[name]
        item = self.layout.find(name)
        if isinstance(item, BitView):
            return bits.read(item, {f.name: self._bytes(f) for f in self._read_by(item)})
        assert item is not None
        raw = self._raw(item)
        if item.data_type.native or item.per is Per.ROW_TILES or item.bit_width == 8:
            return raw
        return bits.read(dense(name, name, item.bit_width, item.count), {name: raw})

    def _read_by(self, view: BitView) -> list[BlockField]:
        return [f for f in self.layout.fields if f.name in view.sources]

    def _bytes(self, f: BlockField) -> U8:
        raw = self._raw(f)
        return raw if raw.dtype == np.uint8 else np.ascontiguousarray(raw).view(np.uint8)

    def numbers(self, name: str) -> F32:
        item = self.layout.find(name)
        table = scale_table(item.data_type) if isinstance(item, BlockField) else None
        codes = self.codes(name)
        return np.take(table, codes) if table is not None else codes.astype(np.float32)

    def index(self, terms: list[tuple[Array, int]]) -> Array:
        total: Array = terms[0][0].astype(np.uint16) * np.uint16(terms[0][1])
        for codes, multiplier in terms[1:]:
            total += codes.astype(np.uint16) * np.uint16(multiplier)
        return total

    def table(self, values: F32, index: Array) -> F32:
        # Indices are at most as wide as the table (`padded`), or the encoder's own.
        return np.take(values, index, axis=0, mode="clip")

    def to_float(self, codes: Array, signed_bits: int) -> F32:
        if signed_bits and codes.dtype.kind == "u":
            half = codes.dtype.type(1 << (signed_bits - 1))
            return np.asarray((codes ^ half).astype(np.float32) - np.float32(half))
        return codes.astype(np.float32)

    def reshape(self, value: Array, tail: tuple[int, ...]) -> Array:
        return value.reshape(*value.shape[:2], *tail)

    def permute(self, value: Array, perm: tuple[int, ...]) -> Array:
        return value.transpose(0, 1, *(2 + p for p in perm))

    def multiply(self, a: Any, b: Any) -> Any:
        return a * b

    def divide(self, a: Any, b: Any) -> Any:
        return a / b

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def subtract(self, a: Any, b: Any) -> Any:
        return a - b

    def maximum(self, a: Any, b: Any) -> Any:
        return np.maximum(a, b)

    def constant(self, value: float) -> Any:
        return np.float32(value)
