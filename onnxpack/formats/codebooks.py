"""Codebook formats: NF4, and signs alone (XNOR, ggml's Q1_0). NaN and infinity are refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from onnxpack.formats.base import F32, Array
from onnxpack.formats.data import load
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import VALID, Codes, Declared
from onnxpack.formats.layout import (
    BitPart,
    BitView,
    BlockField,
    BlockLayout,
    Per,
    Role,
    StorageOrder,
    interleaved,
    require,
)
from onnxpack.formats.linear import scale_field
from onnxpack.formats.profiles import Codebook, Parameter, QuantizationProfile, TilingQuantization
from onnxpack.formats.scaling import float_dtype, mean_abs, require_int, rounded

NF4_CODEBOOK = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""Quantiles of the normal distribution (QLoRA); float32 values are these decimals parsed."""

_NESTED = 256
"""Scales that share one scale in double quantization."""


@functools.cache
def nf4_midpoints() -> F32:
    """float32 midpoints of neighbouring entries; a value on one takes the lower code."""
    book = np.asarray(NF4_CODEBOOK, np.float32)
    return (book[1:] + book[:-1]) / np.float32(2)


def nf4_codes(x: F32) -> Array:
    """Index of the nearest entry for values in [-1, 1]."""
    codes = np.zeros(x.shape, np.uint8)
    for midpoint in nf4_midpoints():
        codes += x > midpoint
    return codes


