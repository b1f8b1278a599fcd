"""EXL2 (mixed widths along permuted rows, squared scales) and EXL3 (a trellis of 16-bit states; decode only).

EXL2 is encoded round to nearest, wider codes for input features of more energy. NaN and infinity are refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, ProfileError, Role, require
from onnxpack.formats.profiles import (
    Codebook,
    LinearUniform,
    Parameter,
    QuantizationProfile,
    Rotation,
    RotationType,
    Side,
    TilingQuantization,
)
from onnxpack.formats.rules import RULES
from onnxpack.formats.scaling import require_int, slabs
from onnxpack.formats.tensors import AnyView, JoinView, TensorField, TensorLayout, TensorView

_WIDTHS = (8, 6, 5, 4, 3, 2)
_ZERO = 128
_SAMPLE = (4096, 4096)

Run = tuple[int, int]
"""A group: bits, rows."""


class Exl2(Arranged):
    """Input features in an order of falling width: groups of rows, dense codes along K, 4-bit squared scales.

    `bits` is the mean width, made of the two widths around it; `group` rows share scales. `groups` instead lists
    every [bits, rows]. q_weight int32, q_scale int32 (eight v - 1 a word), q_scale_max float16, q_groups int16 (bits,
    first word row), q_invperm int32: the stored place of each input feature. scale = v**2 * (q_scale_max / 256).
    """

    name = "exl2"
    row = "EXL2 (variable bpw)"
    source = "exllamav2 conversion/adaptivegptq.py, pack_tensor.cu, q_matrix.cu"
    differs = "symmetric, squared 4-bit scales; widths change inside a matrix; a permutation is stored"

    def __init__(self, *, bits: float = 3.5, group: int = 128, groups: Sequence[Sequence[int]] = ()) -> None:
        number = isinstance(bits, int | float) and not isinstance(bits, bool) and 2 <= bits <= 8
        require(number, "bits", f"{bits!r} is not 2 to 8")
        require_int(group, "group", 32, 1 << 16)
        require(group % 32 == 0, "group", f"{group} is not a multiple of 32")
        self.bits, self.group = float(bits), group
        self.groups = _checked(groups)

    @property
    def profile(self) -> QuantizationProfile:  # type: ignore[override]
        """The profile for the shape that figures are given for."""
        rows = sum(r for _, r in self.groups) if self.groups else _SAMPLE[1]
        return self.profile_for((_SAMPLE[0], rows))

    @property
    def params(self) -> Mapping[str, Any]:
        given = {"bits": self.bits, "group": self.group}
        return {**given, "groups": [list(g) for g in self.groups]} if self.groups else given

    def groups_for(self, k: int) -> tuple[Run, ...]:
        """The groups of a weight with K input features."""
        if self.groups:
            rows = sum(r for _, r in self.groups)
            if rows != k:
                raise ProfileError("K", f"{k} is not the {rows} rows of its groups")
            return self.groups
        if k % 32:
            raise ProfileError("K", f"{k} is not a multiple of 32")
        return _mixed(k, self.bits, self.group)

    def profile_for(self, shape: tuple[int, ...]) -> QuantizationProfile:
        return _exl2_profile(self.groups_for(int(shape[1])))

    def fitted(self, encoded: Encoded) -> Exl2:
        pairs, words = encoded.fields.get("q_groups"), encoded.fields.get("q_weight")
        if pairs is None or words is None or pairs.ndim != 1 or words.ndim != 2 or pairs.size < 2 or pairs.size % 2:
            return self
        widths, starts = pairs[0::2].astype(np.int64), pairs[1::2].astype(np.int64) & 0xFFFF
        lengths = np.diff(np.append(starts, len(words)))
        if not np.isin(widths, _WIDTHS).all() or (lengths < 1).any() or ((lengths * 32) % widths).any():
            raise ProfileError("q_groups", f"format {self.name}: not groups of whole code words")
        found = tuple((int(b), int(n * 32 // b)) for b, n in zip(widths, lengths, strict=True))
        k = encoded.shape[1] if len(encoded.shape) == 2 else 0
        own = self.groups or (_mixed(k, self.bits, self.group) if k > 0 and k % 32 == 0 else ())
        return self if found == own else Exl2(groups=found)

    def measure(self, w: Array) -> dict[str, Array]:
        k = w.shape[1]
        energy, top = np.zeros(k), np.zeros(k, np.float32)
        for part in slabs(w):
            energy += np.square(part, dtype=np.float64).sum(axis=0)
            np.maximum(top, np.abs(part).max(axis=0), out=top)
        order = np.argsort(-energy, kind="stable")
        places = np.empty(k, np.int32)
        places[order] = np.arange(k, dtype=np.int32)
        groups = self.groups_for(k)
        first = np.cumsum([0, *(r for _, r in groups[:-1])])
        highest = np.maximum.reduceat(top[order], first)
        steps = np.array([_top(b) for b, _ in groups], np.float32)
        largest = (highest / steps).astype(np.float16)
        words = np.cumsum([0, *(r * b // 32 for b, r in groups[:-1])])
        pairs = np.stack([[b for b, _ in groups], words.astype(np.uint16).view(np.int16)], axis=1)
        return {"q_invperm": places, "q_scale_max": largest, "q_groups": pairs.astype(np.int16).reshape(-1)}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        # x is in stored order.
        framed, x = x.shape, x.reshape(len(x), -1)
        groups = self.groups_for(x.shape[1])
        first = np.cumsum([0, *(r for _, r in groups[:-1])])
        counts = [r for _, r in groups]
        width = np.array([b for b, _ in groups])
        largest = (spans["q_scale_max"].astype(np.float32) * np.float32(1 / 256)).astype(np.float16).astype(np.float32)
        safe = np.where(largest == 0, np.float32(1), largest)
        wanted = np.maximum.reduceat(np.abs(x), first, axis=1) / np.array([_top(int(b)) for b in width], np.float32)
        v = np.clip(np.ceil(np.sqrt(wanted / safe)), 1, 16)
        scale = (v * v * largest).astype(np.float16).astype(np.float32)
        scale = np.where(scale == 0, np.float32(1), scale)
        half = np.repeat(1 << (width - 1), counts).astype(np.float32)
        codes = np.clip(np.rint(x / np.repeat(scale, counts, axis=1)), -half, half - 1) + _ZERO
        return {"codes": codes.astype(np.uint8).reshape(framed), "v": self._as_stored(v - 1, framed)}

    @staticmethod
    def _as_stored(v: Array, framed: tuple[int, ...]) -> Array:
        codes: Array = v.astype(np.uint8)
        return codes[..., None] if len(framed) > 2 else codes


def _top(bits: int) -> int:
    """The largest code of either sign."""
    return (1 << (bits - 1)) - (1 if bits > 2 else 0)


def _checked(groups: Sequence[Sequence[int]]) -> tuple[Run, ...]:
    made = []
    for i, group in enumerate(groups):
        pair = tuple(group) if isinstance(group, list | tuple) else ()
        fine = len(pair) == 2 and all(type(v) is int for v in pair)
        require(fine and pair[0] in _WIDTHS and pair[1] > 0 and pair[1] % 32 == 0, f"groups[{i}]", f"{group!r}")
        made.append((pair[0], pair[1]))
    falling = all(a >= b for (a, _), (b, _) in itertools.pairwise(made))
    require(falling, "groups", "widths do not fall")
    return tuple(made)


def _mixed(k: int, bits: float, group: int) -> tuple[Run, ...]:
    """Groups whose mean width comes close to `bits`: of the width above it first, then of the one below."""
    below = max(b for b in _WIDTHS if b <= bits)
    above = min(b for b in _WIDTHS if b >= bits)
    rows = [min(group, k - at) for at in range(0, k, group)]
    share = 0.0 if above == below else (bits - below) / (above - below)
    wide = round(share * len(rows))
    return tuple((above if i < wide else below, r) for i, r in enumerate(rows))


@functools.lru_cache(maxsize=64)
def _exl2_profile(groups: tuple[Run, ...]) -> QuantizationProfile:
    widths = sorted({b for b, _ in groups}, reverse=True)
    total = sum(r for _, r in groups)
    words, count = sum(r * b // 32 for b, r in groups), len(groups)
    fields = (
        TensorField(Role.VALUES, "q_weight", DataType.INT32, (str(words), "N")),
        TensorField(Role.SCALE, "q_scale", DataType.INT32, (str(count), "N/8")),
        TensorField(Role.SCALE, "q_scale_max", DataType.FLOAT16, (str(count),)),
        TensorField(Role.MASK, "q_groups", DataType.INT16, (str(2 * count),)),
        TensorField(Role.MASK, "q_invperm", DataType.INT32, (str(total),)),
    )
    runs: list[TensorView] = []
    first = 0
    for width in widths:
        lines = sum(r for b, r in groups if b == width)
        runs.append(
            TensorView(
                f"codes of {width}", "q_weight", "u w n b | u n (w b) | u n i | n (u i)",
                (("u", str(lines // 32)), ("w", str(width)), ("n", "N"), ("b", "4")),
                (BitPart("q_weight", 0, width, (32,), (width,)),), start=f"N*{4 * first}", cut="n",
                dims=("N", str(lines)),
            )
        )  # fmt: skip
        first += lines * width // 32
    rows = {r for _, r in groups}
    # Groups of one size are an axis of the frame; others are spread over their rows.
    even = len(rows) == 1
    repeat = () if even else tuple(r for _, r in groups)
    frame = ("N", str(count), str(max(rows))) if even else ("N", str(total))
    shared = (str(count), "1") if even else (str(total),)
    views: tuple[AnyView, ...] = (
        *runs,
        JoinView("codes", tuple((view.name, _ZERO - (1 << (b - 1))) for view, b in zip(runs, widths, strict=True))),
        TensorView(
            "v", "q_scale", "g u b | g u b | g u i | (u i) g",
            (("g", str(count)), ("b", "4")), (BitPart("q_scale", 0, 4, (8,), (4,)),), cut="u", per=8, repeat=repeat,
            dims=("N", *shared),
        ),
        TensorView("largest", "q_scale_max", "g | 1 g", repeat=repeat, dims=("1", *shared)),
    )  # fmt: skip
    squares = tuple(float((i + 1) ** 2) for i in range(16))
    scale = Parameter("v", levels=squares, parent=Parameter("largest", factor=1 / 256))
    leaf = QuantizationProfile(
        linear=LinearUniform(DataType.UINT8, bits=8, zero_point=_ZERO, scale=scale, codes="codes"),
        data_type=DataType.FLOAT16,
    )
    return QuantizationProfile(
        tiling=TilingQuantization((max(rows),), (1,), (leaf,)),
        data_type=DataType.FLOAT16,
        tensors=TensorLayout(frame, fields, views, order="q_invperm"),
    )


class Exl3(Arranged):
    """trellis int16 [K / 16, N / 16, 16 * bits]: every value of a 16 x 16 tile is a window of 16 bits of its circle.

    A window is the index of one of 65536 values that a closed form gives (`codebook`: "3inst", "mcg" or "mul1"). suh
    and svh, float16, are the factors of input and output features around Hadamard transforms in blocks of 128.
    """

    name = "exl3"
    row = "EXL3 (improved EXL2)"
    source = "exllamav3 codebook.cuh, exl3_dq.cuh, quantize.py"
    differs = "nothing like EXL2: a trellis, no linear codes, no group scales"
    min_opset = 13
    encodes = False
    refusal = "it has no encoder (a search over paths of its trellis)"

    def __init__(self, *, bits: int = 4, codebook: str = "3inst") -> None:
        require_int(bits, "bits", 1, 8)
        require(codebook in RULES, "codebook", f"{codebook!r} is not one of {', '.join(RULES)}")
        self.bits, self.codebook = bits, codebook
        size = 32 * bits
        # Bytes from the last word to the first, so that a window is a run of bits; then the first word once more.
        words = np.arange(size).reshape(-1, 4)[::-1]
        shuffle = np.concatenate([words.reshape(-1), words[0]])
        part = BitPart("trellis", 8 * size - bits, 16, (256,), (-bits,))
        fields = (
            TensorField(Role.CODE, "trellis", DataType.INT16, ("K/16", "N/16", str(16 * bits))),
            TensorField(Role.SCALE, "suh", DataType.FLOAT16, ("K",)),
            TensorField(Role.SCALE, "svh", DataType.FLOAT16, ("N",)),
        )
        inner = {"nl": "8", "kl": "4", "nh": "2", "kh": "2", "kx": "2"}
        views = (
            TensorView(
                "states", "trellis",
                "kt nt b | nt kt b | nt kt nl kl nh kh kx | (nt nh nl) (kt kh kl kx)",
                (("kt", "K/16"), ("b", str(size)), *inner.items()), (part,), cut="nt", per=16,
                shuffle=tuple(map(int, shuffle)),
            ),
            TensorView("suh", "suh", "k | k", dims=("K",), apart=True),
            TensorView("svh", "svh", "n | n", dims=("N",), apart=True),
        )  # fmt: skip
        book = Codebook(codebook_size=1 << 16, index_bits=16, codes="states", rule=codebook)
        self.profile = QuantizationProfile(
            codebook=book,
            pre_rotation=Rotation(RotationType.HADAMARD, (128,), block_size=128, signs="suh"),
            post_rotation=Rotation(RotationType.HADAMARD, (128,), side=Side.N, block_size=128, signs="svh"),
            tensors=TensorLayout(("N", "K"), fields, views),
        )

    @property
    def params(self) -> Mapping[str, object]:
        return {"bits": self.bits, "codebook": self.codebook}

    def fitted(self, encoded: Encoded) -> Exl3:
        trellis = encoded.fields.get("trellis")
        if trellis is None or trellis.ndim != 3:
            return self
        bits = trellis.shape[2] // 16
        marked = [rule for rule in ("mcg", "mul1") if rule in encoded.fields]
        codebook = marked[0] if marked else self.codebook
        if not 1 <= bits <= 8 or (bits, codebook) == (self.bits, self.codebook):
            return self
        return Exl3(bits=bits, codebook=codebook)
