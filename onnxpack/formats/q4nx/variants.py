"""The other tiles that travel under the name Q4NX, each decoded to float32 [rows, columns] (rows = output features).

Layouts only: nothing here judges whether the bytes are what they are said to be. `matrix` of every function is a grid
of tiles, uint8 [tile rows, tile columns, bytes of a tile]; padding is decoded too.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from onnxpack.formats.q4nx import bf16
from onnxpack.formats.q4nx.tile import (
    GROUP,
    HALF,
    ROWS,
    TILE_128,
    Geometry,
    Planes,
    pack,
    plane_of,
    unpack,
    unpack_codes,
)

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

INT8_ORDERS = ("column", "block", "row")
"""Orders of the codes in a tile of 8704 bytes; nothing in a file says which: column c*32 + r (Qwen3.5 heads), block
(r/16, c/32, c%32, r%16) (Qwen3.6 mixture of experts), row r*256 + c."""


def _spread(plane: F32) -> F32:
    """A value per group to a value per column."""
    return np.repeat(plane, GROUP, axis=1)


def unsigned(matrix: U8, geometry: Geometry) -> F32:
    """Codec B of Q4_1 origin: code * scale + minimum."""
    planes = unpack(matrix, geometry)
    scaled = planes.codes.astype(np.float32) * _spread(bf16.to_float(planes.scales))
    return np.asarray(scaled + _spread(bf16.to_float(planes.minimums)))


def signed(matrix: U8, geometry: Geometry) -> F32:
    """Codec B of Q4_0 origin: the code is a two's complement nibble, value = code * scale, minimums are zero."""
    planes = unpack(matrix, geometry)
    codes = (planes.codes ^ 8).astype(np.float32) - np.float32(8)
    return np.asarray(codes * _spread(bf16.to_float(planes.scales)) + np.float32(0))  # no negative zero


def to_unsigned(matrix: U8, geometry: Geometry) -> U8:
    """The same values as `signed`, written as codec B reads them: code + 8, minimum = -8 * scale, all exact.

    ValueError when a scale is so large that its eightfold is infinite.
    """
    planes = unpack(matrix, geometry)
    minimums = np.float32(0) - np.float32(8) * bf16.to_float(planes.scales)
    if not np.isfinite(minimums).all():
        raise ValueError("a scale is too large to be written unsigned")
    empty = planes.scales == 0  # also what pads a tile: stays all zeros
    codes = np.where(np.repeat(empty, GROUP, axis=1), 0, planes.codes ^ 8).astype(np.uint8)
    return pack(Planes(codes, planes.scales, bf16.to_bits(minimums)), geometry)


def zero_point(matrix: U8, geometry: Geometry) -> F32:
    """Codec A: the second plane is a zero point in code units, value = scale * (code - zero point)."""
    planes = unpack(matrix, geometry)
    centred = planes.codes.astype(np.float32) - _spread(bf16.to_float(planes.minimums))
    return np.asarray(centred * _spread(bf16.to_float(planes.scales)))


def int8_slot(matrix: U8) -> F32:
    """32 x 128 int8 codes in a slot of 5120 bytes: scales, a copy of them (or zeros), codes, 512 zeros."""
    rows, cols = matrix.shape[:2]
    codes = matrix[..., 512:4608].view(np.int8).reshape(rows, cols, ROWS // HALF, 128, HALF)
    values = codes.transpose(0, 2, 4, 1, 3).reshape(rows * ROWS, cols * 128).astype(np.float32)
    return np.asarray(values * _spread(_scales(matrix, 4)))


def int8_wide(matrix: U8, order: str) -> F32:
    """32 x 256 int8 codes behind 512 bytes of scales, in one of INT8_ORDERS."""
    rows, cols = matrix.shape[:2]
    codes = matrix[..., 512:].view(np.int8)
    if order == "column":
        tiles = codes.reshape(rows, cols, 256, ROWS).transpose(0, 1, 3, 2)
    elif order == "block":
        blocks = codes.reshape(rows, cols, ROWS // HALF, 8, GROUP, HALF)
        tiles = blocks.transpose(0, 1, 2, 5, 3, 4).reshape(rows, cols, ROWS, 256)
    else:
        tiles = codes.reshape(rows, cols, ROWS, 256)
    values = tiles.transpose(0, 2, 1, 3).reshape(rows * ROWS, cols * 256).astype(np.float32)
    return np.asarray(values * _spread(_scales(matrix, 8)))


def _scales(matrix: U8, groups: int) -> F32:
    stored = matrix[..., : 2 * ROWS * groups].view("<u2").reshape(*matrix.shape[:2], groups, ROWS)
    return bf16.to_float(plane_of(stored))


def two_level(matrix: U8) -> F32:
    """4736 bytes: 8-bit scale and minimum per group, 4-bit codes, one bfloat16 factor of each per row (as Q4_K)."""
    rows, cols = matrix.shape[:2]

    def small(start: int) -> F32:
        return plane_of(matrix[..., start : start + 256].reshape(rows, cols, 8, ROWS)).astype(np.float32)

    def factor(start: int) -> F32:
        bits = matrix[..., start : start + 64].view("<u2").reshape(rows, cols, 1, ROWS)
        return np.repeat(bf16.to_float(plane_of(bits)), 8, axis=1)

    packed = matrix[..., 512:4608].reshape(rows, cols, 256, HALF)
    pairs = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, cols, 256, ROWS)
    codes = pairs.transpose(0, 3, 1, 2).reshape(rows * ROWS, cols * 256).astype(np.float32)
    scale, minimum = factor(4608) * small(0), factor(4672) * small(256)
    return np.asarray(codes * _spread(scale) + _spread(minimum))


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(matrix: U8) -> F32:
    """32 x 128 E2M1 codes with an E8M0 exponent per group; 255 is NaN."""
    rows, cols = matrix.shape[:2]
    exponents = matrix[..., :128].view(ml_dtypes.float8_e8m0fnu).reshape(rows, cols, 4, ROWS)
    codes = matrix[..., 512:].reshape(rows, cols, ROWS // HALF, TILE_128.cols, HALF // 2)
    return np.asarray(_E2M1[unpack_codes(codes)] * _spread(plane_of(exponents).astype(np.float32)))
