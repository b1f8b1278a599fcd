"""Logarithmic quantization: powers of two. There is no file format of it; two layouts are defined here.

Zero has no code: it becomes +2**offset. NaN and infinity are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes, Declared
from onnxpack.formats.layout import BlockField, BlockLayout, Role, StorageOrder, require
from onnxpack.formats.profiles import LogUniform, QuantizationProfile
from onnxpack.formats.scaling import require_int

_SQRT2 = 2**0.5


def log2_codes(x: F32, offset: int, bits: int) -> Array:
    """clip(round(log2 |x|) - offset): exact, since round turns up at sqrt(2), which no float equals."""
    fraction, exponent = np.frexp(np.abs(x))
    nearest = exponent - 1 + (fraction * 2.0 > _SQRT2).astype(np.int32)
    codes = np.clip(nearest - offset, 0, (1 << bits) - 1)
    return np.where(x == 0, 0, codes).astype(np.uint8)


class Log(Declared):
    """y = +-2**(code + offset). `variant` "plane": 4-bit codes (low nibble first) and a plane of sign bits (5 bits a
    value); "packed": one nibble of sign bit and 3-bit code (4 bits a value).

    `offset` is the exponent of the smallest magnitude. The document's -7 suits values from 1/128 to 256; for weights
    choose one so that their largest magnitude is near the top code.
    """

    name = "log"
    row = "Log quantization"
    source = "Miyashita et al. 2016 (1603.01025); no file format exists"
    differs = "mixes a 4-bit code and a sign plane (5 bits) under the name of 4; clips after packing the sign"

    def __init__(self, *, variant: str = "plane", offset: int = -7) -> None:
        require(variant in ("plane", "packed"), "variant", f"{variant!r} is not plane or packed")
        require_int(offset, "offset", -126, 112)
        self.variant, self.offset = variant, offset
        plane = variant == "plane"
        fields = [BlockField(Role.CODE, 0, 4, 8, DataType.UNDEFINED, "codes")]
        if plane:
            fields.append(BlockField(Role.SIGN, 0, 1, 8, DataType.UNDEFINED, "signs"))
        leaf = LogUniform(4, 2.0, offset, has_sign=True, signs="signs" if plane else "")
        self._bits = leaf.code_bits
        self.profile = QuantizationProfile(
            log=leaf,
            layout=BlockLayout(8, 5 if plane else 4, tuple(fields)),
            storage_order=StorageOrder.SEQUENTIAL,
            partial=True,
        )

    @property
    def params(self) -> Mapping[str, object]:
        return {"variant": self.variant, "offset": self.offset}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        codes, negative = log2_codes(x, self.offset, self._bits), (x < 0).view(np.uint8)
        if self.variant == "packed":
            return {"codes": codes | negative << np.uint8(3)}
        return {"codes": codes, "signs": negative}
