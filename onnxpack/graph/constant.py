"""A value known before the model runs, and what the rules about views say of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from onnxpack.reasons import Reason
from onnxpack.types import Array


@dataclass(frozen=True, eq=False)
class Constant:
    """A value known before the model runs: a stored tensor, or an operator over constants."""

    name: str
    shape: tuple[int, ...]
    dtype: ir.DataType
    tensor: ir.TensorProtocol | None = None
    node: ir.Node | None = None
    index: int = 0
    """Which output of `node`."""
    inputs: tuple[Constant | None, ...] = ()
    reason: Reason | None = None
    """Why it may not be relied on after all (overridable, scale computed at run time)."""

    @cached_property
    def root(self) -> Constant:
        """The stored tensor that the values come from: the first input of the first input, and so on."""
        at = self
        while at.tensor is None and at.inputs and at.inputs[0] is not None:
            if at.node is not None and at.node.op_type == "ConstantOfShape":
                break
            at = at.inputs[0]
        return at

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """Operators between the value and its root, from the value inwards."""
        at, root, ops = self, self.root, []
        while at.node is not None and at is not root:
            ops.append(at.node.op_type)
            if not at.inputs or at.inputs[0] is None:
                break
            at = at.inputs[0]
        return tuple(ops)

    @property
    def nbytes(self) -> int:
        """Bytes of the value as its type stores it; 0 for strings, whose length says nothing."""
        if self.dtype == ir.DataType.STRING:
            return 0
        return -(-math.prod(self.shape) * self.dtype.bitwidth // 8)


Inputs = Sequence[Constant | None]
"""The inputs of a node, as constants."""
Small = Callable[[Constant], Array]
"""Gives the numbers of a constant that is short enough to be a shape or a list of axes."""
Shape = tuple[int, ...]
Result = Callable[[ir.Node, Inputs, int, Small], tuple[Shape, ir.DataType]]
"""Shape and type of an output, by its index, without reading weights."""
Apply = Callable[[ir.Node, Sequence[Array | None], int], Array]
"""Its numbers."""


@dataclass(frozen=True)
class View:
    """One operator over constants."""

    result: Result
    apply: Apply
