"""SpQR: three-bit codes with doubly quantized scales and zeros in 16 x 16 tiles, and float16 outliers added on top.

Encoding rounds to nearest with clipped ranges and keeps the largest residuals as outliers; SpQR's choice by
sensitivity is calibration. NaN and infinity are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.errors import UsageError
from onnxpack.formats.arranged import Arranged, Plan
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, Role
from onnxpack.formats.profiles import (
    LinearUniform,
    OutlierMode,
    Parameter,
    QuantizationProfile,
    SparseQuantization,
    TilingQuantization,
)
from onnxpack.formats.scaling import require_int
from onnxpack.formats.tensors import Outliers, TensorField, TensorLayout, TensorView

_TOP = 7
_CLIP = 3.0
"""Ranges reach this many standard deviations of a tile; what lies beyond is left to the outliers."""


def _tiles(name: str, codes: str, *parts: BitPart, dims: tuple[str, ...], numbers: bool = False) -> TensorView:
    """A view of the dense words, one of eight bytes for each row of a tile."""
    unit = "t u (r b)" if numbers else "t u r b"
    sizes = (("t", "N/16"), ("u", "K/16"), ("r", "16"), ("b", "8"))
    kind = DataType.FLOAT16 if numbers else DataType.UNDEFINED
    return TensorView(
        name, "dense_weights", f"t u r b | {unit} | {codes}", sizes, parts, read_as=kind, cut="t", dims=dims
    )


def _second(name: str, which: int) -> TensorView:
    """One of a tile's four float16 numbers: byte f in bits 54 to 61 of the words of rows 2 f and 2 f + 1."""
    at = 54 + 256 * which
    copies = tuple(BitPart("dense_weights", at + 64 * copy, 8, (2,), (128,)) for copy in (0, 1))
    return _tiles(name, "t u i | t i u 1", *copies, dims=("N/16", "1", "K/16", "1"), numbers=True)


