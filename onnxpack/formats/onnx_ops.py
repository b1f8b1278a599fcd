"""Decoding as a piece of graph: the steps of `evaluate` as standard ONNX operators, all shapes known.

Nothing newer than opset 13 is needed, so every opset from 13 to 26 is served (before 14, arithmetic on codes goes
through int32: uint8 has none); codes are taken apart with BitShift
and Mod on uint8, small floats and codebooks are looked up with Gather, float16 fields inside blocks are put together
from their two bytes exactly.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.errors import UsageError
from onnxpack.formats import bits
from onnxpack.formats.base import Array, Decoder
from onnxpack.formats.datatypes import DataType, scale_table
from onnxpack.formats.geometry import BLOCKS, Geometry, stored_count
from onnxpack.formats.layout import BitPart, BitView, BlockField, DigitPart, Per, StorageOrder, dense

F32 = npt.NDArray[np.float32]
OUTPUT = "weight"
_UINT8_ARITHMETIC = 14  # the opset from which Add and Mul know uint8


@dataclass(frozen=True)
class Tensor:
    """A value of the graph: name, shape, element type."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Graph:
    """Collects nodes and constants; names are local and follow from the order of calls."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[bytes, Any] = {}

    def node(self, op: str, inputs: list[str], **attributes: Any) -> str:
        """Append a node; the name of its output."""
        from onnx import helper

        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def constant(self, array: Array) -> str:
        """A constant tensor, shared between equal ones."""
        from onnx import numpy_helper

        array = np.ascontiguousarray(array) if array.ndim else array
        key = repr((array.dtype.str, array.shape)).encode() + array.tobytes()
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, f"const_{len(self.constants)}")
        return str(self.constants[key].name)

    def decoder(self, output: str, name: str = OUTPUT) -> Decoder:
        """What was collected; the last node's output takes the fixed name, so that no Identity is needed."""
        last = self.nodes[-1]
        assert last.output[0] == output
        last.output[0] = name
        return Decoder(tuple(self.nodes), name, tuple(self.constants.values()))


