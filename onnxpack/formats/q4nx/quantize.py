"""Quantize a weight [K, N] into tiles, a cache-sized block at a time, and measure what it cost.

The rule, per group of 32 values along K:

* minimum = bfloat16(lowest value); scale = bfloat16(max(0, highest - minimum) / 15), both to nearest, ties to even;
* code = (value - minimum) / scale, in float32, to nearest, ties to even, clipped to 0..15; a scale of 0 gives code 0.
  Codes are fitted to the rounded scale and minimum: those are what the reader has.
* a group that K cuts short must hold exact zeros behind the cut: scale = bfloat16(max(-lowest / 8, highest / 7)),
  minimum = -8 * scale, so that code 8 is 0. Groups entirely behind the cut, and rows behind N, are all zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from onnxpack.errors import ModelError
from onnxpack.formats.q4nx import bf16
from onnxpack.formats.q4nx.errors import BandedErrorSums, Totals
from onnxpack.formats.q4nx.tile import GROUP, HALF, ROWS, TILE, TileViews, views

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

_BAND = 1024  # columns of a block, where N allows: 4 KB of each row, so that a mapped source is read by whole pages
_PIECE = 64 * 1024  # values worked on at once: two float32 temporaries of this size stay in a core's second-level cache
_ZERO, _FIFTEEN = np.float32(0), np.float32(15)
_LIMIT = 2.0**120  # no scale, minimum, or product of them comes near the end of float32 below this
_ORDINARY = (1e-15, 1e15)  # magnitudes whose products, and sums of 32 products, are ordinary float32 numbers


@dataclass(frozen=True)
class _Block:
    """Where a block lies in the weight, in values: at most one tile column high."""

    row: int
    height: int
    column: int
    width: int

    @property
    def groups(self) -> int:
        """Groups along K, a cut one included."""
        return -(-self.height // GROUP)

    @property
    def padded_width(self) -> int:
        """Width in whole tile rows."""
        return -(-self.width // ROWS) * ROWS

    @property
    def where(self) -> tuple[slice, slice]:
        """Index into the weight."""
        return slice(self.row, self.row + self.height), slice(self.column, self.column + self.width)

    @property
    def tiles(self) -> tuple[slice, int]:
        """Index into the grid of tiles."""
        first = self.column // ROWS
        return slice(first, first + self.padded_width // ROWS), self.row // TILE.cols


def encode(w: Array, tiles: Array) -> BandedErrorSums:
    """Quantize w [K, N] (any float type, rounded to float32 first) into tiles [tiles, 5120] of one-byte elements.

    ModelError with the position of the first NaN, infinity or value beyond 2**120.
    """
    k, n = w.shape
    tile_rows, tile_cols = TILE.grid(n, k)
    raw = tiles.view(np.uint8).reshape(tile_rows, tile_cols, TILE.nbytes)
    out, totals, buffers = views(raw), Totals(tile_rows), _Buffers()
    for at in _blocks(k, n):
        x = buffers.load(w, at)
        scales, minimums, ordinary = _fit(x, at, w)
        _store_planes(out, at, scales, minimums)
        sums = _encode_block(x, at, bf16.to_float(scales), bf16.to_float(minimums), ordinary, out, buffers)
        totals.add(at.row, at.column, *sums)
    _zero_behind(out, k)
    return totals.sums()


def _blocks(k: int, n: int) -> Iterator[_Block]:
    """Blocks in tile order: bands of whole tile rows, in each band one tile column after the other."""
    for column in range(0, n, _BAND):
        for row in range(0, k, TILE.cols):
            yield _Block(row, min(TILE.cols, k - row), column, min(_BAND, n - column))


class _Buffers:
    """Temporaries of one encoding, reused by every block."""

    def __init__(self) -> None:
        self._source = np.empty(TILE.cols * _BAND, np.float32)
        self.quotient, self.product = np.empty(_PIECE, np.float32), np.empty(_PIECE, np.float32)
        self.codes = np.empty(_PIECE, np.uint8)
        self.pairs, self.packed = np.empty(_PIECE // 2, np.uint16), np.empty(_PIECE // 2, np.uint8)

    def load(self, w: Array, at: _Block) -> F32:
        """A block as float32 [groups, 32, padded width], zeros where it is padded.

        A copy even of a float32 weight: seven passes over rows that lie far apart cost more than one and a copy.
        """
        part = w[at.where]
        copy = _shaped(self._source, at.groups * GROUP, at.padded_width)
        if copy.shape != part.shape:
            copy[...] = 0
        # A transposing copy of more than 32 columns at once would fight over cache lines.
        step = ROWS if abs(w.strides[0]) < abs(w.strides[1]) else at.width
        with np.errstate(over="ignore"):  # a float64 too large for float32 is refused as an infinity, by name
            for column in range(0, at.width, step):
                span = slice(column, min(column + step, at.width))
                np.copyto(copy[: at.height, span], part[:, span], casting="unsafe")
        return copy.reshape(at.groups, GROUP, at.padded_width)


def _shaped(buffer: Array, *shape: int) -> Array:
    """The front of a flat buffer as an array of this shape."""
    return buffer[: math.prod(shape)].reshape(shape)


def _fit(x: F32, at: _Block, w: Array) -> tuple[U16, U16, bool]:
    """Scales and minimums, bfloat16 patterns [groups, padded width], of a block [groups, 32, padded width].

    Also says whether all magnitudes are ordinary, so that float32 sums of squares will do.
    """
    low, high = np.minimum.reduce(x, axis=1), np.maximum.reduce(x, axis=1)
    reach = max(float(high.max()), -float(low.min()))
    if not reach < _LIMIT:
        _refuse(w, at)
    minimums = bf16.to_bits(low + np.float32(0))  # no negative zero
    spread = np.subtract(high, bf16.to_float(minimums))
    np.maximum(spread, 0, out=spread)
    np.divide(spread, np.float32(15), out=spread)
    ordinary = reach < _ORDINARY[1] and float(spread.min()) > _ORDINARY[0]
    scales = bf16.to_bits(spread)
    if at.height % GROUP:  # the last group is cut short
        scales[-1] = bf16.to_bits(np.maximum(low[-1] / np.float32(-8), high[-1] / np.float32(7)))
        minimums[-1] = bf16.to_bits(np.float32(0) - np.float32(8) * bf16.to_float(scales[-1]))
    return scales, minimums, ordinary


def _refuse(w: Array, at: _Block) -> NoReturn:
    with np.errstate(over="ignore"):
        part = np.abs(np.asarray(w[at.where], np.float32))
    row, column = np.argwhere(~(part < _LIMIT))[0]
    value = float(w[at.row + row, at.column + column])
    what = "is too large for 4-bit groups" if np.isfinite(part[row, column]) else "is not finite"
    where = f"[{at.row + row}, {at.column + column}]"
    raise ModelError(f"weight value {value} at {where} {what}", hint="repair the checkpoint")


def _encode_block(
    x: F32, at: _Block, scales: F32, minimums: F32, ordinary: bool, out: TileViews, buffers: _Buffers
) -> tuple[F64, F64, F64]:
    """Codes of one block, piece by piece, and the sums of its errors per group: residual, energy, cross.

    `scales` and `minimums` are what the reader will see.
    """
    # Where the scale is 0 any unit will do that keeps (value - minimum) / unit small: the code is 0, and the
    # quotient times the unit is the error.
    unit = scales if scales.all() else np.where(scales > 0, scales, np.where(minimums, np.abs(minimums), np.float32(1)))
    width = at.padded_width
    residual, energy, cross = (np.empty((at.groups, width), np.float32 if ordinary else np.float64) for _ in range(3))
    step = max(1, _PIECE // (GROUP * width))
    for first in range(0, at.groups, step):
        groups = slice(first, min(first + step, at.groups))
        piece = x[groups]
        error, product, codes = (_shaped(b, *piece.shape) for b in (buffers.quotient, buffers.product, buffers.codes))
        np.subtract(piece, minimums[groups, None], out=error)
        np.divide(error, unit[groups, None], out=error)
        np.rint(error, out=product)
        np.clip(product, _ZERO, _FIFTEEN, out=product)
        np.copyto(codes, product, casting="unsafe")
        _store_codes(out, at, first, codes, buffers)
        np.subtract(error, product, out=error)  # in units
        # Sums of products in a fixed order, never BLAS: the figures must not depend on threads or machine.
        scratch = product if ordinary else np.empty(piece.shape, np.float64)
        for a, b, total in ((error, error, residual), (piece, piece, energy), (piece, error, cross)):
            np.multiply(a, b, out=scratch, dtype=scratch.dtype)
            np.add.reduce(scratch, axis=1, out=total[groups])
    wide = unit.astype(np.float64)
    return residual * wide * wide, energy.astype(np.float64), cross * wide


def _store_planes(out: TileViews, at: _Block, scales: U16, minimums: U16) -> None:
    for stored, plane in ((out.scales, scales), (out.minimums, minimums)):
        by_tile = plane.reshape(at.groups, -1, ROWS).transpose(1, 0, 2)
        stored[(*at.tiles, slice(at.groups))] = by_tile


def _store_codes(out: TileViews, at: _Block, group: int, codes: U8, buffers: _Buffers) -> None:
    """Codes [groups, 32, padded width] to nibbles in place: two neighbours make a byte, 16 make a column of a half."""
    rows, width = codes.shape[0] * GROUP, at.padded_width
    low_high = codes.reshape(rows, width).view("<u2")  # even row in the low byte, odd row in the high one
    pairs, packed = _shaped(buffers.pairs, *low_high.shape), _shaped(buffers.packed, *low_high.shape)
    np.right_shift(low_high, 4, out=pairs)
    np.bitwise_or(pairs, low_high, out=pairs)
    np.copyto(packed, pairs, casting="unsafe")
    columns = packed.view(np.uint64).reshape(rows, width // ROWS, ROWS // HALF).transpose(1, 2, 0)
    words = out.codes.view(np.uint64)[..., 0]
    words[(*at.tiles, slice(None), slice(group * GROUP, group * GROUP + rows))] = columns


def _zero_behind(out: TileViews, k: int) -> None:
    """Whole groups behind the end of K hold nothing: zeros."""
    used = -(-k // GROUP) * GROUP % TILE.cols
    if used:
        out.scales[:, -1, used // GROUP :] = 0
        out.minimums[:, -1, used // GROUP :] = 0
        out.codes[:, -1, :, used:] = 0
