"""Inputs made up from a seed, so that any model runs without a data set.

Numbers are normally distributed; whole numbers are ids below the length of the table that they index, masks are ones,
positions count up, everything else is 0 or 1. Dimensions without a size get one that is small.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from onnxpack.errors import UsageError
from onnxpack.types import Array
from onnxpack.verify.inputs import Feed, InputSpec

DEFAULT_SIZE = 16
_SAME_VALUES = {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose"}
_BATCH = re.compile(r"batch|^n$|^b$|num_seq", re.IGNORECASE)


def table_lengths(model: onnx.ModelProto) -> dict[str, int]:
    """For each graph input that indexes stored tables: the length of the shortest.

    Looks at Gather nodes of the main graph, through operators that leave values as they are. Reads no weights.
    """
    graph = model.graph
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    maker = {output: node for node in graph.node for output in node.output}
    fed = {value.name for value in graph.input}
    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type != "Gather" or not shapes.get(node.input[0]):
            continue
        dims = shapes[node.input[0]]
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if not -len(dims) <= axis < len(dims):
            continue
        name, length = node.input[1], int(dims[axis])
        while name in maker and maker[name].op_type in _SAME_VALUES and maker[name].input:
            name = maker[name].input[0]
        if name in fed:
            found[name] = min(length, found.get(name, length))
    return found


def random_feed(
    specs: Sequence[InputSpec],
    seed: int,
    sizes: Mapping[str, int] | None = None,
    lengths: Mapping[str, int] | None = None,
) -> Feed:
    """One feed. `sizes`: of symbolic dimensions by name; `lengths`: ids of an input stay below its length.

    UsageError for inputs that numpy has no type for, and for names in `sizes` that no input has.

    >>> spec = InputSpec("ids", "tensor(int64)", ("batch", "seq"))
    >>> random_feed([spec], 0, {"seq": 4}, {"ids": 10})["ids"].shape
    (1, 4)
    """
    sizes = dict(sizes or {})
    symbols = sorted({dim for spec in specs for dim in spec.shape if isinstance(dim, str)})
    if unknown := sorted(sizes.keys() - {part for symbol in symbols for part in [symbol, *_terms(symbol)]}):
        hint = f"there are {', '.join(symbols)}" if symbols else "every dimension is fixed"
        raise UsageError(f"no input has a dimension called {unknown[0]!r}", hint=hint)
    rng = np.random.Generator(np.random.PCG64(seed))
    return {spec.name: _values(spec, _shape(spec, sizes), rng, (lengths or {}).get(spec.name)) for spec in specs}


def _shape(spec: InputSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else _size(dim, axis, sizes) for axis, dim in enumerate(spec.shape))


def _size(dim: str | None, axis: int, sizes: Mapping[str, int]) -> int:
    if dim is None:
        return DEFAULT_SIZE if axis else 1
    if dim in sizes:
        return sizes[dim]
    terms = _terms(dim)
    if len(terms) > 1:
        return sum(int(term) if term.isdecimal() else _size(term, axis, sizes) for term in terms)
    return 1 if axis == 0 and _BATCH.search(dim) else DEFAULT_SIZE


def _terms(symbol: str) -> list[str]:
    """Exporters write sums as names: ``past_sequence_length + 1``."""
    return [term.strip() for term in symbol.split("+")]


def _values(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator, length: int | None) -> Array:
    dtype, name = spec.dtype, spec.name.lower()
    if dtype is None or dtype.kind not in "biuf":
        raise UsageError(f"{spec.type} cannot be made up", where=f"input {spec.name}", hint="give the inputs in a file")
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if length is None and "mask" in name:
        return np.ones(shape, dtype)
    if length is None and dtype.kind != "b" and "position" in name:
        return np.broadcast_to(np.arange(shape[-1] if shape else 1, dtype=dtype), shape).copy()
    limit = 2 if length is None or dtype.kind == "b" else max(1, length)
    if dtype.kind != "b":
        limit = min(limit, np.iinfo(dtype).max)
    return rng.integers(0, limit, shape).astype(dtype)