class Spqr(Arranged):
    """dense_weights uint64, one per row of each 16 x 16 tile: scale, zero, 16 codes, a byte of the tile's parameters.

    row_offsets int32 [N + 1] and col_vals uint32 (float16 above a 16-bit column) are the outliers: one for each
    `one_in` weights, or `count` of them. All arithmetic is in float16.
    """

    name = "spqr"
    row = "SpQR"
    source = "Vahe1994/SpQR inference_lib (tensor_compress_interleaved)"
    differs = (
        "scales have two levels; outliers add to the base; columns are uint16, values float16; two bits are unused"
    )
    min_opset = 16

    def __init__(self, *, one_in: int = 100, count: int = 0) -> None:
        require_int(one_in, "one_in", 1, 1 << 30)
        require_int(count, "count", 0, 1 << 40)
        self.one_in, self.count = one_in, count
        entries = str(count) if count else f"N*K|{one_in}"
        fields = (
            TensorField(Role.VALUES, "dense_weights", DataType.UINT64, ("N*K/16",)),
            TensorField(Role.MASK, "row_offsets", DataType.INT32, ("N+1",)),
            TensorField(Role.VALUES, "col_vals", DataType.UINT32, (entries,)),
        )
        word = "dense_weights"
        one = ("N/16", "16", "K/16", "1")
        entry = "e b | e b | e i | (e i)"
        views = (
            _tiles("codes", "t u r c | t r u c", BitPart(word, 6, 3, (16,), (3,)), dims=("N/16", "16", "K/16", "16")),
            _tiles("ws", "t u r c | t r u c", BitPart(word, 0, 3, (1,), (3,)), dims=one),
            _tiles("wz", "t u r c | t r u c", BitPart(word, 3, 3, (1,), (3,)), dims=one),
            *(_second(name, i) for i, name in enumerate(("Ss", "Zs", "Sz", "Zz"))),
            TensorView("offsets", "row_offsets", "n | n", dims=("N+1",), apart=True),
            TensorView(
                "columns", "col_vals", entry, (("b", "4"),), (BitPart("col_vals", 0, 16, (1,), (32,)),),
                dims=(entries,), apart=True,
            ),
            TensorView(
                "added", "col_vals", entry, (("b", "4"),), (BitPart("col_vals", 16, 8, (2,), (8,)),),
                read_as=DataType.FLOAT16, dims=(entries,), apart=True,
            ),
        )  # fmt: skip
        linear = LinearUniform(
            DataType.UINT8,
            bits=3,
            scale=Parameter("ws", minus=Parameter("Sz"), parent=Parameter("Ss")),
            zero=Parameter("wz", minus=Parameter("Zz"), parent=Parameter("Zs")),
            codes="codes",
        )
        leaf = QuantizationProfile(linear=linear, data_type=DataType.FLOAT16)
        row = QuantizationProfile(tiling=TilingQuantization((16,), (1,), (leaf,)))
        tile = QuantizationProfile(tiling=TilingQuantization((16, 16), (0, 1), (row,)))
        self.profile = QuantizationProfile(
            sparse=SparseQuantization(
                tile,
                outlier_ratio=0.0 if count else 1 / one_in,
                mode=OutlierMode.ADD,
                index_data_type=DataType.UINT16,
                csr=True,
            ),
            data_type=DataType.FLOAT16,
            tensors=TensorLayout(
                ("N/16", "16", "K/16", "16"), fields, views, outliers=Outliers("offsets", "columns", "added")
            ),
        )

    @property
    def params(self) -> Mapping[str, int]:
        return {"one_in": self.one_in, "count": self.count}

    def fitted(self, encoded: Encoded) -> Spqr:
        entries = encoded.fields.get("col_vals")
        if entries is None or entries.ndim != 1 or len(encoded.shape) != 2 or not entries.size:
            return self
        total = int(np.prod(encoded.shape, dtype=np.int64))
        have = self.count or -(-total // self.one_in)
        return self if have == entries.size else Spqr(one_in=self.one_in, count=entries.size)

    def plan(self, shape: tuple[int, ...]) -> Plan:
        plan = super().plan(shape)
        if plan.shape[1] > 1 << 16:
            raise UsageError(f"format {self.name} stores columns in 16 bits; K = {plan.shape[1]} is more")
        return plan

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        # x is [tiles down, 16, tiles across, 16].
        limit = _CLIP * np.sqrt(np.square(x, dtype=np.float64).mean(axis=(1, 3), keepdims=True)).astype(np.float32)
        near = np.clip(x, -limit, limit)
        low, high = (np.asarray(f(near, axis=-1, keepdims=True)) for f in (np.min, np.max))
        scale = (high - low) / np.float32(_TOP)
        scale = np.where(scale == 0, np.float32(1e-4), scale).astype(np.float32)
        ws, first, first_zero = _nested(scale)
        scale = _nested_value(ws, first, first_zero)
        safe = np.where(scale == 0, np.float32(1), scale)
        wz, second, second_zero = _nested(-low / safe)
        zero = _nested_value(wz, second, second_zero)
        codes = np.clip(np.rint(x / safe + zero), 0, _TOP)
        return {
            **{name: array.astype(np.uint8) for name, array in (("codes", codes), ("ws", ws), ("wz", wz))},
            "Ss": first,
            "Sz": first_zero,
            "Zs": second,
            "Zz": second_zero,
        }

    def add_outliers(self, w: Array, plan: Plan, out: Mapping[str, Array]) -> None:
        n, k = plan.shape
        left = -self.decode_rows(out, plan, 0, n)
        rows = max(1, (1 << 16) // k)
        for i in range(0, n, rows):
            left[i : i + rows] += np.asarray(w[i : i + rows], np.float32)
        flat, count = left.reshape(-1), out["col_vals"].size
        size = np.abs(flat)
        least = np.partition(size, size.size - count)[size.size - count]
        above = np.flatnonzero(size > least)
        equal = np.flatnonzero(size == least)[: count - len(above)]
        at = np.sort(np.concatenate([above, equal]))
        out["row_offsets"][...] = np.searchsorted(at, np.arange(n + 1) * k)
        values = flat[at].astype(np.float16).view(np.uint16).astype(np.uint32)
        out["col_vals"][...] = values << np.uint32(16) | (at % k).astype(np.uint32)


def _nested(values: Array) -> tuple[F32, F32, F32]:
    """Three-bit numbers of each row, and the tile's float16 step and offset (in steps) that they stand for."""
    low, high = (np.asarray(f(values, axis=1, keepdims=True), np.float32) for f in (np.min, np.max))
    step = ((high - low) / np.float32(_TOP)).astype(np.float16).astype(np.float32)
    # All alike: the number itself is the step, at one step above the offset 0.
    flat = (step == 0) | (np.abs(low) > np.float32(1e4) * step)
    step = np.where(flat, low.astype(np.float16).astype(np.float32), step)
    safe = np.where(step == 0, np.float32(1), step)
    offset = np.where(flat, np.float32(0), (-low / safe).astype(np.float16).astype(np.float32))
    codes = np.where(flat, np.float32(1), np.clip(np.rint(values / safe + offset), 0, _TOP))
    return np.asarray(codes, np.float32), np.asarray(step, np.float32), np.asarray(offset, np.float32)


def _half(values: Array) -> F32:
    return values.astype(np.float16).astype(np.float32)


def _nested_value(codes: Array, step: F32, offset: F32) -> F32:
    return _half(_half(codes - offset) * step)
