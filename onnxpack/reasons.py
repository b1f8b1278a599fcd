"""The closed list of reasons why a matrix product does not run on the NPU.

Matcher, census, plan, manifest and runtime share it: one code, one sentence, one cure. A new reason is one entry here.

>>> Reason("no-kernel").sentence
'no kernel of this (K, N) is in the library'
>>> sorted(r.value for r in Reason)[:2]
['batched-weight', 'below-row-threshold']
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a site stays on the host, or is not bound at all."""

    NO_KERNEL = "no-kernel"
    DYNAMIC_WEIGHT = "dynamic-weight"
    OVERRIDABLE_WEIGHT = "overridable-weight"
    BATCHED_WEIGHT = "batched-weight"
    UNSUPPORTED_DTYPE = "unsupported-dtype"
    VECTOR_OPERAND = "vector-operand"
    K_ZERO = "k-zero"
    K_TOO_LONG = "k-too-long-for-int32"
    NOT_TILEABLE = "not-tileable"
    OVER_BUDGET = "over-budget"
    BELOW_ROW_THRESHOLD = "below-row-threshold"
    HOST_IS_FASTER = "host-is-faster"
    IN_SUBGRAPH = "in-subgraph"
    UNSUPPORTED_OP = "unsupported-op"
    NON_FINITE_WEIGHT = "non-finite-weight"
    SCALE_ALONG_K = "scale-along-k"
    ZERO_POINT_ALONG_K = "zero-point-along-k"
    SCALE_NOT_CONSTANT = "scale-not-constant"
    SIXTEEN_BIT_ACTIVATION = "sixteen-bit-activation"
    BLOCK_SCALES = "block-scales"
    FLOAT8 = "float8"
    VENDOR_OPERATOR = "vendor-operator"
    SHARED_OUTPUT = "shared-output"
    PACKED_ELSEWHERE = "packed-elsewhere"
    SWITCHED_OFF = "switched-off"

    @property
    def sentence(self) -> str:
        """What the code means, for a person."""
        return _TEXT[self][0]

    @property
    def cure(self) -> str:
        """What the person can do about it."""
        return _TEXT[self][1]


_TEXT: dict[Reason, tuple[str, str]] = {
    Reason.NO_KERNEL: ("no kernel of this (K, N) is in the library", "build one, or pass --kernels"),
    Reason.DYNAMIC_WEIGHT: ("both operands are computed at run time", "nothing: attention products are like this"),
    Reason.OVERRIDABLE_WEIGHT: (
        "the weight is also a graph input, so a caller may replace it",
        "remove the initializer from the graph's inputs",
    ),
    Reason.BATCHED_WEIGHT: ("the weight is a stack of matrices", "split it into one MatMul per matrix"),
    Reason.UNSUPPORTED_DTYPE: ("the operand type is not one that is quantized to int8", "export the model in float32"),
    Reason.VECTOR_OPERAND: ("the weight is a vector, not a matrix", "nothing: a dot product gains nothing"),
    Reason.K_ZERO: ("K is 0: the result is zero", "remove the node"),
    Reason.K_TOO_LONG: ("K is too long for an exact int32 accumulator", "split the product along K"),
    Reason.NOT_TILEABLE: ("no tiling of the design holds this shape", "see `onnxpack plan` for padding and splitting"),
    Reason.OVER_BUDGET: ("the budget of distinct kernels is used up", "raise --budget"),
    Reason.BELOW_ROW_THRESHOLD: ("the call has fewer rows than the NPU is worth", "lower the row threshold"),
    Reason.HOST_IS_FASTER: ("the host is predicted to be faster", "see `onnxpack plan --costs`"),
    Reason.IN_SUBGRAPH: ("the product is inside an If, Loop or Scan body", "move it out of the body"),
    Reason.UNSUPPORTED_OP: ("this operator, or this form of it, is not bound", "export it as MatMul or Gemm"),
    Reason.NON_FINITE_WEIGHT: ("the weight has a NaN or an infinity", "repair the checkpoint"),
    Reason.SCALE_ALONG_K: ("a scale varies along K, inside the sum", "quantize per tensor, per row or per column"),
    Reason.ZERO_POINT_ALONG_K: ("a zero point varies along K, inside the sum", "use one zero point per tensor"),
    Reason.SCALE_NOT_CONSTANT: ("a scale or zero point is computed at run time", "make it an initializer"),
    Reason.SIXTEEN_BIT_ACTIVATION: ("the activation is 16 bit", "quantize activations to 8 bit (A8W8)"),
    Reason.BLOCK_SCALES: ("scales per block of K do not fit an int8 product", "quantize per tensor or per column"),
    Reason.FLOAT8: ("the operand is float8", "quantize to int8"),
    Reason.VENDOR_OPERATOR: ("the operator belongs to a vendor's domain", "export plain ONNX, or plain QDQ"),
    Reason.SHARED_OUTPUT: ("an inner value of the group is used elsewhere", "quantize the other use separately"),
    Reason.PACKED_ELSEWHERE: ("the weight is already in another tool's packed form", "start from the source model"),
    Reason.SWITCHED_OFF: ("an environment switch keeps it off the NPU", "unset the switch (see docs/runtime.md)"),
}
