"""`model.data`: what stays float, each tensor on its own page, equal bytes once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxpack.graph.tensors import TensorStore
from onnxpack.pack.space import reserve
from onnxpack.types import Array

ALIGNMENT = 4096
_PIECE = 4 << 20
_SAMPLES = 64


@dataclass(frozen=True)
class DataLayout:
    """Where each tensor's bytes will stand; tensors of equal bytes share a place."""

    tensors: tuple[ir.TensorProtocol, ...]
    """The distinct ones, in file order."""
    offsets: tuple[int, ...]
    place_of: Mapping[int, int]
    """id of a tensor to its index in `tensors`."""
    nbytes: int


def lay_out(tensors: Sequence[ir.TensorProtocol], store: TensorStore) -> DataLayout:
    """Decide the places. Tensors are compared byte by byte where size and a sample agree, never by name."""
    distinct: list[ir.TensorProtocol] = []
    candidates: dict[tuple[int, bytes], list[int]] = {}
    place_of: dict[int, int] = {}
    for tensor in tensors:
        raw = store.raw(tensor)
        same = candidates.setdefault((len(raw), _sample(raw)), [])
        found = next((i for i in same if _equal(raw, store.raw(distinct[i]))), None)
        if found is None:
            found = len(distinct)
            distinct.append(tensor)
            same.append(found)
        place_of[id(tensor)] = found
    offsets, end = [], 0
    for tensor in distinct:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + tensor.nbytes
    return DataLayout(tuple(distinct), tuple(offsets), place_of, end)


def write(path: Path, plan: DataLayout, store: TensorStore) -> str:
    """Write the file; returns its digest."""
    whole = hashlib.sha256()
    with path.open("wb") as file:
        reserve(file.fileno(), path, plan.nbytes)
        for tensor, offset in zip(plan.tensors, plan.offsets, strict=True):
            gap = bytes(offset - file.tell())
            file.write(gap)
            whole.update(gap)
            for piece in _pieces(store.raw(tensor)):
                file.write(piece)
                whole.update(piece)
        file.flush()
        os.ftruncate(file.fileno(), plan.nbytes)
    return whole.hexdigest()


def _pieces(raw: Array) -> Iterator[memoryview]:
    for start in range(0, len(raw), _PIECE):
        yield raw[start : start + _PIECE].data


def _sample(raw: Array) -> bytes:
    """A few bytes from all over: enough to keep most unequal tensors apart without reading them."""
    step = max(1, len(raw) // _SAMPLES)
    return bytes(raw[::step][: _SAMPLES + 1]) + bytes(raw[-_SAMPLES:])


def _equal(a: Array, b: Array) -> bool:
    return all(np.array_equal(a[i : i + _PIECE], b[i : i + _PIECE]) for i in range(0, len(a), _PIECE))
