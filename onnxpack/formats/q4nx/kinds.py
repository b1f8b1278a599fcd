"""What a stored tensor is, by its element type and shape, and what its bytes say about it.

Size and shape settle the geometry. The bytes settle the sign convention, and betray look-alikes: in a genuine tensor
of Q4_1 origin every group that varies uses codes 0 and 15, in one of Q4_0 origin every group uses -8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from onnxpack.formats.q4nx import bf16
from onnxpack.formats.q4nx.header import Entry, count
from onnxpack.formats.q4nx.tile import ROWS, TILE, TILE_128, Geometry, views

U8 = npt.NDArray[np.uint8]

SHARE = 0.99
"""Least share of groups that must use the codes a genuine quantizer uses."""

_CHUNK = 64  # tiles looked at together
PLAIN: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""Element types of tensors that are not made of tiles, as headers spell them."""
_ROUNDING = 2.0**-8  # relative error that two bfloat16 roundings leave in a minimum


class Kind(StrEnum):
    """How the bytes of a tensor are read."""

    UNSIGNED = "q4_1"
    """Codec B, code * scale + minimum."""
    SIGNED = "q4_0"
    """Codec B with two's complement codes and zero minimums."""
    UNSIGNED_128 = "q4_1 32x128"
    SIGNED_128 = "q4_0 32x128"
    ZERO_POINT = "codec A"
    INT8_SLOT = "int8 32x128"
    INT8_WIDE = "int8 32x256"
    TWO_LEVEL = "q4_k"
    MXFP4 = "mxfp4"
    PLAIN = "plain"
    UNKNOWN = "unknown"


@dataclass
class Judgement:
    """What a tensor was found to be. `refusal` says why its values are not to be believed; None when they are."""

    kind: Kind
    refusal: str | None = None
    notes: list[str] = field(default_factory=list)


def tile_nbytes(entry: Entry) -> int | None:
    """Bytes of a tile, when the tensor is made of tiles: its last dimension, counted in bytes."""
    last = entry.shape[-1] if len(entry.shape) >= 2 else 0
    # Files exist that call packed bytes F32: what counts is that the bytes are as many as the shape has elements.
    return last if last in _TILES and count(entry.shape) == entry.nbytes else None


_TILES = {TILE.nbytes, TILE_128.nbytes, 8704, 9216, 4736}


def judge(entry: Entry, data: U8) -> Judgement:
    """Look at one tensor; `data` are its bytes. Reads each tile once, a few at a time."""
    if entry.dtype == "Q4NX":
        return _codec_a(entry)
    nbytes = tile_nbytes(entry)
    if nbytes is None:
        return _plain(entry)
    found = _tiled(entry, nbytes, data.reshape(-1, nbytes))
    if entry.dtype not in ("I8", "U8"):
        found.notes.append(f"packed bytes are called {entry.dtype}")
    return found


def _codec_a(entry: Entry) -> Judgement:
    found = Judgement(Kind.ZERO_POINT, "codec A (zero points instead of minimums): decode it with convert=True")
    if len(entry.shape) != 2 or count(TILE.grid(*entry.shape)) * TILE.nbytes != entry.nbytes:
        what = f"{entry.nbytes} bytes are not the tiles of a matrix {list(entry.shape)}"
        return Judgement(Kind.UNKNOWN, what)
    return found


def _plain(entry: Entry) -> Judgement:
    dtype = PLAIN.get(entry.dtype)
    if dtype is None:
        return Judgement(Kind.UNKNOWN, f"element type {entry.dtype!r} is not known")
    if count(entry.shape) * dtype.itemsize != entry.nbytes:
        return Judgement(Kind.UNKNOWN, f"{entry.nbytes} bytes do not hold {entry.dtype}{list(entry.shape)}")
    return Judgement(Kind.PLAIN)


def _tiled(entry: Entry, nbytes: int, tiles: U8) -> Judgement:
    if nbytes == 9216:
        return Judgement(Kind.UNKNOWN, "tiles of 9216 bytes (a mixed-precision draft) are not read")
    if nbytes == 8704:
        return Judgement(Kind.INT8_WIDE, "the order of the codes stands nowhere in the file: name it")
    if nbytes == 4736:
        return Judgement(Kind.TWO_LEVEL, notes=["layout known from a description only"])
    if nbytes == TILE_128.nbytes and entry.dtype == "U8":
        return _mxfp4(entry, tiles)
    if nbytes == TILE.nbytes and _is_int8_slot(tiles):
        return Judgement(Kind.INT8_SLOT)
    return _four_bit(tiles, TILE if nbytes == TILE.nbytes else TILE_128)


