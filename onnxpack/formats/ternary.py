"""Ternary formats: ggml's TQ1_0 and TQ2_0, Sherry's STQ1_0, and plain base-3 bytes. NaN and infinity are refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes, Declared
from onnxpack.formats.layout import (
    BitPart,
    BitView,
    BlockField,
    BlockLayout,
    DigitPart,
    Per,
    Role,
    StorageOrder,
    interleaved,
)
from onnxpack.formats.linear import scale_field
from onnxpack.formats.profiles import (
    Codebook,
    FieldWeight,
    Parameter,
    QuantizationProfile,
    Scatter,
    StructuredBlockUniform,
    TilingQuantization,
)
from onnxpack.formats.scaling import amax, mean_abs, nonzero

_TERNARY = (-1.0, 0.0, 1.0)


def ternary(x: F32) -> Array:
    """0, 1, 2 for values that round (half away from zero) to -1, 0, 1; |x| <= 1."""
    return (x >= 0.5).view(np.uint8) + np.uint8(1) - (x <= -0.5).view(np.uint8)


def _absmax_codes(x: F32) -> Codes:
    top = amax(x)
    inverse = np.where(top > 0, np.float32(1) / nonzero(top), np.float32(0))
    return {"d": top.astype(np.float16), "trits": ternary(x * inverse)}


def _tiled(size: int, leaf: Codebook, layout: BlockLayout) -> QuantizationProfile:
    return QuantizationProfile(
        tiling=TilingQuantization((size,), (1,), (QuantizationProfile(codebook=leaf),)), layout=layout
    )


class Tq10(Declared):
    """Blocks of 256: five trits a byte as a rounded base-3 fraction, in strides; float16 absmax last."""

    name = "tq1_0"
    row = "TQ1_0"
    source = "ggml block_tq1_0, ggml-quants.c"
    differs = (
        "1.6 bits leaves out the float16 scale and the tail of 4 trits a byte; digits are a fraction, order strided"
    )
    profile = _tiled(
        256,
        Codebook(_TERNARY, packed_count=5, packed_bytes=1, scale=Parameter("d"), codes="trits"),
        interleaved(
            256,
            54,
            BlockField(Role.CODE, 0, 8, 48, DataType.UINT8, "qs"),
            BlockField(Role.CODE, 0, 8, 4, DataType.UINT8, "qh"),
            BlockField(Role.SCALE, 0, 16, 1, DataType.FLOAT16, "d"),
            views=[
                BitView(
                    "trits",
                    digit_parts=(
                        DigitPart("qs", 0, 32, 5, fraction=True),
                        DigitPart("qs", 32, 16, 5, fraction=True, start=160),
                        DigitPart("qh", 0, 4, 4, fraction=True, start=240),
                    ),
                )
            ],
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return _absmax_codes(x)


class Tq20(Declared):
    """Blocks of 256: two bits a value, in strides of 32; float16 absmax last. Code 3 is read as +2, never written."""

    name = "tq2_0"
    row = "TQ2_0"
    source = "ggml block_tq2_0, ggml-quants.c"
    differs = "index_bits 0 would mean base 3; it is 2 bits, in strides of 32; 2.0 bits leaves out the scale"
    profile = _tiled(
        256,
        Codebook((*_TERNARY, 2.0), packed_count=4, packed_bytes=1, index_bits=2, scale=Parameter("d"), codes="trits"),
        interleaved(
            256,
            66,
            BlockField(Role.CODE, 0, 8, 64, DataType.UINT8, "qs"),
            BlockField(Role.SCALE, 0, 16, 1, DataType.FLOAT16, "d"),
            views=[BitView("trits", (BitPart("qs", 0, 2, (2, 4, 32), (256, 2, 8)),))],
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return _absmax_codes(x)


class Ternary(Declared):
    """Five trits a byte in natural order: byte b = sum of (t + 1) * 3**n for value 5b + n; one float32 mean |w|.

    No public file format packs like this; TQ1_0 is the one in use. t = clip(round half to even(w / s), -1, 1).
    """

    name = "ternary"
    row = "1.58-bit Ternary (BitNet)"
    source = "the document's own sketch, with the order of digits made definite; ggml TQ1_0 is the format in use"
    differs = "1.63 bits counts no scale (1.6 bare, 1.6875 as TQ1_0); the order of digits is undefined"
    profile = QuantizationProfile(
        codebook=Codebook(_TERNARY, packed_count=5, packed_bytes=1, scale=Parameter("scale"), codes="trits"),
        layout=BlockLayout(
            5,
            1,
            (BlockField(Role.CODE, 0, 8, 1, DataType.UINT8, "packed"), scale_field(DataType.FLOAT, Per.TENSOR)),
            (BitView("trits", digit_parts=(DigitPart("packed", 0, 1, 5, byte_major=True),)),),
        ),
        storage_order=StorageOrder.SEQUENTIAL,
        partial=True,
    )

    def measure(self, w: Array) -> dict[str, Array]:
        return {"scale": nonzero(mean_abs(w))}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return {"trits": (np.clip(np.rint(x / spans["scale"]), -1, 1) + 1).astype(np.uint8)}


def stq_codebook() -> tuple[float, ...]:
    """The 32 entries of 4: slot 4z + b0 + 2 b1 has its zero at z and signs +, b0, b1; entry + 16 is its negative.

    >>> np.reshape(stq_codebook(), (32, 4))[[0, 1, 17]].astype(int).tolist()
    [[0, 1, 1, 1], [0, 1, -1, 1], [0, -1, 1, -1]]
    """
    book = []
    for sign, zero, high, low in itertools.product((1.0, -1.0), range(4), (0, 1), (0, 1)):
        lanes = [sign, -sign if low else sign, -sign if high else sign]
        book += [*lanes[:zero], 0.0, *lanes[zero:]]
    return tuple(book)


class Stq10(Declared):
    """Sherry: of four values 16 apart one is zero.

    4 bits say which, and two signs relative to the first; a sign plane flips all; float16 absmax per 256.
    """

    name = "stq1_0"
    row = "STQ1_0 (Sherry)"
    source = "llama.cpp pull request 22836 (open): block_stq1_0"
    differs = "the codebook is left out; groups are 16 apart, the pull request's first commits grouped neighbours"
    profile = QuantizationProfile(
        structured_block=StructuredBlockUniform(
            interleaved(
                256,
                42,
                BlockField(Role.CODE, 0, 4, 64, DataType.UNDEFINED, "qs"),
                BlockField(Role.SIGN, 0, 1, 64, DataType.UNDEFINED, "sign"),
                BlockField(Role.SCALE, 0, 16, 1, DataType.FLOAT16, "d"),
            ),
            stq_codebook(),
            4,
            (FieldWeight(Role.CODE, 1), FieldWeight(Role.SIGN, 16)),
            Scatter(64, 4, 16),
            axis=1,
        )
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        # Lanes p of group g are values 64 (g // 16) + g % 16 + 16 p.
        lanes = x.reshape(*x.shape[:2], 4, 4, 16)
        size, minus = np.abs(lanes), (lanes < 0).view(np.uint8)
        low = np.minimum(size[..., 0, :], size[..., 1, :])
        late = np.minimum(size[..., 2, :], size[..., 3, :]) < low
        # The first smallest of the four, and the signs of the other three, in order.
        zero = np.where(late, 2 + (size[..., 3, :] < size[..., 2, :]), size[..., 1, :] < size[..., 0, :]).astype(
            np.uint8
        )
        first, second, third = (np.where(zero <= i, minus[..., i + 1, :], minus[..., i, :]) for i in range(3))
        slot = zero << np.uint8(2) | (second ^ first) | (third ^ first) << np.uint8(1)
        whole = (*x.shape[:2], 64)
        return {"qs": slot.reshape(whole), "sign": first.reshape(whole), "d": amax(x).astype(np.float16)}
