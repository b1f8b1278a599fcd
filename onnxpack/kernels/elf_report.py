"""Say what any file is, and whether it can be bound as a kernel: `inspect` reports, `check` raises."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxpack.errors import KernelError
from onnxpack.kernels import control_code, elf, xclbin
from onnxpack.kernels.control_code import BadCode
from onnxpack.kernels.full_elf import FullElf, read_full_elf
from onnxpack.kernels.library import Record
from onnxpack.kernels.target import NPU2, Target
from onnxpack.kernels.xclbin import BadXclbin
from onnxpack.shapes import Gemm

FILE_LIMIT = 64 << 20
"""Larger than any kernel; such a file is not read."""

GEMM_ARGUMENTS = 3
"""A, B and C."""

WHAT = {
    "full-elf": "a full ELF: configuration and control code, loadable alone",
    "instruction-elf": "an instruction ELF: control code alone, which needs the xclbin it was made with",
    "core-elf": "the ELF of one core, an input of the configuration; it is never loaded by itself",
    "instructions": "a raw instruction stream, which needs the xclbin it was made with",
    "xclbin": "an xclbin: a configuration that needs an instruction stream beside it",
    "elf": "an ELF, but not of an NPU",
    "text": "text, not a kernel",
    "git-lfs-pointer": "a Git LFS pointer: the file itself was never downloaded",
    "link-text": "the text of a symbolic link: the file it names was not copied",
    "empty": "an empty file",
    "unreadable": "not a readable file",
    "unknown": "nothing that is known here",
}
"""One sentence for each kind of report."""


@dataclass(frozen=True)
class ElfReport:
    """What a file is. `bindable` is true exactly when `problems` is empty."""

    path: str
    kind: str
    """A key of `WHAT`."""
    nbytes: int = 0
    sha256: str = ""
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    """`<kernel>:<instance>` names."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else was found, by kind of file: columns, operations, patches, ..."""

    @property
    def what(self) -> str:
        """One sentence."""
        return WHAT[self.kind]

    @property
    def bindable(self) -> bool:
        """Whether the file may be loaded as a kernel."""
        return not self.problems


def inspect(path: str | os.PathLike[str], target: Target = NPU2) -> ElfReport:
    """Report on any file. Never raises for what the file is or holds; reads it once, at most 64 MiB."""
    name = os.fspath(path)
    try:
        data = _read(Path(name))
    except (OSError, ValueError) as error:
        return ElfReport(name, "unreadable", problems=(getattr(error, "strerror", None) or str(error),))
    return inspect_bytes(data, name, target)


def inspect_bytes(data: bytes, name: str = "", target: Target = NPU2) -> ElfReport:
    """The report on a file's content."""
    kind = sniff(data)
    problems, warnings, kernels, facts = _READERS[kind](data, target) if kind in _READERS else ([], [], (), {})
    if kind != "full-elf":
        problems = [f"it is {WHAT[kind]}", *problems]
    digest = hashlib.sha256(data).hexdigest()
    return ElfReport(name, kind, len(data), digest, tuple(problems), tuple(warnings), tuple(kernels), facts)