def _mxfp4(entry: Entry, tiles: U8) -> Judgement:
    if len(entry.shape) != 4:
        return Judgement(Kind.MXFP4, "MXFP4 tiles need a shape [experts, tile rows, tile columns, 2560]")
    if any(chunk[:, 128:512].any() for chunk in _chunks(tiles)):
        return Judgement(Kind.MXFP4, "the tiles were rearranged for a device (they carry a bias); not read")
    return Judgement(Kind.MXFP4)


def _chunks(tiles: U8) -> Iterator[U8]:
    for start in range(0, len(tiles), _CHUNK):
        yield tiles[start : start + _CHUNK]


def _is_int8_slot(tiles: U8) -> bool:
    """Whether a slot of 5120 bytes holds int8: 512 zeros at its end, and a copy of the scales, or zeros, behind them.

    A 4-bit tile whose last 128 columns are constant has zeros there too, but then also where int8 has codes.
    """
    copied = four_bit = True
    for chunk in _chunks(tiles):
        if chunk[:, 4608:].any():
            return False
        second = chunk[:, 256:512]
        copied = copied and np.array_equal(second, chunk[:, :256])
        if not copied and second.any():
            return False
        four_bit = four_bit and not (second.any() or chunk[:, 2048:3072].any())
    return len(tiles) > 0 and not four_bit


@dataclass
class _Count:
    """What the groups of a 4-bit tensor have in common."""

    finite: bool = True
    minimums: bool = False
    varying: int = 0
    full: int = 0
    lowest: int = 0
    negative: int = 0
    like_zero_points: int = 0

    def add(self, chunk: U8, geometry: Geometry) -> None:
        seen = views(chunk[:, None], geometry)
        scales, minimums = bf16.to_float(seen.scales[:, 0]), bf16.to_float(seen.minimums[:, 0])
        self.finite = self.finite and bool(np.isfinite(scales).all() and np.isfinite(minimums).all())
        if not self.finite:
            return
        self.minimums = self.minimums or bool(minimums.any())
        low, high, lowest = _code_range(seen.codes[:, 0], geometry)
        varies = scales != 0
        # Rounding a minimum that is large beside the scale shifts every code; a genuine group shows it too.
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            symmetric = varies & (minimums == np.float32(-8) * scales)
            shift = np.abs(minimums) * np.float32(_ROUNDING) / np.abs(scales)
        slack = np.minimum(np.where(shift > 0.5, np.ceil(shift), 0), 7)
        full = (low <= slack) & (high >= 15 - slack)
        self.varying += int(varies.sum())
        self.full += int((varies & np.where(symmetric, (low == 0) | (high == 15), full)).sum())
        self.lowest += int((varies & lowest).sum())
        self.negative += int((varies & (scales < 0) & ~symmetric).sum())
        self.like_zero_points += int((varies & (minimums >= 1) & (minimums <= 15)).sum())


def _code_range(codes: U8, geometry: Geometry) -> tuple[Any, Any, Any]:
    """Per group, [tiles, group, row]: least and greatest code, and whether code -8 (nibble 8) occurs."""
    halves = codes.reshape(len(codes), 2, geometry.groups, 32, 8)
    nibbles = [halves & 15, halves >> 4]
    low = np.stack([n.min(axis=3) for n in nibbles], axis=-1)
    high = np.stack([n.max(axis=3) for n in nibbles], axis=-1)
    lowest = np.stack([(n == 8).any(axis=3) for n in nibbles], axis=-1)
    return tuple(x.transpose(0, 2, 1, 3, 4).reshape(len(codes), geometry.groups, ROWS) for x in (low, high, lowest))  # type: ignore[return-value]


def _four_bit(tiles: U8, geometry: Geometry) -> Judgement:
    counted = _Count()
    for chunk in _chunks(tiles):
        counted.add(chunk, geometry)
    wide = geometry is TILE
    unsigned, signed = (Kind.UNSIGNED, Kind.SIGNED) if wide else (Kind.UNSIGNED_128, Kind.SIGNED_128)
    if not counted.finite:
        return Judgement(unsigned, "a scale or a minimum is not finite")
    if not counted.varying:
        return Judgement(unsigned, notes=["every group is constant"])
    if not counted.minimums:
        share = counted.lowest / counted.varying
        note = f"signed codes: every minimum is zero, code -8 in {share:.3f} of the groups"
        refusal = None if share >= SHARE else f"{note}: a look-alike, or damaged"
        return Judgement(signed, refusal, [note])
    share = counted.full / counted.varying
    note = f"codes 0 and 15 in {share:.3f} of the groups"
    if share < SHARE:
        return Judgement(unsigned, f"{note}: a look-alike, or damaged", [note])
    if counted.negative:
        return Judgement(unsigned, f"{counted.negative} groups have a negative scale", [note])
    if counted.like_zero_points >= SHARE * counted.varying:
        return Judgement(unsigned, "minimums look like zero points (codec A under another name)", [note])
    return Judgement(unsigned, notes=[note])
