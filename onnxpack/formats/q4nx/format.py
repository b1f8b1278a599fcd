"""Q4NX as a format of the registry: one stored tensor of tiles, [tiles, 5120] bytes, over the weight's [N, K]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import ml_dtypes
import numpy as np

from onnxpack.errors import UsageError
from onnxpack.formats.base import F32, Array, Decoder, Encoded, FieldSpec, Format, Orientation, View
from onnxpack.formats.q4nx import graph
from onnxpack.formats.q4nx.dequantize import decode_columns
from onnxpack.formats.q4nx.errors import BandedErrorSums
from onnxpack.formats.q4nx.quantize import encode
from onnxpack.formats.q4nx.tile import TILE

TILES = "tiles"


class Q4NX(Format):
    """4-bit codes with a bfloat16 scale and minimum per 32 values of K, in tiles of 32 output by 256 input features.

    >>> f = Q4NX()
    >>> w = np.linspace(-1, 1, 256 * 32, dtype=np.float32).reshape(256, 32)
    >>> e = f.encode(w)
    >>> e.fields["tiles"].shape, e.bits_per_weight, bool(np.abs(f.decode(e) - w).max() < 0.01)
    ((1, 5120), 5.0, True)
    """

    name = "q4nx"
    row = "Q4NX"
    family = "linear"
    orientation = Orientation.KN
    min_opset: ClassVar[int] = 13
    container: ClassVar[str] = "weights.q4nx"

    def fields(self, shape: tuple[int, ...]) -> dict[str, FieldSpec]:
        k, n = _matrix(shape)
        tile_rows, tile_cols = TILE.grid(n, k)
        return {TILES: FieldSpec(np.dtype(np.int8), (tile_rows * tile_cols, TILE.nbytes))}

    def views(self, shape: tuple[int, ...]) -> dict[str, View]:
        count = self.fields(shape)[TILES].shape[0]
        return {
            graph.CODES: View(TILES, FieldSpec(np.dtype(np.uint8), (count, TILE.nbytes))),
            graph.PLANES: View(TILES, FieldSpec(np.dtype(ml_dtypes.bfloat16), (count, TILE.nbytes // 2))),
        }

    def encode_into(self, w: Array, out: Mapping[str, Array]) -> BandedErrorSums:
        _matrix(w.shape)
        return encode(w, out[TILES])

    def decode(self, encoded: Encoded) -> F32:
        k, n = _matrix(encoded.shape)
        return decode_columns(encoded.fields[TILES], (k, n), 0, n)

    def decode_columns(self, encoded: Encoded, start: int, stop: int, out: F32 | None = None) -> F32:
        """Columns [start, stop) of the weight, float32 [K, stop - start], without decoding any other tile row."""
        return decode_columns(encoded.fields[TILES], _matrix(encoded.shape), start, stop, out)

    def decoder(self, shape: tuple[int, ...], opset: int) -> Decoder:
        if opset < self.min_opset:
            raise UsageError(f"format q4nx has no decoder at opset {opset}", hint="use int8, or opset 13 or later")
        return graph.decoder(_matrix(shape), opset)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise UsageError(f"format q4nx takes a matrix [K, N], not shape {list(shape)}")
    return shape[0], shape[1]
