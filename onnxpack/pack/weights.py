"""Weights from the model into the formats of the plan: distinct ones only, in threads, a block at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpack.errors import ModelError
from onnxpack.formats.base import FieldSpec
from onnxpack.graph.constant import Constant
from onnxpack.graph.tensors import TensorStore
from onnxpack.pack.container import Layout, Place, layout
from onnxpack.pack.manifest import FieldRecord, TensorRecord
from onnxpack.pack.read import array_sha256
from onnxpack.pack.sources import Source
from onnxpack.types import Array

_COMPARE_ROWS = 64


@dataclass(frozen=True)
class Stored:
    """One weight that has been stored: its record, and what a person wants to read about it."""

    record: TensorRecord
    cosine: float
    """Between the source and what the stored bytes mean, or the least that it can be."""
    looks_dequantized: bool
    """Whether the source is float with the values of int8 codes times a scale."""


def distinct(sources: Sequence[Source], store: TensorStore) -> dict[str, str]:
    """Name of each weight to the name under which it is stored: equal numbers in one format are stored once.

    Numbers are compared, never names; most weights differ in a small sample and are not read for it.
    """
    groups: dict[Any, list[Source]] = {}
    stored: dict[str, str] = {}
    for source in sources:
        # the numbers are let go again: those of computed weights are in memory, all of them together would be a model
        numbers = source.numbers(store)
        key = (source.shape, source.format, repr(source.params), *map(_sample, numbers))
        same = groups.setdefault(key, [])
        twin = next((other for other in same if all(map(_equal, other.numbers(store), numbers))), None)
        if twin is None:
            same.append(source)
        stored[source.name] = (twin or source).name
    return stored


def _sample(array: Array) -> tuple[str, bytes]:
    steps = tuple(slice(None, None, max(1, d // 8)) for d in array.shape)
    return array.dtype.name, np.ascontiguousarray(array[steps]).tobytes()


def _equal(a: Array, b: Array) -> bool:
    if a.shape != b.shape:
        return False
    if a.ndim < 2:
        return np.array_equal(a, b)
    first, second = a, b
    if first.strides[0] < first.strides[1]:
        first, second = first.T, second.T
    rows = range(0, len(first), _COMPARE_ROWS)
    return all(np.array_equal(first[i : i + _COMPARE_ROWS], second[i : i + _COMPARE_ROWS]) for i in rows)


@dataclass(frozen=True)
class Containers:
    """The files that hold the weights, laid out."""

    layouts: Mapping[str, Layout]
    """By file name."""
    _names: Mapping[tuple[str, str], tuple[str, str]]

    def key(self, weight: str, field: str) -> tuple[str, str]:
        """File, and name in it, of a field of a weight."""
        return self._names[weight, field]

    def place(self, weight: str, field: str) -> Place:
        """Where the bytes of a field are in its file."""
        file, name = self._names[weight, field]
        return self.layouts[file].places[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(plan.nbytes for plan in self.layouts.values())


def containers(sources: Iterable[Source]) -> Containers:
    """Lay the files out. A tensor is called after its weight, and its field where the weight has several."""
    entries: dict[str, dict[str, FieldSpec]] = {}
    names: dict[tuple[str, str], tuple[str, str]] = {}
    for source in sources:
        held, fields = entries.setdefault(source.container, {}), source.fields()
        for field, spec in fields.items():
            name = source.name if len(fields) == 1 else f"{source.name}.{field}"
            while name in held:  # "a" + "b.codes" and "a.b" + "codes" are two tensors
                name += "#"
            held[name] = spec
            names[source.name, field] = (source.container, name)
    return Containers({file: layout(fields) for file, fields in entries.items()}, names)


def encode(source: Source, store: TensorStore, files: Containers, out: Mapping[tuple[str, str], Array]) -> Stored:
    """Write one weight into its mapped fields. ModelError names the tensor when a value is not finite."""
    arrays = {field: out[files.key(source.name, field)] for field in source.fields()}
    try:
        sums = source.fill(store, arrays)
    except ModelError as error:
        raise ModelError(error.what, where=f"tensor {source.root.name}", hint=error.hint) from None
    fields = {name: _field(source.container, files.place(source.name, name), array) for name, array in arrays.items()}
    return Stored(
        TensorRecord(
            name=source.name,
            shape=source.shape,
            format=source.format,
            params=dict(source.params),
            fields=fields,
            source=source.root.name,
            source_nbytes=source.root.nbytes,
            error=sums.figures(),
            bands=sums.bands(),
        ),
        sums.cosine,
        source.looks_dequantized(store),
    )


def _field(file: str, place: Place, array: Array) -> FieldRecord:
    return FieldRecord(file, place.offset, place.nbytes, array.dtype.name, tuple(array.shape), array_sha256(array))


def external_leaves(constant: Constant) -> dict[int, ir.ExternalTensor]:
    """The external tensors that a constant is made of, by id: in two bodies two tensors may have one name."""
    found: dict[int, ir.ExternalTensor] = {}
    stack = [constant]
    while stack:
        at = stack.pop()
        if isinstance(at.tensor, ir.ExternalTensor):
            found[id(at.tensor)] = at.tensor
        stack += [c for c in at.inputs if c is not None]
    return found
