"""Small-float formats: FP8 E4M3, the OCP microscaling formats MXFP4 and MXFP6, NVIDIA's NVFP4.

Encoders round half to even and saturate at the largest number (no infinities, no NaN codes are ever written); NaN and
infinity in a weight are refused. Decoding follows the format: an E4M3 code 0x7F, an E8M0 scale 255 are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType, float_table
from onnxpack.formats.declared import Codes, Declared
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
from onnxpack.formats.profiles import FloatingPointUniform, Parameter, QuantizationProfile, TilingQuantization
from onnxpack.formats.scaling import amax, amax_of, nonzero, small_float

E4M3 = FloatingPointUniform(1, 4, 3, 7, has_nan=True, packed_count=1, packed_bytes=1, scale=Parameter("scale"))


def e4m3(x: F32) -> Array:
    """E4M3FN codes, saturated at 448."""
    return small_float(x, 4, 3, 7, has_nan=True)


class Fp8E4M3(Declared):
    """One code byte per value, one float32 scale amax / 448."""

    name = "fp8_e4m3"
    row = "FP8 E4M3"
    source = "ONNX float8 specification, OCP OFP8"
    differs = "the overflow policy is not stated; ours saturates at 448"
    profile = QuantizationProfile(
        floating_point=E4M3,
        layout=BlockLayout(
            1,
            1,
            (
                BlockField(Role.VALUES, 0, 8, 1, DataType.FLOAT8E4M3FN, "codes"),
                scale_field(DataType.FLOAT, Per.TENSOR),
            ),
        ),
        storage_order=StorageOrder.SEQUENTIAL,
    )

    def measure(self, w: Array) -> dict[str, Array]:
        return {"scale": nonzero(amax_of(w) / np.float32(448))}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return {"codes": e4m3(np.asarray(x / spans["scale"], np.float32))}


SCALE_MODES = ("floor", "even", "rceil")


def mx_scale(top: F32, mode: str, emax: int, mantissa: int, largest: float) -> Array:
    """E8M0 byte of a block's scale from its absolute maximum, by the three rules in use; 0 for a block of zeros."""
    bits = top.view(np.int32)
    if mode == "rceil":
        # ceil(log2(amax / largest)) without a logarithm: exponent, plus one if any mantissa bit is set.
        ratio = (top / np.float32(largest)).view(np.int32)
        exponent = (ratio >> 23) - 127 + ((ratio > 0x7FFFFF) & (ratio & 0x7FFFFF != 0))
    else:
        if mode == "even":
            bits = bits + (1 << (23 - mantissa - 1))
        exponent = (bits >> 23) - 127 - emax
    return np.where(top == 0, 0, np.clip(exponent, -127, 127) + 127).astype(np.uint8)


class Microscaling(Declared):
    """Blocks of 32 along K with a power-of-two scale byte (E8M0); codes and scales are separate tensors.

    `scale_mode`: "floor" (OCP), "even" or "rceil".
    """

    exponent: ClassVar[int]
    mantissa: ClassVar[int]
    bias: ClassVar[int]

    def __init__(self, *, scale_mode: str = "floor") -> None:
        require(scale_mode in SCALE_MODES, "scale_mode", f"{scale_mode!r} is not one of {', '.join(SCALE_MODES)}")
        self.scale_mode = scale_mode
        bits = 1 + self.exponent + self.mantissa
        count = 8 // math.gcd(8, bits)
        leaf = FloatingPointUniform(
            1,
            self.exponent,
            self.mantissa,
            self.bias,
            packed_count=count,
            packed_bytes=count * bits // 8,
            scale=Parameter("scales"),
        )
        codes = BlockField(Role.VALUES, 0, bits, 32, DataType.UNDEFINED, "codes")
        scale = BlockField(Role.EXPONENT, 0, 8, 1, DataType.FLOAT8E8M0, "scales")
        self.profile = QuantizationProfile(
            tiling=TilingQuantization((32,), (1,), (QuantizationProfile(floating_point=leaf),)),
            layout=BlockLayout(32, 4 * bits + 1, (codes, scale)),
            storage_order=StorageOrder.SEQUENTIAL,
        )
        self._largest = float(np.abs(float_table(1, self.exponent, self.mantissa, self.bias)).max())

    @property
    def params(self) -> Mapping[str, str]:
        return {"scale_mode": self.scale_mode}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        emax = (1 << self.exponent) - 1 - self.bias
        scale = mx_scale(amax(x), self.scale_mode, emax, self.mantissa, self._largest)
        # The smallest divisor in use is 2**-126, the smallest normal float32, whatever the byte says.
        divisor: F32 = np.ldexp(np.float32(1), np.maximum(scale.astype(np.int32) - 127, -126)).astype(np.float32)
        return {"codes": small_float(x / divisor, self.exponent, self.mantissa, self.bias), "scales": scale}


