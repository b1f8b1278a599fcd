"""What the codes of a block mean, written once for numpy and for ONNX.

`evaluate` walks a profile and asks an `Ops` for each step; NumpyOps computes, OnnxOps emits nodes. So a format's
decoder in a graph is its decoder here, operation for operation: same order, same roundings.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from onnxpack.errors import UsageError
from onnxpack.formats.datatypes import DataType, float_table
from onnxpack.formats.layout import BlockField, Per, Role
from onnxpack.formats.profiles import (
    Codebook,
    FloatingPointUniform,
    LinearUniform,
    LogUniform,
    Parameter,
    QuantizationProfile,
    StructuredBlockUniform,
)
from onnxpack.formats.rules import rule_table

V = TypeVar("V")
F32 = npt.NDArray[np.float32]


class Ops(Protocol[V]):
    """The operations a decoder is made of. Values have the shape [rows, blocks, ...]; only `...` is named in calls."""

    def codes(self, name: str) -> V:
        """Integer codes [rows, blocks, count] of a field or view."""

    def numbers(self, name: str) -> V:
        """float32 numbers [rows or 1, blocks or 1, count] of a serialized parameter's field or view."""

    def index(self, terms: list[tuple[V, int]]) -> V:
        """Sum of codes times multipliers."""

    def table(self, values: F32, index: V) -> V:
        """values[index]; a table of vectors adds a last axis."""

    def to_float(self, codes: V, signed_bits: int) -> V:
        """float32 of codes; `signed_bits` > 0: of two's complement numbers of that many bits."""

    def reshape(self, value: V, tail: tuple[int, ...]) -> V:
        """New shape after rows and blocks."""

    def permute(self, value: V, perm: tuple[int, ...]) -> V:
        """Reorder the axes after rows and blocks."""

    def multiply(self, a: V, b: V) -> V:
        """a * b in float32, broadcast."""

    def divide(self, a: V, b: V) -> V:
        """a / b."""

    def add(self, a: V, b: V) -> V:
        """a + b."""

    def subtract(self, a: V, b: V) -> V:
        """a - b."""

    def maximum(self, a: V, b: V) -> V:
        """The larger one."""

    def constant(self, value: float) -> V:
        """A float32 scalar."""


class TensorOps(Ops[V], Protocol[V]):
    """What decoders of whole tensors need besides; values have the shape of the layout's frame."""

    def take(self, table: V, index: V) -> V:
        """table[index] of a stored table; a table of vectors adds a last axis."""

    def half(self, value: V) -> V:
        """float32 values rounded to float16."""


def evaluate(profile: QuantizationProfile, ops: Ops[V]) -> V:
    """Decoded values [rows, blocks, block_size] of a profile that has a block layout."""
    return _Evaluation(profile, ops).run()


def evaluate_tensors(profile: QuantizationProfile, ops: TensorOps[V]) -> V:
    """Decoded values in the frame of a profile's tensor layout, before outliers, order, rotations and diagonals."""
    return _TensorEvaluation(profile, ops).value()


