"""AQLM: a vector of 8 weights is the sum of one entry from each of several learned codebooks, times a scale per row.

Encoding learns codebooks by k-means on normalized rows and then takes the nearest entries one codebook after the other:
round-to-nearest, without AQLM's beam search and fine-tuning. NaN and infinity are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxpack.formats.arranged import Arranged
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes
from onnxpack.formats.layout import BitPart, Role
from onnxpack.formats.profiles import Codebook, Parameter, QuantizationProfile
from onnxpack.formats.scaling import nonzero, require_int
from onnxpack.formats.tensors import TensorField, TensorLayout, TensorView

_VECTOR = 8
_SAMPLE = 1 << 12
_ROUNDS = 6
_SLAB = 1 << 9


class Aqlm(Arranged):
    """codes int8 (int16 above 8 bits) [N, K / 8, codebooks], codebooks float16, scales float16 per row.

    Codes are unsigned numbers stored in signed types. value = scale * (codebook 0 [code 0] + codebook 1 [code 1]...).
    """

    name = "aqlm"
    row = "AQLM 2×8"
    source = "AQLM inference_lib utils.py"
    differs = "3.0 bits is wrong; scales per row and learned codebooks are stored; codes are stored signed"

    def __init__(self, *, codebooks: int = 2, bits: int = 8) -> None:
        require_int(codebooks, "codebooks", 1, 8)
        require_int(bits, "bits", 1, 16)
        self.codebooks, self.bits = codebooks, bits
        size, itemsize = 1 << bits, 1 if bits <= 8 else 2
        fields = (
            TensorField(
                Role.CODE, "codes", DataType.INT8 if itemsize == 1 else DataType.INT16, ("N", "K/8", str(codebooks))
            ),
            TensorField(Role.VALUES, "codebooks", DataType.FLOAT16, (str(codebooks), str(size), "1", "8")),
            TensorField(Role.SCALE, "scales", DataType.FLOAT16, ("N", "1", "1", "1")),
        )
        sizes = (("v", "K/8"), ("m", str(codebooks)), ("b", str(itemsize)))
        views = [
            TensorView(
                f"codes[{i}]", "codes", "n v m b | n v (m b) | n v i | n (v i)",
                sizes, (BitPart("codes", 8 * itemsize * i, bits, (1,), (8 * itemsize,)),), cut="n", dims=("N", "K/8"),
            )
            for i in range(codebooks)
        ]  # fmt: skip
        views += [
            TensorView(
                f"codebooks[{i}]", "codebooks", "e v | e v", (("e", str(size)), ("v", "8")),
                start=str(i * size * _VECTOR), dims=(str(size), "8"), apart=True,
            )
            for i in range(codebooks)
        ]  # fmt: skip
        views.append(TensorView("scales", "scales", "n | n 1 1", cut="n", dims=("N", "1", "1")))
        leaf = Codebook(
            num_codebooks=codebooks,
            codebook_size=size,
            vector_size=_VECTOR,
            index_bits=bits,
            scale=Parameter("scales"),
            codes="codes",
            stored="codebooks",
        )
        layout = TensorLayout(("N", "K/8", "8"), fields, tuple(views))
        self.profile = QuantizationProfile(codebook=leaf, tensors=layout)

    @property
    def params(self) -> Mapping[str, int]:
        return {"codebooks": self.codebooks, "bits": self.bits}

    def fitted(self, encoded: Encoded) -> Aqlm:
        books = encoded.fields.get("codebooks")
        if books is None or books.ndim != 4 or not books.size:
            return self
        count, bits = books.shape[0], (books.shape[1] - 1).bit_length()
        fits = 1 <= count <= 8 and 1 <= bits <= 16
        return Aqlm(codebooks=count, bits=bits) if fits and (count, bits) != (self.codebooks, self.bits) else self

    def measure(self, w: Array) -> dict[str, Array]:
        # A sample of vectors, evenly over the weight; rows are normalized by their root mean square.
        rows = np.unique(np.linspace(0, len(w) - 1, min(len(w), 64)).astype(np.int64))
        x = np.asarray(w[rows], np.float32)
        x = x / nonzero(_rms(x).astype(np.float16).astype(np.float32))
        vectors = x.reshape(-1, _VECTOR)
        vectors = vectors[np.unique(np.linspace(0, len(vectors) - 1, min(len(vectors), _SAMPLE)).astype(np.int64))]
        made = {}
        for i in range(self.codebooks):
            book = learned(vectors, 1 << self.bits).astype(np.float16)
            made[f"codebooks[{i}]"] = book
            wide = book.astype(np.float32)
            vectors = vectors - wide[nearest(vectors, wide)]
        return made

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        scale = _rms(x.reshape(len(x), -1)).astype(np.float16)
        left = (x / nonzero(scale.astype(np.float32))[..., None]).reshape(-1, _VECTOR)
        made: Codes = {"scales": scale[..., None]}
        for i in range(self.codebooks):
            book = spans[f"codebooks[{i}]"].astype(np.float32)
            codes = nearest(left, book)
            left = left - book[codes]
            made[f"codes[{i}]"] = codes.reshape(x.shape[:2]).astype(np.uint8 if self.bits <= 8 else np.uint16)
        return made


def _rms(x: F32) -> F32:
    """Root mean square of each row, [rows, 1], summed in float64."""
    root: F32 = np.sqrt(np.square(x, dtype=np.float64).mean(axis=1, keepdims=True)).astype(np.float32)
    return root


def nearest(vectors: F32, book: F32) -> Array:
    """Index of the nearest entry for each vector; the first of equals. The order of additions is fixed: no BLAS."""
    found = np.empty(len(vectors), np.int64)
    half = np.zeros(len(book), np.float32)
    for j in range(book.shape[1]):
        half += book[:, j] * book[:, j]
    half *= np.float32(0.5)
    for first in range(0, len(vectors), _SLAB):
        part = vectors[first : first + _SLAB]
        score = np.broadcast_to(-half, (len(part), len(book))).copy()
        for j in range(book.shape[1]):
            score += part[:, j : j + 1] * book[:, j]
        found[first : first + _SLAB] = score.argmax(axis=1)
    return found


def learned(vectors: F32, size: int) -> F32:
    """`size` entries by k-means, begun with vectors spread evenly over their order by sum; same input, same entries."""
    order = np.argsort(vectors.sum(axis=1, dtype=np.float64), kind="stable")
    book = vectors[order[np.linspace(0, len(order) - 1, size).astype(np.int64)]].copy()
    for _ in range(_ROUNDS if len(vectors) > size else 0):
        codes = nearest(vectors, book)
        counts = np.bincount(codes, minlength=size)
        for j in range(vectors.shape[1]):
            sums = np.bincount(codes, vectors[:, j].astype(np.float64), size)
            book[:, j] = np.where(counts > 0, sums / np.maximum(counts, 1), book[:, j])
    return book
