"""Formats around a rotation or a diagonal: QuaRot, SmoothQuant, QuIP#. NaN and infinity are refused.

Decoding gives the weight in its own basis: the rotation (or diagonal) is undone, in a graph too, so that a product
with the decoded weight needs nothing done to its other operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import FLOAT_NAMES, DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, Role, require
from onnxpack.formats.profiles import (
    Diagonal,
    LinearUniform,
    Parameter,
    QuantizationProfile,
    Rotation,
    RotationType,
)
from onnxpack.formats.scaling import amax_of, float_dtype, nonzero, require_int, rounded
from onnxpack.formats.tensors import TensorField, TensorLayout, TensorView

_LEAST = np.float32(1e-5)
_FLOATS = {data_type.storage: name for name, data_type in FLOAT_NAMES.items()}


def random_bits(count: int, stream: int) -> Array:
    """Zeros and ones that look random and are the same everywhere: bits of hashed indices.

    >>> random_bits(8, 0).tolist()
    [1, 0, 1, 0, 1, 0, 1, 0]
    """
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(1)).astype(np.uint8)


class QuaRot(Arranged):
    """int4 rows of W Q with Q = diag(signs) H / sqrt(K): nibbles two's complement, even column low; a scale per row.

    `block` cuts Q into blocks (0: the whole of K, a power of two or 12 times one). Signs are bits, set for -1. scale =
    max(amax, 1e-5) / 7, codes rounded half to even. Decoding multiplies by the transpose of Q.
    """

    name = "quarot"
    row = "QuaRot (rotational quantization)"
    source = "spcl/QuaRot fake_quant (round to nearest), quarot pack_i4"
    differs = "UINT4 with zero point 0 cannot hold negative codes; no groups of 128; the signs of Q are stored"

    def __init__(self, *, block: int = 0, scale_dtype: str = "float16") -> None:
        require_int(block, "block", 0, 1 << 20)
        self.block, self.scale_dtype, self._type = block, scale_dtype, float_dtype(scale_dtype)
        fields = (
            TensorField(Role.VALUES, "weight", DataType.UINT8, ("N", "K/2")),
            TensorField(Role.SCALE, "scales", self._type, ("N",)),
            TensorField(Role.SIGN, "signs", DataType.UINT8, ("K|8",)),
        )
        views = (
            TensorView(
                "codes", "weight", "n u b | n u b | n u i | n (u i)",
                (("n", "N"), ("b", "1")), (BitPart("weight", 0, 4, (2,), (4,)),), cut="n",
            ),
            TensorView("scales", "scales", "n | n 1", cut="n", dims=("N", "1")),
            TensorView(
                "signs", "signs", "u b | u b | u i | (u i)",
                (("b", "1"),), (BitPart("signs", 0, 1, (8,), (1,)),), dims=("K",), apart=True, levels=(1.0, -1.0),
            ),
        )  # fmt: skip
        self.profile = QuantizationProfile(
            linear=LinearUniform(
                DataType.INT4, bits=4, symmetric=True, axis=0, scale=Parameter("scales"), codes="codes"
            ),
            pre_rotation=Rotation(RotationType.HADAMARD, (block,), block_size=block, signs="signs"),
            tensors=TensorLayout(("N", "K"), fields, views),
        )

    @property
    def params(self) -> Mapping[str, object]:
        return {"block": self.block, "scale_dtype": self.scale_dtype}

    def fitted(self, encoded: Encoded) -> QuaRot:
        scales = encoded.fields.get("scales")
        kind = _FLOATS.get(scales.dtype, self.scale_dtype) if scales is not None else self.scale_dtype
        return self if kind == self.scale_dtype else QuaRot(block=self.block, scale_dtype=kind)

    def measure(self, w: Array) -> dict[str, Array]:
        return {"signs": random_bits(w.shape[1], 0)}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        top = np.maximum(np.abs(x).max(axis=1, keepdims=True), _LEAST)
        scale = rounded(top / np.float32(7), self._type)
        codes = np.clip(np.rint(x / nonzero(scale)), -8, 7).astype(np.int8).view(np.uint8) & np.uint8(15)
        return {"codes": codes, "scales": scale.astype(self._type.storage)}


def smoothing(act_absmax: Array, weights: Sequence[Array], alpha: float = 0.5) -> F32:
    """SmoothQuant's factor for each input feature of weights [N, K] that share their input: |X|**a / |W|**(1 - a)."""
    tops = np.maximum(np.maximum.reduce([amax_of(w, 0) for w in weights]), _LEAST)
    # In float64, so that the last bit of a float32 does not depend on whose power function it is.
    ratio = np.asarray(act_absmax, np.float64) ** alpha / tops.astype(np.float64) ** (1 - alpha)
    factors: F32 = np.maximum(ratio.astype(np.float32), _LEAST)
    return factors


