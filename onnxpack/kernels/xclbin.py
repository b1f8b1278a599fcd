"""Read the outline of an xclbin: sections, columns, kernels. Enough to say what it is and why it cannot be bound."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

MAGIC = b"xclbin2\0"
HEADER_BYTES = 456
SECTION_BYTES = 40
AIE_PARTITION = 32
EMBEDDED_METADATA = 2
_SECTIONS_LIMIT = 256
_METADATA_LIMIT = 1 << 20


class BadXclbin(ValueError):
    """The file breaks the structure of an xclbin."""


@dataclass(frozen=True)
class Xclbin:
    """What an xclbin says about itself."""

    version: str
    sections: tuple[int, ...]
    columns: int | None
    pdis: int
    kernels: tuple[str, ...]


def read_xclbin(data: bytes) -> Xclbin:
    """The outline. BadXclbin when the file is cut or a section lies outside of it."""
    if len(data) < HEADER_BYTES:
        raise BadXclbin(f"{len(data)} bytes are too few for an xclbin header")
    (length,) = struct.unpack_from("<Q", data, 304)
    if length != len(data):
        raise BadXclbin(f"it declares {length} bytes and has {len(data)}")
    patch, major, minor = struct.unpack_from("<HBB", data, 328)
    (count,) = struct.unpack_from("<I", data, 448)
    if count > _SECTIONS_LIMIT or HEADER_BYTES + SECTION_BYTES * count > len(data):
        raise BadXclbin(f"its table of {count} sections does not fit into it")
    kinds, columns, pdis, kernels = [], None, 0, ()  # type: tuple[list[int], int | None, int, tuple[str, ...]]
    for number in range(count):
        kind, _, offset, size = struct.unpack_from("<I16s4xQQ", data, HEADER_BYTES + SECTION_BYTES * number)
        if offset + size > len(data):
            raise BadXclbin(f"section {number} (kind {kind}) ends past the end of the file")
        kinds.append(kind)
        body = data[offset : offset + size]
        if kind == AIE_PARTITION and size >= 184:
            (columns,) = struct.unpack_from("<H", body, 32)
            pdis = body.count(bytes.fromhex("dd0000004433221188776655ccbbaa99"))
        if kind == EMBEDDED_METADATA:
            found = re.findall(rb'<kernel name="([\w.-]{1,64})"', body[:_METADATA_LIMIT])
            kernels = tuple(name.decode() for name in found[:16])
    return Xclbin(f"{major}.{minor}.{patch}", tuple(kinds), columns, pdis, kernels)
