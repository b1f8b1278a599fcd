"""ggml's codebook formats: IQ4_NL (16 uneven levels) and IQ1_S (vectors of 8 from a grid of 2048). Encoders search."""

from __future__ import annotations

from collections.abc import Mapping

from onnxpack.formats import search, search_grid
from onnxpack.formats.base import F32, Array
from onnxpack.formats.data import load
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes, Declared
from onnxpack.formats.layout import BitPart, BitView, BlockField, Role, interleaved
from onnxpack.formats.profiles import Codebook, Parameter, QuantizationProfile, TilingQuantization

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Iq4Nl(Declared):
    """Blocks of 32: float16 scale, 16 bytes; low nibbles are values 0-15, high nibbles 16-31."""

    name = "iq4_nl"
    row = "IQ4_NL"
    source = "ggml-common.h"
    differs = "the document has no sketch of it"
    profile = QuantizationProfile(
        tiling=TilingQuantization(
            (32,),
            (1,),
            (
                QuantizationProfile(
                    codebook=Codebook(
                        tuple(map(float, IQ4_LEVELS)),
                        packed_count=2,
                        packed_bytes=1,
                        index_bits=4,
                        scale=Parameter("d"),
                        codes="codes",
                    )
                ),
            ),
        ),
        layout=interleaved(
            32,
            18,
            BlockField(Role.SCALE, 0, 16, 1, DataType.FLOAT16, "d"),
            BlockField(Role.CODE, 0, 8, 16, DataType.UINT8, "qs"),
            views=[BitView("codes", (BitPart("qs", 0, 4, (2, 16), (4, 8)),))],
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        d, codes = search.levels(x, IQ4_LEVELS)
        return {"d": d, "codes": codes}


_SCALES = tuple(float(2 * s + 1) for s in range(8))
_DELTA = 0.125


class Iq1S(Declared):
    """Blocks of 256: float16 scale; 11-bit grid indices (8 low bits, 3 high) per 8 values; per 32 values a 3-bit odd
    scale and a shift of +-1/8. The grid is a table that ships with ggml."""

    name = "iq1_s"
    row = "IQ1_S"
    source = "ggml-common.h (iq1s_grid)"
    differs = "44 + 2 bytes lack the eight 3-bit scales and the shift; the scale comes first; indices are split 8 + 3"
    profile = QuantizationProfile(
        tiling=TilingQuantization(
            (256,),
            (1,),
            (
                QuantizationProfile(
                    codebook=Codebook(
                        tuple(float(v) for v in load("iq1_s_grid").reshape(-1)),
                        num_codebooks=1,
                        codebook_size=2048,
                        vector_size=8,
                        index_bits=11,
                        scale=Parameter("scales", levels=_SCALES, parent=Parameter("d")),
                        shift=Parameter("deltas", levels=(_DELTA, -_DELTA)),
                        codes="codes",
                    )
                ),
            ),
        ),
        layout=interleaved(
            256,
            50,
            BlockField(Role.SCALE, 0, 16, 1, DataType.FLOAT16, "d"),
            BlockField(Role.CODE, 0, 8, 32, DataType.UINT8, "qs"),
            BlockField(Role.CODE, 0, 8, 16, DataType.UINT8, "qh"),
            views=[
                BitView("codes", (BitPart("qs", 0, 8, (32,), (8,)), BitPart("qh", 0, 3, (8, 4), (16, 3), shift=8))),
                BitView("scales", (BitPart("qh", 12, 3, (8,), (16,)),)),
                BitView("deltas", (BitPart("qh", 15, 1, (8,), (16,)),)),
            ],
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return search_grid.encode(x)
