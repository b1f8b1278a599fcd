"""QuIP#'s E8P: vectors of 8 weights from a half-integer lattice, between Hadamard transforms of both sides.

The codebook is made from its definition: 256 vectors of magnitudes, an even number of sign flips, a shift of a quarter
either way. Encoding takes the nearest of all 65536 (round to nearest, without QuIP#'s error feedback and fine-tuning).
NaN and infinity are refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, Role
from onnxpack.formats.profiles import (
    Codebook,
    Parameter,
    QuantizationProfile,
    Rotation,
    RotationType,
    Side,
)
from onnxpack.formats.rotated import random_bits
from onnxpack.formats.scaling import slabs
from onnxpack.formats.tensors import TensorField, TensorLayout, TensorView

_EXTRA = """
    31113333 13113333 11313333 11133333 33313311 33313131 33311331 33313113 33311313 33311133 33133311 33133131
    33131331 33133113 33131313 33131133 31333311 31333131 31331331 31333113 31331313 13331133 13333311 13333131
    13331331 13333113 13331313 11331333 33113331
"""
"""The vectors of norm 12 that fill the table up to 256, in halves."""

_STORED = (0, 2, 4, 6, 1, 3, 5, 7)
"""The coordinate that each stored place of an entry holds."""
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The stored place (and sign bit) of each decoded coordinate."""
_QUARTER = np.float32(0.25)
_SPREAD = 1.03
"""Root mean square that normalized weights have on this lattice (QuIP#'s choice)."""
_SLAB = 1 << 9


