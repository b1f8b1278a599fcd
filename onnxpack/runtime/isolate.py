"""Bound sites become bare products: y = a @ weight, and everything around them operators of their own.

Gemm's transA, alpha, beta and C, and the casts of 16-bit sites, are written out once, here, so that every device
computes them with the same onnxruntime operators and only the bare product differs between devices. A QDQ group is one
bare product from codes to codes, or to float: its DequantizeLinear, bias and QuantizeLinear are part of it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper

from onnxpack.errors import PackError
from onnxpack.pack.manifest import QdqRecord, SiteRecord
from onnxpack.runtime.constants import Constants
from onnxpack.runtime.graphs import Scope, bodies, opset, replace_nodes, walk
from onnxpack.runtime.groups import MIN_OPSET as GROUP_OPSET
from onnxpack.runtime.groups import GraphIndex, fold, group_of
from onnxpack.runtime.product import DOMAIN, Product
from onnxpack.runtime.prune import prune
from onnxpack.runtime.rounding import keep_at_cuts, kept
from onnxpack.runtime.trace import runs_as_product
from onnxpack.runtime.types import ElementTypes

MIN_OPSET = 7
"""The oldest opset at which elementwise operators broadcast."""

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def isolate(model: onnx.ModelProto, sites: Iterable[SiteRecord], constants: Constants, where: str) -> None:
    """Rewrite, in place, every bound site of the main graph and of all bodies; drop decoders nobody needs any more.

    Where a site is of 16 bit, values of that type are rounded as the graph says, in one session as in many.
    PackError when a site's node is missing or is not one that can be bound.
    """
    wanted = {site.node: site for site in sites if runs_as_product(site)}
    version = opset(model)
    if wanted and version < MIN_OPSET:
        raise PackError(f"opset {version} is older than {MIN_OPSET}", where=where, hint="build the pack again")
    found: dict[str, tuple[Scope, NodeProto]] = {}
    for scope in walk(model.graph):
        for node in scope[-1].node:
            if node.domain == DOMAIN:
                raise PackError(f"node {node.name!r} is of domain {DOMAIN!r}, which no file may use", where=where)
            if node.name in wanted:
                if node.name in found:
                    raise PackError(f"two nodes are called {node.name!r}", where=where)
                found[node.name] = (scope, _checked(node, wanted[node.name], version, where))
    if missing := sorted(wanted.keys() - found.keys()):
        raise PackError(f"site node {missing[0]!r} is not in the graph", where=where, hint="build the pack again")
    types, rewriter, indexes = ElementTypes(model), _Rewriter(constants, version), dict[int, GraphIndex]()
    unread = set[str]()
    for name, (scope, node) in found.items():
        group, nodes = group_of(wanted[name]), [node]
        if group is not None:
            index = indexes.get(id(scope[-1])) or GraphIndex(scope[-1])
            indexes[id(scope[-1])] = index
            nodes = fold(index, node, group, where)
        kind = TensorProto.FLOAT if wanted[name].qdq is not None else _float_type(types, scope, node, where)
        site = _Site(node, wanted[name].weight or "", kind, group, nodes[-1].output[0])
        rewriter.add([inner.name for inner in nodes], site)
        # What decoded the weight; for a group also the activation, and whatever else it has taken in.
        unread.update(*(inner.input for inner in nodes) if group is not None else [node.input[1:2]])
    sixteen_bit = any(site is not None and site.kind != TensorProto.FLOAT for site in rewriter.places.values())
    known = types.of_main_graph() if sixteen_bit else {}
    _rewrite(model.graph, rewriter)
    prune(model, sorted(unread - {""}))
    if sixteen_bit:
        keep_at_cuts(model, constants, known)


def _checked(node: NodeProto, site: SiteRecord, version: int, where: str) -> NodeProto:
    at = f"{where}: node {node.name}"
    if group_of(site) is not None and version < GROUP_OPSET:
        raise PackError(f"opset {version} has no integer products", where=at, hint="build the pack again")
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
        raise PackError(f"operator {node.op_type!r} cannot be bound by this version", where=at, hint="update onnxpack")
    if not 2 <= len(node.input) <= (2 if node.op_type == "MatMul" else 3) or len(node.output) != 1:
        raise PackError(f"{len(node.input)} inputs and {len(node.output)} outputs", where=at)
    if node.op_type == "Gemm" and site.qdq is None and _attribute(node, "transB", 0):
        raise PackError("a bound Gemm has its weight as [K, N]: transB must be 0", where=at)
    return node


def _float_type(types: ElementTypes, scope: Scope, node: NodeProto, where: str) -> int:
    # The weight first: its decoder is made of standard operators, so its type is always known.
    kind = types.of_any(scope, [node.input[1], node.input[0], node.output[0]], node.name)
    if kind not in _FLOATS:
        name = "unknown" if kind is None else TensorProto.DataType.Name(kind).lower()
        raise PackError(f"element type {name} cannot be bound", where=f"{where}: node {node.name}")
    return kind


def _attribute(node: NodeProto, name: str, default: float) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            if attribute.type not in (AttributeProto.FLOAT, AttributeProto.INT):
                raise PackError(f"attribute {name} is not a number", where=f"node {node.name}")
            return float(attribute.f if attribute.type == AttributeProto.FLOAT else attribute.i)
    return default


@dataclass(frozen=True)
class _Site:
    """What is to stand in the place of a bound node, or of the last node of a group."""

    node: NodeProto
    weight: str
    kind: int
    """Element type of a float site."""
    group: QdqRecord | None
    y: str


@dataclass(frozen=True)
class _Rewriter:
    constants: Constants
    opset: int
    places: dict[str, _Site | None] = field(default_factory=dict)
    """By name of a node: the site that stands there, or None when the node only goes."""

    def add(self, nodes: Sequence[str], site: _Site) -> None:
        for name in nodes:
            if name in self.places:
                raise PackError(f"node {name!r} belongs to two sites", hint="build the pack again")
            self.places[name] = None
        self.places[nodes[-1]] = site


def _rewrite(graph: onnx.GraphProto, rewriter: _Rewriter) -> None:
    """Depth first, so that a node's bodies are rewritten before the node itself is copied."""
    views: dict[tuple[str, str], str] = {}

    def expand(node: NodeProto) -> Iterable[NodeProto] | None:
        for body in bodies(node):
            _rewrite(body, rewriter)
        if node.name not in rewriter.places:
            return None
        site = rewriter.places[node.name]
        return [] if site is None else _expand(site, rewriter, views)

    replace_nodes(graph, expand)


