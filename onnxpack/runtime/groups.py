"""QDQ groups: which nodes of the graph a group takes away, and whether its record fits the graph at all."""

from __future__ import annotations

from collections import Counter

import onnx
from onnx import NodeProto

from onnxpack.errors import PackError
from onnxpack.pack.manifest import QdqRecord, SiteRecord, TensorRecord
from onnxpack.pack.read import Pack
from onnxpack.quant.qdq import signed_zero_points
from onnxpack.runtime.graphs import bodies, captured

MIN_OPSET = 10
"""The oldest opset with integer products."""

_DOMAINS = ("", "ai.onnx", "com.microsoft")


class GraphIndex:
    """Nodes of one graph by name, and how often it reads each value: by its nodes, in their bodies, as its output."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = {node.name: node for node in graph.node}
        self.reads = Counter(value.name for value in graph.output)
        for node in graph.node:
            self.reads.update(node.input)
            self.reads.update(name for body in bodies(node) for name in captured(body))


def group_of(site: SiteRecord) -> QdqRecord | None:
    """The record of a site that takes codes; None where only the weight is quantized, or nothing."""
    return None if site.qdq is None or site.qdq.x is None else site.qdq


def fold(index: GraphIndex, product: NodeProto, record: QdqRecord, where: str) -> list[NodeProto]:
    """The nodes that a group replaces: product, the bias's Add, the QuantizeLinear, as far as it has them; in order.

    PackError when the record does not fit the graph.
    """
    at = f"{where}: node {product.name}"
    _check_numbers(record, at)
    chain = [product]
    for name, op in _inner(record):
        before, node = chain[-1].output[0], index.nodes.get(name)
        if node is None or node.op_type != op or node.domain not in _DOMAINS or len(node.output) != 1:
            raise PackError(f"the group's {op} {name!r} is not beside the product", where=at, hint=_REBUILD)
        if before not in (node.input if op == "Add" else node.input[:1]) or index.reads[before] != 1:
            raise PackError(f"{name!r} is not the only reader of {before!r}", where=at, hint=_REBUILD)
        chain.append(node)
    return chain


_REBUILD = "build the pack again"


def _inner(record: QdqRecord) -> list[tuple[str, str]]:
    found = []
    if record.bias is not None and record.bias.node is not None:
        found.append((record.bias.node, "Add"))
    if record.requantize is not None:
        found.append((record.requantize.node, "QuantizeLinear"))
    return found


def _check_numbers(record: QdqRecord, at: str) -> None:
    scales, points = len(record.x_scale), len(record.x_zero_point)
    if record.x_dtype is None or not scales or points not in (1, scales):
        raise PackError(f"{scales} scales and {points} zero points of {record.x_dtype}", where=at, hint=_REBUILD)
    if (record.x_axis is None) != (scales == 1) and not (scales == 1 and (record.x_axis or 0) < -1):
        raise PackError(f"{scales} scales along axis {record.x_axis}", where=at, hint=_REBUILD)
    if record.x_axis is not None and record.x_axis >= -1:
        raise PackError(f"scales along axis {record.x_axis}, which is K", where=at, hint=_REBUILD)
    _check_codes(record.x_zero_point, record.x_dtype, at)
    if record.requantize is not None:
        _check_codes([record.requantize.zero_point], record.requantize.dtype, at)


def _check_codes(points: list[int], dtype: str, at: str) -> None:
    low = -128 if dtype == "int8" else 0
    if not all(low <= point <= low + 255 for point in points):
        raise PackError(f"a zero point of {points} is not {dtype}", where=at, hint=_REBUILD)


def facts(site: SiteRecord, pack: Pack) -> str | None:
    """What a quantized site is, in one line: how many scales and zero points, and whether column sums are needed.

    A zero point that is one number is given as that number, several as how many they are.
    """
    record = site.qdq
    if record is None or site.weight is None:
        return None
    weight = pack.tensors[site.weight]
    columns = {name: max(1, _size(weight, name)) for name in ("scales", "zero_points") if name in weight.fields}
    weight_facts = f"sw={columns.get('scales', 1)} zp_w={columns.get('zero_points', 0)}"
    if record.x is None or record.x_dtype is None:
        return f"qdq weight only {weight_facts}"
    points = signed_zero_points(record.x_zero_point, record.x_dtype)
    y = "float out" if record.requantize is None else f"zp_y={record.requantize.zero_point}"
    bias = "" if record.bias is None else f" bias={record.bias.dtype}"
    sums = f" colsum k={weight.shape[0]} n={weight.shape[1]}" if points.any() else ""
    x_zero = record.x_zero_point[0] if len(points) == 1 else len(points)
    return f"qdq sx={len(record.x_scale)} zp_x={x_zero} {weight_facts} {y}{bias}{sums}"


def _size(weight: TensorRecord, name: str) -> int:
    shape = weight.fields[name].shape
    return int(shape[0]) if shape else 1
