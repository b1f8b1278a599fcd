"""Reading and writing codes whose bits lie at constant strides, for many blocks at once.

No loop runs over blocks or elements: only over the at most eight places that a code can have inside a byte.

>>> part = BitPart("qs", 0, 4, (2, 2), (4, 8))  # low nibbles first, then the high ones
>>> view = BitView("codes", (part,))
>>> read(view, {"qs": np.array([[0x21, 0x43]], np.uint8)}).tolist()
[[1, 3, 2, 4]]
>>> out = {"qs": np.zeros((1, 2), np.uint8)}
>>> write(view, np.array([[1, 3, 2, 4]]), out); out["qs"].tolist()
[[33, 67]]
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.formats.layout import BitPart, BitView, DigitPart, require

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]

_MOST_PLACES = 64  # bound of the unrolled loop: 8 places for strides that divide 8, more only for odd layouts


@dataclass(frozen=True)
class Piece:
    """Bits of some codes that lie inside one byte each: code |= ((byte >> down) & mask) << up.

    `where` picks the codes from the part's split array, `byte` is the first byte, `counts` and `strides` (in bytes)
    walk the others.
    """

    where: tuple[int | slice, ...]
    byte: int
    down: int
    up: int
    width: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A part's dims split so that each either steps over whole bytes or stays within a few of them."""

    dims: tuple[int, ...]
    pieces: tuple[Piece, ...]


