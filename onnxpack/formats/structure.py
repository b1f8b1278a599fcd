"""Structure types: the physical description of a stored tensor, all counts concrete, its size computed from it.

A structure has serialized fields (arrays, bit packings, nested structures) and constants, which take no bytes.
Structures nest inline or by index into a model-level list.

>>> block = StructType("BLOCK", (Field("d", array=ArrayType(DataType.FLOAT16, (1,))),
...                              Field("qs", array=ArrayType(DataType.UINT4, (32,)))))
>>> tensor = StructType("TENSOR", (Field("blocks", struct=StructRef((4, 8), inline=block)),))
>>> tensor.nbytes()
576
>>> tensor.check_length(575)
Traceback (most recent call last):
...
onnxpack.formats.layout.ProfileError: TENSOR: 575 bytes are stored, the type says 576
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnxpack.formats.datatypes import DataType
from onnxpack.formats.layout import require

_DEPTH = 32
_MOST = 1 << 62


def _extent(dims: tuple[int, ...], path: str) -> int:
    require(all(d >= 0 for d in dims), path, "a dimension is negative")
    count = math.prod(dims)
    require(count < _MOST, path, "the dimensions overflow")
    return count


@dataclass(frozen=True)
class ArrayType:
    """Elements of a scalar type without gaps (sub-byte elements: least significant bits first, last byte filled up)."""

    element_type: DataType
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        require(self.element_type.bits > 0, "element_type", f"{self.element_type.name} has no width")
        _extent(self.dims, "dims")

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return -(-math.prod(self.dims) * self.element_type.bits // 8)


@dataclass(frozen=True)
class Component:
    """Bits of one element of a bit packing."""

    name: str
    width: int


@dataclass(frozen=True)
class BitPacking:
    """Elements of a width that no scalar type has; components are named from the most significant bit down."""

    dims: tuple[int, ...]
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        _extent(self.dims, "dims")
        require(bool(self.components), "components", "an element has bits")
        require(all(1 <= c.width <= 64 for c in self.components), "components", "a width is not 1 to 64")

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return sum(c.width for c in self.components)

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return -(-math.prod(self.dims) * self.bits // 8)


@dataclass(frozen=True)
class StructRef:
    """An array of structures (dims () for one), inline or by index into the model's list of types."""

    dims: tuple[int, ...] = ()
    type_index: int | None = None
    inline: StructType | None = None

    def __post_init__(self) -> None:
        _extent(self.dims, "dims")
        require(
            (self.type_index is None) != (self.inline is None), "type_index", "an index or an inline type, one of them"
        )

    def resolve(self, types: Sequence[StructType]) -> StructType:
        """The structure that is meant."""
        if self.inline is not None:
            return self.inline
        known = self.type_index is not None and 0 <= self.type_index < len(types)
        require(known, "type_index", f"{self.type_index} is not one of {len(types)} types")
        return types[self.type_index or 0]


@dataclass(frozen=True)
class Constant:
    """A tensor that is part of the type, not of the payload."""

    data_type: DataType
    dims: tuple[int, ...]
    values: tuple[int | float | str, ...]

    def __post_init__(self) -> None:
        count = _extent(self.dims, "dims")
        require(count == len(self.values), "values", f"{len(self.values)} values for dims {list(self.dims)}")


@dataclass(frozen=True)
class Field:
    """One named member: exactly one of array, bits, struct (serialized) and constant."""

    name: str
    array: ArrayType | None = None
    bits: BitPacking | None = None
    struct: StructRef | None = None
    constant: Constant | None = None
    doc_string: str = ""

    def __post_init__(self) -> None:
        given = [x for x in (self.array, self.bits, self.struct, self.constant) if x is not None]
        require(len(given) == 1, self.name or "name", "one of array, bits, struct, constant")


@dataclass(frozen=True)
class Function:
    """The function that decodes or encodes: domain, name and the ai.onnx opset it is written for."""

    domain: str
    name: str
    opset: int


@dataclass(frozen=True)
class Output:
    """What the decoder gives: element type and logical shape."""

    data_type: DataType
    dims: tuple[int, ...]


@dataclass(frozen=True)
class StructType:
    """A named structure; a root one also says what it decodes to, and by which functions."""

    name: str
    fields: tuple[Field, ...]
    doc_string: str = ""
    metadata_props: tuple[tuple[str, str], ...] = ()
    decoder: Function | None = None
    encoder: Function | None = None
    output: Output | None = None

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        require(len(set(names)) == len(names), "fields", "two fields have one name")

    def nbytes(self, types: Sequence[StructType] = ()) -> int:
        """Exact bytes of the payload."""
        return _size(self, types, 0)

    def bits_per_weight(self, types: Sequence[StructType] = ()) -> float:
        """True bits per decoded value, everything serialized counted."""
        require(self.output is not None, "output", "the type does not say what it decodes to")
        assert self.output is not None
        return 8 * self.nbytes(types) / math.prod(self.output.dims)

    def check_length(self, stored: int, types: Sequence[StructType] = ()) -> None:
        """ProfileError unless the stored length is the computed one."""
        wanted = self.nbytes(types)
        require(stored == wanted, self.name, f"{stored} bytes are stored, the type says {wanted}")

    def find(self, name: str) -> Field | None:
        """The field of that name."""
        return next((f for f in self.fields if f.name == name), None)


def _size(struct: StructType, types: Sequence[StructType], depth: int) -> int:
    require(depth < _DEPTH, struct.name, f"nested deeper than {_DEPTH} (or within itself)")
    total = 0
    for f in struct.fields:
        if f.array is not None:
            total += f.array.nbytes
        elif f.bits is not None:
            total += f.bits.nbytes
        elif f.struct is not None:
            total += math.prod(f.struct.dims) * _size(f.struct.resolve(types), types, depth + 1)
    require(total < _MOST, struct.name, "the size overflows")
    return total


def to_list(root: StructType) -> tuple[StructType, list[StructType]]:
    """The same type with every inline structure moved into a model-level list (equal ones once)."""
    types: list[StructType] = []
    return _lifted(root, types), types


def _lifted(struct: StructType, types: list[StructType]) -> StructType:
    fields = []
    for f in struct.fields:
        if f.struct is not None and f.struct.inline is not None:
            inner = _lifted(f.struct.inline, types)
            if inner not in types:
                types.append(inner)
            f = Field(f.name, struct=StructRef(f.struct.dims, type_index=types.index(inner)), doc_string=f.doc_string)
        fields.append(f)
    return _with_fields(struct, fields)


def to_inline(root: StructType, types: Sequence[StructType], depth: int = 0) -> StructType:
    """Inverse of to_list."""
    require(depth < _DEPTH, root.name, f"nested deeper than {_DEPTH} (or within itself)")
    fields = []
    for f in root.fields:
        if f.struct is not None:
            inner = to_inline(f.struct.resolve(types), types, depth + 1)
            f = Field(f.name, struct=StructRef(f.struct.dims, inline=inner), doc_string=f.doc_string)
        fields.append(f)
    return _with_fields(root, fields)


def _with_fields(struct: StructType, fields: list[Field]) -> StructType:
    rest = (struct.doc_string, struct.metadata_props, struct.decoder, struct.encoder, struct.output)
    return StructType(struct.name, tuple(fields), *rest)
