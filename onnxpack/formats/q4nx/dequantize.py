"""Tiles back to float32: value = code * scale + minimum, the product exact, the sum rounded once.

>>> from onnxpack.formats.q4nx.quantize import encode
>>> w = np.linspace(-1, 1, 64, dtype=np.float32).reshape(32, 2)
>>> tiles = np.empty((1, 5120), np.int8)
>>> _ = encode(w, tiles)
>>> column = decode_columns(tiles, (32, 2), 1, 2)
>>> column.shape, bool(np.abs(column - w[:, 1:]).max() < 0.07)
((32, 1), True)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.formats.q4nx import bf16
from onnxpack.formats.q4nx.tile import GROUP, HALF, ROWS, TILE, TileViews, views

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_TILE_ROWS = 16  # of a block, so that its temporaries stay in a core's second-level cache


def decode_columns(tiles: Array, shape: tuple[int, int], start: int, stop: int, out: F32 | None = None) -> F32:
    """Columns [start, stop) of the weight [K, N], as float32 [K, stop - start]; nothing else is read or held.

    `tiles` is [tiles, 5120] of one-byte elements. `out` may be given, in any memory order.
    """
    k, n = shape
    if not 0 <= start <= stop <= n:
        raise ValueError(f"columns {start}..{stop} of {n}")
    if out is None:
        out = np.empty((k, stop - start), np.float32)
    tile_rows, tile_cols = TILE.grid(n, k)
    seen = views(tiles.view(np.uint8).reshape(tile_rows, tile_cols, TILE.nbytes))
    first, last = start // ROWS, -(-stop // ROWS)
    buffers = _Buffers()
    for row in range(first, last, _TILE_ROWS):
        rows = slice(row, min(row + _TILE_ROWS, last))
        wanted = slice(max(start, ROWS * row), min(stop, ROWS * rows.stop))
        for column in range(tile_cols):
            height = min(TILE.cols, k - column * TILE.cols)
            block = _decode_block(seen, rows, column, -(-height // GROUP), buffers)
            part = block[:height, wanted.start - ROWS * row : wanted.stop - ROWS * row]
            out[column * TILE.cols :, :][:height, wanted.start - start : wanted.stop - start] = part
    return out


class _Buffers:
    """Temporaries of one decoding."""

    def __init__(self) -> None:
        size = TILE.cols * _TILE_ROWS * ROWS
        self.words = np.empty(size // HALF, np.uint64)
        self.pairs, self.high = np.empty(size // 2, "<u2"), np.empty(size // 2, "<u2")
        self.values = np.empty(size, np.float32)


def _decode_block(seen: TileViews, rows: slice, column: int, groups: int, buffers: _Buffers) -> F32:
    """float32 [32 * groups, 32 * rows] of one tile column."""
    count, height = rows.stop - rows.start, groups * GROUP
    codes = _codes(seen, rows, column, height, buffers).reshape(groups, GROUP, count * ROWS)
    scales, minimums = (
        bf16.to_float(plane[rows, column, :groups].transpose(1, 0, 2).reshape(groups, 1, count * ROWS))
        for plane in (seen.scales, seen.minimums)
    )
    values = buffers.values[: codes.size].reshape(codes.shape)
    np.copyto(values, codes)
    np.multiply(values, scales, out=values)
    np.add(values, minimums, out=values)
    return values.reshape(height, count * ROWS)


def _codes(seen: TileViews, rows: slice, column: int, height: int, buffers: _Buffers) -> U8:
    """Codes [height, 32 * rows], one a byte: the 8 bytes of a column of a half move as one word."""
    stored = seen.codes.view(np.uint64)[rows, column, :, :height, 0]  # [tile rows, half, column]
    shape = (height, stored.shape[0], ROWS // HALF)
    words = buffers.words[: math.prod(shape)].reshape(shape)
    np.copyto(words, stored.transpose(2, 0, 1))
    packed = words.reshape(-1).view(np.uint8)
    pairs, high = buffers.pairs[: packed.size], buffers.high[: packed.size]
    np.copyto(pairs, packed)
    np.left_shift(pairs, 4, out=high)  # the even row stays in the low byte, the odd row moves to the high one
    np.bitwise_or(pairs, high, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)
    return pairs.view(np.uint8)
