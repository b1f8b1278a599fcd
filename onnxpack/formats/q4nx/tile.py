"""The Q4NX tile: 32 output features by 256 (or 128) input features, 4-bit codes, a bfloat16 scale and minimum a group.

A group is 32 consecutive columns of one row. In a tile the scales come first, then the minimums, both group-major, then
the codes: two halves of 16 rows, in each half one column after the other, 8 bytes a column, the even row in the low
nibble. Tiles follow each other row by row of the grid.

>>> TILE.nbytes, TILE.grid(64, 320), TILE_128.nbytes
(5120, (2, 2), 2560)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

ROWS = 32
GROUP = 32
HALF = 16


@dataclass(frozen=True)
class Geometry:
    """Size of a tile; everything else follows."""

    cols: int

    @property
    def groups(self) -> int:
        """Groups in a row of the tile."""
        return self.cols // GROUP

    @property
    def plane_nbytes(self) -> int:
        """Bytes of the scales; the minimums take as many."""
        return 2 * ROWS * self.groups

    @property
    def nbytes(self) -> int:
        """Bytes of a tile."""
        return 2 * self.plane_nbytes + ROWS * self.cols // 2

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Tiles along the rows and along the columns that a matrix needs."""
        return -(-rows // ROWS), -(-cols // self.cols)


TILE = Geometry(256)
TILE_128 = Geometry(128)


@dataclass(frozen=True)
class TileViews:
    """Arrays over the bytes of a grid of tiles; writing to them writes the tiles."""

    scales: U16
    """bfloat16 patterns [tile rows, tile columns, group, row]."""
    minimums: U16
    """As scales."""
    codes: U8
    """Two codes a byte [tile rows, tile columns, half, column, pair of rows]."""


def views(tiles: Array, geometry: Geometry = TILE) -> TileViews:
    """Look into tiles of one-byte elements, [tile rows, tile columns, nbytes]."""
    raw, plane = tiles.view(np.uint8), geometry.plane_nbytes
    grid = raw.shape[:2]
    words = raw[..., : 2 * plane].view("<u2").reshape(*grid, 2, geometry.groups, ROWS)
    return TileViews(
        words[:, :, 0],
        words[:, :, 1],
        raw[..., 2 * plane :].reshape(*grid, ROWS // HALF, geometry.cols, HALF // 2),
    )


@dataclass(frozen=True)
class Planes:
    """A matrix taken apart, rows are output features: codes [rows, cols], scales and minimums [rows, cols / 32]."""

    codes: U8
    scales: U16
    minimums: U16


def unpack(tiles: Array, geometry: Geometry = TILE) -> Planes:
    """Codes and planes of a grid of tiles, padding included. Codes are raw nibbles, 0..15."""
    seen = views(tiles, geometry)
    return Planes(unpack_codes(seen.codes), plane_of(seen.scales), plane_of(seen.minimums))


def unpack_codes(codes: U8) -> U8:
    """Bytes [tile rows, tile columns, half, column, pair] to nibbles [rows, columns]."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1)
    tile_rows, tile_cols, halves, cols, pairs = codes.shape
    by_row = nibbles.transpose(0, 2, 4, 5, 1, 3)
    return by_row.reshape(tile_rows * halves * pairs * 2, tile_cols * cols)


def plane_of(stored: Array) -> Array:
    """A plane as stored, [tile rows, tile columns, group, row], as a matrix [rows, groups]."""
    tile_rows, tile_cols, groups, rows = stored.shape
    return stored.transpose(0, 3, 1, 2).reshape(tile_rows * rows, tile_cols * groups)


def pack(planes: Planes, geometry: Geometry = TILE) -> U8:
    """Inverse of unpack: tiles [tile rows, tile columns, nbytes]. Rows must fill tiles; columns are padded with zeros.

    >>> w = np.arange(32 * 32, dtype=np.uint8).reshape(32, 32) % 16
    >>> back = unpack(pack(Planes(w, np.ones((32, 1), np.uint16), np.zeros((32, 1), np.uint16))))
    >>> bool((back.codes[:, :32] == w).all()), back.codes.shape, back.scales.sum()
    (True, (32, 256), np.uint64(32))
    """
    rows, cols = planes.codes.shape
    tile_rows, tile_cols = geometry.grid(rows, cols)
    if rows % ROWS or cols % GROUP:
        raise ValueError(f"codes [{rows}, {cols}] do not fill groups of {GROUP} columns and tiles of {ROWS} rows")
    tiles = np.zeros((tile_rows, tile_cols, geometry.nbytes), np.uint8)
    out = views(tiles, geometry)
    groups = tile_cols * geometry.groups
    for stored, plane in ((out.scales, planes.scales), (out.minimums, planes.minimums)):
        whole = np.zeros((rows, groups), np.uint16)
        whole[:, : plane.shape[1]] = plane
        stored[...] = whole.reshape(tile_rows, ROWS, tile_cols, geometry.groups).transpose(0, 2, 3, 1)
    codes = np.zeros((rows, tile_cols * geometry.cols), np.uint8)
    codes[:, :cols] = planes.codes
    pairs = codes.reshape(tile_rows, ROWS // HALF, HALF // 2, 2, tile_cols, geometry.cols)
    out.codes[...] = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).transpose(0, 3, 1, 4, 2)
    return tiles
