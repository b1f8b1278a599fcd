"""A profile and a shape, made concrete: blocks per row, stored tensors, and rectangles small enough for a cache.

Blocks lie along the rows of a weight [N, K], or along the whole flattened weight (then there is one long row).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxpack.errors import UsageError
from onnxpack.formats.base import Array, FieldSpec
from onnxpack.formats.layout import BlockField, BlockLayout, Per, StorageOrder
from onnxpack.formats.profiles import QuantizationProfile

BLOCKS = "blocks"
"""Name of the one stored tensor of an interleaved format."""

_CHUNK = 1 << 16  # values: with their temporaries they stay in a core's second-level cache
_CHUNK_ROWS = 128  # of a transposed weight: whole cache lines of it


@dataclass(frozen=True)
class Chunk:
    """A rectangle of blocks: rows [row, row + rows), blocks [unit, unit + units) of each."""

    row: int
    rows: int
    unit: int
    units: int


@dataclass(frozen=True)
class Geometry:
    """Where the blocks of one weight lie. `width` is values per row, `units` blocks per row."""

    shape: tuple[int, int]
    layout: BlockLayout
    order: StorageOrder
    flat: bool
    rows: int
    width: int
    units: int

    @property
    def unit(self) -> int:
        """Values of one block."""
        return self.layout.block_size

    def specs(self) -> dict[str, FieldSpec]:
        """The stored tensors, in order."""
        if self.order is StorageOrder.INTERLEAVED:
            size = self.units * self.layout.bytes_per_block
            return {BLOCKS: FieldSpec(np.dtype(np.uint8), (size,) if self.flat else (self.rows, size))}
        return {f.name: FieldSpec(stored_type(f), self._field_shape(f)) for f in self.layout.fields}

    def _field_shape(self, f: BlockField) -> tuple[int, ...]:
        count = stored_count(f)
        if f.per is Per.TENSOR:
            return () if count == 1 else (count,)
        if f.per is Per.ROW:
            return (self.shape[0],) if count == 1 else (self.shape[0], count)
        if f.per is Per.COLUMN:
            return (self.shape[1],)
        if f.per is Per.ROW_TILES:
            packed = self.units if f.data_type.native else -(-self.units * f.bit_width // 8)
            return (self.rows, packed)
        if self.flat:
            if count == self.unit:
                return self.shape
            return (-(-self.width * count // self.unit),)
        if f.as_tiles:
            return (self.rows, self.units) if count == 1 else (self.rows, self.units, count)
        return (self.rows, self.units * count)

    def chunks(self, transposed: bool = False) -> Iterator[Chunk]:
        """Rectangles that cover the blocks, in an order that does not depend on anything but shape and layout."""
        whole_rows = any(f.per is Per.ROW_TILES for f in self.layout.fields)
        rows = max(1, _CHUNK // max(1, self.width))
        if transposed:
            rows = max(rows, _CHUNK_ROWS)
        rows = min(rows, self.rows)
        units = self.units if whole_rows else max(1, _CHUNK // (rows * self.unit))
        for row in range(0, self.rows, rows):
            for unit in range(0, self.units, units):
                yield Chunk(row, min(rows, self.rows - row), unit, min(units, self.units - unit))

    def chunks_of(self, first: int, last: int) -> Iterator[Chunk]:
        """Runs of the blocks [first, last) of a flattened weight."""
        units = max(1, _CHUNK // self.unit)
        for unit in range(first, last, units):
            yield Chunk(0, 1, unit, min(units, last - unit))

    def values_of(self, w: Array, chunk: Chunk) -> npt.NDArray[np.float32]:
        """float32 [rows, units, unit] of a rectangle of the weight; a cut block is filled up with zeros."""
        first, last = chunk.unit * self.unit, min(self.width, (chunk.unit + chunk.units) * self.unit)
        rows = slice(chunk.row, chunk.row + chunk.rows)
        block = _flat_slice(w, first, last)[None] if self.flat else w[rows, first:last]
        full = chunk.units * self.unit
        if last - first == full:
            x = np.ascontiguousarray(block, np.float32)
        else:
            x = np.zeros((chunk.rows, full), np.float32)
            x[:, : last - first] = block
        return x.reshape(chunk.rows, chunk.units, self.unit)

    def valid(self, chunk: Chunk) -> int:
        """Values of a row of the rectangle that lie in the weight."""
        return min(self.width, (chunk.unit + chunk.units) * self.unit) - chunk.unit * self.unit

    def put(self, values: npt.NDArray[np.float32], chunk: Chunk, out: npt.NDArray[np.float32]) -> None:
        """Write decoded values [rows, units, unit] into a C-contiguous weight."""
        first, count = chunk.unit * self.unit, self.valid(chunk)
        flat = values.reshape(chunk.rows, -1)[:, :count]
        if self.flat:
            out.reshape(-1)[first : first + count] = flat[0]
        else:
            out[chunk.row : chunk.row + chunk.rows, first : first + count] = flat


def stored_type(f: BlockField) -> np.dtype[np.generic]:
    """Element type of a sequential field's tensor: its own where numpy has it, else bytes."""
    return f.data_type.storage


def stored_count(f: BlockField) -> int:
    """Elements of one copy of a field in its stored type."""
    return f.count if f.data_type.native else f.nbytes


def matrix(shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """(N, K). UsageError, naming the format, unless the shape is that of a matrix."""
    if len(shape) != 2:
        raise UsageError(f"format {name} takes a matrix [N, K], not shape {list(shape)}")
    n, k = (int(d) for d in shape)
    if n < 1 or k < 1 or n * k >= 1 << 48:
        raise UsageError(f"format {name} cannot store shape {list(shape)}", hint="every dimension is at least 1")
    return n, k


def geometry(profile: QuantizationProfile, shape: tuple[int, ...], name: str) -> Geometry:
    """Lay the blocks of a profile over a weight [N, K]. UsageError, naming the format, where they do not fit."""
    layout = profile.block
    assert layout is not None
    n, k = matrix(shape, name)
    flat = not profile.by_row
    rows, width = (1, n * k) if flat else (n, k)
    if width % layout.block_size and not profile.partial:
        what = "values" if flat else "columns (K)"
        hint = "store this weight in another format"
        raise UsageError(
            f"format {name}: {width} {what} are not a multiple of its block of {layout.block_size}", hint=hint
        )
    order = profile.structured_block.storage_order if profile.structured_block else profile.storage_order
    return Geometry((n, k), layout, order, flat, rows, width, -(-width // layout.block_size))


def _flat_slice(w: Array, first: int, last: int) -> Array:
    if w.flags.c_contiguous:
        return w.reshape(-1)[first:last]
    k = w.shape[1]
    top = first // k
    return w[top : (last - 1) // k + 1].reshape(-1)[first - top * k : last - top * k]


def is_transposed(w: Array) -> bool:
    """Whether the columns of a matrix are the contiguous ones."""
    return bool(w.ndim == 2 and w.strides[0] < w.strides[1])
