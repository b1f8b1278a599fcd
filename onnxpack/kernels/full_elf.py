"""The checks that a full ELF must pass before it is bound. The driver checks next to nothing.

Each check has a message of its own. None of them proves that the kernel multiplies; that takes a run (see `canary`).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from onnxpack.kernels import control_code
from onnxpack.kernels.control_code import BadCode, ControlCode
from onnxpack.kernels.elf import (
    BadElf,
    Relocation,
    Section,
    Symbol,
    read_note,
    read_relocations,
    read_sections,
    read_symbols,
)

ONCE = (
    ".symtab",
    ".strtab",
    ".dynsym",
    ".dynstr",
    ".rela.dyn",
    ".note.xrt.configuration",
    ".note.xrt.UID",
)
NUMBERED = (".group", ".ctrltext", ".pdi")
PDI_MAGIC = bytes.fromhex("dd0000004433221188776655ccbbaa99")
GROUP_SECTION = 17
SCALAR, SHIM_DMA, ADDRESS64 = 3, 5, 8
_OBJECT, _FUNC = 1, 2
_OTHER_SYMBOLS = re.compile(r"scratch-pad-(mem|ctrl)|control-packet|ctrlpkt-pm-.*")


@dataclass(frozen=True)
class KernelEntry:
    """One kernel that the file offers."""

    name: str
    """`<kernel>:<instance>`."""
    arguments: int
    control_code: str
    """Section that holds its code."""


@dataclass
class FullElf:
    """What was found, and what is wrong with it."""

    columns: int | None = None
    kernels: list[KernelEntry] = field(default_factory=list)
    code: ControlCode | None = None
    """Of the first kernel."""
    patches: Counter[int] = field(default_factory=Counter)
    """Relocations of buffer addresses, by argument."""
    reach: dict[int, int] = field(default_factory=dict)
    """Bytes that each argument must have, at least, for all its transfers to lie inside."""
    pdi_bytes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_full_elf(data: bytes, max_columns: int) -> FullElf:
    """Check the whole file behind its header. Never raises for bad content: the result carries the problems."""
    found = FullElf()
    try:
        _Checker(read_sections(data), found, max_columns).run()
    except BadElf as error:
        found.problems.append(str(error))
    return found


class _Checker:
    def __init__(self, sections: list[Section], found: FullElf, max_columns: int) -> None:
        self.sections = sections
        self.found = found
        self.max_columns = max_columns
        self.codes: dict[int, ControlCode] = {}

    def run(self) -> None:
        self.found.problems += self._inventory()
        if self.found.problems:
            return  # the rest would only repeat it
        self._notes()
        symbols = read_symbols(self._one(".symtab"), self._one(".strtab"))
        dynamic = read_symbols(self._one(".dynsym"), self._one(".dynstr"))
        self.found.problems += self._code()
        self.found.problems += self._groups(symbols)
        self.found.problems += self._patches(dynamic)
        self.found.problems += self._pdis(dynamic)
        self.found.warnings += self._doubts()

    def _one(self, name: str) -> Section:
        return next(s for s in self.sections if s.name == name)

    def _numbered(self, stem: str) -> list[Section]:
        return [s for s in self.sections if re.fullmatch(rf"{re.escape(stem)}\.\d+", s.name)]

    def _inventory(self) -> Iterator[str]:
        names = Counter(s.name for s in self.sections)
        for name in ONCE:
            if names[name] != 1:
                yield f"{name} is there {names[name]} times, not once"
        for stem in NUMBERED:
            if not self._numbered(stem):
                yield f"there is no {stem}.* section"
            stray = [s.name for s in self.sections if stem in s.name and s not in self._numbered(stem)]
            if stray and stem != ".group":
                yield f"section {stray[0]} would be taken for {stem}.* by the loader"
        saved = [s.name.replace("preempt_save", "") for s in self.sections if "preempt_save" in s.name]
        restored = [s.name.replace("preempt_restore", "") for s in self.sections if "preempt_restore" in s.name]
        if sorted(saved) != sorted(restored):
            yield ".preempt_save and .preempt_restore sections do not come in pairs"

    def _notes(self) -> None:
        owner, kind, value = read_note(self._one(".note.xrt.configuration"))
        if (owner, kind, len(value)) != (b"XRT\0", 6, 4):
            self.found.problems.append("the configuration note is not XRT's (type 6, 4 bytes)")
        else:
            (self.found.columns,) = struct.unpack("<I", value)
            if not 1 <= self.found.columns <= self.max_columns:
                self.found.problems.append(
                    f"it is configured for {self.found.columns} columns, and the array has {self.max_columns}"
                )
        owner, kind, value = read_note(self._one(".note.xrt.UID"))
        if owner != b"XRT\0" or len(value) != 16:
            self.found.problems.append(f"its UID note has {len(value)} bytes, not 16 (32: an instruction ELF's)")

    def _code(self) -> Iterator[str]:
        for section in self._numbered(".ctrltext"):
            try:
                code = control_code.walk(section.data)
            except BadCode as error:
                yield f"{section.name}: {error}"
                continue
            self.codes[section.index] = code
            self.found.code = self.found.code or code
            if code.generation != control_code.XDNA2:
                yield f"{section.name} is for {control_code.GENERATIONS[code.generation]}"
            if code.columns != self.found.columns:
                yield f"{section.name} is for {code.columns} columns, the configuration for {self.found.columns}"
            if not code.load_pdi:
                yield f"{section.name} never loads the array's configuration (no load_pdi): it would time out"
            if code.tail:
                self.found.warnings.append(f"{section.name} has {code.tail} bytes after its declared end")

    def _groups(self, symbols: list[Symbol]) -> Iterator[str]:
        owners: Counter[int] = Counter()
        for group in self._numbered(".group"):
            if group.kind != GROUP_SECTION or len(group.data) < 8 or len(group.data) % 4:
                yield f"{group.name} is not a group of sections"
                continue
            flag, *members = struct.unpack(f"<{len(group.data) // 4}I", group.data)
            if flag != 1:
                yield f"{group.name} has flag {flag}, not 1"
            if any(not 0 < member < len(self.sections) for member in members):
                yield f"{group.name} names a section that does not exist"
                continue
            owners.update(set(members))
            code = [self.sections[member] for member in members if self.sections[member].name.startswith(".ctrltext.")]
            if not code:
                yield f"{group.name} holds no control code"
                continue
            yield from self._kernel(group, code[0], symbols)
        for section in self._numbered(".ctrltext"):
            if owners[section.index] != 1:
                yield f"{section.name} belongs to {owners[section.index]} groups, not to one"

    def _kernel(self, group: Section, code: Section, symbols: list[Symbol]) -> Iterator[str]:
        if not 0 < group.info < len(symbols):
            yield f"{group.name} names symbol {group.info}, and there are {len(symbols)}"
            return
        instance = symbols[group.info]
        if instance.kind != _OBJECT or not instance.name:
            yield f"the instance of {group.name} is not an object symbol with a name"
            return
        if not 0 < instance.section < len(symbols) or symbols[instance.section].kind != _FUNC:
            yield f"instance {instance.name} names no kernel function"
            return
        mangled = symbols[instance.section].name
        parsed = demangle(mangled)
        if parsed is None:
            yield f"kernel symbol {mangled!r} is not a function of buffers (_Z<length><name>Pc...)"
            return
        name, arguments = parsed
        self.found.kernels.append(KernelEntry(f"{name}:{instance.name}", arguments, code.name))

    def _patches(self, dynamic: list[Symbol]) -> Iterator[str]:
        seen = set()
        for relocation in read_relocations(self._one(".rela.dyn")):
            problem = self._patch(relocation, dynamic)
            if problem is not None and problem not in seen:
                seen.add(problem)
                yield problem
            if len(seen) >= 8:
                yield "and more of its kind"
                return
        most = max((kernel.arguments for kernel in self.found.kernels), default=0)
        for argument in range(most):
            if not self.found.patches[argument]:
                yield f"the address of argument {argument} is never patched in"
        beyond = [argument for argument in self.found.patches if argument >= most]
        if beyond:
            yield f"argument {min(beyond)} is patched, and the kernel takes {most}"

    def _patch(self, relocation: Relocation, dynamic: list[Symbol]) -> str | None:
        if not 0 < relocation.symbol < len(dynamic):
            return f"a relocation names symbol {relocation.symbol}, and there are {len(dynamic)}"
        symbol = dynamic[relocation.symbol]
        if not 0 < symbol.section < len(self.sections):
            return f"symbol {symbol.name!r} patches section {symbol.section}, which does not exist"
        section = self.sections[symbol.section]
        code = self.codes.get(section.index)
        if relocation.scheme not in (SCALAR, SHIM_DMA, ADDRESS64):
            return f"relocation scheme {relocation.scheme} is unknown"
        need = {SCALAR: 4, SHIM_DMA: 12, ADDRESS64: 8}[relocation.scheme]
        if not relocation.offset or relocation.offset % 4 or relocation.offset + need > len(section.data):
            return f"a relocation at {relocation.offset:#x} does not lie on a word inside {section.name}"
        if code is None:
            return f"a relocation patches {section.name}, which is not (valid) control code"
        if relocation.scheme == ADDRESS64:
            return self._pdi_patch(relocation, symbol, code)
        if not re.fullmatch(r"\d{1,4}", symbol.name):
            return None if _OTHER_SYMBOLS.fullmatch(symbol.name) else f"symbol {symbol.name!r} is no argument"
        if relocation.scheme == SCALAR:
            return f"argument {symbol.name} is a scalar, and the loader takes only buffers"
        return self._buffer_patch(relocation, symbol, code)

    def _pdi_patch(self, relocation: Relocation, symbol: Symbol, code: ControlCode) -> str | None:
        if not any(s.name == symbol.name for s in self._numbered(".pdi")):
            return f"an address is patched with {symbol.name!r}, which is no configuration in this file"
        if relocation.offset - 8 not in code.load_pdi:
            return f"the address of {symbol.name} is patched in at {relocation.offset:#x}, where no load_pdi is"
        return None

    def _buffer_patch(self, relocation: Relocation, symbol: Symbol, code: ControlCode) -> str | None:
        argument = int(symbol.name)
        if relocation.offset not in code.shim_descriptors:
            return f"argument {argument} is patched in at {relocation.offset:#x}, where no shim descriptor begins"
        if relocation.addend >> 31:
            return f"argument {argument} is patched with the folded address bit of an instruction file"
        # The size of the symbol is that of this transfer, not of the buffer; its runs may lie apart, but not be fewer.
        end = relocation.addend + max(symbol.size, 4)
        self.found.reach[argument] = max(end, self.found.reach.get(argument, 0))
        self.found.patches[argument] += 1
        return None

    def _pdis(self, dynamic: list[Symbol]) -> Iterator[str]:
        used = {dynamic[r.symbol].name for r in self._relocations(dynamic)}
        for section in self._numbered(".pdi"):
            self.found.pdi_bytes.append(len(section.data))
            if not len(section.data):
                yield f"{section.name} is empty"
            elif bytes(section.data[:16]) != PDI_MAGIC:
                self.found.warnings.append(f"{section.name} does not begin like the configurations that are known")
            if section.name not in used:
                yield f"{section.name} is never loaded"

    def _relocations(self, dynamic: list[Symbol]) -> Iterator[Relocation]:
        for relocation in read_relocations(self._one(".rela.dyn")):
            if relocation.symbol < len(dynamic):
                yield relocation

    def _digests(self) -> tuple[bytes, bytes]:
        """What assemblers are known to take as UID."""
        code = self._numbered(".ctrltext")
        return _md5(code), _md5([s for s in self.sections if s in code or s in self._numbered(".pdi")])

    def _doubts(self) -> Iterator[str]:
        _, _, uid = read_note(self._one(".note.xrt.UID"))
        if len(uid) == 16 and uid not in self._digests():
            yield "its UID is the MD5 neither of its control code nor of that and its configurations"
        tables = [s for s in self.sections if s.name == ".dynamic"]
        for table in tables:
            entries = dict(struct.iter_unpack("<II", table.data)) if len(table.data) % 8 == 0 else {}
            relocations = self._one(".rela.dyn")
            if entries.get(7) != relocations.index or entries.get(8) != len(relocations.data):
                yield ".dynamic does not point at .rela.dyn"


def _md5(sections: list[Section]) -> bytes:
    total = hashlib.md5(usedforsecurity=False)
    for section in sections:
        total.update(section.data)
    return total.digest()


def demangle(symbol: str) -> tuple[str, int] | None:
    """Name and number of buffers of a kernel symbol; None when the loader would not take it.

    >>> demangle("_Z4mainPcPcPc"), demangle("main"), demangle("_Z4mainPci")
    (('main', 3), None, None)
    """
    head = re.match(r"_Z([1-9]\d{0,2})", symbol)
    if head is None:
        return None
    name = symbol[head.end() : head.end() + int(head[1])]
    signature = symbol[head.end() + int(head[1]) :]
    if len(name) != int(head[1]) or not re.fullmatch(r"(P[civ])+", signature):
        return None
    return name, len(signature) // 2
