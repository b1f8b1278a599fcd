"""A kernel library: which shapes have an ELF, where it is, and what is known about it.

Two spellings name one, wherever a command takes `--kernels`:

* a directory of ELFs, each with its record beside it: ``i8_16x1024x2048_0123456789ab.elf`` and ``….json``;
* a list, the form of the environment variable ``ONEBIT_EP_NPU_ELFS``: ``16x1024x2048=/a/q.elf,16x1024x1024=/a/kv.elf``,
  or bare shapes without a path when only the count matters (census).

Reading one looks at names, records and the first bytes of each file, no more: a census stays fast. `kernels.check`
looks inside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from onnxpack import records
from onnxpack.errors import KernelError, UsageError
from onnxpack.shapes import Gemm

SCHEMA = "onnxpack/kernel/1.0"
"""Schema of a record; another major version is refused, unknown keys are ignored."""

_SHAPE = r"[1-9]\d{0,9}x[1-9]\d{0,9}x[1-9]\d{0,9}"
_ENTRY_BREAK = re.compile(rf",\s*(?={_SHAPE}\s*(?:=|,|$))")
"""A comma ends an entry only before another shape, so that a path may hold commas."""

_NAME = re.compile(rf"i8_({_SHAPE})(?:_[0-9a-f]{{12}})?\.elf")
_RECORD_LIMIT = 1 << 20
_PROOFS = ("proved", "canary", "unproved")
"""Best first."""


@dataclass(frozen=True)
class Canary:
    """A known product: operands made from `seed`, and the digest of the int32 result (little-endian, row-major)."""

    seed: int
    sha256: str


@dataclass(frozen=True)
class Proof:
    """A run of the canary on a device that gave the known product: for this file, these inputs, this driver."""

    elf_sha256: str
    key: str
    canary_sha256: str
    driver: str


@dataclass(frozen=True)
class Record:
    """What is known about one ELF; the `.json` beside it."""

    schema: str
    key: str
    """sha256 over every input of the build (64 hex digits); "" for an ELF of unknown origin."""
    m: int
    k: int
    n: int
    sha256: str
    nbytes: int
    target: str
    design: str
    kernel_name: str
    """`<kernel>:<instance>`, the name XRT wants."""
    parameters: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    """Tool versions and digests, design and kernel source digests, the command lines."""
    licence: str = "unknown"
    canary: Canary | None = None
    proof: Proof | None = None
    """None until `kernels check --run --record` was passed."""

    @property
    def proved(self) -> bool:
        """Whether the canary was run on a device and passed, with exactly this file and this canary."""
        proof, canary = self.proof, self.canary
        if proof is None or canary is None:
            return False
        return (proof.elf_sha256, proof.key, proof.canary_sha256) == (self.sha256, self.key, canary.sha256)

    @property
    def gemm(self) -> Gemm:
        """The shape this ELF was compiled for, as the record states it."""
        return Gemm(self.m, self.k, self.n)


@dataclass(frozen=True)
class Kernel:
    """One entry: a shape, its file (None when only the shape was named) and its record (None when foreign)."""

    gemm: Gemm
    path: Path | None = None
    record: Record | None = None

    @property
    def proof(self) -> str:
        """`proved` when a device gave its canary's known product, `canary` when it has one that was never run, else
        `unproved`: nothing but its name vouches for it."""
        if self.record is None or self.record.canary is None:
            return "unproved"
        return "proved" if self.record.proved else "canary"


@dataclass(frozen=True)
class Library:
    """Kernels by shape. `problems` are lines about files that look like kernels and were left out."""

    kernels: tuple[Kernel, ...] = ()
    problems: tuple[str, ...] = ()

    @cached_property
    def shapes(self) -> frozenset[Gemm]:
        """Every (M, K, N) that has a kernel. Exact shapes: "closest" does not exist."""
        return frozenset(self._best)

    @cached_property
    def _best(self) -> dict[Gemm, Kernel]:
        best: dict[Gemm, Kernel] = {}
        for kernel in self.kernels:
            best.setdefault(kernel.gemm, kernel)
        return best

    def find(self, gemm: Gemm) -> Kernel | None:
        """The kernel of exactly this shape: the best proved one, then by file name."""
        return self._best.get(gemm)

    def to_list(self) -> str:
        """The library as an ``MxKxN=path`` list, by shape: what ``ONEBIT_EP_NPU_ELFS`` takes.

        >>> parse_kernels("16x8x24,8x16x32").to_list()
        '8x16x32,16x8x24'
        """
        best = (self._best[gemm] for gemm in sorted(self._best))
        return ",".join(str(k.gemm) if k.path is None else f"{k.gemm}={k.path}" for k in best)


def parse_kernels(text: str) -> Library:
    """Read a library from a directory or a list.

    UsageError: neither a directory nor a list, or a shape listed twice with two files. KernelError: a listed file is
    missing or is no NPU ELF, or a record contradicts its file.

    >>> library = parse_kernels("16x1024x2048, 16x1024x1024")
    >>> Gemm(16, 1024, 2048) in library.shapes, Gemm(16, 2048, 1024) in library.shapes
    (True, False)
    """
    if re.match(rf"\s*{_SHAPE}\s*(?:=|,|$)", text):
        return _parse_list(text)
    if text and _is_directory(Path(text)):
        return read_directory(Path(text))
    if re.match(r"\s*\d+x", text) or "=" in text:
        raise UsageError(f"{text!r} is not a list of kernels", where="--kernels", hint="write MxKxN=path,MxKxN=path")
    raise UsageError(
        f"{text!r} is not a directory", where="--kernels", hint="give a directory of ELFs or a list MxKxN=path,..."
    )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long, or with a null byte: not a directory, whatever else it is
        return False


def _parse_list(text: str) -> Library:
    kernels: dict[Gemm, Kernel] = {}
    for entry in _ENTRY_BREAK.split(text):
        shape, equals, name = entry.strip().rstrip(",").partition("=")
        kernel = Kernel(Gemm.parse(shape))
        if equals:
            if not name or "\0" in name:
                raise UsageError(f"no file is named for {shape}", where="--kernels", hint="write MxKxN=path")
            kernel = open_elf(Path(name), kernel.gemm)
        if kernels.get(kernel.gemm, kernel) != kernel:
            raise UsageError(f"{kernel.gemm} is listed twice with different files", where="--kernels")
        kernels[kernel.gemm] = kernel
    return Library(tuple(kernels.values()))


def read_directory(folder: Path) -> Library:
    """The library that a directory is: every `*.elf` in it (not below), the best of each shape first."""
    kernels, problems = [], []
    for path in sorted(folder.glob("*.elf")):
        try:
            kernels.append(open_elf(path))
        except KernelError as error:
            problems.append(error.render())
    kernels.sort(key=lambda k: (k.gemm, _PROOFS.index(k.proof), k.record is None, str(k.path)))
    return Library(tuple(kernels), tuple(problems))


def open_elf(path: Path, gemm: Gemm | None = None) -> Kernel:
    """One ELF with the record beside it, if there is one. The shape is the caller's, the record's and the file name's:
    those that are known must agree. KernelError otherwise."""
    _peek(path)
    record = read_record(path.with_suffix(".json"))
    named = _NAME.fullmatch(path.name)
    claims = {
        "the list": gemm,
        "the record": record.gemm if record else None,
        "the file name": Gemm.parse(named[1]) if named else None,
    }
    known = {who: shape for who, shape in claims.items() if shape is not None}
    if not known:
        raise KernelError(
            "nothing says which shape this ELF is for", where=str(path), hint="list it as MxKxN=path, or add its record"
        )
    if len(set(known.values())) > 1:
        said = ", ".join(f"{who} says {shape}" for who, shape in known.items())
        raise KernelError(f"two shapes for one ELF: {said}", where=str(path))
    if record is not None and path.stat().st_size != record.nbytes:
        raise KernelError(
            f"has {path.stat().st_size} bytes, its record says {record.nbytes}", where=str(path), hint="build it again"
        )
    return Kernel(next(iter(known.values())), path, record)


def read_record(path: Path) -> Record | None:
    """The record in `path`, or None when there is no such file. KernelError when it is not a record."""
    text = _read_head(path, _RECORD_LIMIT + 1)
    if text is None:
        return None
    if len(text) > _RECORD_LIMIT:
        raise KernelError("larger than any kernel record", where=str(path))
    try:
        record = records.loads(text, Record)
    except records.RecordError as error:
        raise KernelError(f"not a kernel record: {error}", where=str(path)) from None
    if record.schema.rpartition(".")[0] != SCHEMA.rpartition(".")[0]:
        raise KernelError(
            f"schema {record.schema!r} is not one this version reads ({SCHEMA})",
            where=str(path),
            hint="update onnxpack",
        )
    if min(record.m, record.k, record.n) < 1:
        raise KernelError(f"{record.m}x{record.k}x{record.n} is not a shape", where=str(path))
    return record


def _peek(path: Path) -> None:
    """Turn away what cannot be an NPU ELF by its first bytes: empty files, Git-LFS pointers, links saved as text."""
    head = _read_head(path, 8)
    if head is None:
        raise KernelError("no such file", where=str(path))
    if head[:4] != b"\x7fELF":
        what = "is empty" if not head else "is not an ELF file"
        raise KernelError(what, where=str(path), hint="see `onnxpack kernels inspect`")


def _read_head(path: Path, nbytes: int) -> bytes | None:
    """The beginning of a regular file; None when there is none. A pipe by that name is not waited for."""
    try:
        if not path.is_file():
            if path.exists():
                raise KernelError("not a regular file", where=str(path))
            return None
        with path.open("rb") as file:
            return file.read(nbytes)
    except OSError as error:
        raise KernelError(f"cannot be read: {error.strerror}", where=str(path)) from None


def elf_name(gemm: Gemm, key: str) -> str:
    """File name of a kernel: shape and the first 12 digits of its key.

    >>> elf_name(Gemm(16, 1024, 2048), "0123456789abcdef" * 4)
    'i8_16x1024x2048_0123456789ab.elf'
    """
    return f"i8_{gemm}_{key[:12]}.elf"
