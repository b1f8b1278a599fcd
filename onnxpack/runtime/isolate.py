"""Bound sites become bare products: y = a @ weight, float32, and everything around them operators of their own.

Gemm's transA, alpha, beta and C, and the casts of 16-bit sites, are written out once, here, so that every device
computes them with the same onnxruntime operators and only the bare product differs between devices.

A bare product is a node of the domain ``onnxpack`` that never leaves the process: the host lowering replaces it by
integer operators, the cut (reference device, NPU) takes it out of the graph.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper

from onnxpack.errors import PackError
from onnxpack.pack.manifest import SiteRecord
from onnxpack.runtime.constants import Constants
from onnxpack.runtime.graphs import Scope, bodies, opset, replace_nodes, walk
from onnxpack.runtime.prune import prune
from onnxpack.runtime.trace import runs_as_product
from onnxpack.runtime.types import ElementTypes

DOMAIN = "onnxpack"
PRODUCT = "Product"
MIN_OPSET = 7
"""The oldest opset at which elementwise operators broadcast."""

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


@dataclass(frozen=True)
class Product:
    """One bare product: a float32 [..., K] in, y float32 [..., N] out."""

    node: str
    """Name of the node; the site's own."""
    a: str
    y: str
    weight: str
    """Name of the packed weight."""


def as_product(node: NodeProto) -> Product | None:
    """The bare product that a node stands for, if it is one."""
    if (node.domain, node.op_type) != (DOMAIN, PRODUCT):
        return None
    return Product(node.name, node.input[0], node.output[0], node.attribute[0].s.decode())


def main_products(model: onnx.ModelProto) -> list[Product]:
    """The bare products of the main graph, in order; those in bodies are not among them."""
    found = (as_product(node) for node in model.graph.node)
    return [product for product in found if product is not None]


def isolate(model: onnx.ModelProto, sites: Iterable[SiteRecord], constants: Constants, where: str) -> None:
    """Rewrite, in place, every bound site of the main graph and of all bodies; drop decoders nobody needs any more.

    PackError when a site's node is missing or is not one that can be bound.
    """
    if (version := opset(model)) < MIN_OPSET:
        raise PackError(f"opset {version} is older than {MIN_OPSET}", where=where, hint="build the pack again")
    wanted = {site.node: site for site in sites if runs_as_product(site)}
    found = {}
    for scope in walk(model.graph):
        for node in scope[-1].node:
            if node.domain == DOMAIN:
                raise PackError(f"node {node.name!r} is of domain {DOMAIN!r}, which no file may use", where=where)
            if node.name in wanted:
                if node.name in found:
                    raise PackError(f"two nodes are called {node.name!r}", where=where)
                found[node.name] = (scope, _checked(node, where))
    if missing := sorted(wanted.keys() - found.keys()):
        raise PackError(f"site node {missing[0]!r} is not in the graph", where=where, hint="build the pack again")
    types = ElementTypes(model)
    kinds = {name: _float_type(types, scope, node, where) for name, (scope, node) in found.items()}
    decoded = {node.input[1] for _, node in found.values()}
    _rewrite(model.graph, _Rewriter({n: wanted[n].weight or "" for n in found}, kinds, constants))
    prune(model, decoded)


def _checked(node: NodeProto, where: str) -> NodeProto:
    at = f"{where}: node {node.name}"
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
        raise PackError(f"operator {node.op_type!r} cannot be bound by this version", where=at, hint="update onnxpack")
    if not 2 <= len(node.input) <= (2 if node.op_type == "MatMul" else 3) or len(node.output) != 1:
        raise PackError(f"{len(node.input)} inputs and {len(node.output)} outputs", where=at)
    if node.op_type == "Gemm" and _attribute(node, "transB", 0):
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
class _Rewriter:
    weights: dict[str, str]
    kinds: dict[str, int]
    constants: Constants


def _rewrite(graph: onnx.GraphProto, rewriter: _Rewriter) -> None:
    """Depth first, so that a node's bodies are rewritten before the node itself is copied."""
    views: dict[tuple[str, str], str] = {}

    def expand(node: NodeProto) -> Iterable[NodeProto] | None:
        for body in bodies(node):
            _rewrite(body, rewriter)
        return _expand(node, rewriter, views) if node.name in rewriter.weights else None

    replace_nodes(graph, expand)


def _expand(
    node: NodeProto, rewriter: _Rewriter, views: dict[tuple[str, str], str]
) -> Generator[NodeProto, None, None]:
    """The site as a bare product between its operators. `views` shares Transpose and Cast of one input."""
    constants, kind = rewriter.constants, rewriter.kinds[node.name]
    sixteen_bit = kind != TensorProto.FLOAT
    a = node.input[0]
    if node.op_type == "Gemm" and _attribute(node, "transA", 0):
        a = yield from _view("Transpose", a, views, constants, perm=[1, 0])
    if sixteen_bit:
        a = yield from _view("Cast", a, views, constants, to=TensorProto.FLOAT)
    tail: list[tuple[str, list[str], dict[str, Any]]] = []
    if node.op_type == "Gemm":
        alpha = _attribute(node, "alpha", 1.0)
        if alpha != 1:
            tail.append(("Mul", [constants.scalar(np.float32(alpha))], {}))
        c = yield from _addend(node, sixteen_bit, views, constants)
        if c is not None:
            tail.append(("Add", [c], {}))
    if sixteen_bit:
        tail.append(("Cast", [], {"to": kind}))
    steps = [constants.names.fresh(f"{node.name}/product") for _ in tail] + [node.output[0]]
    yield helper.make_node(PRODUCT, [a], steps[:1], node.name, domain=DOMAIN, weight=rewriter.weights[node.name])
    for before, after, (op, more, attributes) in zip(steps, steps[1:], tail, strict=False):
        name = constants.names.fresh(f"{node.name}/{op.lower()}")
        yield helper.make_node(op, [before, *more], [after], name, **attributes)


def _addend(
    node: NodeProto, sixteen_bit: bool, views: dict[tuple[str, str], str], constants: Constants
) -> Generator[NodeProto, None, str | None]:
    """beta * C in float32; None where there is nothing to add. As in BLAS, a beta of 0 means that C is not read."""
    beta = _attribute(node, "beta", 1.0)
    if len(node.input) < 3 or not node.input[2] or beta == 0:
        return None
    c: str = node.input[2]
    if sixteen_bit:
        c = yield from _view("Cast", c, views, constants, to=TensorProto.FLOAT)
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
