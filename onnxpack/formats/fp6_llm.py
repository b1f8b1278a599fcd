"""FP6-LLM (TC-FPx): six- and five-bit floats in bit planes, in the order that its kernel's threads load.

NaN and infinity are refused; values saturate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, Role, require
from onnxpack.formats.profiles import FloatingPointUniform, Parameter, QuantizationProfile
from onnxpack.formats.scaling import nonzero, small_float
from onnxpack.formats.tensors import SumView, TensorField, TensorLayout, TensorView

_LOW = 4  # bits of the second plane

_KINDS = {"e3m2": (3, 2, 3, 28.0), "e2m2": (2, 2, 1, 7.0)}
"""Exponent bits, mantissa bits, bias, largest value."""


def _plane(name: str, width: int, start: str) -> TensorView:
    """A plane of `width` bits a value, over 64 rows and 16 columns at a time.

    Thread (r, c) of 32 holds values (v2, v1, v0) of each 16 x 16 block: row r + 8 v1, column 8 v2 + 2 c + v0. A
    word of 32 bits holds its fields for 32 / width / 8 blocks, least significant bit at 16 - width + 16 v0 - 8 v1 -
    width * (block, v2).
    """
    blocks = 4 // width
    part = BitPart("weight", 16 - width, width, (2 * blocks, 2, 2), (-width, -8, 16))
    sizes = {"i": "N/64", "j": "K/16", "w": str(4 // blocks), "r": "8", "c": "4", "b": "4"}
    inner = {"blk": str(blocks), "u": "2", "v": "2", "x": "2"}
    return TensorView(
        name, "weight",
        "i j w r c b | i j w r c b | i j w r c blk u v x | (i w blk v r) (j u c x)",
        (*sizes.items(), *inner.items()), (part,), start=start, cut="i", per=64,
    )  # fmt: skip


class Fp6Llm(Arranged):
    """weight uint8 [N, K * bits / 8]: a plane of the top bits (sign, high exponent), then one of the low four.

    `kind` "e3m2" (FP6) or "e2m2" (FP5), neither with infinities; scales float16 per row; values are rounded to float16.
    """

    name = "fp6_llm"
    row = "FP6 LLM (TC-FPn)"
    source = "usyd-fsalab/fp6_llm weight_prepacking.h"
    differs = "planes are 2 + 4 bits, not 4 + 2; the scale is per row, not per 128"

    def __init__(self, *, kind: str = "e3m2") -> None:
        require(kind in _KINDS, "kind", f"{kind!r} is not e3m2 or e2m2")
        self.kind = kind
        exponent, mantissa, bias, _ = _KINDS[kind]
        bits = 1 + exponent + mantissa
        high = bits - _LOW
        fields = (
            TensorField(Role.VALUES, "weight", DataType.UINT8, ("N", f"K*{bits}/8")),
            TensorField(Role.SCALE, "scales", DataType.FLOAT16, ("N",)),
        )
        views = (
            _plane("high", high, "0"),
            _plane("low", _LOW, f"N*K*{high}/8"),
            SumView("codes", (("high", 1 << _LOW), ("low", 1))),
            TensorView("scales", "scales", "n | n 1", cut="n", dims=("N", "1")),
        )
        leaf = FloatingPointUniform(
            1, exponent, mantissa, bias, split_storage=True, split_bits=(high, _LOW), scale=Parameter("scales")
        )
        self.profile = QuantizationProfile(
            floating_point=leaf, data_type=DataType.FLOAT16, tensors=TensorLayout(("N", "K"), fields, views)
        )

    @property
    def params(self) -> Mapping[str, str]:
        return {"kind": self.kind}

    def fitted(self, encoded: Encoded) -> Fp6Llm:
        weight = encoded.fields.get("weight")
        if weight is None or len(encoded.shape) != 2 or weight.ndim != 2:
            return self
        bits = 8 * weight.shape[1] / max(1, encoded.shape[1])
        kind = {6.0: "e3m2", 5.0: "e2m2"}.get(bits, self.kind)
        return self if kind == self.kind else Fp6Llm(kind=kind)

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        exponent, mantissa, bias, top = _KINDS[self.kind]
        scale = (np.abs(x).max(axis=1, keepdims=True) / np.float32(top)).astype(np.float16)
        scaled = np.ascontiguousarray(x / nonzero(scale.astype(np.float32)))
        return {"codes": small_float(scaled, exponent, mantissa, bias), "scales": scale}
