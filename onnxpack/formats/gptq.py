"""GPTQ and AWQ checkpoints: unsigned codes in int32 words along K or N, zero points packed alike, float16 scales.

Encoding is round-to-nearest; calibration is not part of a format. NaN and infinity are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, Role, require
from onnxpack.formats.profiles import LinearUniform, Parameter, QuantizationProfile, TilingQuantization
from onnxpack.formats.scaling import require_int, slabs
from onnxpack.formats.tensors import TensorField, TensorLayout, TensorView

_ORDER = ((4, 2), (4, 16))
"""AWQ: columns 0, 2, 4, 6 take the low four nibbles of a word, columns 1, 3, 5, 7 the high ones."""


def asymmetric(x: F32, bits: int, least_zero: int = 0) -> tuple[Array, Array, Array]:
    """Codes, zero points and float16 scales of groups [.., group]: the range of values and 0, rounded to nearest."""
    top = (1 << bits) - 1
    low = np.minimum(x.min(axis=-1, keepdims=True), 0)
    high = np.maximum(x.max(axis=-1, keepdims=True), 0)
    # With zero points from `least_zero` on, the codes below it are lost to a group without negative values.
    step = np.maximum((high - low) / np.float32(top), high / np.float32(top - least_zero))
    scale = step.astype(np.float16)
    scale = np.where(scale == 0, np.float16(1), scale)
    wide = scale.astype(np.float32)
    zero = np.clip(np.rint(-low / wide), least_zero, top)
    codes = np.clip(np.rint(x / wide) + zero, 0, top)
    return codes.astype(np.uint8), zero.astype(np.uint8), scale


def _tiled(group: int, linear: LinearUniform, layout: TensorLayout) -> QuantizationProfile:
    tiling = TilingQuantization((group,), (1,), (QuantizationProfile(linear=linear),))
    return QuantizationProfile(tiling=tiling, tensors=layout)


class Gptq(Arranged):
    """qweight int32 [K * bits / 32, N] along K, qzeros int32 [K / group, N * bits / 32] along N, scales float16.

    `zeros` "v1" stores zero points less one (0 cannot be stored; 2**bits - 1 is read back as 0), "v2" as they are.
    `act_order` adds g_idx int32 [K], the group of each input feature; ours go by falling energy of their columns.
    A 3-bit code may lie across words: 32 codes in three of them. Groups of zeros have scale 1.
    """

    name = "int4_gptq"
    row = "INT4 GPTQ (per-group)"
    source = "AutoGPTQ qlinear_cuda_old.py (v1), GPTQModel (v2)"
    differs = "codes are unsigned; zeros less one in v1; scales and zeros are tensors; the order of packing; g_idx"

    def __init__(self, *, bits: int = 4, group: int = 128, zeros: str = "v1", act_order: bool = False) -> None:
        require(bits in (2, 3, 4, 8), "bits", f"{bits!r} is not 2, 3, 4 or 8")
        require_int(group, "group", 8, 1 << 16)
        require(zeros in ("v1", "v2"), "zeros", f"{zeros!r} is not v1 or v2")
        self.bits, self.group, self.zeros, self.act_order = bits, group, zeros, bool(act_order)
        self.profile = self._profile()

    @property
    def params(self) -> Mapping[str, object]:
        return {name: getattr(self, name) for name in ("bits", "group", "zeros", "act_order")}

    def _profile(self) -> QuantizationProfile:
        bits, group, each = self.bits, self.group, 32 if self.bits == 3 else 32 // self.bits
        words = {"w": str(each * bits // 32), "b": "4"}
        part = (each,), (bits,)
        fields = [
            TensorField(Role.VALUES, "qweight", DataType.INT32, (f"K*{bits}/32", "N")),
            TensorField(Role.ZERO_POINT, "qzeros", DataType.INT32, (f"K/{group}", f"N*{bits}/32")),
            TensorField(Role.SCALE, "scales", DataType.FLOAT16, (f"K/{group}", "N")),
        ]
        if self.act_order:
            fields.append(TensorField(Role.MASK, "g_idx", DataType.INT32, ("K",)))
        parts = {name: (BitPart(name, 0, bits, *part),) for name in ("qweight", "qzeros")}
        spread = {"index": "g_idx", "dims": ("N", "K")} if self.act_order else {"dims": ("N", f"K/{group}", "1")}
        n, g = ("n", "N"), ("g", f"K/{group}")
        views = (
            TensorView(
                "codes", "qweight", "kw w n b | kw n (w b) | kw n i | n (kw i)",
                (n, *words.items()), parts["qweight"], cut="n",
            ),
            TensorView(
                "zeros", "qzeros", "g nw w b | g nw (w b) | g nw i | (nw i) g",
                (g, *words.items()), parts["qzeros"], cut="nw", per=each, **spread,
            ),
            TensorView("scales", "scales", "g n | n g", (g,), cut="n", **spread),
        )  # fmt: skip
        frame = ("N", "K") if self.act_order else ("N", f"K/{group}", str(group))
        top = 1 << bits
        levels = tuple(float((i + 1) % top) for i in range(top)) if self.zeros == "v1" else ()
        linear = LinearUniform(
            DataType.UINT8, bits=bits, scale=Parameter("scales"), zero=Parameter("zeros", levels=levels), codes="codes"
        )
        return _tiled(group, linear, TensorLayout(frame, tuple(fields), views))

    def fitted(self, encoded: Encoded) -> Gptq:
        qweight, scales = encoded.fields.get("qweight"), encoded.fields.get("scales")
        if len(encoded.shape) != 2 or qweight is None or scales is None:
            return self
        if qweight.ndim != 2 or scales.ndim != 2 or not scales.size:
            return self
        k = encoded.shape[1]
        bits, group = qweight.shape[0] * 32 // max(1, k), k // scales.shape[0]
        act_order = "g_idx" in encoded.fields
        if bits not in (2, 3, 4, 8) or group < 8 or (bits, group, act_order) == (self.bits, self.group, self.act_order):
            return self
        return Gptq(bits=bits, group=group, zeros=self.zeros, act_order=act_order)

    def measure(self, w: Array) -> dict[str, Array]:
        if not self.act_order:
            return {}
        energy = np.zeros(w.shape[1])
        for part in slabs(w):
            energy += np.square(part, dtype=np.float64).sum(axis=0)
        ranks = np.empty(w.shape[1], np.int32)
        ranks[np.argsort(-energy, kind="stable")] = np.arange(w.shape[1], dtype=np.int32)
        return {"g_idx": ranks // np.int32(self.group)}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        least = 1 if self.zeros == "v1" else 0
        index = spans.get("g_idx")
        order = np.argsort(index, kind="stable") if index is not None else None
        groups = x if order is None else np.take(x, order, axis=1).reshape(len(x), -1, self.group)
        codes, zero, scale = asymmetric(groups, self.bits, least)
        stored = zero - np.uint8(least)
        if order is None or index is None:
            return {"codes": codes, "zeros": stored, "scales": scale}
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        codes = np.take(codes.reshape(x.shape), back, axis=1)
        return {"codes": codes, "zeros": stored[..., 0], "scales": scale[..., 0]}


class Awq(Arranged):
    """Four-bit codes and zero points (as they are) in int32 words, float16 scales per group along K.

    `variant` "gemm": words along N, columns in the order 0, 2, 4, 6, 1, 3, 5, 7; "gemv": words along K, in order,
    scales and zeros [N, groups] filled up; "llm-awq": the 16-bit words of llm-awq v2, in its own order, with
    scaled_zeros = -zero * scale. Groups of zeros have scale 1.
    """

    name = "int4_awq"
    row = "INT4 AWQ (per-group)"
    source = "AutoAWQ gemm.py, gemv.py, packing_utils.py; llm-awq qmodule.py (v2)"
    differs = "the order of nibbles is the format; zeros are not less one; scales and zeros are tensors"

    def __init__(self, *, group: int = 128, variant: str = "gemm") -> None:
        require(group in (32, 64, 128), "group", f"{group!r} is not 32, 64 or 128")
        require(variant in ("gemm", "gemv", "llm-awq"), "variant", f"{variant!r} is not gemm, gemv or llm-awq")
        self.group, self.variant = group, variant
        layout = {"gemm": self._gemm, "gemv": self._gemv, "llm-awq": self._llm_awq}[variant]()
        real = variant == "llm-awq"
        linear = LinearUniform(
            DataType.UINT8,
            bits=4,
            scale=Parameter("scales"),
            zero=None if real else Parameter("zeros"),
            minimum=Parameter("scaled_zeros", factor=-1) if real else None,
            codes="codes",
        )
        self.profile = _tiled(group, linear, layout)

    @property
    def params(self) -> Mapping[str, object]:
        return {"group": self.group, "variant": self.variant}

    @property
    def _frame(self) -> tuple[str, str, str]:
        return "N", f"K/{self.group}", str(self.group)

    def _gemm(self) -> TensorLayout:
        g = f"K/{self.group}"
        fields = (
            TensorField(Role.VALUES, "qweight", DataType.INT32, ("K", "N/8")),
            TensorField(Role.ZERO_POINT, "qzeros", DataType.INT32, (g, "N/8")),
            TensorField(Role.SCALE, "scales", DataType.FLOAT16, (g, "N")),
        )
        dims, word = ("N", g, "1"), ("b", "4")
        views = (
            TensorView(
                "codes", "qweight", "k nw b | nw k b | nw k i | (nw i) k",
                (("k", "K"), word), (BitPart("qweight", 0, 4, *_ORDER),), cut="nw", per=8,
            ),
            TensorView(
                "zeros", "qzeros", "g nw b | g nw b | g nw i | (nw i) g",
                (("g", g), word), (BitPart("qzeros", 0, 4, *_ORDER),), cut="nw", per=8, dims=dims,
            ),
            TensorView("scales", "scales", "g n | n g", (("g", g),), cut="n", dims=dims),
        )  # fmt: skip
        return TensorLayout(self._frame, fields, views)

    def _padded_groups(self) -> str:
        """The number of groups, filled up as both kernels want it: whole words, and a multiple for small groups."""
        many = 128 // self.group
        return f"K/{self.group}|8|{many}*{many}*8"

    def _gemv(self) -> TensorLayout:
        full = self._padded_groups()
        fields = (
            TensorField(Role.VALUES, "qweight", DataType.INT32, ("N", "K/8")),
            TensorField(Role.ZERO_POINT, "qzeros", DataType.INT32, ("N", f"{full}/8")),
            TensorField(Role.SCALE, "scales", DataType.FLOAT16, ("N", full)),
        )
        n, word = ("n", "N"), ("b", "4")
        kept = ("N", f"K/{self.group}", "1")
        views = (
            TensorView(
                "codes", "qweight", "n kw b | n kw b | n kw i | n (kw i)",
                (n, word), (BitPart("qweight", 0, 4, (8,), (4,)),), cut="n",
            ),
            TensorView(
                "zeros", "qzeros", "n gw b | n gw b | n gw i | n (gw i) 1",
                (n, word), (BitPart("qzeros", 0, 4, (8,), (4,)),), cut="n", dims=kept,
            ),
            TensorView("scales", "scales", "n g | n g 1", (n,), cut="n", dims=kept),
        )  # fmt: skip
        return TensorLayout(self._frame, fields, views)

    def _llm_awq(self) -> TensorLayout:
        full, kept = self._padded_groups(), ("N", f"K/{self.group}", "1")
        fields = (
            TensorField(Role.VALUES, "qweight", DataType.INT16, ("N/4", "K")),
            TensorField(Role.SCALE, "scales", DataType.FLOAT16, (full, "N")),
            TensorField(Role.ZERO_POINT, "scaled_zeros", DataType.FLOAT16, (full, "N")),
        )
        # Four rows share 64 columns; in 32 of them, words take every eighth pair's four values.
        codes = TensorView(
            "codes", "qweight", "n4 p r u q c b | n4 p r u q c b | n4 p r u q c a | (n4 r) (p u a q c)",
            (("n4", "N/4"), ("r", "4"), ("u", "2"), ("q", "4"), ("c", "2"), ("b", "2")),
            (BitPart("qweight", 0, 4, (4,), (4,)),), cut="n4", per=4,
        )  # fmt: skip
        numbers = tuple(
            TensorView(name, name, "g n | n g 1", (("g", full),), cut="n", dims=kept)
            for name in ("scales", "scaled_zeros")
        )
        return TensorLayout(self._frame, fields, (codes, *numbers))

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        codes, zero, scale = asymmetric(x, 4)
        if self.variant != "llm-awq":
            return {"codes": codes, "zeros": zero, "scales": scale}
        shifted = -(zero.astype(np.float32) * scale.astype(np.float32))
        return {"codes": codes, "scales": scale, "scaled_zeros": shifted.astype(np.float16)}
