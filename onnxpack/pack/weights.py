"""Weights from the model into the formats of the plan: distinct ones only, in threads, a block at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from onnxpack.errors import ModelError, OnnxpackError
from onnxpack.formats.base import ErrorSums, FieldSpec, Format, Orientation
from onnxpack.graph.constants import Constant, evaluate
from onnxpack.graph.tensors import TensorStore
from onnxpack.pack.container import Layout, layout
from onnxpack.pack.manifest import FieldRecord, TensorRecord
from onnxpack.types import Array

T = TypeVar("T")
_COMPARE_ROWS = 64


@dataclass(frozen=True)
class Source:
    """One weight to store: a constant of the model, seen as a matrix [K, N]."""

    name: str
    constant: Constant
    transposed: bool
    format: Format
    sites: int

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        k, n = self.constant.shape[-2:]
        return (n, k) if self.transposed else (k, n)

    @property
    def format_shape(self) -> tuple[int, int]:
        """The shape in the orientation that the format takes."""
        k, n = self.shape
        return (k, n) if self.format.orientation is Orientation.KN else (n, k)

    def matrix(self, store: TensorStore) -> Array:
        """The numbers in the format's orientation; a view of the stored bytes wherever that is possible."""
        array = evaluate(self.constant, store)
        array = array.reshape(array.shape[-2:])
        if self.transposed != (self.format.orientation is Orientation.NK):
            array = array.T
        if not self.format.takes_any_float and array.dtype != np.float32:
            array = array.astype(np.float32)
        return array


@dataclass(frozen=True)
class Stored:
    """One weight that has been stored: its record, and what a person wants to read about it."""

    record: TensorRecord
    sites: int


def distinct(sources: Sequence[Source], store: TensorStore) -> dict[str, str]:
    """Name of each weight to the name under which it is stored: equal numbers in one format are stored once.

    Numbers are compared, never names; most weights differ in a small sample and are not read for it.
    """
    groups: dict[Any, list[tuple[Source, Array]]] = {}
    stored: dict[str, str] = {}
    for source in sources:
        array = source.matrix(store) if source.format.takes_any_float else evaluate(source.constant, store)
        key = (
            source.shape,
            source.transposed,
            array.dtype,
            source.format.name,
            repr(source.format.params),
            _sample(array),
        )
        same = groups.setdefault(key, [])
        twin = next((other for other, numbers in same if _equal(array, numbers)), None)
        if twin is None:
            same.append((source, array))
        stored[source.name] = (twin or source).name
    return stored


def _sample(array: Array) -> bytes:
    rows, columns = (max(1, d // 8) for d in array.shape[-2:])
    return np.ascontiguousarray(array[..., ::rows, ::columns]).tobytes()


def _equal(a: Array, b: Array) -> bool:
    first, second = a.reshape(a.shape[-2:]), b.reshape(b.shape[-2:])
    if first.strides[0] < first.strides[1]:
        first, second = first.T, second.T
    rows = range(0, len(first), _COMPARE_ROWS)
    return all(np.array_equal(first[i : i + _COMPARE_ROWS], second[i : i + _COMPARE_ROWS]) for i in rows)


def containers(sources: Iterable[Source]) -> dict[str, Layout]:
    """The files that hold these weights, laid out: file name to layout."""
    entries: dict[str, dict[str, FieldSpec]] = {}
    for source in sources:
        held = entries.setdefault(source.format.container, {})
        for name, spec in source.format.fields(source.format_shape).items():
            held[stored_name(source.name, name)] = spec
    return {file: layout(fields) for file, fields in entries.items()}


def stored_name(weight: str, field: str) -> str:
    """Name of a field in its container."""
    return f"{weight}.{field}"


def encode(source: Source, store: TensorStore, layouts: Mapping[str, Layout], out: Mapping[str, Array]) -> Stored:
    """Encode one weight into its mapped fields. ModelError names the tensor when a value is not finite."""
    specs = source.format.fields(source.format_shape)
    arrays = {name: out[stored_name(source.name, name)] for name in specs}
    try:
        sums = source.format.encode_into(source.matrix(store), arrays)
    except ModelError as error:
        raise ModelError(error.what, where=f"tensor {source.constant.root.name}", hint=error.hint) from None
    places = layouts[source.format.container].places
    fields = {}
    for name, array in arrays.items():
        place = places[stored_name(source.name, name)]
        fields[name] = FieldRecord(
            source.format.container,
            place.offset,
            place.nbytes,
            array.dtype.name,
            tuple(array.shape),
            hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest(),
        )
    return Stored(_record(source, fields, sums), source.sites)


def _record(source: Source, fields: dict[str, FieldRecord], sums: ErrorSums) -> TensorRecord:
    return TensorRecord(
        name=source.name,
        shape=source.shape,
        format=source.format.name,
        params=dict(source.format.params),
        fields=fields,
        source=source.constant.root.name,
        source_nbytes=source.constant.root.nbytes,
        error=sums.figures(),
    )


def external_leaves(constant: Constant) -> dict[str, ir.TensorProtocol]:
    """The external tensors that a constant is made of, by name."""
    found: dict[str, ir.TensorProtocol] = {}
    stack = [constant]
    while stack:
        at = stack.pop()
        if isinstance(at.tensor, ir.ExternalTensor):
            found[at.name] = at.tensor
        stack += [c for c in at.inputs if c is not None]
    return found


def in_threads(tasks: Sequence[Callable[[], T]], largest_first: Sequence[int]) -> list[T]:
    """Results of all tasks, in their order. The first failing task, in that order, raises; the rest are dropped."""
    futures: dict[int, Future[T]] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        try:
            for index in sorted(range(len(tasks)), key=lambda i: (-largest_first[i], i)):
                futures[index] = pool.submit(tasks[index])
            return [futures[index].result() for index in range(len(tasks))]
        except (OnnxpackError, OSError, MemoryError, KeyboardInterrupt):
            pool.shutdown(wait=True, cancel_futures=True)
            raise
