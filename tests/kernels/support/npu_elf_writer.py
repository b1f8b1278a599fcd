"""Write NPU ELF files for tests: structurally whole, never meant for a device. Standard library only.

`full_elf()` makes what the checks accept; every argument makes it different, and `Elf` lets a test damage it anywhere.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

PDI_MAGIC = bytes.fromhex("dd0000004433221188776655ccbbaa99")
SHIM_DESCRIPTOR = 0x1D000


@dataclass
class Section:
    """One section; `link` is a section name, `members` of a group as well."""

    name: str
    kind: int
    data: bytes = b""
    flags: int = 0
    link: str = ""
    info: int = 0
    align: int = 1
    entry: int = 0


@dataclass
class Elf:
    """A 32-bit ELF in parts."""

    sections: list[Section] = field(default_factory=list)
    abi: int = 69
    abi_version: int = 0x10
    kind: int = 2
    machine: int = 1

    def section(self, name: str) -> Section:
        """By name."""
        return next(s for s in self.sections if s.name == name)

    def index(self, name: str) -> int:
        """Index in the written table (0 is the empty section)."""
        return 1 + [s.name for s in self.sections].index(name)

    def drop(self, name: str) -> Elf:
        """Without that section."""
        self.sections = [s for s in self.sections if s.name != name]
        return self

    def to_bytes(self) -> bytes:
        """The file: header, sections, section table last."""
        names = b"\0" + b"".join(s.name.encode() + b"\0" for s in self.sections)
        self.sections[0].data = names
        out = bytearray(52)
        table = [struct.pack("<10I", *[0] * 10)]
        where = {s.name: i + 1 for i, s in enumerate(self.sections)}
        for s in self.sections:
            out += bytes(-len(out) % s.align)
            title = names.index(b"\0" + s.name.encode() + b"\0") + 1
            link = where.get(s.link, 0)
            row = (title, s.kind, s.flags, 0, len(out), len(s.data), link, s.info, s.align, s.entry)
            table.append(struct.pack("<10I", *row))
            out += s.data
        out += bytes(-len(out) % 4)
        ident = b"\x7fELF" + bytes([1, 1, 1, self.abi, self.abi_version]) + bytes(7)
        rest = struct.pack(
            "<HHIIIIIHHHHHH", self.kind, self.machine, 1, 0, 52, len(out), 0, 52, 32, 0, 40, len(self.sections) + 1, 1
        )
        out[:52] = ident + rest
        return bytes(out) + b"".join(table)


def load_pdi(number: int = 1) -> bytes:
    """The operation that configures the array."""
    return struct.pack("<4I", 0x00010008, number, 0, 0)


def transfer(argument: int, descriptor: int = 0, column: int = 0) -> bytes:
    """Block write of one shim descriptor, its address patch, and a wait."""
    address = (column << 25) + SHIM_DESCRIPTOR + 0x20 * (descriptor % 16)
    write = struct.pack("<12I", 0x01, 0, address, 48, 0x100, *[0] * 7)
    patch = struct.pack("<12I", 0x81, 48, 0, 0, 0, 0, address + 4, 0, argument, 0, 0, 0)
    return write + patch + struct.pack("<4I", 0x80, 16, 0, 0x10100)


def control_code(operations: list[bytes], columns: int = 8, first_word: int = 0x06040100) -> bytes:
    """Header and operations."""
    body = b"".join(operations)
    return struct.pack("<4I", first_word, 0x100 | columns, len(operations), 16 + len(body)) + body


def note(kind: int, content: bytes) -> bytes:
    """A note owned by XRT."""
    return struct.pack("<3I", 4, len(content), kind) + b"XRT\0" + content


def strings(*names: str) -> tuple[bytes, dict[str, int]]:
    """A string table and where each name is."""
    data, where = b"\0", {}
    for name in names:
        where[name] = len(data)
        data += name.encode() + b"\0"
    return data, where


def full_elf(
    transfers: tuple[int, int, int] = (1, 1, 1),
    columns: int = 8,
    kernel: str = "main",
    instance: str = "sequence",
    arguments: int = 3,
    pdi: bytes = b"",
    moves: list[tuple[int, int, int]] | None = None,
) -> Elf:
    """A whole full ELF: one kernel whose sequence makes that many transfers of A, B and C, or the given moves:
    (argument, first byte, bytes). Real assemblers make one symbol for each argument and number of bytes."""
    if moves is None:
        moves = [(argument, 0, 1024) for argument, count in enumerate(transfers) for _ in range(count)]
    known = sorted({(argument, nbytes) for argument, _, nbytes in moves} | {(a, 1024) for a in range(3, arguments)})
    operations, patches, at = [load_pdi()], [(0x18, 1, 8, 0)], 16 + 16
    for number, (argument, first, nbytes) in enumerate(moves):
        patches.append((at + 16, 2 + known.index((argument, nbytes)), 5, first))
        operations.append(transfer(argument, number, number % columns))
        at += len(operations[-1])
    code = control_code(operations, columns)
    mangled = f"_Z{len(kernel)}{kernel}" + "Pc" * arguments
    strtab, name = strings(mangled, instance)
    symbols = struct.pack("<IIIBBH", 0, 0, 0, 0, 0, 0)
    symbols += struct.pack("<IIIBBH", name[mangled], 0, 0, 0x22, 0, 0)
    symbols += struct.pack("<IIIBBH", name[instance], 0, 0, 0x21, 0, 1)
    dynstr, dynamic_name = strings(".pdi.1", *map(str, range(max(arguments, 3))))
    dynsym = struct.pack("<IIIBBH", 0, 0, 0, 0, 0, 0)
    dynsym += struct.pack("<IIIBBH", dynamic_name[".pdi.1"], 0, 0, 0x11, 0, 5)
    for argument, nbytes in known:
        dynsym += struct.pack("<IIIBBH", dynamic_name[str(argument)], 0, nbytes, 0x11, 0, 5)
    rela = b"".join(struct.pack("<III", at, symbol << 8 | scheme, add) for at, symbol, scheme, add in patches)
    uid = hashlib.md5(code, usedforsecurity=False).digest()
    return Elf(
        [
            Section(".shstrtab", 3),
            Section(".strtab", 3, strtab),
            Section(".symtab", 2, symbols, link=".strtab", info=1, align=4, entry=16),
            Section(".pdi.1", 1, PDI_MAGIC + pdi + bytes(64), flags=6, align=16),
            Section(".ctrltext.0", 1, code, flags=0x206, align=16),
            Section(".dynstr", 3, dynstr),
            Section(".dynsym", 11, dynsym, link=".dynstr", info=1, align=8, entry=16),
            Section(".rela.dyn", 4, rela, link=".dynsym", align=8, entry=12),
            Section(".dynamic", 6, struct.pack("<4I", 7, 8, 8, len(rela)), link=".dynstr", align=8, entry=8),
            Section(".group.0", 17, struct.pack("<3I", 1, 5, 4), link=".symtab", info=2, align=4, entry=4),
            Section(".note.xrt.configuration", 7, note(6, struct.pack("<I", columns))),
            Section(".note.xrt.UID", 7, note(3, uid)),
        ]
    )


def instruction_elf() -> Elf:
    """An instruction ELF: control code without a configuration."""
    whole = full_elf()
    uid = hashlib.md5(whole.section(".ctrltext.0").data, usedforsecurity=False).hexdigest()
    code = Section(".ctrltext", 1, whole.section(".ctrltext.0").data, flags=6, align=16)
    kept = [whole.section(".dynstr"), whole.section(".dynsym"), whole.section(".rela.dyn")]
    return Elf(
        [Section(".shstrtab", 3), code, *kept, Section(".note.xrt.UID", 7, note(4, uid.encode()))], abi_version=2
    )
