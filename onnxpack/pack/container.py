"""Write a safetensors file whose layout is known before its bytes are: sizes, header, space, mapped arrays to fill.

The file is strictly valid: no holes, no overlap, tensors aligned to their type. Its header is padded with spaces so
that the data starts on a page, which mapping readers and direct I/O like.

>>> plan = layout({"codes": FieldSpec(np.dtype(np.int8), (3, 5)), "scales": FieldSpec(np.dtype(np.float32), (5,))})
>>> [(name, place.offset, place.nbytes) for name, place in plan.places.items()], plan.nbytes
([('scales', 4096, 20), ('codes', 4116, 15)], 4131)
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from onnxpack.errors import EnvironmentFault, UsageError
from onnxpack.formats.base import FieldSpec
from onnxpack.pack.space import reserve

ALIGNMENT = 4096
"""Where the data of a file that we write starts: a multiple of this."""

HEADER_LIMIT = 100_000_000
"""Readers of the safetensors library refuse longer headers."""

METADATA = "__metadata__"

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I16": "<i2",
        "U16": "<u2",
        "F16": "<f2",
        "BF16": ml_dtypes.bfloat16,
        "I32": "<i4",
        "U32": "<u4",
        "F32": "<f4",
        "I64": "<i8",
        "U64": "<u8",
        "F64": "<f8",
    }.items()
}
"""Element types as safetensors spells them. Types below one byte have no array form here and are not in it."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: `offset` counts from the start of the file."""

    spec: FieldSpec
    offset: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.spec.nbytes


@dataclass(frozen=True)
class Layout:
    """A file that does not exist yet: its header (length word included) and the place of each tensor, in file order."""

    header: bytes
    places: Mapping[str, Place]

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(place.nbytes for place in self.places.values())


def dtype_name(dtype: np.dtype[Any]) -> str:
    """How safetensors spells a type. UsageError when it has no word for it.

    >>> dtype_name(np.dtype(ml_dtypes.bfloat16)), dtype_name(np.dtype(np.int8))
    ('BF16', 'I8')
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UsageError(f"safetensors has no name for elements of type {dtype}") from None


def layout(entries: Mapping[str, FieldSpec], metadata: Mapping[str, str] | None = None) -> Layout:
    """Place tensors without holes: wide elements first, so that each is aligned to its type, then in the order given.

    Equal entries in equal order give equal bytes. UsageError for a name or a type that cannot stand in such a file.
    """
    order = sorted(entries, key=lambda name: -entries[name].dtype.itemsize)
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        _check_name(name)
        spec, start = entries[name], end
        end += spec.nbytes
        header[name] = {
            "dtype": dtype_name(spec.dtype),
            "shape": [int(dim) for dim in spec.shape],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise UsageError(f"{len(entries)} tensors need a header of {len(text)} bytes, more than readers accept")
    start = 8 + len(text)
    places = {name: Place(entries[name], start + header[name]["data_offsets"][0]) for name in order}
    return Layout(len(text).to_bytes(8, "little") + text, places)


def _check_name(name: str) -> None:
    if name == METADATA:
        raise UsageError(f"a tensor cannot be called {METADATA}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"tensor name {name!r} is not Unicode text") from None


class MappedTensors(Mapping[str, npt.NDArray[Any]]):
    """Writable arrays over a file, by tensor name, in file order. Threads may fill different tensors at once."""

    def __init__(self, buffer: mmap.mmap, places: Mapping[str, Place]) -> None:
        self._buffer = buffer
        self._places = places
        self._arrays = {name: _view(buffer, place) for name, place in places.items()}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def release(self, name: str) -> None:
        """Let the pages of a finished tensor leave the process; the bytes stay in the file. Others are not touched."""
        place = self._places[name]
        start = -(-place.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (place.offset + place.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._buffer.madvise(mmap.MADV_DONTNEED, start, length)

    def _close(self) -> None:
        self._arrays.clear()
        # An array that the caller still holds keeps the map alive until it is dropped; nothing here can prevent that.
        with suppress(BufferError):
            self._buffer.close()


def _view(buffer: mmap.mmap, place: Place) -> npt.NDArray[Any]:
    count = int(np.prod(place.spec.shape, dtype=np.int64))
    return np.frombuffer(buffer, place.spec.dtype, count, place.offset).reshape(place.spec.shape)


@contextmanager
def create(path: str | Path, plan: Layout, *, sync: bool = False) -> Iterator[MappedTensors]:
    """Make the file of `plan`: yields its tensors to be filled; on success the file appears under `path`, in one step.

    All space is reserved first, so that running out of it is an error here and not a signal later. After an exception
    nothing is left. `sync` waits until the bytes are on the disk. EnvironmentFault says what the machine lacks.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise EnvironmentFault(f"cannot be created: {error.strerror}", where=str(target)) from None
    try:
        try:
            reserve(fd, target, plan.nbytes)
            buffer = mmap.mmap(fd, plan.nbytes)
            buffer[: len(plan.header)] = plan.header
            tensors = MappedTensors(buffer, plan.places)
            try:
                yield tensors
            finally:
                tensors._close()
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        _publish(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _publish(partial: Path, target: Path) -> None:
    try:
        partial.replace(target)
    except OSError as error:
        raise EnvironmentFault(f"cannot be replaced: {error.strerror}", where=str(target)) from None
