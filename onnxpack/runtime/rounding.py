"""16-bit values that stay 16 bit: onnxruntime computes float16 in float32 on the CPU and drops what casts it can.

Most of its float16 operators are emulated: a Cast to float32 before, a Cast back behind. Where two such casts meet,
both go, one of ours as well as its own, and the value between is never rounded: more digits than the model says, and
others than where a segment ends and the value really is float16. An Unsqueeze and a Squeeze, which have kernels of
every type, copy nothing and survive the optimizer, keep the casts apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from onnxpack.runtime.constants import Constants
from onnxpack.runtime.cut import Segment, cut
from onnxpack.runtime.graphs import opset, replace_nodes
from onnxpack.runtime.product import main_products

SIXTEEN_BIT = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_AXES_ARE_AN_INPUT = 13


def kept(source: str, result: str, constants: Constants, version: int) -> Iterator[NodeProto]:
    """`result` is `source`, rounded to its own type; two nodes that change nothing else, at any rank."""
    between = constants.names.fresh(f"{result}/kept")
    for op, before, after in (("Unsqueeze", source, between), ("Squeeze", between, result)):
        name = constants.names.fresh(f"{result}/{op.lower()}")
        if version >= _AXES_ARE_AN_INPUT:
            yield helper.make_node(
                op, [before, constants.tensor(np.zeros(1, np.int64), "onnxpack/axis")], [after], name
            )
        else:
            yield helper.make_node(op, [before], [after], name, axes=[0])


def keep_at_cuts(model: onnx.ModelProto, constants: Constants, types: Mapping[str, int]) -> None:
    """Round, in place, every 16-bit value that would cross from one segment to another if the graph were cut.

    So the whole graph in one session and the cut one compute the same. `types` are those of the graph before bare
    products stood in it, which inference cannot see through.
    """
    names = {product.node for product in main_products(model)}
    steps = [step for step in cut(model, names) if isinstance(step, Segment)]
    wanted = {name for step in steps for name in step.outputs if types.get(name) in SIXTEEN_BIT}
    version = opset(model)

    def expand(node: NodeProto) -> list[NodeProto] | None:
        made = [out for out in node.output if out in wanted]
        if not made:
            return None
        changed: NodeProto = NodeProto.FromString(node.SerializeToString())
        nodes = [changed]
        for index, out in enumerate(node.output):
            if out in wanted:
                changed.output[index] = constants.names.fresh(f"{out}/unrounded")
                nodes += kept(changed.output[index], out, constants, version)
        return nodes

    replace_nodes(model.graph, expand)
