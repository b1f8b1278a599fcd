"""What a quantized product is: a weight with codes of its own, the activation, bias and output around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from onnxpack.graph.constant import Constant
from onnxpack.reasons import Reason

CODES = (ir.DataType.INT8, ir.DataType.UINT8)


@dataclass(frozen=True)
class Refusal:
    """Why a quantized product is not taken as one: the reason, where, and the condition that failed."""

    reason: Reason
    node: str
    why: str


@dataclass(frozen=True, eq=False)
class OwnWeight:
    """A weight that the graph already holds as codes: never quantized again, bit for bit the operand."""

    codes: Constant
    """[K, N], or [N, K] when `transposed`."""
    scale: Constant
    """One, or one a column of B."""
    zero_point: Constant | None
    transposed: bool
    dequantize: ir.Node

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Codes, scale and, where there is one, zero point."""
        found = (self.codes, self.scale, self.zero_point)
        return tuple(constant for constant in found if constant is not None)

    @property
    def initializer(self) -> ir.Value | None:
        """The initializer that is the codes, as bytes that can be mapped; None when they are made of something else."""
        value = self.dequantize.inputs[0]
        plain = value is not None and self.codes.tensor is not None and self.codes.dtype in CODES
        return value if plain and value is not None and value.is_initializer() else None


@dataclass(frozen=True, eq=False)
class Activation:
    """A quantized activation: x = (q - zero_point) * scale, per tensor or along `axis`, which is never K."""

    value: ir.Value
    dtype: ir.DataType
    scale: Constant
    zero_point: Constant | None
    axis: int | None
    """Counted from the end of A's dimensions (-2 is the row axis); None: per tensor."""


@dataclass(frozen=True, eq=False)
class Bias:
    """A constant added per column: int32 in the scale of the accumulator, or float32 after it."""

    constant: Constant
    """int32 [N] codes, or float32 values that broadcast over the rows."""
    in_accumulator: bool
    node: ir.Node | None
    """The Add, or None for the C of a Gemm."""


@dataclass(frozen=True, eq=False)
class Requantize:
    """The output QuantizeLinear: per tensor."""

    node: ir.Node
    scale: Constant
    zero_point: Constant | None
    dtype: ir.DataType


@dataclass(frozen=True, eq=False)
class Group:
    """A quantized product that is one site. Without `activation` only the weight is quantized."""

    weight: OwnWeight
    activation: Activation | None
    bias: Bias | None
    requantize: Requantize | None

    @property
    def traits(self) -> str:
        """What the group is, for a person: ``sx=1 sw=80 zp_x=1 zp_w=0 zp_y=1 bias=int32``."""
        act, out = self.activation, self.requantize
        parts = ["weight only"] if act is None else [f"sx={count(act.scale)}"]
        parts.append(f"sw={count(self.weight.scale)}")
        parts += [] if act is None else [f"zp_x={count(act.zero_point)}"]
        parts.append(f"zp_w={count(self.weight.zero_point)}")
        parts.append("float out" if out is None else f"zp_y={count(out.zero_point)}")
        if self.bias is not None:
            parts.append(f"bias={'int32' if self.bias.in_accumulator else 'float'}")
        return " ".join(parts)


def count(constant: Constant | None) -> int:
    """Elements of a scale or zero point; 0 for one that is not there."""
    return 0 if constant is None else max(1, math.prod(constant.shape))
