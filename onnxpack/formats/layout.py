"""Where the bits of a block lie: physical fields, and the logical arrays read out of them.

A field is a run of bytes; a view is an array of codes whose bits lie in fields at constant strides. Strided bits say
all that real formats do: nibbles low or high half first, bit planes, codes that continue in another field, packing
along K or along N.

>>> low_nibble_first = BitView("codes", (BitPart("qs", 0, 4, (16, 2), (8, 4)),))
>>> half_split = BitView("codes", (BitPart("qs", 0, 4, (2, 16), (4, 8)),))
>>> low_nibble_first.count, half_split.bits
(32, 4)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from onnxpack.errors import UsageError
from onnxpack.formats.datatypes import DataType


class ProfileError(UsageError):
    """A profile or a structure type that contradicts itself; `path` names the field."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(what, where=path)
        self.path = path


def require(condition: bool, path: str, what: str) -> None:
    """ProfileError at `path` unless the condition holds."""
    if not condition:
        raise ProfileError(path, what)


class Role(StrEnum):
    """What a field is for (the document's BlockFieldRole)."""

    VALUES = "VALUES"
    SIGN = "SIGN"
    SCALE = "SCALE"
    ZERO_POINT = "ZERO_POINT"
    BIAS = "BIAS"
    EXPONENT = "EXPONENT"
    CODE = "CODE"
    MASK = "MASK"


class StorageOrder(StrEnum):
    """INTERLEAVED: all fields of block 0, then of block 1. SEQUENTIAL: one array per field, over all blocks."""

    INTERLEAVED = "INTERLEAVED"
    SEQUENTIAL = "SEQUENTIAL"


class Per(StrEnum):
    """What one copy of a field belongs to. ROW_TILES: one row holds one element per tile, packed without gaps."""

    TILE = "TILE"
    ROW = "ROW"
    COLUMN = "COLUMN"
    TENSOR = "TENSOR"
    ROW_TILES = "ROW_TILES"


@dataclass(frozen=True)
class BlockField:
    """A run of `count` elements of `bit_width` bits, `bit_offset` bits into its block (0 where it stands alone).

    Extensions to the document: `name`; `per`; `as_tiles` keeps the axis of tiles in a sequential array's shape
    ([N, tiles, count] instead of [N, tiles * count]).
    """

    role: Role
    bit_offset: int
    bit_width: int
    count: int
    data_type: DataType = DataType.UNDEFINED
    name: str = ""
    per: Per = Per.TILE
    as_tiles: bool = False

    def __post_init__(self) -> None:
        require(bool(self.name), "name", "a field needs a name")
        require(1 <= self.bit_width <= 64, "bit_width", f"{self.bit_width} is not 1 to 64")
        require(self.count >= 1, "count", f"{self.count} is not positive")
        require(self.bit_offset >= 0, "bit_offset", f"{self.bit_offset} is negative")
        require(self.bit_offset % 8 == 0, "bit_offset", f"{self.bit_offset} is not a whole byte")
        width = self.data_type.bits
        require(not width or width == self.bit_width, "bit_width", f"{self.bit_width} is not {self.data_type.name}'s")

    @property
    def nbytes(self) -> int:
        """Bytes of one copy; the last byte may have unused bits."""
        return -(-self.bit_width * self.count // 8)


@dataclass(frozen=True)
class BitPart:
    """`bit_width` bits for each element of a row-major array `dims`, `strides` bits apart, from bit `bit_offset` on.

    Bits are counted from the least significant bit of the field's first byte. They land in elements `start`...
    of the view, `shift` bits up. Parts of one view that cover the same elements are put together by OR.
    """

    field: str
    bit_offset: int
    bit_width: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    shift: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        require(1 <= self.bit_width <= 16, "bit_width", f"{self.bit_width} is not 1 to 16")
        require(len(self.dims) == len(self.strides), "strides", "as many strides as dims")
        require(all(d >= 1 for d in self.dims), "dims", "every dimension is positive")
        require(self.lowest >= 0, "strides", "bits lie before the field")
        require(0 <= self.shift <= 16, "shift", f"{self.shift} is not 0 to 16")
        require(self.start >= 0, "start", "a start is not negative")

    @property
    def count(self) -> int:
        """Elements covered."""
        return math.prod(self.dims)

    @property
    def lowest(self) -> int:
        """First bit that is read."""
        return self.bit_offset + sum(min(0, (d - 1) * s) for d, s in zip(self.dims, self.strides, strict=True))

    @property
    def end(self) -> int:
        """One past the last bit that is read."""
        reach = sum(max(0, (d - 1) * s) for d, s in zip(self.dims, self.strides, strict=True))
        return self.bit_offset + reach + self.bit_width


@dataclass(frozen=True)
class DigitPart:
    """Bytes that hold `digits` base-`base` digits each.

    `fraction` false: byte = sum of digit n times base**n. True (ggml): byte is the digits read as a base-N fraction,
    digit 0 most significant, rounded up to 256ths. Element order: digit-major (`byte_major` false: all bytes'
    digit 0, then digit 1, ...) or byte-major.
    """

    field: str
    byte_offset: int
    count: int
    digits: int
    base: int = 3
    fraction: bool = False
    byte_major: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        require(self.base >= 2, "base", f"{self.base} is not a base")
        fits = self.base <= 256 and 1 <= self.digits <= 8 and self.base**self.digits <= 256
        require(fits, "digits", "the digits do not fit a byte")
        require(self.count >= 1 and self.byte_offset >= 0, "count", "count is positive, byte_offset not negative")

    @property
    def elements(self) -> int:
        """Elements covered."""
        return self.count * self.digits


@dataclass(frozen=True)
class BitView:
    """A logical array of codes, assembled from parts of physical fields."""

    name: str
    parts: tuple[BitPart, ...] = ()
    digit_parts: tuple[DigitPart, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.parts) != bool(self.digit_parts), "parts", "bits or digits, one of the two")
        spans = sorted({(p.start, p.count) for p in self.parts} | {(p.start, p.elements) for p in self.digit_parts})
        at = 0
        for start, count in spans:
            require(start == at, "parts", f"elements {at} to {start} are covered twice or not at all")
            at += count

    @property
    def count(self) -> int:
        """Elements of the view."""
        return max([p.start + p.count for p in self.parts] + [p.start + p.elements for p in self.digit_parts])

    @property
    def sources(self) -> set[str]:
        """Names of the fields that are read."""
        return {p.field for p in self.parts} | {p.field for p in self.digit_parts}

    @property
    def bits(self) -> int:
        """Bits of the widest code."""
        digits = [(p.base - 1).bit_length() for p in self.digit_parts]
        return max([p.shift + p.bit_width for p in self.parts] + digits)