class Nf4(Declared):
    """Flat blocks of `block` values (rows are ignored), even element in the high nibble, float32 absmax per block.

    `double_quant`: absmax is stored as a byte, an index into a table of 256 levels, times a float32 per 256 blocks,
    plus one float32 offset (the mean). The last block may be short. A block of zeros has absmax 0.
    """

    name = "nf4"
    row = "NF4 (QLoRA)"
    source = "bitsandbytes functional.py and backends/default/ops.py"
    differs = "scale constant 1.0 (absmax is serialized), codebook cut to 4 digits, nibble order unstated"

    def __init__(self, *, block: int = 64, double_quant: bool = False) -> None:
        require_int(block, "block", 16, 4096)
        require(block & (block - 1) == 0, "block", f"{block} is not a power of two")
        self.block, self.double_quant = block, bool(double_quant)
        self.profile = self._nested_profile() if double_quant else self._plain_profile()

    @property
    def params(self) -> Mapping[str, object]:
        return {"block": self.block, "double_quant": self.double_quant}

    def _leaf(self, scale: Parameter) -> QuantizationProfile:
        book = Codebook(
            NF4_CODEBOOK, packed_count=2, packed_bytes=1, codebook_size=16, index_bits=4, scale=scale, codes="codes"
        )
        return QuantizationProfile(codebook=book)

    def _codes(self, size: int) -> tuple[BlockField, BitView]:
        stored = BlockField(Role.VALUES, 0, 8, size // 2, DataType.UINT8, "packed")
        return stored, BitView("codes", (BitPart("packed", 4, 4, (size // 2, 2), (8, -4)),))

    def _plain_profile(self) -> QuantizationProfile:
        stored, view = self._codes(self.block)
        fields = (stored, scale_field(DataType.FLOAT, Per.TILE, "absmax"))
        return QuantizationProfile(
            tiling=TilingQuantization((self.block,), (), (self._leaf(Parameter("absmax")),)),
            layout=BlockLayout(self.block, self.block // 2 + 4, fields, (view,)),
            storage_order=StorageOrder.SEQUENTIAL,
            partial=True,
        )

    def _nested_profile(self) -> QuantizationProfile:
        size = self.block * _NESTED
        stored, view = self._codes(size)
        levels = tuple(float(v) for v in load("nf4_levels"))
        scale = Parameter("absmax", levels=levels, parent=Parameter("nested_absmax"), bias=Parameter("offset"))
        fields = (
            stored,
            BlockField(Role.SCALE, 0, 8, _NESTED, DataType.UINT8, "absmax"),
            scale_field(DataType.FLOAT, Per.TILE, "nested_absmax"),
            scale_field(DataType.FLOAT, Per.TENSOR, "offset"),
        )
        inner = QuantizationProfile(tiling=TilingQuantization((self.block,), (), (self._leaf(scale),)))
        return QuantizationProfile(
            tiling=TilingQuantization((size,), (), (inner,)),
            layout=BlockLayout(size, size // 2 + _NESTED + 4, fields, (view,)),
            storage_order=StorageOrder.SEQUENTIAL,
            partial=True,
        )

    def measure(self, w: Array) -> dict[str, Array]:
        if not self.double_quant:
            return {}
        g = self.geometry(w.shape)
        total, count = 0.0, -(-g.width // self.block)
        for chunk in g.chunks():
            blocks = np.abs(g.values_of(w, chunk)).reshape(-1, self.block)
            total += float(blocks.max(axis=1).sum(dtype=np.float64))
        return {"offset": np.asarray(total / count, np.float32)}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        groups = x.reshape(*x.shape[:2], -1, self.block)
        top = np.abs(groups).max(axis=-1)
        # As the reference has it, codes are taken with the exact absmax even where it is then stored as a byte.
        extra: Codes = {"absmax": top}
        if self.double_quant:
            offset = spans["offset"].reshape(())
            # Filling must not stretch the last blocks' levels: it counts as the offset itself.
            beyond = -(-int(spans[VALID]) // self.block)
            top.reshape(-1)[beyond:] = offset
            extra = nested_absmax(top, offset)
            top = np.abs(groups).max(axis=-1)
        inverse = np.where(top > 0, np.float32(1) / top, np.float32(0))
        scaled = np.clip(groups * inverse[..., None], -1, 1)
        return {"codes": nf4_codes(scaled).reshape(x.shape), **extra}


def nested_absmax(top: F32, offset: F32) -> Codes:
    """absmax [rows, blocks, 256] as bytes: nearest level of (absmax - offset) / its largest magnitude."""
    centred = top - offset
    scale = np.abs(centred).max(axis=-1, keepdims=True)
    unit = np.clip(centred * np.where(scale > 0, np.float32(1) / scale, np.float32(0)), -1, 1)
    levels = np.asarray(load("nf4_levels"), np.float32)
    # One search per block of weights, not per weight.
    codes = np.searchsorted((levels[1:] + levels[:-1]) / np.float32(2), unit, side="left").astype(np.uint8)
    return {"absmax": codes, "nested_absmax": scale}


_SIGNS = (-1.0, 1.0)


class Xnor(Declared):
    """One bit per value (1: value >= 0), least significant first, rows start at bytes; one mean |w| per row."""

    name = "xnor"
    row = "Binary/XNOR (1-bit)"
    source = "XNOR-Net (Rastegari et al. 2016), its alpha without the centring and clamping of training"
    differs = "alpha per row is missing; the sign of zero needs a rule (>= 0 is +1)"

    def __init__(self, *, scale_dtype: str = "float16") -> None:
        self.scale_dtype, self._type = scale_dtype, float_dtype(scale_dtype)
        leaf = Codebook(_SIGNS, packed_count=8, packed_bytes=1, index_bits=1, scale=Parameter("alpha"), codes="bits")
        fields = (BlockField(Role.SIGN, 0, 1, 8, DataType.UNDEFINED, "bits"), scale_field(self._type, Per.ROW, "alpha"))
        self.profile = QuantizationProfile(
            tiling=TilingQuantization((0,), (1,), (QuantizationProfile(codebook=leaf),)),
            layout=BlockLayout(8, 1, fields),
            storage_order=StorageOrder.SEQUENTIAL,
            partial=True,
        )

    @property
    def params(self) -> Mapping[str, str]:
        return {"scale_dtype": self.scale_dtype}

    def measure(self, w: Array) -> dict[str, Array]:
        return {"alpha": rounded(mean_abs(w, axis=1), self._type)}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return {"bits": (x >= 0).view(np.uint8)}


class Q10(Declared):
    """ggml's Q1_0, the block relative of XNOR: 128 values, float16 mean |w|, then a bit per value."""

    name = "q1_0"
    row = "Binary/XNOR (1-bit)"
    source = "ggml block_q1_0"
    differs = "not in the document: the executable relative of XNOR"
    profile = QuantizationProfile(
        tiling=TilingQuantization(
            (128,),
            (1,),
            (QuantizationProfile(codebook=Codebook(_SIGNS, index_bits=1, scale=Parameter("d"), codes="bits")),),
        ),
        layout=interleaved(
            128,
            18,
            BlockField(Role.SCALE, 0, 16, 1, DataType.FLOAT16, "d"),
            BlockField(Role.SIGN, 0, 1, 128, DataType.UNDEFINED, "bits"),
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        d = (np.abs(x).sum(axis=-1, keepdims=True, dtype=np.float64) / 128).astype(np.float16)
        return {"d": d, "bits": (x >= 0).view(np.uint8)}