class _Evaluation(Generic[V]):
    def __init__(self, profile: QuantizationProfile, ops: Ops[V]) -> None:
        layout = profile.block
        assert layout is not None
        self.profile, self.ops, self.layout = profile, ops, layout
        self.groups = _groups(profile)

    def run(self) -> V:
        return self.ops.reshape(self.value(), (self.layout.block_size,))

    def value(self) -> V:
        """The values, in groups."""
        leaf = self.profile.leaf.value
        if isinstance(leaf, StructuredBlockUniform):
            return self.structured(leaf)
        if isinstance(leaf, LinearUniform):
            return self.linear(leaf)
        if isinstance(leaf, Codebook):
            return self.codebook(leaf)
        if isinstance(leaf, FloatingPointUniform):
            return self.floating(leaf)
        if isinstance(leaf, LogUniform):
            return self.log(leaf)
        raise UsageError(f"a {self.profile.leaf.kind} profile has no decoder of its own")

    def frame(self, value: V) -> V:
        """[.., block_size] as [.., groups, values per group], so that parameters broadcast."""
        return self.ops.reshape(value, (self.groups, self.layout.block_size // self.groups))

    def parameter(self, p: Parameter) -> V:
        """A parameter as [.., groups or 1, 1]."""
        ops = self.ops
        value = ops.table(padded(p.levels, p.vector), ops.codes(p.field)) if p.levels else ops.numbers(p.field)
        value = self.grouped(value, p.field)
        if p.factor != 1:
            value = self.rounded(ops.multiply(value, ops.constant(p.factor)))
        if p.least:
            value = ops.maximum(value, ops.constant(p.least))
        if p.inverse:
            value = self.rounded(ops.divide(ops.constant(1), value))
        if p.offset:
            value = self.rounded(ops.subtract(value, ops.constant(p.offset)))
        if p.minus is not None:
            value = self.rounded(ops.subtract(value, self.parameter(p.minus)))
        if p.parent is not None:
            parent = self.parameter(p.parent)
            value = self.rounded(ops.divide(value, parent) if p.divide else ops.multiply(value, parent))
        return self.rounded(ops.add(value, self.parameter(p.bias))) if p.bias is not None else value

    def grouped(self, value: V, field: str) -> V:
        """Numbers of a field as [.., groups or 1, 1]."""
        return self.ops.reshape(value, (_count(self.layout.find(field)), 1))

    def rounded(self, value: V) -> V:
        """A step's result, in the precision that the format computes in."""
        return value

    def scaled(self, value: V, leaf: LinearUniform | Codebook | FloatingPointUniform) -> V:
        ops = self.ops
        if leaf.scale is not None:
            return self.rounded(ops.multiply(value, self.parameter(leaf.scale)))
        if not isinstance(leaf, FloatingPointUniform):
            if leaf.scale_float is not None:
                return ops.multiply(value, ops.constant(leaf.scale_float))
            if leaf.scale_int is not None:
                return ops.multiply(value, ops.constant(math.ldexp(1.0, leaf.scale_int)))
        return value

    def linear(self, leaf: LinearUniform) -> V:
        ops = self.ops
        if leaf.storage_type.is_float:
            raise UsageError("float codes are a floating_point profile's")
        value = self.frame(ops.to_float(ops.codes(leaf.codes), leaf.bits if leaf.storage_type.signed else 0))
        if leaf.zero is not None:
            value = self.rounded(ops.subtract(value, self.parameter(leaf.zero)))
        elif leaf.zero_point:
            value = ops.subtract(value, ops.constant(leaf.zero_point))
        value = self.scaled(value, leaf)
        return ops.subtract(value, self.parameter(leaf.minimum)) if leaf.minimum is not None else value

    def codebook(self, leaf: Codebook) -> V:
        ops = self.ops
        if leaf.num_codebooks > 1 and not leaf.stored:
            raise UsageError("additive codebooks are evaluated where they are stored tensors")
        value = self.frame(self.entries(leaf))
        if leaf.shift is not None:
            value = ops.add(value, self.parameter(leaf.shift))
        return self.scaled(value, leaf)

    def entries(self, leaf: Codebook) -> V:
        ops = self.ops
        if leaf.rule:
            return ops.table(rule_table(leaf.rule), ops.codes(leaf.codes))
        line = straight(leaf.codebook_data) if leaf.vector_size <= 1 else None
        if line is None:
            return ops.table(padded(leaf.codebook_data, leaf.vector_size), ops.codes(leaf.codes))
        first, step = line
        value = ops.to_float(ops.codes(leaf.codes), 0)
        value = value if step == 1 else ops.multiply(value, ops.constant(step))
        return ops.add(value, ops.constant(first))

    def floating(self, leaf: FloatingPointUniform) -> V:
        bits = (leaf.sign_bits, leaf.exponent_bits, leaf.mantissa_bits)
        table = float_table(*bits, leaf.exponent_bias, leaf.has_inf, leaf.has_nan)
        return self.scaled(self.frame(self.ops.table(table, self.ops.codes(leaf.codes))), leaf)

    def log(self, leaf: LogUniform) -> V:
        ops = self.ops
        index = ops.codes(leaf.codes)
        if leaf.signs:
            index = ops.index([(index, 1), (ops.codes(leaf.signs), 1 << leaf.bits)])
        return self.frame(ops.table(log_table(leaf), index))

    def structured(self, leaf: StructuredBlockUniform) -> V:
        ops, size = self.ops, self.layout.block_size
        if leaf.codebook_data:
            value = self.looked_up(leaf)
        else:
            field = leaf.by_role(Role.VALUES)
            if field is None:
                raise UsageError("a structured block without a codebook has VALUES")
            value = ops.to_float(ops.codes(field.name), field.bit_width if field.data_type.signed else 0)
        value = ops.reshape(value, (1, size))
        for role, step in ((Role.ZERO_POINT, ops.subtract), (Role.SCALE, ops.multiply), (Role.BIAS, ops.add)):
            field = leaf.by_role(role)
            if field is not None:
                value = step(value, ops.reshape(ops.numbers(field.name), (field.count, 1)))
        return value

    def looked_up(self, leaf: StructuredBlockUniform) -> V:
        ops, length = self.ops, leaf.codebook_vector_size
        terms = [(ops.codes(f.name), t.multiplier) for t in leaf.index_formula if (f := leaf.by_role(t.field))]
        value = ops.table(padded(leaf.codebook_data, length), ops.index(terms))
        if leaf.scatter is None:
            return value
        s = leaf.scatter
        chunks = self.layout.block_size // s.group_size
        value = ops.reshape(value, (chunks, s.group_size // s.vector_size, s.vector_size))
        return ops.permute(value, (0, 2, 1))


class _TensorEvaluation(_Evaluation[V]):
    """The same steps where views already have the frame's shape: nothing is grouped, parameters broadcast."""

    def __init__(self, profile: QuantizationProfile, ops: TensorOps[V]) -> None:
        self.profile, self.ops, self.tensors = profile, ops, ops
        self.half = profile.leaf.data_type is DataType.FLOAT16

    def frame(self, value: V) -> V:
        return value

    def grouped(self, value: V, field: str) -> V:
        return value

    def rounded(self, value: V) -> V:
        return self.tensors.half(value) if self.half else value

    def entries(self, leaf: Codebook) -> V:
        if not leaf.stored:
            return super().entries(leaf)
        ops, total = self.tensors, None
        for i in range(max(1, leaf.num_codebooks)):
            one = ops.take(ops.numbers(f"{leaf.stored}[{i}]"), ops.codes(f"{leaf.codes}[{i}]"))
            total = one if total is None else ops.add(total, one)
        assert total is not None
        return total


def _groups(profile: QuantizationProfile) -> int:
    """Parameter groups in a block: tiles inside the tile, else what the parameters' own counts say."""
    layout = profile.block
    assert layout is not None
    counts = {1}
    for parameter in getattr(profile.leaf.value, "parameters", {}).values():
        counts |= {_count(layout.find(p.field)) for _, p in parameter.walk("")} if parameter else set()
    groups = max(counts)
    whole = all(groups % c == 0 for c in counts) and layout.block_size % groups == 0
    if not whole or any(c not in (1, groups) for c in counts):
        raise UsageError(f"parameters of {sorted(counts)} values a block do not share groups")
    return groups


def _count(item: Any) -> int:
    if isinstance(item, BlockField) and item.per is Per.ROW_TILES:
        return 1
    return int(item.count)


@functools.lru_cache(maxsize=32)
def padded(values: tuple[float, ...], vector: int = 0) -> F32:
    """A codebook as a float32 table, filled up with zeros to a power of two: no index of its width lies outside."""
    table = np.asarray(values, np.float32)
    if vector > 1:
        table = table.reshape(-1, vector)
    full = 1 << (len(table) - 1).bit_length()
    if full > len(table):
        table = np.concatenate([table, np.zeros((full - len(table), *table.shape[1:]), np.float32)])
    table.setflags(write=False)
    return table


@functools.lru_cache(maxsize=32)
def straight(values: tuple[float, ...]) -> tuple[float, float] | None:
    """First value and step of a codebook of small whole numbers on a line: it needs no table.

    >>> straight((-1.0, 0.0, 1.0)), straight((-1.0, 0.0, 2.0))
    ((-1.0, 1.0), None)
    """
    if not 2 <= len(values) <= 256 or any(abs(v) > 1 << 16 or v != int(v) for v in values):
        return None
    step = values[1] - values[0]
    on_line = all(v == values[0] + i * step for i, v in enumerate(values))
    return (values[0], step) if on_line else None


@functools.lru_cache(maxsize=32)
def log_table(leaf: LogUniform) -> F32:
    """sign * base ** (code + offset) of every code, the sign bit on top."""
    exponents = np.arange(1 << leaf.code_bits) + leaf.offset
    whole = leaf.base == 2 and float(leaf.offset).is_integer()
    values = np.ldexp(1.0, exponents.astype(np.int64)) if whole else np.float_power(leaf.base, exponents)
    with np.errstate(over="ignore"):
        table = values.astype(np.float32)
    table = np.concatenate([table, -table]) if leaf.has_sign else table
    table.setflags(write=False)
    return table