@dataclass(frozen=True)
class BlockLayout:
    """The physical block: logical size, bytes, fields in order; extension: `views`, the codes read from the fields."""

    block_size: int
    bytes_per_block: int
    fields: tuple[BlockField, ...]
    views: tuple[BitView, ...] = field(default=())

    def __post_init__(self) -> None:
        require(self.block_size >= 1, "block_size", f"{self.block_size} is not positive")
        names = [f.name for f in self.fields] + [v.name for v in self.views]
        require(len(set(names)) == len(names), "fields", "two fields or views have one name")
        total = sum(f.nbytes for f in self.fields if f.per is Per.TILE)
        require(total <= self.bytes_per_block, "bytes_per_block", f"fields take {total} bytes")
        for i, view in enumerate(self.views):
            self._check_view(view, f"views[{i}]")

    def _check_view(self, view: BitView, path: str) -> None:
        for j, part in enumerate(view.parts):
            room = self._bytes_of(part.field, f"{path}.parts[{j}].field")
            require(part.end <= 8 * room, f"{path}.parts[{j}]", f"bit {part.end - 1} lies outside {part.field}")
        for j, digits in enumerate(view.digit_parts):
            room = self._bytes_of(digits.field, f"{path}.digit_parts[{j}].field")
            inside = digits.byte_offset + digits.count <= room
            require(inside, f"{path}.digit_parts[{j}]", f"bytes lie outside {digits.field}")

    def _bytes_of(self, name: str, path: str) -> int:
        match = [f for f in self.fields if f.name == name]
        require(bool(match), path, f"no field is called {name!r}")
        require(match[0].per is Per.TILE, path, "a view reads fields of the tile")
        return match[0].nbytes

    def find(self, name: str) -> BlockField | BitView | None:
        """The field or view of that name."""
        items: tuple[BlockField | BitView, ...] = (*self.fields, *self.views)
        return next((item for item in items if item.name == name), None)

    def check_interleaved(self) -> None:
        """ProfileError unless the fields fill distinct bytes of the block."""
        at = 0
        for i, f in enumerate(sorted(self.fields, key=lambda f: f.bit_offset)):
            require(f.per is Per.TILE, f"fields[{i}].per", "an interleaved block holds fields of the tile only")
            require(f.bit_offset >= 8 * at, f"fields[{i}].bit_offset", f"{f.name} overlaps the field before it")
            at = f.bit_offset // 8 + f.nbytes
        require(at <= self.bytes_per_block, "bytes_per_block", f"fields reach byte {at}")


def interleaved(block_size: int, nbytes: int, *items: BlockField, views: Sequence[BitView] = ()) -> BlockLayout:
    """A block of fields one after the other, in the order given, without gaps."""
    placed, at = [], 0
    for f in items:
        placed.append(BlockField(f.role, 8 * at, f.bit_width, f.count, f.data_type, f.name))
        at += f.nbytes
    require(at == nbytes, "bytes_per_block", f"fields take {at} bytes, not {nbytes}")
    return BlockLayout(block_size, nbytes, tuple(placed), tuple(views))


def dense(name: str, field: str, bits: int, count: int) -> BitView:
    """Codes without gaps, least significant bits first (for nibbles: even element low)."""
    return BitView(name, (BitPart(field, 0, bits, (count,), (bits,)),))
