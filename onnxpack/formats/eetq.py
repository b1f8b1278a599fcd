"""EETQ: int8 per output feature, stored in the order that its kernel loads. NaN and infinity are refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, Role, require
from onnxpack.formats.profiles import LinearUniform, Parameter, QuantizationProfile
from onnxpack.formats.scaling import half_away, nonzero
from onnxpack.formats.tensors import TensorField, TensorLayout, TensorView


class Eetq(Arranged):
    """qweight int8 [K, N], weight_scales float16 [N]; codes are of max |w| / 128, rounded half away from zero.

    `variant` "sm80" (and 75): 128 is added, rows are shuffled in sixteens, columns interleaved in pairs over 64 rows,
    bytes 1 and 2 of every four swapped; "plain": two's complement, row-major. An all-zero column has scale 0.
    """

    name = "eetq"
    row = "EETQ (INT8 weight-only)"
    source = "EETQ csrc/cutlass_preprocessors.cc"
    differs = "the stored order and the added 128 are left out; the divisor is 128; scales are a tensor"

    def __init__(self, *, variant: str = "sm80") -> None:
        require(variant in ("sm80", "plain"), "variant", f"{variant!r} is not sm80 or plain")
        self.variant = variant
        fields = (
            TensorField(Role.VALUES, "qweight", DataType.INT8, ("K", "N")),
            TensorField(Role.SCALE, "weight_scales", DataType.FLOAT16, ("N",)),
        )
        part = BitPart("qweight", 0, 8, (1,), (8,))
        if variant == "sm80":
            # Row 8 b + 2 a + c of sixteen stands at 4 a + 2 b + c, then the bits b and c change places.
            codes = TensorView(
                "codes", "qweight",
                "np kp pair h a c b x | np pair kp h b a c x | np pair kp h b a c i | (np pair) (kp h b a c i)",
                (
                    ("np", "N/2"), ("kp", "K/64"), ("pair", "2"),
                    ("h", "4"), ("a", "4"), ("c", "2"), ("b", "2"), ("x", "1"),
                ),
                (part,), cut="np", per=2,
            )  # fmt: skip
        else:
            codes = TensorView(
                "codes", "qweight", "k n x | n k x | n k i | n (k i)", (("k", "K"), ("x", "1")), (part,), cut="n"
            )
        scales = TensorView("scales", "weight_scales", "n | n 1", cut="n", dims=("N", "1"))
        linear = LinearUniform(
            DataType.INT8 if variant == "plain" else DataType.UINT8,
            bits=8,
            axis=0,
            zero_point=0 if variant == "plain" else 128,
            scale=Parameter("scales"),
            codes="codes",
        )
        self.profile = QuantizationProfile(linear=linear, tensors=TensorLayout(("N", "K"), fields, (codes, scales)))

    @property
    def params(self) -> Mapping[str, str]:
        return {"variant": self.variant}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        scale = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 128)
        codes = np.clip(half_away(x / nonzero(scale)), -128, 127).astype(np.int8).view(np.uint8)
        if self.variant == "sm80":
            codes ^= np.uint8(128)
        return {"codes": codes, "scales": scale.astype(np.float16)}