class Mxfp4(Microscaling):
    """E2M1 codes, even element low."""

    name = "mxfp4"
    row = "MXFP4"
    exponent, mantissa, bias = 2, 1, 1
    source = "OCP Microscaling Formats (MX) v1.0"
    differs = "5.0 bits is wrong (4.25); the shared exponent is per block of 32, not per super-block"


class Mxfp6E3M2(Microscaling):
    """E3M2 codes, four in three bytes, least significant bits first."""

    name = "mxfp6_e3m2"
    row = "MXFP6 E3M2"
    exponent, mantissa, bias = 3, 2, 3
    source = "OCP Microscaling Formats (MX) v1.0; dense packing as AMD Quark and compressed-tensors write it"
    differs = "6.125 bits is wrong (6.25); FLOAT6_E3M2 has neither infinity nor NaN"


class Mxfp6E2M3(Microscaling):
    """E2M3 codes, four in three bytes, least significant bits first."""

    name = "mxfp6_e2m3"
    row = "MXFP6 E2M3"
    exponent, mantissa, bias = 2, 3, 1
    source = Mxfp6E3M2.source
    differs = "not in the document: the other MXFP6"


E2M1_TOP, E4M3_TOP = np.float32(6), np.float32(448)
_LEAST = np.float32(2**-6)


class Nvfp4(Declared):
    """E2M1 codes (even element low), one E4M3 scale per 16 along K, one float32 scale for the tensor.

    `tensor_scale`: "multiply" (y = v * (scale * g), g = amax / 2688), "divide" (y = v * (scale / G), G = 2688 / amax)
    or "none" (no tensor scale).
    """

    name = "nvfp4"
    row = "NVFP4 (E2M1 + FP8 scale)"
    source = "torchao and ModelOpt (multiply), compressed-tensors nvfp4-pack-quantized (divide)"
    differs = "the second-level float32 scale is missing; tools disagree whether it multiplies or divides"

    def __init__(self, *, tensor_scale: str = "multiply") -> None:
        known = ("multiply", "divide", "none")
        require(tensor_scale in known, "tensor_scale", f"{tensor_scale!r} is not one of {', '.join(known)}")
        self.tensor_scale = tensor_scale
        parent = None if tensor_scale == "none" else Parameter("tensor_scale")
        scale = Parameter("scales", parent=parent, divide=tensor_scale == "divide")
        leaf = FloatingPointUniform(1, 2, 1, 1, packed_count=2, packed_bytes=1, scale=scale)
        fields = [
            BlockField(Role.VALUES, 0, 4, 16, DataType.UNDEFINED, "codes"),
            BlockField(Role.SCALE, 0, 8, 1, DataType.FLOAT8E4M3FN, "scales"),
        ]
        if parent is not None:
            fields.append(scale_field(DataType.FLOAT, Per.TENSOR, "tensor_scale"))
        self.profile = QuantizationProfile(
            tiling=TilingQuantization((16,), (1,), (QuantizationProfile(floating_point=leaf),)),
            layout=BlockLayout(16, 9, tuple(fields)),
            storage_order=StorageOrder.SEQUENTIAL,
        )

    @property
    def params(self) -> Mapping[str, str]:
        return {"tensor_scale": self.tensor_scale}

    def measure(self, w: Array) -> dict[str, Array]:
        if self.tensor_scale == "none":
            return {}
        top, product = amax_of(w), E4M3_TOP * E2M1_TOP
        scale = top / product if self.tensor_scale == "multiply" else product / nonzero(top)
        return {"tensor_scale": nonzero(np.asarray(scale, np.float32))}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        wanted = amax(x) / E2M1_TOP
        tensor = spans.get("tensor_scale", np.float32(1))
        divide = self.tensor_scale == "divide"
        if divide:
            # compressed-tensors gives a block of zeros the scale 1/8; torchao clips every scale from below.
            wanted = np.minimum(wanted * tensor, E4M3_TOP)
            scale = e4m3(np.where(wanted == 0, np.float32(0.125), wanted))
        else:
            scale = e4m3(np.clip(wanted / tensor, _LEAST, E4M3_TOP))
        value = float_table(1, 4, 3, 7, has_nan=True)[scale]
        value = value / tensor if divide else value * tensor
        return {"codes": small_float(x / nonzero(value), 2, 1, 1), "scales": scale}


