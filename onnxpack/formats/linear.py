"""Integer formats with scales of their own type: INT8 per tensor and per channel, INT4 per tensor and in groups.

NaN and infinity are refused. A group of zeros has scale 1 and codes 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes, Declared
from onnxpack.formats.layout import BlockField, BlockLayout, Per, Role, StorageOrder, require
from onnxpack.formats.profiles import LinearUniform, Parameter, QuantizationProfile, TilingQuantization
from onnxpack.formats.scaling import amax, amax_of, float_dtype, nonzero, require_int, rounded

_SOURCE = "ONNX QuantizeLinear and DequantizeLinear"


def scale_field(data_type: DataType, per: Per, name: str = "scale") -> BlockField:
    """One scale."""
    return BlockField(Role.SCALE, 0, data_type.bits, 1, data_type, name, per)


def value_field(bits: int, count: int, data_type: DataType = DataType.UNDEFINED, name: str = "values") -> BlockField:
    """`count` codes, least significant bits first."""
    return BlockField(Role.VALUES, 0, bits, count, data_type, name)


def _int8_profile(axis: int, per: Per) -> QuantizationProfile:
    fields = (value_field(8, 1, DataType.INT8), scale_field(DataType.FLOAT, per))
    return QuantizationProfile(
        linear=LinearUniform(DataType.INT8, bits=8, symmetric=True, axis=axis, scale=Parameter("scale")),
        layout=BlockLayout(1, 1, fields),
        storage_order=StorageOrder.SEQUENTIAL,
    )


def _int8_codes(x: F32, scale: Array) -> Codes:
    return {"values": np.clip(np.rint(x / scale), -128, 127).astype(np.int8)}


class Int8Symmetric(Declared):
    """One float32 scale, amax / 127; codes are rounded half to even."""

    name = "int8_symmetric"
    row = "INT8 symmetric"
    source = _SOURCE
    differs = "the document's pseudo-code clips codes to [0, 255]; signed codes clip to [-128, 127]"
    profile = _int8_profile(-1, Per.TENSOR)

    def measure(self, w: Array) -> dict[str, Array]:
        return {"scale": nonzero(amax_of(w) / np.float32(127))}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return _int8_codes(x, spans["scale"])


class Int8PerChannel(Declared):
    """One float32 scale for each index of `axis` (0: output features, the rows; 1: input features)."""

    name = "int8_per_channel"
    row = "INT8 per-channel"
    source = _SOURCE + " with axis"
    differs = "the document stores one scalar scale as a constant; per channel it is a serialized vector"

    def __init__(self, *, axis: int = 0) -> None:
        require_int(axis, "axis", 0, 1)
        self.axis = axis
        self.profile = _int8_profile(axis, Per.ROW if axis == 0 else Per.COLUMN)

    @property
    def params(self) -> Mapping[str, int]:
        return {"axis": self.axis}

    def measure(self, w: Array) -> dict[str, Array]:
        return {"scale": nonzero(amax_of(w, 1 - self.axis) / np.float32(127))}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return _int8_codes(x, spans["scale"])


class Int4Symmetric(Declared):
    """Two's complement nibbles, even element low; one scale per `group` columns, or one for the tensor (group 0).

    scale = amax / 7 in `scale_dtype`, codes = clip(round half to even(x / scale), -8, 7).
    """

    name = "int4_symmetric"
    row = "INT4 Symmetric"
    source = _SOURCE + ", INT4, block_size (opset 21)"
    differs = "4.5 bits is the figure of groups of 32 with float16 scales, its example is per tensor; unsigned clip"

    def __init__(self, *, group: int = 32, scale_dtype: str = "float16") -> None:
        require_int(group, "group", 0, 1 << 16)
        require(group % 2 == 0, "group", f"{group} is not even (0: per tensor)")
        self.group, self.scale_dtype, self._type = group, scale_dtype, float_dtype(scale_dtype)
        linear = LinearUniform(DataType.INT4, bits=4, symmetric=True, scale=Parameter("scale"))
        codes = value_field(4, group or 2)
        if not group:
            layout = BlockLayout(2, 1, (codes, scale_field(self._type, Per.TENSOR)))
            self.profile = QuantizationProfile(
                linear=linear, layout=layout, storage_order=StorageOrder.SEQUENTIAL, partial=True
            )
            return
        size = group // 2 + self._type.bits // 8
        self.profile = QuantizationProfile(
            tiling=TilingQuantization((group,), (1,), (QuantizationProfile(linear=linear),)),
            layout=BlockLayout(group, size, (codes, scale_field(self._type, Per.TILE))),
            storage_order=StorageOrder.SEQUENTIAL,
        )

    @property
    def params(self) -> Mapping[str, object]:
        return {"group": self.group, "scale_dtype": self.scale_dtype}

    def measure(self, w: Array) -> dict[str, Array]:
        return {} if self.group else {"scale": rounded(nonzero(amax_of(w) / np.float32(7)), self._type)}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        whole = "scale" in spans
        scale = spans["scale"].astype(np.float32) if whole else rounded(nonzero(amax(x) / np.float32(7)), self._type)
        codes = np.clip(np.rint(x / nonzero(scale)), -8, 7).astype(np.int8).view(np.uint8)
        return {"values": codes & 15} if whole else {"values": codes & 15, "scale": scale}