class SmoothQuant(Arranged):
    """int8 rows of W diag(s), float32 scale amax / 127 per row (or one, `axis` -1); s float32 per input feature.

    The decoder divides by s: the product with unchanged activations is right. In W8A8 use X / s instead is multiplied
    with the codes. s comes from `act_absmax` of calibration; without it all inputs count alike.
    """

    name = "smoothquant"
    row = "SmoothQuant (W8A8)"
    source = "mit-han-lab/smoothquant smooth.py, fake_quant.py"
    differs = "a diagonal, not a rotation; the weight's scale axis is 0 (outputs)"

    def __init__(self, *, axis: int = 0, smooth: bool = True, alpha: float = 0.5) -> None:
        require_int(axis, "axis", -1, 0)
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 <= alpha <= 1
        require(number, "alpha", f"{alpha!r} is not 0 to 1")
        self.axis, self.smooth, self.alpha = axis, bool(smooth), float(alpha)
        fields = [
            TensorField(Role.VALUES, "weight", DataType.INT8, ("N", "K")),
            TensorField(Role.SCALE, "weight_scale", DataType.FLOAT, ("N",) if axis == 0 else ()),
        ]
        scale = (
            TensorView("scales", "weight_scale", "n | n 1", cut="n", dims=("N", "1"))
            if axis == 0
            else TensorView("scales", "weight_scale", "n k | n k", (("n", "1"), ("k", "1")), dims=("1", "1"))
        )
        part = BitPart("weight", 0, 8, (1,), (8,))
        views = [
            TensorView(
                "codes", "weight", "n k b | n k b | n k i | n (k i)", (("k", "K"), ("b", "1")), (part,), cut="n"
            ),
            scale,
        ]
        if smooth:
            fields.append(TensorField(Role.SCALE, "smooth_scale", DataType.FLOAT, ("K",)))
            views.append(TensorView("smooth", "smooth_scale", "k | k", dims=("K",), apart=True))
        linear = LinearUniform(
            DataType.INT8, bits=8, symmetric=True, axis=axis, scale=Parameter("scales"), codes="codes"
        )
        self.profile = QuantizationProfile(
            linear=linear,
            pre_scaling=Diagonal("smooth") if smooth else None,
            tensors=TensorLayout(("N", "K"), tuple(fields), tuple(views)),
        )

    @property
    def params(self) -> Mapping[str, object]:
        return {"axis": self.axis, "smooth": self.smooth, "alpha": self.alpha}

    def fitted(self, encoded: Encoded) -> SmoothQuant:
        smooth, scale = "smooth_scale" in encoded.fields, encoded.fields.get("weight_scale")
        axis = self.axis if scale is None else 0 if scale.ndim else -1
        if (smooth, axis) == (self.smooth, self.axis):
            return self
        return SmoothQuant(axis=axis, smooth=smooth, alpha=self.alpha)

    def factors(self, w: Array) -> F32:
        """s for one weight, every input as large as any other."""
        return smoothing(np.ones(w.shape[1], np.float32), [w], self.alpha)

    def measure(self, w: Array) -> dict[str, Array]:
        factors = self.factors(w) if self.smooth else None
        made: dict[str, Array] = {} if factors is None else {"smooth": factors}
        if self.axis < 0:
            top = amax_of(w) if factors is None else (amax_of(w, 0) * factors).max()
            made["scales"] = np.maximum(top, _LEAST).reshape(1, 1) / np.float32(127)
        return made

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        if self.axis < 0:
            return {"codes": _int8(x / spans["scales"])}
        scale = np.maximum(np.abs(x).max(axis=1, keepdims=True), _LEAST) / np.float32(127)
        return {"codes": _int8(x / scale), "scales": scale}

    def encode_smoothed(self, w: Array, act_absmax: Array, together: Sequence[Array] = ()) -> Encoded:
        """Encode with the factors that calibration gives; `together`: other weights that share the input."""
        return _Calibrated(smoothing(act_absmax, [w, *together], self.alpha), axis=self.axis, alpha=self.alpha).encode(
            w
        )


class _Calibrated(SmoothQuant):
    def __init__(self, factors: F32, *, axis: int, alpha: float) -> None:
        super().__init__(axis=axis, alpha=alpha)
        self._factors = factors

    def factors(self, w: Array) -> F32:
        return self._factors


def _int8(x: Array) -> Array:
    return np.clip(np.rint(x), -128, 127).astype(np.int8).view(np.uint8)
