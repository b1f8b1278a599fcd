"""Bare products: what is left of a bound site when everything around it is written out as operators of its own.

A bare product is a node of the domain ``onnxpack`` that never leaves the process: the host lowering replaces it by
integer operators, the cut (reference device, NPU) takes it out of the graph. There are two varieties: float in and
float out, quantized per row on the way; and a QDQ group, whose codes and scales are the graph's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import NodeProto, helper

from onnxpack import records
from onnxpack.pack.manifest import QdqRecord

DOMAIN = "onnxpack"
PRODUCT = "Product"


@dataclass(frozen=True)
class Product:
    """One bare product."""

    node: str
    """Name of the node; the site's own."""
    a: str
    """float32 [..., K]; codes int8 or uint8 [..., K] for a group."""
    y: str
    """float32 [..., N]; codes for a group that ends in a QuantizeLinear."""
    weight: str
    """Name of the packed weight."""
    group: QdqRecord | None = None

    @property
    def bias(self) -> str | None:
        """The constant that is added inside the group, if any."""
        return None if self.group is None or self.group.bias is None else self.group.bias.value

    def to_node(self) -> NodeProto:
        """The node that stands for it."""
        attributes = {"weight": self.weight}
        inputs = [self.a]
        if self.group is not None:
            attributes["group"] = records.dumps(self.group)
            inputs += [] if self.bias is None else [self.bias]
        return helper.make_node(PRODUCT, inputs, [self.y], self.node, domain=DOMAIN, **attributes)


def as_product(node: NodeProto) -> Product | None:
    """The bare product that a node stands for, if it is one."""
    if (node.domain, node.op_type) != (DOMAIN, PRODUCT):
        return None
    held = {attribute.name: attribute.s for attribute in node.attribute}
    group = records.loads(held["group"], QdqRecord) if "group" in held else None
    return Product(node.name, node.input[0], node.output[0], held["weight"].decode(), group)


def main_products(model: onnx.ModelProto) -> list[Product]:
    """The bare products of the main graph, in order; those in bodies are not among them."""
    found = (as_product(node) for node in model.graph.node)
    return [product for product in found if product is not None]
