"""Formats that are declarations: a profile with a layout, and a rule that turns blocks of values into codes.

Sizes, bits per weight, decoding, the decoder in a graph and the structure type all follow from the profile. A format
with parameters makes its profile from them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from onnxpack.errors import ModelError, UsageError
from onnxpack.formats.base import F32, Array, Decoder, Encoded, ErrorSums, FieldSpec, Format, Orientation
from onnxpack.formats.evaluate import evaluate
from onnxpack.formats.geometry import Chunk, Geometry, geometry, is_transposed
from onnxpack.formats.layout import Per
from onnxpack.formats.numpy_ops import Fields, NumpyOps
from onnxpack.formats.profiles import QuantizationProfile

Codes = dict[str, Array]
"""What a rule returns: codes by the names of fields and views, [rows, blocks, count] each."""

_ONE_FREED_BLOCK = 16 << 20

VALID = ""
"""Key, among the spans that a rule is given, of the number of values per row that lie in the weight (not filling)."""


class Declared(Format):
    """A format made of `profile` and, where it can encode, `quantize` (and `measure`, for what spans blocks)."""

    orientation = Orientation.NK
    min_opset: ClassVar[int] = 13
    takes_any_float = True
    profile: QuantizationProfile

    @property
    def family(self) -> str:  # type: ignore[override]
        """Kinds of the profile from outside in: "tiling+linear"."""
        return "+".join(self.profile.chain)

    # The rule --------------------------------------------------------------------------------------------------------

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        """Codes for finite blocks x [rows, blocks, block_size]; `spans` are the parts of `measure` for them."""
        raise UsageError(f"format {self.name} has no encoder", hint="`onnxpack formats` lists those that have one")

    def measure(self, w: Array) -> dict[str, Array]:
        """Fields per tensor, row or column, as they are stored, from the whole weight. Most formats have none."""
        return {}

    # Format ----------------------------------------------------------------------------------------------------------

    def geometry(self, shape: tuple[int, ...]) -> Geometry:
        """The profile laid over a weight."""
        return geometry(self.profile, shape, self.name)

    def fields(self, shape: tuple[int, ...]) -> dict[str, FieldSpec]:
        return self.geometry(shape).specs()

    def encode_into(self, w: Array, out: Mapping[str, Array]) -> ErrorSums:
        if not self.encodes:
            self.quantize(np.zeros((0, 0, 0), np.float32), {})
        g = self.geometry(w.shape)
        keep_freed_memory()
        with np.errstate(all="ignore"):
            spanning = self.measure(w)
            if not all(np.isfinite(value).all() for value in spanning.values()):
                self._refuse_non_finite(w, g)
            for name, value in spanning.items():
                out[name][...] = value.reshape(out[name].shape)
            fields = Fields(g, out)
            residual = energy = 0.0
            for chunk in g.chunks(is_transposed(w)):
                x = g.values_of(w, chunk)
                self._check_finite(x, g, chunk)
                lost, had = self._encode_chunk(x, chunk, g, fields)
                residual, energy = residual + lost, energy + had
        return ErrorSums(residual, energy)

    def _encode_chunk(self, x: F32, chunk: Chunk, g: Geometry, fields: Fields) -> tuple[float, float]:
        spans = {f.name: fields.get(f, chunk) for f in g.layout.fields if f.per not in (Per.TILE, Per.ROW_TILES)}
        codes = self.quantize(x, {**spans, VALID: np.asarray(g.valid(chunk))})
        self._blank_filling(codes, x, g.valid(chunk))
        fields.put(pack_views(codes, g, x.shape[:2]), chunk)
        decoded: F32 = evaluate(self.profile, NumpyOps(g, fields, chunk, codes)).reshape(x.shape[0], -1)
        valid = g.valid(chunk)
        values = x.reshape(x.shape[0], -1)[:, :valid]
        lost = square_sum(values - decoded[:, :valid])
        if not np.isfinite(lost):
            top = np.abs(values).max()
            raise ModelError(f"weight value {top:g} is too large for format {self.name}", hint="choose another format")
        return lost, square_sum(values)

    def _blank_filling(self, codes: Codes, x: F32, valid: int) -> None:
        """Codes of the zeros that fill a cut block are stored as 0."""
        if valid < x.shape[1] * x.shape[2]:
            name = self.profile.leaf.value.codes  # type: ignore[union-attr]
            codes[name] = np.ascontiguousarray(codes[name])
            codes[name].reshape(x.shape[0], -1)[:, valid:] = 0

    def _refuse_non_finite(self, w: Array, g: Geometry) -> None:
        for chunk in g.chunks(is_transposed(w)):
            self._check_finite(g.values_of(w, chunk), g, chunk)

    def _check_finite(self, x: F32, g: Geometry, chunk: Chunk) -> None:
        # One pass: the sum of zero times everything is zero unless something is not finite.
        if np.isfinite(np.add.reduce(x.reshape(-1) * np.float32(0))):
            return
        row, column = np.argwhere(~np.isfinite(x.reshape(x.shape[0], -1)))[0]
        value = x.reshape(x.shape[0], -1)[row, column]
        column += chunk.unit * g.unit
        row += chunk.row
        place = divmod(int(column), g.shape[1]) if g.flat else (int(row), int(column))
        raise ModelError(f"weight value {value} at {list(place)} is not finite", hint="repair the checkpoint")

    def decode(self, encoded: Encoded) -> F32:
        g = self.geometry(encoded.shape)
        return self._decode(encoded, g, g.chunks())

    def decode_columns(self, encoded: Encoded, start: int, stop: int) -> F32:
        """Output features [start, stop): their blocks and no others."""
        g = self.geometry(encoded.shape)
        if g.flat:
            return self._decode_span(encoded, g, start * g.shape[1], stop * g.shape[1]).reshape(-1, g.shape[1]).T
        band = dataclasses.replace(g, shape=(stop - start, g.shape[1]), rows=stop - start)
        named = [Chunk(start + c.row, c.rows, c.unit, c.units) for c in band.chunks()]
        return self._decode(encoded, g, named, start, stop).T

    def _decode_span(self, encoded: Encoded, g: Geometry, start: int, stop: int) -> F32:
        """Values [start, stop) of the flattened weight."""
        self._check_fields(encoded, g)
        first, last = start // g.unit, -(-stop // g.unit)
        out = np.empty((last - first) * g.unit, np.float32)
        fields = Fields(g, encoded.fields)
        with np.errstate(all="ignore"):
            for chunk in g.chunks_of(first, last):
                value = evaluate(self.profile, NumpyOps(g, fields, chunk))
                at = (chunk.unit - first) * g.unit
                out[at : at + chunk.units * g.unit] = value.reshape(-1)
        return out[start - first * g.unit : stop - first * g.unit]

    def _decode(
        self, encoded: Encoded, g: Geometry, chunks: Iterable[Chunk], start: int = 0, stop: int | None = None
    ) -> F32:
        self._check_fields(encoded, g)
        stop = g.shape[0] if stop is None else stop
        out = np.empty((stop - start, g.shape[1]), np.float32)
        keep_freed_memory()
        fields = Fields(g, encoded.fields)
        with np.errstate(all="ignore"):
            for chunk in chunks:
                value = evaluate(self.profile, NumpyOps(g, fields, chunk))
                g.put(value, Chunk(chunk.row - start, chunk.rows, chunk.unit, chunk.units), out)
        return out

    def _check_fields(self, encoded: Encoded, g: Geometry) -> None:
        for name, spec in g.specs().items():
            array = encoded.fields.get(name)
            if array is None:
                raise UsageError(f"format {self.name}: field {name} is missing")
            if array.dtype != spec.dtype or array.shape != spec.shape:
                have = f"{array.dtype} {list(array.shape)}"
                raise UsageError(f"format {self.name}: field {name} is {have}, not {spec.dtype} {list(spec.shape)}")

    def decoder(self, shape: tuple[int, ...], opset: int) -> Decoder:
        from onnxpack.formats.onnx_ops import OnnxOps

        if opset < self.min_opset:
            raise UsageError(f"format {self.name} is decoded from opset {self.min_opset} on, not at {opset}")
        ops = OnnxOps(self.geometry(shape), opset)
        return ops.finish(evaluate(self.profile, ops))


def pack_views(codes: Codes, g: Geometry, lead: tuple[int, ...]) -> dict[str, Array]:
    """Stored fields of a rectangle from codes under the names of fields and views."""
    from onnxpack.formats import bits
    from onnxpack.formats.layout import dense

    packed: dict[str, Array] = {}
    for f in g.layout.fields:
        given = codes.get(f.name)
        if f.per is Per.ROW_TILES:
            assert given is not None
            packed[f.name] = given
        elif f.per is Per.TILE:
            packed[f.name] = _stored(f.name, given, f.data_type.storage) if _is_direct(f, given) else _zeros(f, lead)
            if given is not None and not _is_direct(f, given):
                bits.write(dense(f.name, f.name, f.bit_width, f.count), given, packed)
    for view in g.layout.views:
        if view.name in codes:
            bits.write(view, codes[view.name], packed)
    return packed


def _is_direct(f: Any, given: Array | None) -> bool:
    return given is not None and (f.data_type.native or f.bit_width == 8)


def _stored(name: str, given: Array | None, dtype: np.dtype[Any]) -> Array:
    assert given is not None, name
    return given.astype(dtype, copy=False)


def _zeros(f: Any, lead: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.zeros((*lead, f.nbytes), np.uint8)


@functools.cache
def keep_freed_memory() -> None:
    """Have the C library keep freed temporaries for the next chunk, instead of unmapping and faulting them in again.

    glibc raises its threshold for mapping to the largest mapped block that was freed: freeing one does it. Where the
    allocator is another, nothing happens. Worth a factor of two to four here.
    """
    np.empty(_ONE_FREED_BLOCK, np.uint8)


def square_sum(values: F32) -> float:
    """Sum of squares in float64."""
    flat = values.reshape(-1)
    return float(np.add.reduce(np.multiply(flat, flat, dtype=np.float64)))