def _expand(site: _Site, rewriter: _Rewriter, views: dict[tuple[str, str], str]) -> Generator[NodeProto, None, None]:
    """The site as a bare product between its operators. `views` shares Transpose and Cast of one input."""
    node, group, constants = site.node, site.group, rewriter.constants
    sixteen_bit = site.kind != TensorProto.FLOAT
    a = node.input[0] if group is None or group.x is None else group.x
    if node.op_type == "Gemm" and _attribute(node, "transA", 0):
        a = yield from _view("Transpose", a, views, constants, perm=[1, 0])
    if sixteen_bit:
        a = yield from _widened(a, views, rewriter)
    tail: list[tuple[str, list[str], dict[str, Any]]] = []
    if node.op_type == "Gemm" and not _takes_c(group):
        alpha = _attribute(node, "alpha", 1.0)
        if alpha != 1:
            tail.append(("Mul", [constants.scalar(np.float32(alpha))], {}))
        c = yield from _addend(node, sixteen_bit, views, rewriter)
        if c is not None:
            tail.append(("Add", [c], {}))
    if sixteen_bit:
        tail.append(("Cast", [], {"to": site.kind}))
    if tail and site.y != node.output[0]:
        raise PackError("Gemm's alpha, beta or C stands inside a group", where=f"node {node.name}")
    y = constants.names.fresh(f"{node.name}/unrounded") if sixteen_bit else site.y
    steps = [constants.names.fresh(f"{node.name}/product") for _ in tail] + [y]
    yield Product(node.name, a, steps[0], site.weight, group).to_node()
    for before, after, (op, more, attributes) in zip(steps, steps[1:], tail, strict=False):
        name = constants.names.fresh(f"{node.name}/{op.lower()}")
        yield helper.make_node(op, [before, *more], [after], name, **attributes)
    if sixteen_bit:
        yield from kept(y, site.y, constants, rewriter.opset)


def _widened(source: str, views: dict[tuple[str, str], str], rewriter: _Rewriter) -> Generator[NodeProto, None, str]:
    """A 16-bit value, really rounded to its type, as float32."""
    key = ("kept", source)
    if key not in views:
        views[key] = rewriter.constants.names.fresh(f"{source}/kept")
        yield from kept(source, views[key], rewriter.constants, rewriter.opset)
    return (yield from _view("Cast", views[key], views, rewriter.constants, to=TensorProto.FLOAT))


def _takes_c(group: QdqRecord | None) -> bool:
    """Whether the C of a Gemm is the bias of the group; alpha and beta are 1 then."""
    return group is not None and group.bias is not None and group.bias.node is None


def _addend(
    node: NodeProto, sixteen_bit: bool, views: dict[tuple[str, str], str], rewriter: _Rewriter
) -> Generator[NodeProto, None, str | None]:
    """beta * C in float32; None where there is nothing to add. As in BLAS, a beta of 0 means that C is not read."""
    beta = _attribute(node, "beta", 1.0)
    if len(node.input) < 3 or not node.input[2] or beta == 0:
        return None
    c: str = node.input[2]
    constants = rewriter.constants
    if sixteen_bit:
        c = yield from _widened(c, views, rewriter)
    if beta != 1:
        scaled = constants.names.fresh(f"{node.name}/beta_c")
        yield helper.make_node("Mul", [c, constants.scalar(np.float32(beta))], [scaled], scaled)
        c = scaled
    return c


def _view(
    op: str, source: str, views: dict[tuple[str, str], str], constants: Constants, **attributes: Any
) -> Generator[NodeProto, None, str]:
    key = (op, source)
    if key not in views:
        views[key] = constants.names.fresh(f"{source}/{op.lower()}")
        yield helper.make_node(op, [source], [views[key]], views[key], **attributes)
    return views[key]
