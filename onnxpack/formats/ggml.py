"""ggml's plain 8-bit block format. CONTRIBUTING.md shows this declaration as the example of a format added."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes, Declared
from onnxpack.formats.layout import BlockField, Role, interleaved
from onnxpack.formats.profiles import LinearUniform, Parameter, QuantizationProfile, TilingQuantization
from onnxpack.formats.scaling import amax, half_away


class Q80(Declared):
    """Blocks of 32: float16 scale amax / 127, then int8 codes rounded half away from zero."""

    name = "q8_0"
    row = "Q8_0"
    source = "ggml block_q8_0, ggml-quants.c"
    differs = "not in the document"
    profile = QuantizationProfile(
        tiling=TilingQuantization(
            (32,),
            (1,),
            (
                QuantizationProfile(
                    linear=LinearUniform(DataType.INT8, bits=8, symmetric=True, scale=Parameter("d"), codes="qs")
                ),
            ),
        ),
        layout=interleaved(
            32,
            34,
            BlockField(Role.SCALE, 0, 16, 1, DataType.FLOAT16, "d"),
            BlockField(Role.VALUES, 0, 8, 32, DataType.INT8, "qs"),
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        d = amax(x) / np.float32(127)
        inverse = np.where(d == 0, np.float32(0), np.float32(1) / np.where(d == 0, np.float32(1), d))
        return {"d": d.astype(np.float16), "qs": half_away(x * inverse).astype(np.int8)}
