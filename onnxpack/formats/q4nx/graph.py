"""The decoder as plain ONNX: standard operators from the tiles' own bytes to the float32 weight [K, N], in bands.

The same stored bytes are two initializers: uint8 [tiles, 5120], of which the codes are cut, and bfloat16
[tiles, 2560], of which the scales and minimums are cut. A band is a range of columns of the weight: whole tile rows,
which are consecutive tiles. Runtimes fold constants, so every byte that a node makes here is memory at load: codes
stay bytes as long as they can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxpack.formats.base import Decoder
from onnxpack.formats.q4nx.tile import GROUP, HALF, ROWS, TILE

CODES = "codes"
PLANES = "planes"
OUTPUT = "weight"

BAND_BYTES = 1 << 30
"""float32 bytes that a band may have. Bands bound the single tensors on the way, and what is held by a runtime that
lets go of them as it goes. onnxruntime does not: it keeps every folded value until its pass ends, so there a second
band only adds the joining of the two (7.4 times the float32 weight at the peak of loading, against 6.3 with one)."""


def decoder(shape: tuple[int, int], opset: int, band_bytes: int = BAND_BYTES) -> Decoder:
    """Nodes and constants that make the weight [K, N] of `CODES` and `PLANES`, at ai.onnx `opset` (13 or later)."""
    k, n = shape
    graph = _Graph(opset)
    tile_rows, tile_cols = TILE.grid(n, k)
    step = max(1, band_bytes // (4 * ROWS * TILE.cols * max(1, tile_cols)))
    count = max(1, -(-tile_rows // step))
    bands = [
        _band(graph, f"band{i}/", tile_rows * i // count, tile_rows * (i + 1) // count, tile_cols) for i in range(count)
    ]
    whole = bands[0] if count == 1 else graph.node("Concat", bands, "joined", axis=1)
    padded = (tile_cols * TILE.cols, tile_rows * ROWS)
    if padded == (k, n):
        graph.rename(whole, OUTPUT)
    else:
        graph.slice(whole, OUTPUT, {0: (0, k), 1: (0, n)})
    return Decoder(tuple(graph.nodes), OUTPUT, tuple(graph.constants()))


def _band(graph: _Graph, prefix: str, first: int, last: int, tile_cols: int) -> str:
    """One band, tile rows [first, last), to float32 [tile_cols * 256, 32 * (last - first)].

    No float32 value is moved before the end: codes take their final order as bytes, with the axes (tile column, group,
    column of the group, tile row, half, pair, nibble), to which scales and minimums are broadcast.
    """
    tiles, rows = (first * tile_cols, last * tile_cols), last - first
    halves, pairs = ROWS // HALF, HALF // 2

    packed = graph.slice(CODES, prefix + "packed", {0: tiles, 1: (2 * TILE.plane_nbytes, TILE.nbytes)})
    by_byte = graph.reshape(packed, prefix + "by_byte", (rows, tile_cols, halves, TILE.groups, GROUP, pairs, 1))
    nibbles = graph.node("Concat", graph.nibbles(by_byte, prefix), prefix + "nibbles", axis=6)
    by_column = graph.node("Transpose", [nibbles], prefix + "by_column", perm=[1, 3, 4, 0, 2, 5, 6])
    codes = graph.cast(by_column, prefix + "codes")

    stored = graph.slice(PLANES, prefix + "stored", {0: tiles, 1: (0, TILE.plane_nbytes)})
    by_tile = graph.reshape(stored, prefix + "by_tile", (rows, tile_cols, 2, TILE.groups, ROWS))
    by_plane = graph.node("Transpose", [by_tile], prefix + "by_plane", perm=[2, 1, 3, 0, 4])
    wide = graph.cast(by_plane, prefix + "wide")
    planes = graph.reshape(wide, prefix + "planes", (2 * tile_cols, TILE.groups, 1, rows, halves, pairs, 2))
    scales, minimums = graph.split(planes, tile_cols, prefix + "scales", prefix + "minimums")

    scaled = graph.node("Mul", [codes, scales], prefix + "scaled")
    values = graph.node("Add", [scaled, minimums], prefix + "values")
    return graph.reshape(values, prefix + "weight", (tile_cols * TILE.cols, rows * ROWS))


class _Graph:
    """Collects nodes and the constants that they share."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[Any] = []
        self._constants: dict[str, Any] = {}

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def rename(self, old: str, new: str) -> None:
        """Give the output of the last node its final name."""
        assert self.nodes[-1].output[0] == old
        self.nodes[-1].output[0] = new

    def constants(self) -> Iterator[Any]:
        """All constants, in order of first use."""
        yield from self._constants.values()

    def integers(self, *values: int) -> str:
        """Name of an int64 constant [len(values)]."""
        return self._constant("_".join(["i64", *map(str, values)]), np.array(values, np.int64))

    def byte(self, value: int) -> str:
        """Name of a uint8 scalar."""
        return self._constant(f"u8_{value}", np.array(value, np.uint8))

    def _constant(self, name: str, array: Any) -> str:
        from onnx import numpy_helper

        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def slice(self, source: str, output: str, ranges: dict[int, tuple[int, int]]) -> str:
        starts, ends = zip(*ranges.values(), strict=True)
        constants = [self.integers(*starts), self.integers(*ends), self.integers(*ranges)]
        return self.node("Slice", [source, *constants], output)

    def reshape(self, source: str, output: str, shape: tuple[int, ...]) -> str:
        return self.node("Reshape", [source, self.integers(*shape)], output)

    def cast(self, source: str, output: str) -> str:
        from onnx import TensorProto

        return self.node("Cast", [source], output, to=TensorProto.FLOAT)

    def split(self, source: str, each: int, *outputs: str) -> tuple[str, ...]:
        from onnx import helper

        inputs = [source, self.integers(*[each] * len(outputs))]
        self.nodes.append(helper.make_node("Split", inputs, list(outputs), axis=0))
        return outputs

    def nibbles(self, source: str, prefix: str) -> list[str]:
        """Low and high nibble of each byte. BitwiseAnd came with opset 18; before, two shifts drop the high nibble."""
        if self.opset >= 18:
            low = self.node("BitwiseAnd", [source, self.byte(15)], prefix + "low")
        else:
            up = self.node("BitShift", [source, self.byte(4)], prefix + "up", direction="LEFT")
            low = self.node("BitShift", [up, self.byte(4)], prefix + "low", direction="RIGHT")
        return [low, self.node("BitShift", [source, self.byte(4)], prefix + "high", direction="RIGHT")]