class OnnxOps:
    """Emits a decoder's steps. The graph's inputs are the stored fields, by name."""

    def __init__(self, geometry: Geometry, opset: int) -> None:
        self.geometry, self.layout, self.graph, self.opset = geometry, geometry.layout, Graph(), opset
        self.lead = (geometry.rows, geometry.units)
        self.sliced: dict[str, Tensor] = {}

    # Plain steps -----------------------------------------------------------------------------------------------------

    def _shaped(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        if value.shape == shape:
            return value
        name = self.graph.node("Reshape", [value.name, self.graph.constant(np.array(shape, np.int64))])
        return Tensor(name, shape, value.dtype)

    def _cast(self, value: Tensor, dtype: Any) -> Tensor:
        from onnx import helper

        dtype = np.dtype(dtype)
        if value.dtype == dtype:
            return value
        name = self.graph.node("Cast", [value.name], to=int(helper.np_dtype_to_tensor_dtype(dtype)))
        return Tensor(name, value.shape, dtype)

    def _slice(self, value: Tensor, first: int, last: int, axis: int = -1, step: int = 1) -> Tensor:
        axis %= len(value.shape)
        if (first, last, step) == (0, value.shape[axis], 1):
            return value
        limits = [self.graph.constant(np.array([x], np.int64)) for x in (first, last, axis, step)]
        shape = list(value.shape)
        shape[axis] = -(-(last - first) // step)
        return Tensor(self.graph.node("Slice", [value.name, *limits]), tuple(shape), value.dtype)

    def _concat(self, values: list[Tensor], axis: int = -1) -> Tensor:
        if len(values) == 1:
            return values[0]
        axis %= len(values[0].shape)
        shape = list(values[0].shape)
        shape[axis] = sum(v.shape[axis] for v in values)
        return Tensor(self.graph.node("Concat", [v.name for v in values], axis=axis), tuple(shape), values[0].dtype)

    def _transpose(self, value: Tensor, perm: tuple[int, ...]) -> Tensor:
        if perm == tuple(range(len(perm))):
            return value
        shape = tuple(value.shape[p] for p in perm)
        return Tensor(self.graph.node("Transpose", [value.name], perm=list(perm)), shape, value.dtype)

    def _binary(self, op: str, a: Tensor, b: Tensor, **attributes: Any) -> Tensor:
        shape = tuple(np.broadcast_shapes(a.shape, b.shape))
        return Tensor(self.graph.node(op, [a.name, b.name], **attributes), shape, a.dtype)

    def _const(self, array: Array) -> Tensor:
        return Tensor(self.graph.constant(array), array.shape, array.dtype)

    def _gather(self, table: Array, index: Tensor) -> Tensor:
        wide = self._cast(index, np.int32)
        name = self.graph.node("Gather", [self.graph.constant(table), wide.name], axis=0)
        return Tensor(name, index.shape + table.shape[1:], table.dtype)

    # Fields ----------------------------------------------------------------------------------------------------------

    def _field(self, f: BlockField) -> Tensor:
        """Stored elements [rows or 1, blocks or 1, count]; a field is sliced once however often it is read."""
        if f.name not in self.sliced:
            self.sliced[f.name] = self._sliced(f)
        return self.sliced[f.name]

    def _sliced(self, f: BlockField) -> Tensor:
        g = self.geometry
        if g.order is StorageOrder.INTERLEAVED:
            size = g.layout.bytes_per_block
            spec = g.specs()[BLOCKS]
            blocks = self._shaped(Tensor(BLOCKS, spec.shape, spec.dtype), (*self.lead, size))
            return self._slice(blocks, f.bit_offset // 8, f.bit_offset // 8 + f.nbytes)
        spec = g.specs()[f.name]
        stored = Tensor(f.name, spec.shape, spec.dtype)
        count = stored_count(f)
        if f.per is Per.TENSOR:
            return self._shaped(stored, (1, 1, count))
        if f.per is Per.ROW:
            return self._shaped(stored, (g.shape[0], 1, count))
        if f.per is Per.COLUMN:
            return self._shaped(stored, (1, g.shape[1], 1))
        if f.per is Per.ROW_TILES:
            if f.data_type.native:
                return self._shaped(stored, (*self.lead, 1))
            packed = spec.shape[-1]
            slots = packed * 8 // f.bit_width
            rows = self._view(dense("row", f.name, f.bit_width, slots), self._shaped(stored, (g.rows, 1, packed)))
            return self._shaped(self._slice(rows, 0, g.units), (*self.lead, 1))
        return self._shaped(self._filled(stored, count * g.units), (*self.lead, count))

    def _filled(self, stored: Tensor, wanted: int) -> Tensor:
        have = math.prod(stored.shape)
        if not self.geometry.flat or have == wanted:
            return stored
        flat = self._shaped(stored, (have,))
        return self._concat([flat, self._const(np.zeros(wanted - have, stored.dtype))])

    def codes(self, name: str) -> Tensor:
        item = self.layout.find(name)
        if isinstance(item, BitView):
            return self._view(item, None)
        assert item is not None
        stored = self._field(item)
        if item.data_type.native or item.per is Per.ROW_TILES or item.bit_width == 8:
            return stored
        return self._view(dense(name, name, item.bit_width, item.count), stored)

    def numbers(self, name: str) -> Tensor:
        item = self.layout.find(name)
        if not isinstance(item, BlockField):
            return self._cast(self.codes(name), np.float32)
        table = scale_table(item.data_type)
        if table is not None:
            return self._gather(table, self._field(item))
        if self.geometry.order is StorageOrder.INTERLEAVED and item.data_type is DataType.FLOAT16:
            return self._float16(self._field(item))
        if self.geometry.order is StorageOrder.INTERLEAVED and item.data_type is DataType.INT8:
            return self._gather(np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32), self._field(item))
        if self.geometry.order is StorageOrder.INTERLEAVED and item.data_type.bits > 8:
            raise UsageError(f"{item.data_type.name} fields inside blocks have no ONNX decoder")
        return self._cast(self.codes(name), np.float32)

    def _float16(self, raw: Tensor) -> Tensor:
        """float16 from its two bytes, exactly: table[high] + (low * half_step[high]) * 2.

        For infinities the step is so large that any low byte overflows against them into NaN, as it should.
        """
        count = raw.shape[-1] // 2
        pair = self._shaped(raw, (*raw.shape[:-1], count, 2))
        low, high = (self._shaped(self._slice(pair, i, i + 1), (*raw.shape[:-1], count)) for i in (0, 1))
        base, step = float16_tables()
        part = self._binary("Mul", self._cast(low, np.float32), self._gather(step, high))
        part = self._binary("Mul", part, self._const(np.array(2, np.float32)))
        return self._binary("Add", self._gather(base, high), part)

    # Views -----------------------------------------------------------------------------------------------------------

    def _view(self, view: BitView, given: Tensor | None) -> Tensor:
        windows: dict[int, list[BitPart | DigitPart]] = {}
        every: tuple[BitPart | DigitPart, ...] = (*view.parts, *view.digit_parts)
        for part in every:
            windows.setdefault(part.start, []).append(part)
        joined = any(len(parts) > 1 for parts in windows.values()) or any(p.shift for p in view.parts)
        wide = view.bits > 8 or any(_is_scattered(p) for p in view.parts) or (joined and self.opset < _UINT8_ARITHMETIC)
        made = []
        for start in sorted(windows):
            total: Tensor | None = None
            for part in windows[start]:
                data = given or self._bytes(part.field)
                one = self._digits(part, data) if isinstance(part, DigitPart) else self._bits(part, data, wide)
                total = one if total is None else self._binary("Add", total, one)
            assert total is not None
            made.append(total)
        return self._concat(made)

    def _bytes(self, name: str) -> Tensor:
        stored = self._field(next(f for f in self.layout.fields if f.name == name))
        if stored.dtype != np.uint8:
            raise UsageError(f"{name}: codes inside {stored.dtype} words have no ONNX decoder")
        return stored

    def _bits(self, part: BitPart, data: Tensor, wide: bool) -> Tensor:
        if _is_scattered(part):
            return self._scattered(part, data)
        plan = bits.split(part)
        # Every place is in the same byte: shift by all places at once, then put the axes in order.
        walked = [i for i, w in enumerate(plan.pieces[0].where) if isinstance(w, slice)]
        inner = [i for i in range(len(plan.dims)) if i not in walked]
        data = self._walk(data, plan.pieces[0])
        lead, places = data.shape[:2], len(plan.pieces)
        counts = tuple(plan.dims[i] for i in walked)
        code = self._shaped(data, (*lead, math.prod(counts), 1))
        downs = np.array([p.down for p in plan.pieces], np.uint8)
        if downs.any():
            code = self._binary("BitShift", code, self._const(downs), direction="RIGHT")
        if any(p.down + p.width < 8 for p in plan.pieces):
            code = self._binary("Mod", code, self._const(np.array(1 << part.bit_width, np.uint8)))
        code = self._shaped(code, (*lead, *counts, *(plan.dims[i] for i in inner)))
        order = [*walked, *inner]
        code = self._transpose(code, (0, 1, *(2 + order.index(i) for i in range(len(order)))))
        code = self._shaped(code, (*lead, math.prod(counts) * places))
        if wide:
            code = self._cast(code, np.int32)
        if part.shift:
            code = self._binary("Mul", code, self._const(np.array(1 << part.shift, code.dtype)))
        return code

    def _walk(self, data: Tensor, piece: bits.Piece) -> Tensor:
        """The bytes [rows, blocks, product of counts] that a piece reads, in its order."""
        at = piece.byte + np.zeros(1, np.int64)
        for count, stride in zip(piece.counts, piece.strides, strict=True):
            at = (at[:, None] + np.arange(count) * stride).reshape(-1)
        if np.array_equal(at, np.arange(at[0], at[0] + len(at))):
            return self._slice(data, int(at[0]), int(at[0]) + len(at))
        name = self.graph.node("Gather", [data.name, self.graph.constant(at)], axis=2)
        return Tensor(name, (*data.shape[:2], len(at)), data.dtype)

    def _scattered(self, part: BitPart, data: Tensor) -> Tensor:
        """Codes that straddle bytes: each is a sum of pieces, with byte, shift and mask of its own (int32)."""
        byte, down, mask, up = _pieces_by_code(part)
        total: Tensor | None = None
        for i in range(len(byte)):
            name = self.graph.node("Gather", [data.name, self.graph.constant(byte[i])], axis=2)
            code = self._cast(Tensor(name, (*data.shape[:2], part.count), data.dtype), np.int32)
            for op, operand in (("Div", down[i]), ("Mod", mask[i]), ("Mul", up[i])):
                code = self._binary(op, code, self._const(operand.astype(np.int32)))
            total = code if total is None else self._binary("Add", total, code)
        assert total is not None
        return total

    def _digits(self, part: DigitPart, data: Tensor) -> Tensor:
        stored = self._slice(data, part.byte_offset, part.byte_offset + part.count)
        code = self._gather(bits.digit_table(part.base, part.digits, part.fraction), stored)
        code = code if part.byte_major else self._transpose(code, (0, 1, 3, 2))
        return self._shaped(code, (*code.shape[:2], part.elements))

    # Ops -------------------------------------------------------------------------------------------------------------

    def index(self, terms: list[tuple[Tensor, int]]) -> Tensor:
        total: Tensor | None = None
        for codes, multiplier in terms:
            one = self._cast(codes, np.int32)
            if multiplier != 1:
                one = self._binary("Mul", one, self._const(np.array(multiplier, np.int32)))
            total = one if total is None else self._binary("Add", total, one)
        assert total is not None
        return total

    def table(self, values: F32, index: Tensor) -> Tensor:
        return self._gather(values, index)

    def to_float(self, codes: Tensor, signed_bits: int) -> Tensor:
        if signed_bits and codes.dtype.kind == "u":
            top = self._const(np.array(signed_bits - 1, codes.dtype))
            sign = self._cast(self._binary("BitShift", codes, top, direction="RIGHT"), np.float32)
            return self.subtract(self._cast(codes, np.float32), self.multiply(sign, self.constant(1 << signed_bits)))
        return self._cast(codes, np.float32)

    def reshape(self, value: Tensor, tail: tuple[int, ...]) -> Tensor:
        return self._shaped(value, value.shape[:2] + tail)

    def permute(self, value: Tensor, perm: tuple[int, ...]) -> Tensor:
        return self._transpose(value, (0, 1, *(2 + p for p in perm)))

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary("Mul", a, b)

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary("Div", a, b)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary("Add", a, b)

    def subtract(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary("Sub", a, b)

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary("Max", a, b)

    def constant(self, value: float) -> Tensor:
        return self._const(np.array(value, np.float32))

    def finish(self, value: Tensor) -> Decoder:
        """Blocks [rows, blocks, block_size] as the weight [N, K]; filling of cut blocks is dropped."""
        g = self.geometry
        value = self._slice(self._shaped(value, (g.rows, g.units * g.unit)), 0, g.width)
        value = self._shaped(value, g.shape)
        return self.graph.decoder(value.name)


def _is_scattered(part: BitPart) -> bool:
    pieces = bits.split(part).pieces
    return len({p.byte for p in pieces}) > 1 or len({p.where for p in map(_Where, pieces)}) < len(pieces)


@dataclass(frozen=True)
class _Where:
    """A piece's place as a hashable key (slices are not, before Python 3.12)."""

    piece: bits.Piece

    @property
    def where(self) -> str:
        return repr(self.piece.where)


def _pieces_by_code(part: BitPart) -> tuple[Array, Array, Array, Array]:
    """For the i-th piece of every code: byte, divisor, modulus, multiplier, each int64 [pieces, count]."""
    plan = bits.split(part)
    most = max(sum(repr(p.where) == repr(q.where) for q in plan.pieces) for p in plan.pieces)
    byte, down, mask, up = (np.zeros((most, *plan.dims), np.int64) for _ in range(4))
    down[...], mask[...] = 1, 1
    seen: dict[str, int] = {}
    for piece in plan.pieces:
        i = seen[repr(piece.where)] = seen.get(repr(piece.where), -1) + 1
        at = piece.byte + np.zeros((), np.int64)
        for count, stride in zip(piece.counts, piece.strides, strict=True):
            at = at[..., None] + np.arange(count) * stride
        where = (i, *piece.where)
        byte[where], down[where] = at, 1 << piece.down
        mask[where], up[where] = 1 << piece.width, 1 << piece.up
    flat = (most, part.count)
    return byte.reshape(flat), down.reshape(flat), mask.reshape(flat), up.reshape(flat)


@functools.cache
def float16_tables() -> tuple[F32, F32]:
    """By high byte: the float16 with low byte 0, and half the step of the low byte."""
    high = np.arange(256, dtype=np.uint16) << 8
    base = high.view(np.float16).astype(np.float32)
    exponent = np.maximum((high >> 10) & 31, 1).astype(np.int64)
    step = np.ldexp(1.0, exponent - 26).astype(np.float32)
    step[(high & 0x7FFF) == 0x7C00] = -np.float32(3e38)
    return base, np.where(high & 0x8000, -step, step).astype(np.float32)
