"""What the rules about views share: first input, attributes, arguments that old opsets have as attributes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxpack.graph.constant import Inputs, Shape, Small
from onnxpack.types import Array


def first(inputs: Inputs) -> tuple[Shape, ir.DataType]:
    if not inputs or inputs[0] is None:
        raise ValueError("it has no input")
    return inputs[0].shape, inputs[0].dtype


def present(array: Array | None) -> Array:
    assert array is not None
    return array


def attribute_of(node: ir.Node, name: str, default: Any = None) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def argument_of(node: ir.Node, inputs: Inputs, position: int, name: str, small: Small) -> list[int] | None:
    """An argument that is an attribute in old opsets and an input in new ones."""
    if len(inputs) > position and (given := inputs[position]) is not None:
        return [int(v) for v in small(given).reshape(-1)]
    value = attribute_of(node, name)
    return None if value is None else [int(v) for v in ([value] if isinstance(value, int) else value)]


def checked_axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} does not exist in a tensor of rank {rank}")
    return axis % rank