def _nibbles(name: str, field: str, blocks: int, half: int) -> BitView:
    """Per run of `half` bytes: low nibbles are the first `half` values, high nibbles the next."""
    return BitView(name, (BitPart(field, 0, 4, (blocks, 2, half), (8 * half, 4, 8)),))


class Mxfp4Ggml(Declared):
    """ggml's block of 32: scale byte, then 16 bytes; low nibbles are values 0-15, high nibbles 16-31.

    A value half-way between two codes takes the code with the smaller index, and zero is always code 0.
    """

    name = "mxfp4_ggml"
    row = "MXFP4"
    source = "ggml block_mxfp4"
    differs = "another byte order than OCP's separate tensors, and another rounding of ties"
    profile = QuantizationProfile(
        tiling=TilingQuantization(
            (32,),
            (1,),
            (QuantizationProfile(floating_point=FloatingPointUniform(1, 2, 1, 1, scale=Parameter("e"))),),
        ),
        layout=interleaved(
            32,
            17,
            BlockField(Role.EXPONENT, 0, 8, 1, DataType.FLOAT8E8M0, "e"),
            BlockField(Role.VALUES, 0, 8, 16, DataType.UINT8, "qs"),
            views=[_nibbles("codes", "qs", 1, 16)],
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        top = amax(x)
        exponent = (top.view(np.int32) >> 23) - 127 - 2 + 127
        scale = np.where(top == 0, 0, np.clip(exponent, 0, 254)).astype(np.uint8)
        divisor: F32 = np.ldexp(np.float32(1), scale.astype(np.int32) - 127).astype(np.float32)
        return {"e": scale, "codes": e2m1_ties_down(x / divisor)}


_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e2m1_ties_down(x: F32) -> Array:
    """E2M1 codes with ties to the smaller code; what rounds to zero has no sign."""
    a = np.abs(x)
    codes = np.zeros(x.shape, np.uint8)
    for midpoint in _MIDPOINTS:
        codes += a > np.float32(midpoint)
    codes |= ((x < 0) & (codes > 0)).astype(np.uint8) << np.uint8(3)
    return codes


def _ue4m3_levels() -> tuple[float, ...]:
    """ggml's scale byte: E4M3 without sign; 0 and 0x7F read as 0, the top bit is ignored."""
    table = float_table(1, 4, 3, 7, has_nan=True)[:128].copy()
    table[[0, 127]] = 0
    return tuple(float(v) for v in np.concatenate([table, table]))


class Nvfp4Ggml(Declared):
    """ggml's block of 64: four scale bytes, then 4 runs of 8 bytes; low nibbles are values 0-7 of a run, high 8-15."""

    name = "nvfp4_ggml"
    row = "NVFP4 (E2M1 + FP8 scale)"
    source = "ggml block_nvfp4"
    differs = "another byte order than the checkpoints', no tensor scale"
    profile = QuantizationProfile(
        tiling=TilingQuantization(
            (64,),
            (1,),
            (
                QuantizationProfile(
                    tiling=TilingQuantization(
                        (16,),
                        (),
                        (
                            QuantizationProfile(
                                floating_point=FloatingPointUniform(
                                    1, 2, 1, 1, scale=Parameter("d", levels=_ue4m3_levels())
                                )
                            ),
                        ),
                    )
                ),
            ),
        ),
        layout=interleaved(
            64,
            36,
            BlockField(Role.SCALE, 0, 8, 4, DataType.UINT8, "d"),
            BlockField(Role.VALUES, 0, 8, 32, DataType.UINT8, "qs"),
            views=[_nibbles("codes", "qs", 4, 8)],
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        groups = x.reshape(*x.shape[:2], 4, 16)
        top = amax(groups)[..., 0]
        scale = ue4m3(top / np.float32(6))
        value = np.asarray(_ue4m3_levels(), np.float32)[scale]
        codes = e2m1_ties_down(np.where(value[..., None] > 0, groups / nonzero(value)[..., None], 0))
        return {"d": scale, "codes": codes.reshape(x.shape)}


def ue4m3(x: F32) -> Array:
    """Scale byte for positive scales; from 248 on everything is 448, as the reference has it."""
    codes = small_float(np.ascontiguousarray(x), 4, 3, 7, has_nan=True)
    return np.where(x >= 248, np.uint8(0x7E), codes)
