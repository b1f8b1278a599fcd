"""What can be said about a format: one row of the table, or its layout drawn byte by byte.

>>> from onnxpack.formats import get
>>> for line in drawing(get("tq2_0").profile.layout): print(line)
bytes 0-31: qs = trits[96-127] trits[64-95] trits[32-63] trits[0-31]
bytes 32-63: qs = trits[224-255] trits[192-223] trits[160-191] trits[128-159]
bytes 64-65: d = FLOAT16
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxpack.formats.base import Format
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.layout import BitPart, BitView, BlockField, BlockLayout, Per, Role, dense
from onnxpack.formats.registry import get, names
from onnxpack.formats.tensor_numpy import steps, without_copies
from onnxpack.formats.tensors import JoinView, Sizes, SumView, TensorLayout, TensorView

SAMPLE = (4096, 4096)
"""The shape that figures are given for."""


def summary(made: Format) -> dict[str, Any]:
    """The keys that `formats --json` prints for each format."""
    total = sum(spec.nbytes for spec in made.fields(SAMPLE).values())
    return {
        "name": made.name,
        "row": made.row,
        "family": made.family,
        "bits_per_weight": 8 * total / (SAMPLE[0] * SAMPLE[1]),
        "encode": made.encodes,
        "decode": True,
        "onnx_decoder": made.has_decoder,
    }


def table() -> list[dict[str, Any]]:
    """A row for each format, with its default parameters."""
    return [summary(get(name)) for name in names()]


def details(name: str) -> dict[str, Any]:
    """Everything about one format: its row, parameters, stored tensors, layout, source, differences."""
    made = get(name)
    tensors = [
        {"name": key, "dtype": str(spec.dtype), "shape": list(spec.shape), "bytes": spec.nbytes}
        for key, spec in made.fields(SAMPLE).items()
    ]
    about = {
        **summary(made),
        "description": " ".join((made.__doc__ or "").partition(">>>")[0].split()),
        "params": dict(made.params),
        "shape": list(SAMPLE),
        "orientation": "[K, N]" if made.orientation.value == "kn" else "[N, K]",
        "min_opset": made.min_opset,
        "bytes": sum(spec.nbytes for spec in made.fields(SAMPLE).values()),
        "tensors": tensors,
        "source": made.source,
        "differs": made.differs,
        "refusal": made.refusal,
    }
    if made.profile is None:
        return about
    from onnxpack.formats.functions import structure
    from onnxpack.formats.profile_json import to_data

    profile = made.profile_for(SAMPLE)
    about |= {"profile": to_data(profile), "structure": to_data(structure(made, SAMPLE))}
    if profile.tensors is not None:
        return {**about, "layout": tensor_drawing(profile.tensors)}
    layout = profile.block
    block = {"values": layout.block_size, "bytes": layout.bytes_per_block, "layout": drawing(layout)}
    return {**about, "block": block}


_UNIT = "unit of bytes"


def tensor_drawing(layout: TensorLayout, shape: tuple[int, int] = SAMPLE) -> list[str]:
    """Lines: for every view its field, the bytes of one unit (bit 7 first), and where its codes stand in the weight."""
    sizes = layout.at({"N": shape[0], "K": shape[1]})
    lines = []
    for view in layout.views:
        if isinstance(view, SumView):
            lines.append(f"{view.name} = " + " + ".join(f"{factor} * {term}" for term, factor in view.terms))
        elif isinstance(view, JoinView):
            lines.append(f"{view.name} = one after the other: " + ", ".join(f"{run} + {by}" for run, by in view.runs))
        else:
            lines += _view_lines(view, layout, sizes)
    if layout.order:
        lines.append(f"column k of the weight is decoded column {layout.order}[k]")
    if layout.outliers is not None:
        where = layout.outliers
        lines.append(f"added: {where.values} at {where.columns}, row by row as {where.offsets} say")
    return lines


def _view_lines(view: TensorView, layout: TensorLayout, sizes: Sizes) -> Iterator[str]:
    f = layout.stored(view.field)
    dims = ", ".join(f.dims)
    spread = f", gathered by {view.index}" if view.index else ", repeated over its group" if view.repeat else ""
    if not view.coded:
        yield f"{view.name}: {f.name} {f.data_type.name} [{dims}] as {' -> '.join(view.stages)}{spread}"
        return
    total = math.prod(sizes.dims(f.dims)) * f.data_type.storage.itemsize
    plan = steps(view, sizes, total, layout.frame)
    unit = len(view.shuffle) or plan.first.merged[-1]
    groups = view.stages[1]
    lead = groups[: groups.rindex("(")] if groups.endswith(")") else groups.rpartition(" ")[0]
    order = ", last word first, then the last word again" if view.shuffle else ""
    start = f", from byte {view.start}" if view.start != "0" else ""
    stored = f"{f.name} {f.data_type.name} [{dims}]{start}"
    yield f"{view.name}: {stored} as {view.stages[0]}; for each {lead.strip()}{order}"
    if view.shuffle:
        part = view.parts[0]
        first = f"{part.bit_offset} - {-part.strides[-1]} t"
        yield f"  {view.name}[t] = {part.bit_width} bits from bit {first} on: they overlap"
        yield f"  {view.name}: {view.stages[2]} -> {view.stages[3]}"
        return
    bits = without_copies(view.bits)
    parts = tuple(replace(part, field=_UNIT) for part in bits.parts)
    bits = replace(bits, parts=parts, digit_parts=tuple(replace(part, field=_UNIT) for part in bits.digit_parts))
    one = BlockField(Role.CODE, 0, 8, unit, DataType.UINT8, _UNIT)
    block = BlockLayout(1, unit, (one,), (bits,))
    yield from (f"  {line.replace(f'{_UNIT} = ', '')}" for line in _lines(one, block))
    yield f"  {bits.name}: {view.stages[2]} -> {view.stages[3]}{spread}"


@dataclass(frozen=True)
class _Byte:
    """One byte of a field: the elements its bits belong to, from bit 7 down: (view, first bit, last bit, element)."""

    items: tuple[tuple[str, str, int], ...]


def drawing(layout: BlockLayout) -> list[str]:
    """Lines: runs of bytes that are filled alike, and whose bits are whose, most significant bit first."""
    return [
        line
        for f in sorted(layout.fields, key=lambda f: (f.per.value != "TILE", f.bit_offset))
        for line in _lines(f, layout)
    ]


def _lines(f: BlockField, layout: BlockLayout) -> Iterator[str]:
    where = f.bit_offset // 8
    place = "" if f.per is Per.TILE else f" (one for each {_OWNERS[f.per]})"
    views = [v for v in layout.views if f.name in v.sources]
    if not views and f.data_type is not DataType.UNDEFINED:
        count = f"{f.count} x " if f.count > 1 else ""
        yield f"{_span(where, where + f.nbytes)}: {f.name} = {count}{f.data_type.name}{place}"
        return
    views = views or [dense(f.name, f.name, f.bit_width, f.count)]
    rows = [_Byte(tuple(_digit_items(views, f, i)) or tuple(items)) for i, items in enumerate(_bit_items(views, f))]
    for first, last in _runs(rows):
        text = " ".join(_label(a, b) for a, b in zip(rows[first].items, rows[last].items, strict=True))
        yield f"{_span(where + first, where + last + 1)}: {f.name} = {text}{place}"


_OWNERS = {Per.ROW: "row", Per.COLUMN: "column", Per.TENSOR: "tensor", Per.ROW_TILES: "block, packed along a row"}


def _span(first: int, end: int) -> str:
    return f"byte {first}" if end == first + 1 else f"bytes {first}-{end - 1}"


def _label(first: tuple[str, str, int], last: tuple[str, str, int]) -> str:
    name, bits, element = first
    index = str(element) if last[2] == element else f"{element}-{last[2]}"
    return f"{name}[{index}]{bits}" if name else "unused"


def _bit_items(views: list[BitView], f: BlockField) -> list[list[tuple[str, str, int]]]:
    """For each byte, its bits grouped by the element that they belong to."""
    owner = np.full((f.nbytes * 8, 3), -1, np.int64)  # view, element, bit of the code
    for v, view in enumerate(views):
        for part in view.parts:
            if part.field == f.name:
                at = _positions(part)
                for bit in range(part.bit_width):
                    elements = part.start + np.arange(part.count)
                    owner[at + bit] = np.stack(
                        [np.full(at.shape, v), elements, np.full(at.shape, part.shift + bit)], axis=1
                    )
    return [_group(owner[8 * i : 8 * i + 8], views) for i in range(f.nbytes)]


def _positions(part: BitPart) -> Any:
    at = np.full((), part.bit_offset, np.int64)
    for count, stride in zip(part.dims, part.strides, strict=True):
        at = at[..., None] + np.arange(count) * stride
    return at.reshape(-1)


def _group(bits: Any, views: list[BitView]) -> list[tuple[str, str, int]]:
    items: list[tuple[str, str, int]] = []
    at = 7
    while at >= 0:
        low = at
        while low > 0 and tuple(bits[low - 1][:2]) == tuple(bits[at][:2]):
            low -= 1
        view, element, high_bit = (int(x) for x in bits[at])
        if view < 0:
            items.append(("", "", 0))
        else:
            whole = int(bits[low][2]) == 0 and high_bit == views[view].bits - 1
            span = "" if whole else f".{high_bit}" if at == low else f".{high_bit}-{int(bits[low][2])}"
            items.append((views[view].name, span, element))
        at = low - 1
    return items


def _digit_items(views: list[BitView], f: BlockField, byte: int) -> Iterator[tuple[str, str, int]]:
    for view in views:
        for part in view.digit_parts:
            here = byte - part.byte_offset
            if part.field == f.name and 0 <= here < part.count:
                for n in range(part.digits):
                    element = here * part.digits + n if part.byte_major else n * part.count + here
                    yield view.name, f" digit {n} base {part.base}", part.start + element


def _runs(rows: list[_Byte]) -> Iterator[tuple[int, int]]:
    """Stretches of bytes whose elements all advance by one and the same step from byte to byte."""
    first = 0
    while first < len(rows):
        last, step = first, None
        while last + 1 < len(rows):
            here = _step(rows[last], rows[last + 1])
            if here is None or (step is not None and here != step):
                break
            last, step = last + 1, here
        yield first, last
        first = last + 1


def _step(a: _Byte, b: _Byte) -> tuple[int, ...] | None:
    if [i[:2] for i in a.items] != [i[:2] for i in b.items]:
        return None
    return tuple(y[2] - x[2] for x, y in zip(a.items, b.items, strict=True))