@functools.cache
def split(part: BitPart) -> Split:
    """The pieces that a part is read and written by."""
    dims: list[tuple[int, int]] = []
    for count, stride in zip(part.dims, part.strides, strict=True):
        period = 8 // math.gcd(8, abs(stride)) if stride else count
        if period > 1 and count > period and count % period == 0:
            dims += [(count // period, stride * period), (period, stride)]
        else:
            dims.append((count, stride))
    sub = [i for i, (count, stride) in enumerate(dims) if stride % 8 or stride == 0]
    places = math.prod(dims[i][0] for i in sub)
    require(places <= _MOST_PLACES, part.field, f"codes have {places} places inside bytes, more than {_MOST_PLACES}")
    walked = [(dims[i][0], dims[i][1] // 8) for i in range(len(dims)) if i not in sub]
    pieces = []
    for chosen in itertools.product(*(range(dims[i][0]) for i in sub)):
        at = dict(zip(sub, chosen, strict=True))
        where = tuple(at.get(i, slice(None)) for i in range(len(dims)))
        first = part.bit_offset + sum(at[i] * dims[i][1] for i in sub)
        for byte, down, up, width in _bytes_of(first, part.bit_width, part.shift):
            pieces.append(Piece(where, byte, down, up, width, *_unzip(walked)))
    return Split(tuple(count for count, _ in dims), tuple(pieces))


def _unzip(walked: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(c for c, _ in walked), tuple(s for _, s in walked)


def _bytes_of(first: int, width: int, up: int) -> Iterator[tuple[int, int, int, int]]:
    while width > 0:
        byte, down = divmod(first, 8)
        here = min(width, 8 - down)
        yield byte, down, up, here
        first, width, up = first + here, width - here, up + here


def read(view: BitView, fields: Mapping[str, U8]) -> Array:
    """Codes [..., view.count] of a view; `fields` are bytes [..., nbytes]. uint8, or uint16 for wider codes."""
    lead = fields[min(view.sources)].shape[:-1]
    out = np.zeros((*lead, view.count), np.uint8 if view.bits <= 8 else np.uint16)
    for part in sorted(view.parts, key=lambda p: p.shift):
        _read_bits(part, fields[part.field], out[..., part.start : part.start + part.count])
    for digits in view.digit_parts:
        window = out[..., digits.start : digits.start + digits.elements]
        window[...] = _read_digits(digits, fields[digits.field]).reshape(window.shape)
    return out


def write(view: BitView, codes: Array, fields: Mapping[str, U8]) -> None:
    """Inverse of read: ORs the codes into zeroed bytes."""
    for part in view.parts:
        _write_bits(part, codes[..., part.start : part.start + part.count], fields[part.field])
    for digits in view.digit_parts:
        window = codes[..., digits.start : digits.start + digits.elements]
        _write_digits(digits, window, fields[digits.field])


def _bytes_at(piece: Piece, data: U8, writeable: bool) -> U8:
    first = data[..., piece.byte :]
    shape, strides = (
        first.shape[:-1] + piece.counts,
        first.strides[:-1] + tuple(s * data.strides[-1] for s in piece.strides),
    )
    # Bounds were checked when the layout was made: every byte of every part lies inside its field.
    return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=writeable)


_UNROLLED = 8  # bytes that are walked one by one: short inner loops cost more than their elements


@functools.cache
def _pieces(part: BitPart) -> tuple[Piece, ...]:
    """The pieces of a part; where they walk a few bytes only, one for each of these."""
    plan = split(part)
    made: list[Piece] = []
    for piece in plan.pieces:
        few = 1 < math.prod(piece.counts) <= _UNROLLED and len(plan.pieces) * _UNROLLED <= _MOST_PLACES
        if not few or len(piece.counts) < 2:  # bytes at one stride go on into the next block: no short loop
            return plan.pieces
        for at in itertools.product(*map(range, piece.counts)):
            chosen = iter(at)
            where = tuple(next(chosen) if isinstance(w, slice) else w for w in piece.where)
            byte = piece.byte + sum(i * s for i, s in zip(at, piece.strides, strict=True))
            made.append(Piece(where, byte, piece.down, piece.up, piece.width, (), ()))
    return tuple(made)


def _read_bits(part: BitPart, data: U8, out: Array) -> None:
    plan = split(part)
    target = out.reshape(*out.shape[:-1], *plan.dims)
    assert np.shares_memory(target, out) or not out.size
    fresh: set[tuple[Any, ...]] = set()
    for piece in _pieces(part):
        code = _bytes_at(piece, data, writeable=False)
        if piece.down:
            code = code >> np.uint8(piece.down)
        if piece.down + piece.width < 8:
            code = code & np.uint8((1 << piece.width) - 1)
        if piece.up:
            code = code.astype(out.dtype) << out.dtype.type(piece.up)
        key = tuple(str(w) for w in piece.where)
        where = (..., *piece.where)
        if part.shift == 0 and key not in fresh:
            # The first piece of a code is stored, not OR-ed: one pass less (parts with shift 0 come first).
            target[where] = code
            fresh.add(key)
        else:
            target[where] |= code


def _write_bits(part: BitPart, codes: Array, data: U8) -> None:
    plan = split(part)
    source = codes.reshape(*codes.shape[:-1], *plan.dims)
    for piece in _pieces(part):
        code = source[(..., *piece.where)]
        if piece.up:
            code = code >> codes.dtype.type(piece.up)
        if piece.up or piece.down + piece.width < 8 or codes.dtype.itemsize > 1:
            code = code & codes.dtype.type((1 << piece.width) - 1)
        code = code.astype(np.uint8, copy=False)
        target = _bytes_at(piece, data, writeable=True)
        target |= code << np.uint8(piece.down) if piece.down else code


@functools.cache
def digit_table(base: int, digits: int, fraction: bool) -> U8:
    """Digits of every byte, uint8 [256, digits].

    >>> digit_table(3, 5, False)[5].tolist(), digit_table(3, 5, True)[255].tolist()
    ([2, 1, 0, 0, 0], [2, 2, 2, 2, 2])
    """
    table = np.zeros((256, digits), np.uint8)
    byte = np.arange(256)
    for n in range(digits):
        if fraction:
            table[:, n] = byte * base >> 8
            byte = byte * base & 255
        else:
            table[:, n] = byte % base
            byte = byte // base
    table.setflags(write=False)
    return table


def _read_digits(part: DigitPart, data: U8) -> U8:
    stored = data[..., part.byte_offset : part.byte_offset + part.count]
    table = digit_table(part.base, part.digits, part.fraction)
    if part.byte_major:
        return np.take(table, stored, axis=0)
    out = np.empty((*stored.shape[:-1], part.digits, part.count), np.uint8)
    for n in range(part.digits):
        out[..., n, :] = np.take(np.ascontiguousarray(table[:, n]), stored)
    return out


def _write_digits(part: DigitPart, codes: Array, data: U8) -> None:
    lead = codes.shape[:-1]
    shape = (part.count, part.digits) if part.byte_major else (part.digits, part.count)
    grid = codes.reshape(*lead, *shape)
    total = np.zeros((*lead, part.count), np.uint16)
    # A fraction always has the digits that fill a byte; those that are not stored are zero.
    places = part.digits
    if part.fraction:
        while part.base ** (places + 1) <= 256:
            places += 1
    for n in range(part.digits):
        digit = grid[..., n] if part.byte_major else grid[..., n, :]
        power = part.base ** (places - 1 - n if part.fraction else n)
        total += digit.astype(np.uint16) * np.uint16(power)
    if part.fraction:
        whole = np.uint16(part.base**places)
        total = ((total.astype(np.uint32) * 256 + (whole - 1)) // whole).astype(np.uint16)
    data[..., part.byte_offset : part.byte_offset + part.count] |= total.astype(np.uint8)
