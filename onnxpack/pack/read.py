"""Open a pack: parse and check its manifest, find its tensors.

Only what the manifest says is believed, and only after its sizes fit the files that are really there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from onnxpack import records
from onnxpack.errors import PackError
from onnxpack.pack.container import DTYPES
from onnxpack.pack.digest import content_digest, files_digest
from onnxpack.pack.manifest import SCHEMA, FieldRecord, Manifest, TensorRecord
from onnxpack.planning.check import problems

_MANIFEST_LIMIT = 256 << 20
MANIFEST = "pack.json"
GRAPH = "model.onnx"
DATA = "model.data"


@dataclass(frozen=True)
class Pack:
    """An opened pack. Holds no file open."""

    path: Path
    manifest: Manifest

    @cached_property
    def tensors(self) -> dict[str, TensorRecord]:
        """Packed weights by name."""
        return {tensor.name: tensor for tensor in self.manifest.tensors}

    @property
    def graph_file(self) -> Path:
        """The plain ONNX graph."""
        return self.path / GRAPH

    def field(self, record: FieldRecord) -> npt.NDArray[Any]:
        """A stored tensor, mapped read-only from its file: no bytes are read until they are used."""
        dtype = dtype_of(record.dtype, where=str(self.path))
        if not record.nbytes:
            return np.empty(record.shape, dtype)
        # as text: numpy resolves path objects, which needs parents that may be listed
        return np.memmap(str(self.path / record.file), dtype, "r", record.offset, tuple(record.shape))


def open_pack(path: str | Path, check: Literal["headers", "full"] = "headers") -> Pack:
    """Read the manifest and check it against the files: names, sizes and offsets; with "full" every digest.

    PackError says what does not fit.
    """
    root = Path(path)
    try:
        pack = _open_checked(root)
        if check == "full":
            _check_digests(pack)
    except OSError as error:
        raise PackError(f"cannot be read: {error.strerror}", where=str(error.filename or root)) from None
    except ValueError as error:  # a path that no file system takes: a NUL, a surrogate
        raise PackError(f"cannot be read: {error}", where=str(root)) from None
    return pack


def _open_checked(root: Path) -> Pack:
    manifest = _read_manifest(root)
    sizes: dict[str, int] = {}
    for record in manifest.files:
        if record.path in sizes:
            raise PackError(f"the manifest lists {record.path!r} twice", where=str(root), hint=_REBUILD)
        sizes[record.path] = record.nbytes
        _check_file(root, record.path, record.nbytes)
    for tensor in manifest.tensors:
        for name, stored in tensor.fields.items():
            _check_field(f"{root}: tensor {tensor.name}, field {name}", stored, sizes)
    if GRAPH not in sizes:
        raise PackError(f"the manifest lists no {GRAPH}", where=str(root), hint=_REBUILD)
    _check_sites(root, manifest)
    _check_plan(root, manifest)
    return Pack(root, manifest)


def _check_digests(pack: Pack) -> None:
    """Every digest of the manifest against the bytes, and the two of the whole against their parts."""
    manifest, root = pack.manifest, pack.path
    digests = {}
    for record in manifest.files:
        digests[record.path] = record.sha256
        if file_sha256(root / record.path) != record.sha256:
            raise PackError("digest differs from the manifest's", where=str(root / record.path), hint=_REBUILD)
    for tensor in manifest.tensors:
        for name, stored in tensor.fields.items():
            if array_sha256(pack.field(stored)) != stored.sha256:
                where = f"{root}: tensor {tensor.name}, field {name}"
                raise PackError("digest differs from the manifest's", where=where, hint=_REBUILD)
    content = content_digest(
        digests[GRAPH], digests.get(DATA, ""), manifest.tensors, manifest.sites, manifest.kernels, manifest.plan
    )
    # A later minor version may count more in; its readers know how.
    same_version = manifest.schema == SCHEMA
    if files_digest(manifest.files) != manifest.files_digest or (same_version and content != manifest.content_digest):
        raise PackError("the manifest has been changed since it was written", where=str(root), hint=_REBUILD)


_REBUILD = "build the pack again"


def _read_manifest(root: Path) -> Manifest:
    file = root / MANIFEST
    if not root.is_dir():
        raise PackError("no such directory" if not root.exists() else "not a directory", where=str(root))
    if not file.is_file():
        raise PackError(f"not a pack: it has no {MANIFEST}", where=str(root))
    try:
        if file.stat().st_size > _MANIFEST_LIMIT:
            raise PackError("larger than any manifest", where=str(file), hint=_REBUILD)
        text = file.read_bytes()
        version = records.loads(text, _Version).schema
        if version.rpartition(".")[0] != SCHEMA.rpartition(".")[0]:
            raise PackError(
                f"schema {version!r} is not one this version reads ({SCHEMA})", where=str(file), hint="update onnxpack"
            )
        return records.loads(text, Manifest)
    except records.RecordError as error:
        raise PackError(f"not a manifest: {error}", where=str(file), hint=_REBUILD) from None
    except OSError as error:
        raise PackError(f"cannot be read: {error.strerror}", where=str(file)) from None


@dataclass(frozen=True)
class _Version:
    schema: str


def _check_file(root: Path, name: str, nbytes: int) -> None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\\" in name:
        raise PackError(f"file name {name!r} leads out of the pack", where=str(root))
    file = root / name
    if any((root / parent).is_symlink() for parent in [parts, *list(parts.parents)[:-1]]):
        raise PackError(f"{name} is a link; a pack holds only files of its own", where=str(root))
    if not file.is_file():
        raise PackError(f"{name} is missing", where=str(root), hint=_REBUILD)
    size = file.stat().st_size
    if size != nbytes:
        raise PackError(f"{name} has {size} bytes, the manifest says {nbytes}", where=str(root), hint=_REBUILD)


def _check_field(where: str, record: FieldRecord, sizes: dict[str, int]) -> None:
    dtype = dtype_of(record.dtype, where=where)
    if any(dim < 0 for dim in record.shape):
        raise PackError(f"shape {list(record.shape)} has a negative dimension", where=where)
    wanted = dtype.itemsize
    for dim in record.shape:
        wanted *= dim
    if record.nbytes != wanted:
        raise PackError(f"{record.nbytes} bytes do not hold {record.dtype}{list(record.shape)}", where=where)
    if record.file not in sizes:
        raise PackError(f"file {record.file!r} is not one of the pack's", where=where)
    if record.offset < 0 or record.offset + record.nbytes > sizes[record.file]:
        raise PackError(f"bytes {record.offset}+{record.nbytes} lie outside {record.file}", where=where)


def _check_sites(root: Path, manifest: Manifest) -> None:
    known = {tensor.name: tensor.shape for tensor in manifest.tensors}
    if len(known) != len(manifest.tensors):
        raise PackError("two weights of the manifest have one name", where=str(root), hint=_REBUILD)
    for site in manifest.sites:
        if site.weight is None:
            continue
        if site.weight not in known:
            raise PackError(f"site {site.path} names weight {site.weight!r}, which is not in the pack", where=str(root))
        if known[site.weight] != (site.k, site.n):
            raise PackError(
                f"site {site.path} is [{site.k}, {site.n}], its weight {site.weight!r} {list(known[site.weight])}",
                where=str(root),
            )


def _check_plan(root: Path, manifest: Manifest) -> None:
    if manifest.plan is None:
        return
    bound = {site.path: (site.k, site.n) for site in manifest.sites if site.weight is not None}
    problem = next(problems(manifest.plan, bound), None)
    if problem is not None:
        raise PackError(f"its plan cannot be executed: {problem}", where=str(root), hint=_REBUILD)


def dtype_of(name: str, where: str) -> np.dtype[Any]:
    """The dtype that a manifest or a header names. PackError for anything that is not a plain number type."""
    if name not in _TYPES:
        raise PackError(f"type {name[:40]!r} is not a number type", where=where)
    return _TYPES[name]


_TYPES = {dtype.name: dtype for dtype in DTYPES.values()}


def array_sha256(array: npt.NDArray[Any]) -> str:
    """Digest of the bytes of an array in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def file_sha256(path: Path) -> str:
    """Digest of a whole file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
