"""Profile and shape to structure type, and back without loss.

Serialized codes and parameters become fields; every parameter of the profile becomes a named constant (or, for
operator names and notes, metadata), nested profiles become nested structures. Nothing of a profile is kept elsewhere,
and the way back regenerates the type and compares, so a type whose payload and constants disagree is refused.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import numpy as np

from onnxpack.formats.datatypes import DataType
from onnxpack.formats.geometry import geometry, matrix, stored_count
from onnxpack.formats.layout import BlockField, BlockLayout, Per, StorageOrder, require
from onnxpack.formats.profile_json import from_data, to_data
from onnxpack.formats.profiles import (
    CastUniform,
    Codebook,
    FloatingPointUniform,
    FunctionUniform,
    LinearUniform,
    LogUniform,
    QuantizationProfile,
    SparseQuantization,
    TilingQuantization,
)
from onnxpack.formats.structure import (
    ArrayType,
    BitPacking,
    Component,
    Constant,
    Field,
    Function,
    Output,
    StructRef,
    StructType,
)
from onnxpack.formats.tensors import TensorLayout

_KIND = "kind"
_PREFIX = "profile."
_TYPE_FIELDS = frozenset({"storage_type", "data_type", "outlier_data_type", "index_data_type"})
_WIDE_FIELDS = frozenset({"tile_shape", "zero_point"})
_OPERATORS = ("quantize_op", "dequantize_op")
_MOST_REGIONS = 1 << 12


def to_structure(
    profile: QuantizationProfile,
    shape: tuple[int, ...],
    name: str,
    decoder: Function | None = None,
    encoder: Function | None = None,
) -> StructType:
    """The concrete physical type of a tensor of this logical shape. ProfileError where the two do not fit."""
    body = _body(profile, shape, name)
    output = Output(profile.data_type, tuple(shape))
    return StructType(name, body.fields, body.doc_string, body.metadata_props, decoder, encoder, output)


def from_structure(struct: StructType) -> tuple[QuantizationProfile, tuple[int, ...]]:
    """Profile and shape of a type. ProfileError when the type is not one that a profile gives."""
    require(struct.output is not None, "output", "the type does not say what it decodes to")
    assert struct.output is not None
    profile: QuantizationProfile = from_data(_profile_data(struct, 0), QuantizationProfile)
    again = to_structure(profile, struct.output.dims, struct.name, struct.decoder, struct.encoder)
    require(again == struct, struct.name, f"{_difference(again, struct)} does not fit the constants")
    return profile, struct.output.dims


def _difference(a: StructType, b: StructType) -> str:
    for f in a.fields:
        if b.find(f.name) != f:
            return f"field {f.name}"
    extra = [f.name for f in b.fields if a.find(f.name) is None]
    return f"field {extra[0]}" if extra else "the order of fields, the output or a note"


# Constants


def _body(profile: QuantizationProfile, shape: tuple[int, ...], name: str) -> StructType:
    data = to_data(profile)
    value = data.pop(profile.kind)
    doc = data.pop("doc_string", "")
    props = [(_KIND, profile.kind), *(tuple(p) for p in data.pop("metadata_props", []))]
    if profile.function is not None:
        props += [(key, value.pop(key)) for key in _OPERATORS if key in value]
    payload = _payload(profile, shape, name)
    if any(f.struct is not None and f.name.startswith("tiles") for f in payload):
        value["elem_quant_count"] = len(value.pop("elem_quant"))
    if any(f.name == "base" for f in payload):
        value.pop("base_quant")
    taken = {f.name for f in payload}
    constants = [_apart(f, taken) for f in (*_fields_of(value), *_fields_of(data))]
    return StructType(name, (*payload, *constants), doc, tuple(props))


def _apart(f: Field, taken: set[str]) -> Field:
    """A constant under a name of its own where a serialized field already has its name."""
    if f.name not in taken:
        return f
    return Field(_PREFIX + f.name, struct=f.struct, constant=f.constant)


def _fields_of(data: dict[str, Any]) -> list[Field]:
    made = []
    for key, value in data.items():
        if isinstance(value, dict):
            made.append(Field(key, struct=StructRef(inline=StructType(key, tuple(_fields_of(value))))))
        elif isinstance(value, list) and value and isinstance(value[0], dict | list):
            items = enumerate(value)
            made += [Field(f"{key}[{i}]", struct=StructRef(inline=StructType(key, tuple(_item(v))))) for i, v in items]
        elif key in ("scale_float", "scale_int"):
            data_type = DataType.FLOAT if key == "scale_float" else DataType.INT32
            made.append(Field("scale", constant=Constant(data_type, (), (value,))))
        else:
            made.append(Field(key, constant=_constant(key, value)))
    return made


def _item(value: Any) -> list[Field]:
    return _fields_of(value if isinstance(value, dict) else {"items": value})


def _constant(key: str, value: Any) -> Constant:
    many = isinstance(value, list)
    values = tuple(value) if many else (value,)
    if key in _TYPE_FIELDS:
        values = tuple(int(DataType[v]) for v in values)
    return Constant(_constant_type(key, values), (len(values),) if many else (), values)


def _constant_type(key: str, values: tuple[Any, ...]) -> DataType:
    if any(isinstance(v, str) for v in values):
        return DataType.STRING
    if all(isinstance(v, bool) for v in values):
        return DataType.BOOL
    if all(isinstance(v, int) for v in values):
        wide = key in _WIDE_FIELDS or any(abs(v) >= 1 << 31 for v in values)
        return DataType.INT64 if wide else DataType.INT32
    exact = all(float(np.float32(v)) == v for v in values)
    return DataType.FLOAT if exact else DataType.DOUBLE


def _profile_data(struct: StructType, depth: int) -> dict[str, Any]:
    require(depth < 32, struct.name, "nested too deep")
    props = list(struct.metadata_props)
    require(bool(props) and props[0][0] == _KIND, "metadata_props", "the first entry names the kind")
    kind = props.pop(0)[1]
    value = _data_of(struct)
    known = {f for f in QuantizationProfile.__dataclass_fields__ if f != kind}
    data: dict[str, Any] = {key: value.pop(key) for key in list(value) if key in known}
    if kind == "function":
        value |= {key: v for key, v in props if key in _OPERATORS}
        props = [(key, v) for key, v in props if key not in _OPERATORS]
    if kind == "tiling" and "elem_quant_count" in value:
        value["elem_quant"] = _cycle(struct, int(value.pop("elem_quant_count")), depth)
    base = struct.find("base")
    if kind == "sparse" and base is not None and base.struct is not None:
        value["base_quant"] = _profile_data(base.struct.resolve(()), depth + 1)
    data[kind] = value
    if struct.doc_string:
        data["doc_string"] = struct.doc_string
    if props:
        data["metadata_props"] = [list(p) for p in props]
    return data


def _cycle(struct: StructType, count: int, depth: int) -> list[Any]:
    """The profiles that tiles cycle through: of the first `count` tiles, read back from their types."""
    found: list[Any] = []
    for f in struct.fields:
        if f.struct is not None and f.name.startswith("tiles"):
            inner = _profile_data(f.struct.resolve(()), depth + 1)
            found += [inner] * min(math.prod(f.struct.dims), count - len(found))
    require(len(found) == count, "elem_quant_count", f"{count} profiles, but the tiles have {len(found)}")
    return found


def _data_of(struct: StructType) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for f in struct.fields:
        if f.struct is not None and (f.name.startswith("tiles") or f.name in ("base", "blocks")):
            continue
        if f.constant is not None:
            key, value = _constant_data(f)
            data[key] = value
        elif f.struct is not None:
            inner = _data_of(f.struct.resolve(()))
            key, _, at = f.name.removeprefix(_PREFIX).partition("[")
            if at:
                data.setdefault(key, []).append(inner.get("items", inner))
            else:
                data[key] = inner
    return data


def _constant_data(f: Field) -> tuple[str, Any]:
    assert f.constant is not None
    name = f.name.removeprefix(_PREFIX)
    if name == "scale":
        name = "scale_int" if f.constant.data_type is DataType.INT32 else "scale_float"
    return name, list(f.constant.values) if f.constant.dims else f.constant.values[0]


# Payload


def _payload(profile: QuantizationProfile, shape: tuple[int, ...], name: str) -> list[Field]:
    if profile.block is not None:
        return _laid_out(profile, shape, name)
    if profile.tensors is not None:
        return _stored_tensors(profile.tensors, shape, name)
    value, count = profile.value, math.prod(shape)
    require(count >= 1, "shape", "every dimension is at least 1")
    if isinstance(value, TilingQuantization):
        return _tiles(value, shape, name)
    if isinstance(value, SparseQuantization):
        return _sparse(value, shape, name)
    if isinstance(value, LinearUniform):
        return [_codes("values", value.storage_type, value.bits, count)]
    if isinstance(value, Codebook):
        return [_indices(value, count)]
    if isinstance(value, FloatingPointUniform):
        return _floats(value, count)
    if isinstance(value, LogUniform):
        return _log(value, count)
    if isinstance(value, CastUniform):
        return [Field("values", array=ArrayType(value.storage_type, tuple(shape)))]
    assert isinstance(value, FunctionUniform)
    if value.block_layout is not None:
        blocks = _whole(count, value.block_layout.block_size, "block_layout.block_size")
        block = StructType(f"{name}_BLOCK", tuple(_block_fields(value.block_layout)))
        return [Field("blocks", struct=StructRef((blocks,), inline=block))]
    return [_codes("payload", value.storage_type, value.bits, count)]


def _whole(count: int, size: int, path: str) -> int:
    require(size >= 1 and count % size == 0, path, f"{count} values are not a multiple of {size}")
    return count // size


def _codes(name: str, storage: DataType, bits: int, count: int) -> Field:
    if bits == storage.bits:
        return Field(name, array=ArrayType(storage, (count,)))
    return Field(name, array=ArrayType(DataType.UINT8, (-(-count * bits // 8),)))


def _indices(value: Codebook, count: int) -> Field:
    vectors = _whole(count, max(1, value.vector_size), "vector_size") * max(1, value.num_codebooks)
    if value.index_bits:
        nbytes = -(-vectors * value.index_bits // 8)
    else:
        require(value.packed_count > 0, "packed_count", "base-N codes say how many go into how many bytes")
        nbytes = -(-vectors // value.packed_count) * value.packed_bytes
    return Field("indices", array=ArrayType(DataType.UINT8, (nbytes,)))


_STANDARD = {
    (1, 2, 1, 1): DataType.FLOAT4E2M1,
    (1, 2, 3, 1): DataType.FLOAT6E2M3,
    (1, 3, 2, 3): DataType.FLOAT6E3M2,
    (1, 4, 3, 7): DataType.FLOAT8E4M3FN,
    (1, 5, 2, 15): DataType.FLOAT8E5M2,
}


def _standard_float(value: FloatingPointUniform) -> DataType | None:
    """The ONNX type that these codes are, where there is one."""
    found = _STANDARD.get((value.sign_bits, value.exponent_bits, value.mantissa_bits, value.exponent_bias))
    specials = {DataType.FLOAT8E4M3FN: (False, True), DataType.FLOAT8E5M2: (True, True)}
    if found is None or specials.get(found, (False, False)) != (value.has_inf, value.has_nan):
        return None
    return found


def _floats(value: FloatingPointUniform, count: int) -> list[Field]:
    if value.split_storage:
        planes = value.split_bits or (value.sign_bits + value.exponent_bits, value.mantissa_bits)
        named = (
            ("sign_exponent", "mantissa") if not value.split_bits else tuple(f"plane_{i}" for i in range(len(planes)))
        )
        packings = [BitPacking((count,), (Component(n, bits),)) for n, bits in zip(named, planes, strict=True)]
        return [Field(n, bits=packing) for n, packing in zip(named, packings, strict=True)]
    standard = _standard_float(value)
    if standard is not None:
        return [Field("values", array=ArrayType(standard, (count,)))]
    return [Field("packed", bits=BitPacking((count,), _components(value)))]


def _components(value: FloatingPointUniform) -> tuple[Component, ...]:
    widths = (("sign", value.sign_bits), ("exponent", value.exponent_bits), ("mantissa", value.mantissa_bits))
    return tuple(Component(n, w) for n, w in widths if w)


def _log(value: LogUniform, count: int) -> list[Field]:
    storage = {2: DataType.UINT2, 4: DataType.UINT4, 8: DataType.UINT8}.get(value.bits, DataType.UINT8)
    fields = [_codes("codes", storage, value.bits, count)]
    if value.has_sign:
        fields.append(Field("signs", array=ArrayType(DataType.UINT8, (-(-count // 8),))))
    return fields


def _sparse(value: SparseQuantization, shape: tuple[int, ...], name: str) -> list[Field]:
    base = _body(value.base_quant, shape, f"{name}_BASE")
    count = math.ceil(value.outlier_ratio * math.prod(shape))
    fields = [Field("base", struct=StructRef(inline=base))]
    if value.csr:
        fields.append(Field("row_offsets", array=ArrayType(DataType.INT32, (shape[0] + 1,))))
    fields.append(Field("outlier_indices", array=ArrayType(value.index_data_type, (count,))))
    return [*fields, Field("outlier_values", array=ArrayType(value.outlier_data_type, (count,)))]


def _tiles(value: TilingQuantization, shape: tuple[int, ...], name: str) -> list[Field]:
    axes = value.axes or (0,)
    dims = list(shape) if value.axes else [math.prod(shape)]
    require(max(axes) < len(dims), "axes", f"the tensor has {len(dims)} axes")
    grid, tile = [], list(dims)
    for axis, extent in zip(axes, value.tile_shape, strict=True):
        tile[axis] = extent or dims[axis]
        grid.append(_whole(dims[axis], tile[axis], "tile_shape"))
    kinds = [_body(p, tuple(tile), f"{name}_TILE") for p in value.elem_quant]
    if all(kind == kinds[0] for kind in kinds):
        return [Field("tiles", struct=StructRef(tuple(grid), inline=kinds[0]))]
    count = math.prod(grid)
    require(
        count <= _MOST_REGIONS, "elem_quant", f"{count} tiles of changing type are more than {_MOST_REGIONS} regions"
    )
    require(count >= len(kinds), "elem_quant", f"{len(kinds)} profiles for {count} tiles")
    runs = [(kind, len(list(run))) for kind, run in groupby(i % len(kinds) for i in range(count))]
    return [Field(f"tiles_{i}", struct=StructRef((n,), inline=kinds[k])) for i, (k, n) in enumerate(runs)]


def _stored_tensors(layout: TensorLayout, shape: tuple[int, ...], name: str) -> list[Field]:
    n, k = matrix(shape, name)
    sizes = layout.at({"N": n, "K": k})
    return [Field(f.name, array=ArrayType(f.data_type, sizes.dims(f.dims))) for f in layout.fields]


def _laid_out(profile: QuantizationProfile, shape: tuple[int, ...], name: str) -> list[Field]:
    g = geometry(profile, shape, name)
    if g.order is StorageOrder.INTERLEAVED:
        block = StructType(f"{name}_BLOCK", tuple(_block_fields(g.layout)))
        dims = (g.units,) if g.flat else (g.rows, g.units)
        return [Field("blocks", struct=StructRef(dims, inline=block))]
    leaf = profile.leaf.value
    components = _components(leaf) if isinstance(leaf, FloatingPointUniform) else ()
    specs = g.specs()
    return [_sequential(f, specs[f.name].shape, getattr(leaf, "codes", ""), components) for f in g.layout.fields]


def _sequential(f: BlockField, dims: tuple[int, ...], codes: str, floats: tuple[Component, ...]) -> Field:
    if f.data_type is not DataType.UNDEFINED:
        return Field(f.name, array=ArrayType(f.data_type, dims))
    elements = 8 * dims[-1] // f.bit_width
    exact = f.per is not Per.ROW_TILES and stored_count(f) * 8 == f.count * f.bit_width
    if not exact or elements * f.bit_width != 8 * dims[-1]:
        return Field(f.name, array=ArrayType(DataType.UINT8, dims))
    parts = floats if f.name == codes and floats else (Component("code", f.bit_width),)
    return Field(f.name, bits=BitPacking((*dims[:-1], elements), parts))


def _block_fields(layout: BlockLayout) -> list[Field]:
    fields, at = [], 0
    for f in sorted((f for f in layout.fields if f.per is Per.TILE), key=lambda f: f.bit_offset):
        gap = f.bit_offset // 8 - at
        if gap:
            fields.append(Field(f"padding_{at}", array=ArrayType(DataType.UINT8, (gap,))))
        fields.append(_block_field(f))
        at = f.bit_offset // 8 + f.nbytes
    if layout.bytes_per_block > at:
        fields.append(Field(f"padding_{at}", array=ArrayType(DataType.UINT8, (layout.bytes_per_block - at,))))
    return fields


def _block_field(f: BlockField) -> Field:
    if f.data_type is not DataType.UNDEFINED:
        return Field(f.name, array=ArrayType(f.data_type, (f.count,)))
    return Field(f.name, bits=BitPacking((f.count,), (Component("code", f.bit_width),)))
