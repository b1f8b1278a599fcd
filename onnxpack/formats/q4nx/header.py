"""The header of a foreign Q4NX file: safetensors as it should be, and as it is found.

Files in the wild carry keys that are not tensors and element types that safetensors does not know; a strict parser
fails on them. This one takes the entries that describe a tensor, notes the others, and checks every range against the
file before anything is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpack.errors import ModelError

HEADER_LIMIT = 32 << 20
"""Bytes of JSON: room for a few hundred thousand tensors."""

_DIM_LIMIT = 2**63
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One tensor as the header has it; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Tensors in file order, and what else was found."""

    entries: dict[str, Entry]
    metadata: bool
    """Whether the file has `__metadata__` (the old codec's files do, the converter's do not)."""
    notes: list[str]
    """Keys that are not tensors."""


def read_header(path: Path) -> Header:
    """Parse and check. ModelError says what is wrong."""
    try:
        if not path.is_file():
            raise ModelError("not a file" if path.exists() else "no such file", where=str(path))
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ModelError(f"a header of {length} bytes does not fit a file of {size}", where=str(path))
            if length > HEADER_LIMIT:
                raise ModelError(f"a header of {length} bytes is longer than any we read", where=str(path))
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return parse_header(text, size, str(path))


def parse_header(text: bytes, size: int, where: str) -> Header:
    """The header whose JSON is `text`, of a file of `size` bytes."""
    top = _load(text, where)
    start = 8 + len(text)
    entries: list[Entry] = []
    notes: list[str] = []
    for name, value in top.items():
        if name == _METADATA:
            continue
        if isinstance(value, dict) and {"dtype", "shape", "data_offsets"} <= value.keys():
            entries.append(_entry(name, value, start, size, where))
        else:
            notes.append(f"key {name!r} is not a tensor")
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _refuse_overlap(entries, where)
    return Header({entry.name: entry for entry in entries}, _METADATA in top, notes)


def _load(text: bytes, where: str) -> dict[str, Any]:
    try:
        top = json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ModelError(f"the header is not JSON that describes tensors: {reason[:200]}", where=where) from None
    if not isinstance(top, dict):
        raise ModelError("the header is not a JSON object", where=where)
    return top


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} occurs twice")
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _entry(name: str, value: dict[str, Any], start: int, size: int, where: str) -> Entry:
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    place = f"{where}: tensor {name!r}"
    if not isinstance(dtype, str):
        raise ModelError("dtype is not a string", where=place)
    if not (_integers(shape) and len(shape) <= 16):
        raise ModelError("shape is not a list of sizes", where=place)
    if not (_integers(offsets) and len(offsets) == 2):
        raise ModelError("data_offsets is not a pair of positions", where=place)
    begin, end = offsets
    if not begin <= end <= size - start:
        raise ModelError(f"bytes {begin}..{end} lie outside the {size - start} bytes of data", where=place)
    return Entry(name, dtype, tuple(shape), start + begin, end - begin)


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _DIM_LIMIT for item in value)


def _refuse_overlap(entries: list[Entry], where: str) -> None:
    end, last = 0, ""
    for entry in entries:
        if entry.nbytes and entry.offset < end:
            raise ModelError(f"tensors {last!r} and {entry.name!r} share bytes", where=where)
        if entry.nbytes:
            end, last = entry.offset + entry.nbytes, entry.name


def count(shape: tuple[int, ...]) -> int:
    """Elements of a shape, in integers that do not overflow."""
    return math.prod(shape)
