"""The decoder as plain ONNX: standard operators from the tiles' own bytes to the float32 weight [K, N].

The same stored bytes are two initializers: uint8 [tiles, 5120], of which the codes are cut, and bfloat16
[tiles, 2560], of which the scales and minimums are cut. Whatever depends on nothing but them is folded when
onnxruntime loads the model, and it keeps every value of a chain until all chains are folded. So what may fold is kept
small: codes get their final order as bytes, two of them in one for as long as possible, and the sum over the chain is
1.2 times the float32 weight. The float32 values are made inside a Scan, which is not folded: at every run, one band of
groups after another, each written where the weight is needed. A small weight is folded to the end instead.
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

FOLDED_BYTES = 1 << 20
"""float32 bytes of a weight up to which it is folded whole: 5 times its size while a model loads, nothing per run."""

BAND_BYTES = 2 << 20
"""float32 bytes that a band should have: few enough to stay in a cache, enough that starting a band costs nothing."""

_BLOCKED_OPSET = 21  # DequantizeLinear with a scale per block


def decoder(
    shape: tuple[int, int], opset: int, folded_bytes: int = FOLDED_BYTES, band_bytes: int = BAND_BYTES
) -> Decoder:
    """Nodes and constants that make the weight [K, N] of `CODES` and `PLANES`, at ai.onnx `opset` (13 or later)."""
    k, n = shape
    graph = _Graph(opset)
    groups, pairs = -(-k // GROUP), -(-n // 2)
    if 4 * k * n <= folded_bytes:
        codes, planes = _stored(graph, shape, (groups,))
        values = _values(graph, codes, planes, folds=True)
    else:
        height = _band_height(groups, band_bytes // (4 * GROUP * 2 * pairs))
        codes, planes = _stored(graph, shape, (groups // height, height))
        values = graph.scan([codes, planes], "values", _band(opset, height, pairs))
    whole = (groups * GROUP, pairs * 2)
    if whole == (k, n):
        graph.reshape(values, OUTPUT, whole)
    else:
        graph.slice(graph.reshape(values, "whole", whole), OUTPUT, {0: (0, k), 1: (0, n)})
    return Decoder(tuple(graph.nodes), OUTPUT, tuple(graph.constants()))


def _band_height(groups: int, most: int) -> int:
    """Groups along K in a band: the largest divisor of `groups` that is not above `most`, and at least 1.

    >>> [_band_height(32, most) for most in (0, 7, 40)]
    [1, 4, 32]
    """
    return next((height for height in range(min(groups, most), 1, -1) if groups % height == 0), 1)


def _stored(graph: _Graph, shape: tuple[int, int], lead: tuple[int, ...]) -> tuple[str, str]:
    """Codes, uint8 [*lead, 32, pairs, 2], and planes, float32 [*lead, 2, pairs, 2], in the weight's order.

    `lead` are axes over the groups along K; two columns are a pair; planes are scales and minimums. All of this folds.
    Padding behind the last group and the last pair is cut off.
    """
    k, n = shape
    tile_rows, tile_cols = TILE.grid(n, k)
    groups, pairs = -(-k // GROUP), -(-n // 2)
    padded = (tile_cols * TILE.groups, tile_rows * ROWS // 2)

    packed = graph.slice(CODES, "packed", {1: (2 * TILE.plane_nbytes, TILE.nbytes)})
    by_tile = graph.reshape(packed, "by_tile", (tile_rows, tile_cols, ROWS // HALF, TILE.cols, HALF // 2))
    by_column = graph.node("Transpose", [by_tile], "by_column", perm=[1, 3, 0, 2, 4])
    bytes_ = graph.cut(by_column, "bytes", (padded[0], GROUP, padded[1], 1), (groups, GROUP, pairs, 1), lead)
    rank = len(lead) + 3
    codes = graph.node("Concat", graph.nibbles(bytes_, rank), "ordered_codes", axis=rank - 1)

    stored = graph.slice(PLANES, "stored", {1: (0, TILE.plane_nbytes)})
    by_plane = graph.reshape(stored, "by_plane", (tile_rows, tile_cols, 2, TILE.groups, ROWS))
    by_group = graph.node("Transpose", [by_plane], "by_group", perm=[1, 3, 2, 0, 4])
    narrow = graph.cut(by_group, "narrow", (padded[0], 2, padded[1], 2), (groups, 2, pairs, 2), lead)
    return codes, graph.cast(narrow, "ordered_planes")


def _values(graph: _Graph, codes: str, planes: str, folds: bool) -> str:
    """code * scale + minimum: codes [groups, 32, pairs, 2] and planes [groups, 2, pairs, 2] to float32 like codes.

    Where it need not fold, one blocked DequantizeLinear does the work of Cast and Mul.
    """
    scales, minimums = graph.split(planes, "scales", "minimums")
    if graph.opset >= _BLOCKED_OPSET and not folds:
        scaled = graph.node("DequantizeLinear", [codes, scales], "scaled", axis=1, block_size=GROUP)
    else:
        scaled = graph.node("Mul", [graph.cast(codes, "float_codes"), scales], "scaled")
    return graph.node("Add", [scaled, minimums], "values")


def _band(opset: int, height: int, pairs: int) -> Any:
    """Body of the Scan: one band of `height` groups. It reads nothing from outside, and its names meet none there."""
    from onnx import TensorProto, helper

    graph = _Graph(opset, prefix="q4nx_band/")
    codes, planes = graph.prefix + CODES, graph.prefix + PLANES
    values = _values(graph, codes, planes, folds=False)
    inputs = [
        helper.make_tensor_value_info(codes, TensorProto.UINT8, [height, GROUP, pairs, 2]),
        helper.make_tensor_value_info(planes, TensorProto.FLOAT, [height, 2, pairs, 2]),
    ]
    outputs = [helper.make_tensor_value_info(values, TensorProto.FLOAT, [height, GROUP, pairs, 2])]
    return helper.make_graph(graph.nodes, "q4nx_band", inputs, outputs, list(graph.constants()))


class _Graph:
    """Collects nodes and the constants that they share. All new names begin with `prefix`."""

    def __init__(self, opset: int, prefix: str = "") -> None:
        self.opset = opset
        self.prefix = prefix
        self.nodes: list[Any] = []
        self._constants: dict[str, Any] = {}

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        return self._nodes(op, inputs, [output], **attributes)[0]

    def _nodes(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> list[str]:
        from onnx import helper

        named = [self.prefix + output for output in outputs]
        self.nodes.append(helper.make_node(op, inputs, named, **attributes))
        return named

    def constants(self) -> Iterator[Any]:
        """All constants, in order of first use."""
        yield from self._constants.values()

    def integers(self, *values: int) -> str:
        """Name of an int64 constant [len(values)]."""
        return self._constant("_".join(["i64", *map(str, values)]), np.array(values, np.int64))

    def byte(self, value: int, rank: int) -> str:
        """Name of a uint8 constant of `rank` axes of 1.

        Not a scalar: onnxruntime broadcasts a scalar to a tensor whose last axis is 1 element by element, 45 times
        slower.
        """
        return self._constant(f"u8_{value}", np.full((1,) * rank, value, np.uint8))

    def _constant(self, name: str, array: Any) -> str:
        from onnx import numpy_helper

        name = self.prefix + name
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def slice(self, source: str, output: str, ranges: dict[int, tuple[int, int]]) -> str:
        starts, ends = zip(*ranges.values(), strict=True)
        constants = [self.integers(*starts), self.integers(*ends), self.integers(*ranges)]
        return self.node("Slice", [source, *constants], output)

    def reshape(self, source: str, output: str, shape: tuple[int, ...]) -> str:
        return self.node("Reshape", [source, self.integers(*shape)], output)

    def cut(
        self, source: str, output: str, padded: tuple[int, ...], wanted: tuple[int, ...], lead: tuple[int, ...]
    ) -> str:
        """Seen as `padded`, what lies within `wanted`, with its first axis as the axes `lead`."""
        shape = (*lead, *wanted[1:])
        if padded == wanted:
            return self.reshape(source, output, shape)
        whole = self.reshape(source, output + "_padded", padded)
        inside = self.slice(whole, output + "_inside", {axis: (0, size) for axis, size in enumerate(wanted)})
        return inside if shape == wanted else self.reshape(inside, output, shape)

    def cast(self, source: str, output: str) -> str:
        from onnx import TensorProto

        return self.node("Cast", [source], output, to=TensorProto.FLOAT)

    def split(self, source: str, *outputs: str) -> list[str]:
        """Parts of size 1 along axis 1."""
        return self._nodes("Split", [source, self.integers(*[1] * len(outputs))], list(outputs), axis=1)

    def scan(self, inputs: list[str], output: str, body: Any) -> str:
        return self.node("Scan", inputs, output, body=body, num_scan_inputs=len(inputs))

    def nibbles(self, source: str, rank: int) -> list[str]:
        """Low and high nibble of each byte. BitwiseAnd came with opset 18; before, two shifts drop the high nibble."""
        four = self.byte(4, rank)
        if self.opset >= 18:
            low = self.node("BitwiseAnd", [source, self.byte(15, rank)], "low")
        else:
            up = self.node("BitShift", [source, four], "up", direction="LEFT")
            low = self.node("BitShift", [up, four], "low", direction="RIGHT")
        return [low, self.node("BitShift", [source, four], "high", direction="RIGHT")]
