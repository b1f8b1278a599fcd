"""ggml's K-quants: super-blocks of 256 along K, scales (and minimums) of sub-blocks that are themselves quantized.

y = (d * s) * q - (dmin * m), or (d * s) * q: in this order, in float32, without fused multiply-add. Encoders search
(`search`); NaN and infinity are refused, as is a weight whose scale overflows float16.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats import search
from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes, Declared
from onnxpack.formats.layout import BitPart, BitView, BlockField, BlockLayout, Role, interleaved
from onnxpack.formats.profiles import LinearUniform, Parameter, QuantizationProfile, TilingQuantization

_SUPER = 256


def _profile(sub: int, linear: LinearUniform, layout: BlockLayout) -> QuantizationProfile:
    inner = QuantizationProfile(
        tiling=TilingQuantization((sub,), (), (QuantizationProfile(linear=linear),)),
    )
    return QuantizationProfile(tiling=TilingQuantization((_SUPER,), (1,), (inner,)), layout=layout)


def _raw(name: str, count: int) -> BlockField:
    return BlockField(Role.CODE, 0, 8, count, DataType.UINT8, name)


def _half(name: str, role: Role = Role.SCALE) -> BlockField:
    return BlockField(role, 0, 16, 1, DataType.FLOAT16, name)


def _with_minimum(bits: int) -> LinearUniform:
    return LinearUniform(
        DataType.UINT8,
        bits=bits,
        scale=Parameter("scales", parent=Parameter("d")),
        minimum=Parameter("mins", parent=Parameter("dmin")),
        codes="codes",
    )


def _symmetric(bits: int, scales: str, offset: float, zero_point: int) -> LinearUniform:
    scale = Parameter(scales, offset=offset, parent=Parameter("d"))
    return LinearUniform(DataType.UINT8, bits=bits, zero_point=zero_point, scale=scale, codes="codes")


class WithMinimum(Declared):
    """Common to Q2_K, Q4_K and Q5_K: value = scale * code - minimum, minimum >= 0."""

    bits: int
    sub: int
    scale_bits: int

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        found = search.with_minimum(x.reshape(*x.shape[:2], -1, self.sub), self.bits, self.scale_bits)
        return {**found, "codes": found["codes"].reshape(x.shape)}


class Symmetric(Declared):
    """Common to Q3_K and Q6_K: value = scale * (code - offset), scales of both signs."""

    bits: int
    sub: int
    scale_bits: int

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        d, scales, codes = search.symmetric(x.reshape(*x.shape[:2], -1, self.sub), self.bits, self.scale_bits)
        return {"d": d, "scales": scales, "codes": codes.reshape(x.shape)}


class Q2K(WithMinimum):
    """16 sub-blocks of 16; 4-bit scale and minimum in one byte; 2-bit codes in strides of 32."""

    name = "q2_k"
    row = "Q2_K"
    source = "ggml-common.h, ggml-quants.c"
    differs = "a zero point and one scale cannot express it: the minimum is a second quantized number"
    bits, sub, scale_bits = 2, 16, 4
    profile = _profile(
        16,
        _with_minimum(2),
        interleaved(
            _SUPER,
            84,
            _raw("sc", 16),
            _raw("qs", 64),
            _half("d"),
            _half("dmin", Role.BIAS),
            views=[
                BitView("scales", (BitPart("sc", 0, 4, (16,), (8,)),)),
                BitView("mins", (BitPart("sc", 4, 4, (16,), (8,)),)),
                BitView("codes", (BitPart("qs", 0, 2, (2, 4, 32), (256, 2, 8)),)),
            ],
        ),
    )


class Q3K(Symmetric):
    """16 sub-blocks of 16; 6-bit signed scales in 12 bytes; 2 low bits in strides, the high bit in a plane."""

    name = "q3_k"
    row = "Q3_K"
    source = Q2K.source
    differs = "3.4375 bits; sub-blocks of 16, not 32; no zero point 3: codes are 4 below zero, scales signed"
    bits, sub, scale_bits = 3, 16, 6
    profile = _profile(
        16,
        _symmetric(3, "scales", 32, 4),
        interleaved(
            _SUPER,
            110,
            _raw("hmask", 32),
            _raw("qs", 64),
            _raw("sc", 12),
            _half("d"),
            views=[
                BitView(
                    "scales",
                    (
                        BitPart("sc", 0, 4, (2, 8), (4, 8)),
                        BitPart("sc", 64, 2, (4, 4), (2, 8), shift=4),
                    ),
                ),
                BitView(
                    "codes",
                    (
                        BitPart("qs", 0, 2, (2, 4, 32), (256, 2, 8)),
                        BitPart("hmask", 0, 1, (8, 32), (1, 8), shift=2),
                    ),
                ),
            ],
        ),
    )


_SIX_BITS = (
    BitView(
        "scales",
        (
            BitPart("sc", 0, 6, (4,), (8,)),
            BitPart("sc", 64, 4, (4,), (8,), start=4),
            BitPart("sc", 6, 2, (4,), (8,), shift=4, start=4),
        ),
    ),
    BitView(
        "mins",
        (
            BitPart("sc", 32, 6, (4,), (8,)),
            BitPart("sc", 68, 4, (4,), (8,), start=4),
            BitPart("sc", 38, 2, (4,), (8,), shift=4, start=4),
        ),
    ),
)
"""Eight 6-bit scales and minimums in twelve bytes."""

_NIBBLES = BitPart("qs", 0, 4, (4, 2, 32), (256, 4, 8))


class Q4K(WithMinimum):
    """8 sub-blocks of 32; 6-bit scales and minimums in twelve bytes; nibbles, the low ones first in runs of 32."""

    name = "q4_k"
    row = "Q4_K"
    source = Q2K.source
    differs = "the integer zero point 2 means nothing: the minimum is a real number"
    bits, sub, scale_bits = 4, 32, 6
    profile = _profile(
        32,
        _with_minimum(4),
        interleaved(
            _SUPER,
            144,
            _half("d"),
            _half("dmin", Role.BIAS),
            _raw("sc", 12),
            _raw("qs", 128),
            views=[*_SIX_BITS, BitView("codes", (_NIBBLES,))],
        ),
    )


class Q5K(WithMinimum):
    """As Q4_K, with the fifth bit in a plane of its own."""

    name = "q5_k"
    row = "Q5_K"
    source = Q2K.source
    differs = "as Q4_K; five-bit codes are not contiguous"
    bits, sub, scale_bits = 5, 32, 6
    profile = _profile(
        32,
        _with_minimum(5),
        interleaved(
            _SUPER,
            176,
            _half("d"),
            _half("dmin", Role.BIAS),
            _raw("sc", 12),
            _raw("qh", 32),
            _raw("qs", 128),
            views=[*_SIX_BITS, BitView("codes", (_NIBBLES, BitPart("qh", 0, 1, (8, 32), (1, 8), shift=4)))],
        ),
    )


class Q6K(Symmetric):
    """16 sub-blocks of 16 with int8 scales; 4 low bits and 2 high bits in planes; codes are 32 below zero."""

    name = "q6_k"
    row = "Q6_K"
    source = Q2K.source
    differs = "6.5625 bits; a fixed offset of 32 and int8 scales per 16, not zero point 5"
    bits, sub, scale_bits = 6, 16, 8
    profile = _profile(
        16,
        _symmetric(6, "scales", 0, 32),
        interleaved(
            _SUPER,
            210,
            _raw("ql", 128),
            _raw("qh", 64),
            BlockField(Role.SCALE, 0, 8, 16, DataType.INT8, "scales"),
            _half("d"),
            views=[
                BitView(
                    "codes",
                    (
                        BitPart("ql", 0, 4, (2, 2, 64), (512, 4, 8)),
                        BitPart("qh", 0, 2, (2, 4, 32), (256, 2, 8), shift=4),
                    ),
                )
            ],
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        out = super().quantize(x, spans)
        # The search counts scales from 0; here they are two's complement.
        return {**out, "scales": (out["scales"].astype(np.int16) - 128).astype(np.int8)}
