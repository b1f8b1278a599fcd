"""int8 codes with one float32 scale per output column: the operand of every kernel, and a storage format too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from onnxpack.errors import UsageError
from onnxpack.formats.base import F32, Array, Decoder, Encoded, ErrorSums, FieldSpec, Format, Orientation
from onnxpack.quant import int8


class Int8(Format):
    """codes int8 [K, N], scales float32 [N]; decoded by DequantizeLinear(axis=1), or Cast and Mul below opset 13.

    >>> f = Int8()
    >>> e = f.encode(np.array([[1, 100], [2, 200]], np.float32))
    >>> e.nbytes, e.fields["codes"].tolist(), f.decode(e)[1].tolist()
    (12, [[64, 64], [127, 127]], [2.0, 200.0])
    """

    name = "int8"
    row = "INT8 per-channel"
    family = "linear"
    orientation = Orientation.KN
    min_opset: ClassVar[int] = 7
    takes_any_float: ClassVar[bool] = True

    def fields(self, shape: tuple[int, ...]) -> dict[str, FieldSpec]:
        if len(shape) != 2:
            raise UsageError(f"format int8 takes a matrix [K, N], not shape {list(shape)}")
        k, n = shape
        return {
            "codes": FieldSpec(np.dtype(np.int8), (k, n)),
            "scales": FieldSpec(np.dtype(np.float32), (n,)),
        }

    def encode_into(self, w: Array, out: Mapping[str, Array]) -> ErrorSums:
        error = int8.quantize_columns(w, out["codes"], out["scales"])
        return ErrorSums(float(error.residual.sum()), float(error.energy.sum()))

    def decode(self, encoded: Encoded) -> F32:
        return int8.dequantize_columns(encoded.fields["codes"], encoded.fields["scales"])

    def decoder(self, shape: tuple[int, ...], opset: int) -> Decoder:
        from onnx import TensorProto, helper

        def node(op: str, inputs: list[str], output: str, **attributes: Any) -> Any:
            return helper.make_node(op, inputs, [output], **attributes)

        if opset >= 13:
            return Decoder((node("DequantizeLinear", ["codes", "scales"], "weight", axis=1),), "weight")
        cast = node("Cast", ["codes"], "float", to=TensorProto.FLOAT)
        return Decoder((cast, node("Mul", ["float", "scales"], "weight")), "weight")
