"""onnxruntime's MatMulNBits: blocks along K with scales and optional packed zero points.

NaN and infinity are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes, Declared
from onnxpack.formats.layout import BlockField, BlockLayout, Per, Role, StorageOrder, require
from onnxpack.formats.profiles import LinearUniform, Parameter, QuantizationProfile, Rounding, TilingQuantization
from onnxpack.formats.scaling import float_dtype, half_away, require_int, rounded

_STORAGE = {2: DataType.UINT2, 4: DataType.UINT4, 8: DataType.UINT8}


class MatMulNBits(Declared):
    """B uint8 [N, blocks, block * bits / 8], scales [N, blocks], zero_points uint8 [N, ceil(blocks * bits / 8)].

    `symmetric`: no zero_points, 2**(bits-1) is meant; the scale is (the value of largest magnitude) / -2**(bits-1).
    K need not be a multiple of `block`: the codes that fill the last block are 0. A block of zeros has scale 0 when
    symmetric, else scale 0 and zero point 0.
    """

    name = "matmulnbits"
    row = "MatMulNBits INT4 (ORT)"
    source = "onnxruntime ContribOperators (com.microsoft::MatMulNBits) and MLAS"
    differs = "tiles of 32 x 128 do not exist in onnxruntime; an absent zero point means 2**(bits-1), not 0"

    def __init__(self, *, bits: int = 4, block: int = 32, symmetric: bool = True, scale_dtype: str = "float16") -> None:
        require(bits in _STORAGE, "bits", f"{bits} is not 2, 4 or 8")
        require_int(block, "block", 16, 1 << 16)
        require(block & (block - 1) == 0, "block", f"{block} is not a power of two")
        self.bits, self.block, self.symmetric = bits, block, bool(symmetric)
        self.scale_dtype, self._type = scale_dtype, float_dtype(scale_dtype)
        self.profile = self._profile()

    def _profile(self) -> QuantizationProfile:
        storage = _STORAGE[self.bits]
        nbytes = self.block * self.bits // 8
        fields = [
            BlockField(Role.VALUES, 0, self.bits, self.block, DataType.UNDEFINED, "B", as_tiles=True),
            BlockField(Role.SCALE, 0, self._type.bits, 1, self._type, "scales", as_tiles=True),
        ]
        zero = None
        if not self.symmetric:
            native = DataType.UINT8 if self.bits == 8 else DataType.UNDEFINED
            fields.append(BlockField(Role.ZERO_POINT, 0, self.bits, 1, native, "zero_points", Per.ROW_TILES))
            zero = Parameter("zero_points")
        linear = LinearUniform(
            storage,
            bits=self.bits,
            zero_point=0 if zero else 1 << (self.bits - 1),
            scale=Parameter("scales"),
            zero=zero,
            rounding=Rounding.HALF_UP,
            codes="B",
        )
        return QuantizationProfile(
            tiling=TilingQuantization((self.block,), (1,), (QuantizationProfile(linear=linear),)),
            layout=BlockLayout(self.block, nbytes + self._type.bits // 8, tuple(fields)),
            storage_order=StorageOrder.SEQUENTIAL,
            partial=True,
        )

    @property
    def params(self) -> Mapping[str, object]:
        names = ("bits", "block", "symmetric", "scale_dtype")
        return {name: getattr(self, name) for name in names}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        top = (1 << self.bits) - 1
        low = np.minimum(x.min(axis=-1, keepdims=True), 0)
        high = np.maximum(x.max(axis=-1, keepdims=True), 0)
        if self.symmetric:
            extreme = np.where(-low > high, low, high)
            scale = rounded(extreme / np.float32(-(1 << (self.bits - 1))), self._type)
            zero: Array = np.full((1, 1, 1), 1 << (self.bits - 1), np.float32)
        else:
            scale = rounded((high - low) / np.float32(top), self._type)
            zero = np.clip(half_away(-low / np.where(scale == 0, np.float32(1), scale)), 0, top)
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        codes = x * inverse
        codes += zero
        codes += np.float32(0.5)
        codes = np.clip(np.floor(codes, out=codes), 0, top, out=codes).astype(np.uint8)
        out: Codes = {"B": codes, "scales": scale}
        if not self.symmetric:
            out["zero_points"] = np.broadcast_to(zero, scale.shape).astype(np.uint8)
        return out
