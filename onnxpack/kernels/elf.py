"""Read a 32-bit ELF file that may be hostile: every offset is checked before it is followed, and nothing is read twice.

Only what NPU files use: header, section table, symbols, relocations, notes. Loading one is the driver's business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x7fELF"
HEADER_BYTES = 52
SECTION_BYTES = 40
NOBITS = 8
PLATFORMS = {
    64: "aie2ps",
    69: "aie2p (XDNA2)",
    70: "aie2ps (legacy)",
    75: "aie4",
    86: "aie4a",
    105: "aie4z",
}
"""OS/ABI byte to the platform that a file is for."""
AIE2P = 69
EXEC = 2
M32 = 1
CORE = 264


class BadElf(ValueError):
    """The file breaks the structure of an ELF; the message says what and where."""


def show(name: bytes) -> str:
    """A name out of a file, safe to print.

    >>> show(b".ctrltext\\x1b[2J")
    '.ctrltext\\\\x1b[2J'
    """
    text = name[:80].decode("ascii", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Section:
    """One section and its bytes."""

    index: int
    name: str
    kind: int
    flags: int
    link: int
    info: int
    data: memoryview


@dataclass(frozen=True)
class Symbol:
    """One symbol."""

    name: str
    value: int
    size: int
    kind: int
    """Low nibble of st_info: 1 OBJECT, 2 FUNC."""
    section: int


@dataclass(frozen=True)
class Relocation:
    """One patch."""

    offset: int
    symbol: int
    scheme: int
    addend: int


@dataclass(frozen=True)
class Header:
    """The identifying fields."""

    bits: int
    little: bool
    abi: int
    abi_version: int
    kind: int
    machine: int


def read_header(data: bytes) -> Header:
    """The header's fields, of 32- or 64-bit files. BadElf when the file is too short for them."""
    if len(data) < HEADER_BYTES:
        raise BadElf(f"{len(data)} bytes are too few for an ELF header")
    kind, machine = struct.unpack_from("<HH", data, 16)
    return Header(64 if data[4] == 2 else 32, data[5] == 1, data[7], data[8], kind, machine)


def read_sections(data: bytes) -> list[Section]:
    """Every section. BadElf when the table or a section lies outside of the file, or two sections overlap."""
    table, size, count, names_index = struct.unpack_from("<I", data, 32)[0], *struct.unpack_from("<HHH", data, 46)
    if size != SECTION_BYTES:
        raise BadElf(f"section headers have {size} bytes, not {SECTION_BYTES}")
    if not count or table + SECTION_BYTES * count > len(data):
        raise BadElf(f"the section table ({count} entries at {table:#x}) is not inside the file: it is cut or damaged")
    if names_index >= count:
        raise BadElf(f"section {names_index} should hold the names, and there are {count}")
    raw = [struct.unpack_from("<10I", data, table + SECTION_BYTES * i) for i in range(count)]
    spans = sorted((e[4], e[4] + e[5], i) for i, e in enumerate(raw) if i and e[1] != NOBITS and e[5])
    spans += [(table, table + SECTION_BYTES * count, 0)]
    _check_spans(sorted(spans), len(data))
    view = memoryview(data)
    names = view[raw[names_index][4] : raw[names_index][4] + raw[names_index][5]]
    sections = []
    for index, (name, kind, flags, _, offset, nbytes, link, info, _, _) in enumerate(raw):
        body = view[offset : offset + nbytes] if index and kind != NOBITS else view[:0]
        title = read_name(names, name, f"section {index}") if index else ""
        sections.append(Section(index, title, kind, flags, link, info, body))
    return sections


def _check_spans(spans: list[tuple[int, int, int]], size: int) -> None:
    last, before = HEADER_BYTES, -1
    for start, end, index in spans:
        if end > size:
            raise BadElf(f"section {index} ends at {end:#x}, past the end of the file at {size:#x}")
        if start < last:
            other = "the header" if before < 0 else f"section {before}" if before else "the section table"
            raise BadElf(f"{f'section {index}' if index else 'the section table'} overlaps {other}")
        last, before = end, index


def read_name(table: memoryview, offset: int, who: str) -> str:
    """A zero-terminated name of at most 255 bytes. BadElf when it is not inside its table."""
    if offset >= len(table):
        raise BadElf(f"the name of {who} lies outside of its table")
    head = bytes(table[offset : offset + 256])
    end = head.find(0)
    if end < 0:
        raise BadElf(f"the name of {who} does not end")
    return show(head[:end])


def read_symbols(section: Section, names: Section) -> list[Symbol]:
    """All symbols of a table. BadElf when it is not a table of them."""
    if len(section.data) % 16:
        raise BadElf(f"{section.name} is not a table of symbols")
    entries = struct.iter_unpack("<IIIBBH", section.data)
    return [
        Symbol(read_name(names.data, name, f"symbol {number} of {section.name}"), value, size, info & 15, where)
        for number, (name, value, size, info, _, where) in enumerate(entries)
    ]


def read_relocations(section: Section) -> Iterator[Relocation]:
    """All relocations. BadElf when the section is not a table of them."""
    if len(section.data) % 12:
        raise BadElf(f"{section.name} is not a table of relocations")
    for offset, info, addend in struct.iter_unpack("<III", section.data):
        yield Relocation(offset, info >> 8, info & 0xFF, addend)


def read_note(section: Section) -> tuple[bytes, int, bytes]:
    """Owner, type and content of the one note in a section. BadElf when it is cut."""
    data = section.data
    if len(data) < 12:
        raise BadElf(f"{section.name} is cut")
    name_size, size, kind = struct.unpack_from("<3I", data)
    start = 12 + (name_size + 3) // 4 * 4
    if start + size > len(data):
        raise BadElf(f"{section.name} is cut")
    return bytes(data[12 : 12 + name_size]), kind, bytes(data[start : start + size])
