"""HQQ: codes of 1 to 8 bits, packed in slices of the whole matrix, with float scales and float zero points.

Encoding is HQQ's own start, without its optimization. NaN and infinity are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import FLOAT_NAMES, DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, Role, require
from onnxpack.formats.profiles import LinearUniform, Parameter, QuantizationProfile, TilingQuantization
from onnxpack.formats.scaling import float_dtype, require_int
from onnxpack.formats.tensors import TensorField, TensorLayout, TensorView

_FLAT = np.float32(1e-4)
_STEEPEST = np.float32(2e4)


class Hqq(Arranged):
    """W_q: groups of the flattened weight as rows (`axis` 1) or columns (0), packed in equal slices of rows.

    The first slice takes the highest bits; three-bit codes lie ten to an int32, the rows filled up with zeros. scale
    and zero are floats: value = (code - zero) * scale. Rows must be a multiple of the slices.
    """

    name = "hqq"
    row = "HQQ (mixed-precision per head)"
    source = "hqq core/bitpack.py, core/quantize.py"
    differs = "Half-Quadratic; the zero point is a float; nothing is per head; slices span the whole tensor"

    def __init__(self, *, bits: int = 4, group: int = 64, axis: int = 1, scale_dtype: str = "float16") -> None:
        require(bits in (1, 2, 3, 4, 8), "bits", f"{bits!r} is not 1, 2, 3, 4 or 8")
        require_int(group, "group", 8, 1 << 16)
        require_int(axis, "axis", 0, 1)
        self.bits, self.group, self.axis = bits, group, axis
        self.scale_dtype, self._type = scale_dtype, float_dtype(scale_dtype)
        self.profile = self._profile()

    @property
    def params(self) -> Mapping[str, object]:
        return {name: getattr(self, name) for name in ("bits", "group", "axis", "scale_dtype")}

    def _profile(self) -> QuantizationProfile:
        bits, groups = self.bits, f"N*K/{self.group}"
        word, slices = (4, 10) if bits == 3 else (1, 8 // bits)
        rows, columns = (groups, str(self.group)) if self.axis else (str(self.group), groups)
        one = (groups, "1") if self.axis else ("1", groups)
        fields = (
            TensorField(
                Role.VALUES, "W_q", DataType.INT32 if bits == 3 else DataType.UINT8,
                (f"{rows}{'|' if bits == 3 else '/'}{slices}", columns),
            ),
            TensorField(Role.SCALE, "scale", self._type, one),
            TensorField(Role.ZERO_POINT, "zero", self._type, one),
        )  # fmt: skip
        part = BitPart("W_q", (27 if bits == 3 else 8 - bits), bits, (slices,), (-bits,))
        sizes = (("c", columns), ("b", str(word)))
        views = (
            TensorView("codes", "W_q", "r c b | r c b | r c i | (i r) c", sizes, (part,)),
            TensorView("scale", "scale", "r c | r c", (("c", one[1]),), dims=one),
            TensorView("zero", "zero", "r c | r c", (("c", one[1]),), dims=one),
        )
        linear = LinearUniform(
            DataType.UINT8, bits=bits, scale=Parameter("scale"), zero=Parameter("zero"), codes="codes"
        )
        tiling = TilingQuantization((self.group,), (), (QuantizationProfile(linear=linear),))
        return QuantizationProfile(tiling=tiling, tensors=TensorLayout((rows, columns), fields, views))

    def fitted(self, encoded: Encoded) -> Hqq:
        codes, scale = encoded.fields.get("W_q"), encoded.fields.get("scale")
        names = {FLOAT_NAMES[name].storage: name for name in FLOAT_NAMES}
        if codes is None or scale is None or scale.ndim != 2 or not codes.size or scale.dtype not in names:
            return self
        total = int(np.prod(encoded.shape, dtype=np.int64))
        bits = 3 if codes.dtype == np.int32 else 8 * codes.size // max(1, total)
        axis = (
            1
            if scale.shape[1] == 1 and scale.shape[0] > 1
            else 0
            if scale.shape[0] == 1 < scale.shape[1]
            else self.axis
        )
        group = total // scale.size
        if bits not in (1, 2, 3, 4, 8) or not 8 <= group <= 1 << 16:
            return self
        return Hqq(bits=bits, group=group, axis=axis, scale_dtype=names[scale.dtype])

    def measure(self, w: Array) -> dict[str, Array]:
        if self.axis:
            return {}
        columns = np.ascontiguousarray(w).reshape(self.group, -1)
        low: Array = np.asarray(columns[0], np.float32)
        high = low
        for line in columns[1:]:
            wide = np.asarray(line, np.float32)
            low, high = np.minimum(low, wide), np.maximum(high, wide)
        slope = self._slope(low, high)[None]
        return {"scale": self._stored(1 / slope), "zero": self._stored(-low * slope)}

    def _slope(self, low: Array, high: Array) -> Array:
        width = high - low
        top = np.float32((1 << self.bits) - 1)
        steep = np.where(width <= _FLAT, np.float32(1), (1 / np.where(width <= _FLAT, np.float32(1), width)) * top)
        return np.minimum(steep, _STEEPEST).astype(np.float32)

    def _stored(self, values: Array) -> Array:
        return values.astype(self._type.storage)

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        top = (1 << self.bits) - 1
        if not self.axis:
            # The slope of a group is what its stored scale says; a band holds one value of each.
            slope, zero = 1 / spans["scale"].astype(np.float32), spans["zero"].astype(np.float32)
            return {"codes": np.clip(np.rint(x * slope + zero), 0, top).astype(np.uint8)}
        low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
        slope = self._slope(low, high)
        zero = -low * slope
        codes = np.clip(np.rint(x * slope + zero), 0, top).astype(np.uint8)
        return {"codes": codes, "scale": self._stored(1 / slope), "zero": self._stored(zero)}
