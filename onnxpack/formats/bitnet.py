"""Ternary and two-bit checkpoints: BitNet b1.58 (transformers, I2_S), ParetoQ, Tequila.

NaN and infinity are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import FLOAT_NAMES, DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, DigitPart, Role, require
from onnxpack.formats.profiles import Codebook, LinearUniform, Parameter, QuantizationProfile, TilingQuantization
from onnxpack.formats.scaling import float_dtype, mean_abs, nonzero, require_int, rounded
from onnxpack.formats.tensors import TensorField, TensorLayout, TensorView

_LEVELS = (-1.0, 0.0, 1.0, 2.0)
_LEAST = np.float32(1e-5)
"""What scales of zero (and negative ones) count as."""
_FLOATS = {data_type.storage: name for name, data_type in FLOAT_NAMES.items()}


def _rounded_ternary(x: Array) -> Array:
    return (np.clip(np.rint(x), -1, 1) + 1).astype(np.uint8)


class BitnetHf(Arranged):
    """weight uint8 [N / 4, K]: bits 2 i of byte row r are row i * (N / 4) + r, codes one above the value.

    weight_scale is one float: `linear` "bitlinear" divides by it (it is 1 / mean |w|), "autobitlinear" multiplies.
    """

    name = "bitnet_hf"
    row = "BitNet b1.58"
    source = "transformers integrations/bitnet.py"
    differs = "two bits, not base 3: no released checkpoint is like TQ1_0"

    def __init__(self, *, linear: str = "bitlinear", scale_dtype: str = "bfloat16") -> None:
        require(linear in ("bitlinear", "autobitlinear"), "linear", f"{linear!r} is not bitlinear or autobitlinear")
        self.linear, self.scale_dtype, self._type = linear, scale_dtype, float_dtype(scale_dtype)
        fields = (
            TensorField(Role.CODE, "weight", DataType.UINT8, ("N/4", "K")),
            TensorField(Role.SCALE, "weight_scale", self._type),
        )
        views = (
            TensorView(
                "codes", "weight", "r k b | r k b | r k i | (i r) k",
                (("k", "K"), ("b", "1")), (BitPart("weight", 0, 2, (4,), (2,)),),
            ),
            TensorView("scale", "weight_scale", "n k | n k", (("n", "1"), ("k", "1")), dims=("1", "1")),
        )  # fmt: skip
        scale = Parameter("scale", inverse=linear == "bitlinear")
        book = Codebook(_LEVELS, packed_count=4, packed_bytes=1, index_bits=2, scale=scale, codes="codes")
        self.profile = QuantizationProfile(codebook=book, tensors=TensorLayout(("N", "K"), fields, views))

    @property
    def params(self) -> Mapping[str, str]:
        return {"linear": self.linear, "scale_dtype": self.scale_dtype}

    def fitted(self, encoded: Encoded) -> BitnetHf:
        scale = encoded.fields.get("weight_scale")
        kind = _FLOATS.get(scale.dtype, self.scale_dtype) if scale is not None else self.scale_dtype
        return self if kind == self.scale_dtype else BitnetHf(linear=self.linear, scale_dtype=kind)

    def measure(self, w: Array) -> dict[str, Array]:
        mean = np.maximum(mean_abs(w), _LEAST)
        stored = np.float32(1) / mean if self.linear == "bitlinear" else mean
        return {"scale": np.asarray(stored, np.float32).astype(self._type.storage).reshape(1, 1)}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        scale = spans["scale"].astype(np.float32)
        return {"codes": _rounded_ternary(x * scale if self.linear == "bitlinear" else x / scale)}


class BitnetI2S(Arranged):
    """Two bits a value, one above it, over the flattened weight; one float32 scale, mean |w|, and 28 bytes of filling.

    `build` "x86": element 32 g + p of 128 in byte p at bit 6 - 2 g; "arm": 16 g + p of 64.
    """

    name = "bitnet_i2_s"
    row = "BitNet b1.58"
    source = "microsoft/BitNet ggml-bitnet-mad.cpp (quantize_i2_s)"
    differs = "two bits in strides, not base 3; one scale after all codes"

    def __init__(self, *, build: str = "x86") -> None:
        require(build in ("x86", "arm"), "build", f"{build!r} is not x86 or arm")
        self.build = build
        width = 32 if build == "x86" else 16
        size = 4 * width
        fields = (
            TensorField(Role.CODE, "data", DataType.UINT8, (f"N*K/{size}*{width}",)),
            TensorField(Role.SCALE, "scale", DataType.FLOAT, ()),
            TensorField(Role.MASK, "filling", DataType.UINT8, ("28",)),
        )
        views = (
            TensorView(
                "codes", "data", "t p b | t p b | t p i | t (i p)",
                (("p", str(width)), ("b", "1")), (BitPart("data", 6, 2, (4,), (-2,)),), cut="t",
            ),
            TensorView("scale", "scale", "n k | n k", (("n", "1"), ("k", "1")), dims=("1", "1")),
        )  # fmt: skip
        book = Codebook(_LEVELS, packed_count=4, packed_bytes=1, index_bits=2, scale=Parameter("scale"), codes="codes")
        tiling = TilingQuantization((size,), (), (QuantizationProfile(codebook=book),))
        layout = TensorLayout((f"N*K/{size}", str(size)), fields, views)
        self.profile = QuantizationProfile(tiling=tiling, tensors=layout)

    @property
    def params(self) -> Mapping[str, str]:
        return {"build": self.build}

    def measure(self, w: Array) -> dict[str, Array]:
        return {"scale": nonzero(mean_abs(w)).reshape(1, 1)}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        return {"codes": _rounded_ternary(x / spans["scale"])}


_THIRD = float(np.float32(1) / np.float32(1.5))


def _flat_trits(name: str, dims: tuple[str, ...]) -> TensorView:
    """Five trits a byte over the flattened weight: byte b = sum of (t + 1) * 3**n for value 5 b + n."""
    digits = (DigitPart(name, 0, 1, 5, byte_major=True),)
    return TensorView("codes", name, "u b | u b | u i | (u i)", (("b", "1"),), digit_parts=digits, dims=dims)


class ParetoQ(Arranged):
    """Codes with one alpha per row, as ParetoQ's quantizers mean them. ParetoQ stores floats: the packing is ours.

    `levels` "ternary": 0 and +-2/3 alpha, base-3 bytes over the flattened weight; "2bit": +-1/4 and +-3/4 alpha (there
    is no zero); "3bit" and "4bit": whole multiples of alpha, offset binary; all least significant bits first.
    """

    name = "paretoq"
    row = "ParetoQ (SEQ ternary)"
    source = "facebookresearch/ParetoQ models/utils_quant.py"
    differs = "two-bit levels have no zero, so no integer zero point; the ternary step is 2/3; alpha is per row"

    def __init__(self, *, levels: str = "2bit", scale_dtype: str = "bfloat16") -> None:
        known = ("ternary", "2bit", "3bit", "4bit")
        require(levels in known, "levels", f"{levels!r} is not one of {', '.join(known)}")
        self.levels, self.scale_dtype, self._type = levels, scale_dtype, float_dtype(scale_dtype)
        self.profile = self._profile()

    def _profile(self) -> QuantizationProfile:
        alpha, scale = TensorField(Role.SCALE, "alpha", self._type, ("N",)), Parameter("alpha", least=float(_LEAST))
        numbers = TensorView("alpha", "alpha", "n | n 1", cut="n", dims=("N", "1"))
        if self.levels == "ternary":
            stored = TensorField(Role.CODE, "weight", DataType.UINT8, ("N*K|5",))
            codes = _flat_trits("weight", ("N", "K"))
            book = Codebook((-_THIRD, 0.0, _THIRD), packed_count=5, packed_bytes=1, scale=scale, codes="codes")
            layout = TensorLayout(("N", "K"), (stored, alpha), (codes, numbers))
            return QuantizationProfile(codebook=book, tensors=layout)
        bits = int(self.levels[0])
        each, nbytes = (8 // bits, 1) if bits != 3 else (32, 12)
        stored = TensorField(Role.CODE, "weight", DataType.UINT8, ("N", f"K*{bits}/8"))
        codes = TensorView(
            "codes", "weight", "n u b | n u b | n u i | n (u i)",
            (("n", "N"), ("b", str(nbytes))), (BitPart("weight", 0, bits, (each,), (bits,)),), cut="n",
        )  # fmt: skip
        layout = TensorLayout(("N", "K"), (stored, alpha), (codes, numbers))
        if bits == 2:
            book = Codebook((-0.75, -0.25, 0.25, 0.75), index_bits=2, scale=scale, codes="codes")
            return QuantizationProfile(codebook=book, tensors=layout)
        linear = LinearUniform(
            DataType.UINT8, bits=bits, axis=0, zero_point=1 << (bits - 1), scale=scale, codes="codes"
        )
        return QuantizationProfile(linear=linear, tensors=layout)

    @property
    def params(self) -> Mapping[str, str]:
        return {"levels": self.levels, "scale_dtype": self.scale_dtype}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        top = np.abs(x).max(axis=1, keepdims=True)
        # Training learns alpha from here on: the largest weight, or what makes it the largest code.
        alpha = top / np.float32((1 << (int(self.levels[0]) - 1)) - 1) if self.levels in ("3bit", "4bit") else top
        alpha = rounded(np.maximum(alpha, _LEAST), self._type)
        return {"codes": self.codes_for(x, alpha), "alpha": alpha.astype(self._type.storage)}

    def codes_for(self, x: F32, alpha: F32) -> Array:
        """Codes of values with the alpha of their rows [rows, 1]."""
        ratio = x / np.maximum(alpha, _LEAST)
        if self.levels == "ternary":
            return (np.rint(np.clip(ratio, -0.99, 0.99) * np.float32(1.5)) + 1).astype(np.uint8)
        if self.levels == "2bit":
            codes = np.rint(np.clip(ratio, -0.99, 0.99) * np.float32(2) - np.float32(0.5)) + 2
            return codes.astype(np.uint8)
        half = 1 << (int(self.levels[0]) - 1)
        return (np.clip(np.rint(ratio), -half, half - 1) + half).astype(np.uint8)


class Tequila(Arranged):
    """Ternary with a scale per group along K (0: per row), base-3 bytes over the flattened weight, and a bias per row.

    t = +1 from mean |w| / 2 on, -1 down from its negative; the bias is `dead_zone` times the sum of the weights
    between, to be added to the layer's output: it is stored, and is not part of the decoded weight.
    """

    name = "tequila"
    row = "Tequila (ICLR 2026)"
    source = "AngelSlim TernaryQuant (UltraQuantV2, UltraQuantV3)"
    differs = "the dead zone is not only training's: its bias is stored and added; ties differ from rounding"
    refusal = "its bias is added to the layer's output, which a stored weight cannot do; take ternary or tq1_0"

    def __init__(self, *, group: int = 128, dead_zone: float = 1e-3, scale_dtype: str = "float16") -> None:
        require_int(group, "group", 0, 1 << 16)
        number = isinstance(dead_zone, int | float) and not isinstance(dead_zone, bool) and 0 <= dead_zone <= 1
        require(number, "dead_zone", f"{dead_zone!r} is not 0 to 1")
        self.group, self.dead_zone = group, float(dead_zone)
        self.scale_dtype, self._type = scale_dtype, float_dtype(scale_dtype)
        groups, size = (f"K/{group}", str(group)) if group else ("1", "K")
        fields = (
            TensorField(Role.CODE, "weight", DataType.UINT8, ("N*K|5",)),
            TensorField(Role.SCALE, "scale", self._type, ("N", groups)),
            TensorField(Role.BIAS, "bias", DataType.FLOAT, ("N",)),
        )
        views = (
            _flat_trits("weight", ("N", groups, size)),
            TensorView("scale", "scale", "n g | n g 1", (("g", groups),), cut="n", dims=("N", groups, "1")),
            TensorView("bias", "bias", "n | n 1 1", cut="n", dims=("N", "1", "1")),
        )
        book = Codebook((-1.0, 0.0, 1.0), packed_count=5, packed_bytes=1, scale=Parameter("scale"), codes="codes")
        tiling = TilingQuantization((group,), (1,), (QuantizationProfile(codebook=book),))
        self.profile = QuantizationProfile(tiling=tiling, tensors=TensorLayout(("N", groups, size), fields, views))

    @property
    def params(self) -> Mapping[str, object]:
        return {"group": self.group, "dead_zone": self.dead_zone, "scale_dtype": self.scale_dtype}

    def fitted(self, encoded: Encoded) -> Tequila:
        scale = encoded.fields.get("scale")
        if scale is None or scale.ndim != 2 or not scale.size or len(encoded.shape) != 2:
            return self
        group = 0 if scale.shape[1] == 1 else encoded.shape[1] // scale.shape[1]
        kind = _FLOATS.get(scale.dtype, self.scale_dtype)
        if (group, kind) == (self.group, self.scale_dtype):
            return self
        return Tequila(group=group, dead_zone=self.dead_zone, scale_dtype=kind)

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        mean = np.abs(x).mean(axis=-1, keepdims=True, dtype=np.float64).astype(np.float32)
        half = mean / np.float32(2)
        above, below = (x >= half) & (mean > 0), (x <= -half) & (mean > 0)
        left = np.where(above | below, np.float32(0), x).sum(axis=(1, 2), keepdims=True, dtype=np.float64)
        codes = np.uint8(1) + above.view(np.uint8) - below.view(np.uint8)
        bias = (left * self.dead_zone).astype(np.float32)
        return {"codes": codes, "scale": mean.astype(self._type.storage), "bias": bias}