@functools.cache
def entries() -> F32:
    """The 256 vectors [256, 8] in decoded order: halves of odd numbers, the last stored place negative at odd sums.

    >>> entries().shape, entries()[0].tolist()
    ((256, 8), [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    """
    inside = [row for row in itertools.product((1, 3, 5, 7), repeat=8) if sum(v * v for v in row) <= 40]
    halves = np.array([*sorted(inside), *(tuple(map(int, text)) for text in _EXTRA.split())], np.int64)[:, _STORED]
    halves[halves.sum(axis=1) // 2 % 2 == 1, 7] *= -1
    return np.asarray(halves[:, _PLACES] / 2, np.float32)


@functools.cache
def sign_factors() -> tuple[F32, F32]:
    """For each of 256 sign bytes: factors [256, 8] (always an even number of -1) and the shift [256] of a quarter."""
    byte = np.arange(256)
    bits = byte[:, None] >> np.arange(8) & 1
    odd = bits.sum(axis=1) & 1
    bits[:, 0] ^= odd
    factors = np.asarray(1 - 2 * bits[:, _PLACES], np.float32)
    return factors, np.where(odd, -_QUARTER, _QUARTER).astype(np.float32)


class QuipSharp(Arranged):
    """Qidxs int64 [N, K / 32], 16 bits for 8 weights: entry and signs; SU, SV float16 factors of columns and rows.

    W = diag(SV) H (values H) diag(SU), H / sqrt(size) on both sides; SV carries the scale. K is a multiple of 64, N of
    16, and both are a power of two or 12 times one.
    """

    name = "quip_sharp_e8p"
    row = "QuIP#"
    source = "quip-sharp latticee8_padded12.py (the layout; the codebook is derived)"
    differs = "256 entries with 8-bit indices would be 1 bit; indices have 16; SU, SV and both dimensions are missing"

    def __init__(self) -> None:
        # A word holds two rows' codes for 16 columns; eight pairs of rows and four such columns make a square.
        sizes = {"r": "N/16", "k": "K/64", "p": "8", "q": "4", "b": "8", "c": "2", "s": "2"}
        axes = "r k p q b | r k p q b | r k p q c s | (r p s) (k q c)"
        fields = (
            TensorField(Role.CODE, "Qidxs", DataType.INT64, ("N", "K/32")),
            TensorField(Role.SCALE, "SU", DataType.FLOAT16, ("K",)),
            TensorField(Role.SCALE, "SV", DataType.FLOAT16, ("N",)),
        )
        signs = tuple(BitPart("Qidxs", 32 + 4 * j, 1, (2, 2), (2, 1), shift=j) for j in range(8))
        views = (
            TensorView(
                "entries", "Qidxs", axes, tuple(sizes.items()),
                (BitPart("Qidxs", 0, 8, (2, 2), (16, 8)),), cut="r", per=16, dims=("N", "K/8"),
            ),
            TensorView("signs", "Qidxs", axes, tuple(sizes.items()), signs, cut="r", per=16, dims=("N", "K/8")),
            TensorView("SU", "SU", "k | k", dims=("K",), apart=True),
            TensorView("SV", "SV", "n | n", dims=("N",), apart=True),
        )  # fmt: skip
        factors, shift = sign_factors()
        book = Codebook(
            tuple(map(float, entries().reshape(-1))),
            num_codebooks=1,
            codebook_size=256,
            vector_size=8,
            index_bits=8,
            scale=Parameter("signs", levels=tuple(map(float, factors.reshape(-1))), vector=8),
            shift=Parameter("signs", levels=tuple(map(float, (shift[:, None] * factors).reshape(-1))), vector=8),
            codes="entries",
        )
        self.profile = QuantizationProfile(
            codebook=book,
            pre_rotation=Rotation(RotationType.HADAMARD, (0,), signs="SU"),
            post_rotation=Rotation(RotationType.HADAMARD, (0,), side=Side.N, signs="SV"),
            tensors=TensorLayout(("N", "K/8", "8"), fields, views),
        )

    def measure(self, w: Array) -> dict[str, Array]:
        n, k = w.shape
        squares = [np.square(part, dtype=np.float64).sum(axis=1) for part in slabs(w)]
        root = float(np.sqrt(np.concatenate(squares).sum() / (n * k)))
        # A weight too small for float16 is still more than nothing; one of zeros has the scale 0.
        scale = max(np.float16(root / _SPREAD), np.float16(6e-8)) if root else np.float16(0)
        flips = [
            np.float16(1) - np.float16(2) * random_bits(size, stream).astype(np.float16)
            for size, stream in ((k, 1), (n, 2))
        ]
        return {"SU": flips[0], "SV": flips[1] * scale}

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        chosen, signs = nearest(x.reshape(-1, 8))
        return {"entries": chosen.reshape(x.shape[:2]), "signs": signs.reshape(x.shape[:2])}


def nearest(vectors: F32) -> tuple[Array, Array]:
    """Entry and sign byte of the nearest codeword for each vector [.., 8]; of equals the first. No BLAS."""
    book = entries()
    size, negative = np.abs(book), (book < 0).sum(axis=1) & 1
    half = np.float32(0.5) * np.square(book).sum(axis=1)
    chosen, signs = np.empty(len(vectors), np.uint8), np.empty(len(vectors), np.uint8)
    for first in range(0, len(vectors), _SLAB):
        part = vectors[first : first + _SLAB]
        best = np.full(len(part), -np.inf, np.float32)
        for shift in (_QUARTER, -_QUARTER):
            near = part - shift
            far = np.abs(near)
            flips = (near < 0).sum(axis=1) & 1
            score, least = (
                np.broadcast_to(-half, (len(part), 256)).copy(),
                np.full((len(part), 256), np.inf, np.float32),
            )
            for j in range(8):
                gain = far[:, j : j + 1] * size[:, j]
                score += gain
                np.minimum(least, gain, out=least)
            # An odd number of flips is not a codeword: the cheapest coordinate takes the other sign.
            score -= np.where((flips[:, None] ^ negative) == 1, 2 * least, np.float32(0))
            entry = score.argmax(axis=1)
            # |near - v|**2 = |near|**2 - 2 score: the two shifts are compared by distance.
            value = 2 * np.take_along_axis(score, entry[:, None], 1)[:, 0] - np.square(near).sum(axis=1)
            better = value > best
            best = np.where(better, value, best)
            rows = first + np.flatnonzero(better)
            chosen[rows] = entry[better]
            signs[rows] = _sign_bytes(near[better], book[entry[better]], bool(shift < 0))
    return chosen, signs


def _sign_bytes(near: F32, entry: F32, odd: bool) -> Array:
    gain = near * entry
    flip = gain < 0
    wrong = np.flatnonzero(flip.sum(axis=1) & 1)
    cheapest = np.abs(gain[wrong]).argmin(axis=1)
    flip[wrong, cheapest] ^= True
    bits = np.zeros((len(near), 8), np.uint8)
    bits[:, _PLACES] = flip
    # The stored byte's parity is the shift; bit 0 is turned back by it.
    bits[:, 0] ^= np.uint8(odd)
    return np.packbits(bits, axis=1, bitorder="little")[:, 0]