def check(
    path: str | os.PathLike[str],
    gemm: Gemm | None = None,
    record: Record | None = None,
    target: Target = NPU2,
) -> ElfReport:
    """The report, when the file can be bound as a GEMM kernel (of this shape, as this record says).

    KernelError with the first problem otherwise, and how many there are.
    """
    report = inspect(path, target)
    problems = [*report.problems, *_gemm_problems(report, gemm), *_record_problems(report, gemm, record)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise KernelError(problems[0] + more, where=report.path, hint="see `onnxpack kernels inspect`")
    return report


def sniff(data: bytes) -> str:
    """Which kind of file this is, by its first bytes; a key of `WHAT`.

    >>> sniff(b""), sniff(b"version https://git-lfs.github.com/spec/v1"), sniff(b"../other.elf"), sniff(b"\\0" * 64)
    ('empty', 'git-lfs-pointer', 'link-text', 'unknown')
    """
    if not data:
        return "empty"
    if data[:4] == elf.MAGIC:
        return _sniff_elf(data)
    if data[:8] == xclbin.MAGIC:
        return "xclbin"
    if len(data) >= 4 and int.from_bytes(data[:4], "little") in control_code.GENERATIONS:
        return "instructions"
    return _sniff_text(data)


def _sniff_elf(data: bytes) -> str:
    if len(data) < elf.HEADER_BYTES or data[4] != 1:
        return "elf"
    header = elf.read_header(data)
    if header.machine == elf.CORE:
        return "core-elf"
    if header.abi not in elf.PLATFORMS:
        return "elf"
    return "full-elf" if header.abi_version >= 0x10 else "instruction-elf"


def _sniff_text(data: bytes) -> str:
    head = data[:512]
    if any(byte < 32 and byte not in b"\t\n\r" for byte in head):
        return "unknown"
    if head.startswith(b"version https://git-lfs"):
        return "git-lfs-pointer"
    one_word = re.fullmatch(rb"[^\s]{1,400}\n?", data) if len(data) < 512 else None
    return "link-text" if one_word and (b"/" in data or b"." in data) else "text"


def _read(path: Path) -> bytes:
    # Non-blocking: a pipe by that name must not hang us. Only regular files are read.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > FILE_LIMIT:
            raise ValueError(f"{status.st_size} bytes are more than any kernel has")
        return file.read(FILE_LIMIT)


_Findings = tuple[list[str], list[str], tuple[str, ...], dict[str, Any]]


def _full(data: bytes, target: Target) -> _Findings:
    problems = list(_header_problems(data))
    found = read_full_elf(data, target.columns) if not problems else FullElf()
    return (
        problems + found.problems,
        found.warnings,
        tuple(kernel.name for kernel in found.kernels),
        _full_facts(data, found),
    )


def _header_problems(data: bytes) -> Iterator[str]:
    header = elf.read_header(data)
    if not header.little:
        yield "it is big-endian"
    if header.abi != elf.AIE2P:
        yield f"it is built for {elf.PLATFORMS[header.abi]}, not for aie2p (XDNA2)"
    if header.kind != elf.EXEC:
        yield f"its type is {header.kind}, not {elf.EXEC} (executable)"
    if header.machine != elf.M32:
        yield f"its machine is {header.machine}, not {elf.M32}"


def _full_facts(data: bytes, found: FullElf) -> dict[str, Any]:
    facts: dict[str, Any] = {"abi_version": data[8], "columns": found.columns}
    facts["arguments"] = found.kernels[0].arguments if found.kernels else None
    if found.code is not None:
        facts |= {"operations": found.code.operations, "control_code_bytes": found.code.declared_bytes}
        facts["load_pdi"] = len(found.code.load_pdi)
    facts["patches"] = {str(argument): found.patches[argument] for argument in sorted(found.patches)}
    facts["reach"] = {str(argument): found.reach[argument] for argument in sorted(found.reach)}
    facts["configuration_bytes"] = list(found.pdi_bytes)
    return facts


def _elf_outline(data: bytes, target: Target) -> _Findings:
    """Sections of an ELF that cannot be bound anyway; damage is told as well."""
    facts: dict[str, Any] = {}
    try:
        header = elf.read_header(data)
        facts |= {
            "bits": header.bits,
            "machine": header.machine,
            "type": header.kind,
            "abi": header.abi,
            "abi_version": header.abi_version,
        }
        if header.bits != 32 or header.abi not in elf.PLATFORMS:
            wanted = f"NPU files are 32-bit with OS/ABI {elf.AIE2P}"
            return [f"it is a {header.bits}-bit ELF with OS/ABI {header.abi}; {wanted}"], [], (), facts
        if header.bits == 32:
            facts["sections"] = [section.name for section in elf.read_sections(data)[1:65]]
    except elf.BadElf as error:
        return [str(error)], [], (), facts
    return [], [], (), facts


def _instructions(data: bytes, target: Target) -> _Findings:
    try:
        code = control_code.walk(data)
    except BadCode as error:
        return [str(error)], [], (), {}
    facts = {
        "generation": control_code.GENERATIONS[code.generation],
        "columns": code.columns,
        "operations": code.operations,
        "patches": {str(argument): code.patches[argument] for argument in sorted(code.patches)},
    }
    return [], [], (), facts


def _xclbin(data: bytes, target: Target) -> _Findings:
    try:
        found = xclbin.read_xclbin(data)
    except BadXclbin as error:
        return [str(error)], [], (), {}
    facts = {
        "version": found.version,
        "sections": list(found.sections),
        "columns": found.columns,
        "configurations": found.pdis,
    }
    return [], [], found.kernels, facts


_READERS = {
    "full-elf": _full,
    "instruction-elf": _elf_outline,
    "core-elf": _elf_outline,
    "elf": _elf_outline,
    "instructions": _instructions,
    "xclbin": _xclbin,
}


def _gemm_problems(report: ElfReport, gemm: Gemm | None) -> Iterator[str]:
    if report.problems:
        return
    if len(report.kernels) != 1:
        yield f"it holds {len(report.kernels)} kernels, and nothing says which one to run"
    if report.facts["arguments"] != GEMM_ARGUMENTS:
        yield f"its kernel takes {report.facts['arguments']} buffers, and a product has {GEMM_ARGUMENTS}"
    if gemm is not None:
        sizes = {"0": gemm.m * gemm.k, "1": gemm.k * gemm.n, "2": 4 * gemm.m * gemm.n}
        for argument, reach in report.facts["reach"].items():
            if reach > sizes.get(argument, 0):
                yield f"argument {argument} is used up to byte {reach}, and {gemm} has {sizes.get(argument, 0)} of it"


def _record_problems(report: ElfReport, gemm: Gemm | None, record: Record | None) -> Iterator[str]:
    if record is None or report.problems:
        return
    if report.sha256 != record.sha256:
        yield "its sha256 is not the one in its record"
    if gemm is not None and record.gemm != gemm:
        yield f"its record says {record.gemm}, and {gemm} is wanted"
    if record.kernel_name not in report.kernels:
        yield f"its record names kernel {record.kernel_name!r}, and the file has {', '.join(report.kernels)}"
    wanted = record.parameters.get("descriptors")
    if isinstance(wanted, dict):
        counts = [wanted.get(name) for name in ("A", "B", "C")]
        found = [report.facts["patches"].get(str(argument)) for argument in range(GEMM_ARGUMENTS)]
        if counts != found:
            yield f"it moves A, B and C in {found} transfers, and its record says {counts}"
