"""A format's decoder as an ONNX function, and its encoder where standard operators have one; and its structure type.

A function takes the stored fields by name and gives the weight; constants are nodes inside it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from onnxpack.errors import UsageError
from onnxpack.formats.base import Format
from onnxpack.formats.layout import Per
from onnxpack.formats.profiles import LinearUniform
from onnxpack.formats.structure import Function, StructType
from onnxpack.formats.translate import to_structure

DOMAIN = "onnxpack.formats"
OPSET = 21
"""What functions are written for unless asked otherwise: FunctionProtos of IR version 10."""

_REDUCE_BY_INPUT = 18  # the opset from which ReduceMax takes its axes as an input


def decoder_function(made: Format, shape: tuple[int, ...], opset: int = OPSET) -> Any:
    """FunctionProto: stored tensors in, float32 weight out, at one logical shape."""
    from onnx import helper

    decoder = made.decoder(shape, opset)
    constants = [helper.make_node("Constant", [], [c.name], value=c) for c in decoder.constants]
    nodes = [*constants, *decoder.nodes]
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, _name("Decode", made), list(made.views(shape)), [decoder.output], nodes, opsets)


def has_encoder_function(made: Format) -> bool:
    """Whether `encoder_function` can be written: plain int8 codes with absolute-maximum scales."""
    if made.profile is None or made.profile.layout is None:
        return False
    leaf = made.profile.value
    return isinstance(leaf, LinearUniform) and leaf.storage_type.native and made.encodes


def encoder_function(made: Format, opset: int = OPSET) -> Any:
    """FunctionProto: float32 weight [N, K] in, stored tensors out. UsageError where no standard operators do it."""
    from onnx import TensorProto, helper, numpy_helper

    if not has_encoder_function(made):
        raise UsageError(f"format {made.name} has no encoder of standard operators")
    leaf, per = made.profile.value, made.profile.layout.find("scale").per

    def node(op: str, inputs: list[str], output: str, **attributes: Any) -> Any:
        return helper.make_node(op, inputs, [output], **attributes)

    def constant(name: str, array: Any) -> Any:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array), name))

    axes = {Per.TENSOR: [0, 1], Per.ROW: [1], Per.COLUMN: [0]}[per]
    nodes = [
        constant("axes", np.array(axes, np.int64)),
        constant("top", np.float32(leaf.range[1])),
        constant("one", np.float32(1)),
        constant("zero", np.float32(0)),
        node("Abs", ["weight"], "magnitude"),
        node("ReduceMax", ["magnitude", "axes"], "amax", keepdims=0),
        node("Div", ["amax", "top"], "ratio"),
        node("Equal", ["ratio", "zero"], "empty"),
        node("Where", ["empty", "one", "ratio"], "scale"),
        # Zero points have the shape of the scales, and say by their type that codes are int8.
        node("Sub", ["scale", "scale"], "zeros"),
        node("Cast", ["zeros"], "zero_point", to=TensorProto.INT8),
        node("QuantizeLinear", ["weight", "scale", "zero_point"], "values", axis=max(leaf.axis, 0)),
    ]
    opsets = [helper.make_opsetid("", max(opset, _REDUCE_BY_INPUT))]
    return helper.make_function(DOMAIN, _name("Encode", made), ["weight"], ["values", "scale"], nodes, opsets)


def structure(made: Format, shape: tuple[int, ...], opset: int = OPSET) -> StructType:
    """The structure type of a weight in a format, with its functions by name."""
    if made.profile is None:
        raise UsageError(f"format {made.name} is not declared by a profile")
    encoder = (
        Function(DOMAIN, _name("Encode", made), max(opset, _REDUCE_BY_INPUT)) if has_encoder_function(made) else None
    )
    decoder = Function(DOMAIN, _name("Decode", made), opset)
    name = f"{made.name.upper()}_{'X'.join(map(str, shape))}"
    return to_structure(made.profile_for(shape), shape, name, decoder, encoder)


def _name(verb: str, made: Format) -> str:
    """Decode_matmulnbits_4_32_True_float16: one name for one set of parameters."""
    words = "_".join([verb, made.name, *map(str, made.params.values())])
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", words)
