"""What a device multiplies with: the int8 codes and column scales of a packed weight, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onnxpack.errors import PackError
from onnxpack.pack.manifest import FieldRecord, TensorRecord
from onnxpack.pack.read import Pack
from onnxpack.planning.records import OWN_CODES
from onnxpack.quant.bounds import K_LIMIT_SYMMETRIC
from onnxpack.quant.qdq import I64, column_sums, signed_zero_points
from onnxpack.runtime.made import Arrays, make_operands
from onnxpack.types import F32, I8, Array


@dataclass(frozen=True)
class Operand:
    """codes int8 [K, N] row-major, scales float32 [N] and, for codes that the graph brought, zero points [] or [N].

    When the pack stores exactly these bytes, `codes_at` and `scales_at` say where, so that a session can map the file
    instead of copying; the arrays are then maps of it too. The codes of one scale for all columns have scales of [].
    """

    codes: I8
    scales: F32
    codes_at: FieldRecord | None = None
    scales_at: FieldRecord | None = None
    zero_points: I64 | None = None
    """Where any of them is not 0; shifted like the codes."""

    def columns(self, chosen: slice) -> Operand:
        """The operand of some columns."""
        scales = self.scales[chosen] if self.scales.ndim else self.scales
        points = self.zero_points
        return Operand(
            self.codes[:, chosen], scales, zero_points=points[chosen] if points is not None and points.ndim else points
        )

    def decoded(self) -> F32:
        """The weight that it stands for, float32 [K, N]: (code - zero point) * scale, as DequantizeLinear has it."""
        zero = 0 if self.zero_points is None else self.zero_points.astype(np.float32)
        return np.asarray((self.codes.astype(np.float32) - zero) * self.scales, np.float32)

    @cached_property
    def column_sums(self) -> I64:
        """Sum of the codes of each column, int64 [N]: made when it is first needed, and kept."""
        return column_sums(self.codes)


def is_stored(pack: Pack, weight: str) -> bool:
    """Whether a weight lies in the pack as the codes that are multiplied: int8 [K, N]."""
    record = pack.tensors[weight]
    if record.format == OWN_CODES:
        codes = record.fields.get("codes")
        return codes is not None and codes.dtype == "int8" and not record.params.get("transposed")
    return record.format == "int8"


def operand(pack: Pack, weight: str, made: Callable[[], Arrays] | None = None) -> Operand:
    """The operand of the packed weight called `weight`.

    int8 is taken as it is stored. Any other format is decoded and quantized per column, by `made` where it is given
    (all of a pack at once). PackError for an unknown weight or format, and for shapes that do not fit.
    """
    try:
        record = pack.tensors[weight]
    except KeyError:
        raise PackError(f"the pack has no weight {weight!r}", where=str(pack.path)) from None
    where = f"{pack.path}: tensor {weight}"
    if len(record.shape) != 2 or not 0 < record.shape[0] <= K_LIMIT_SYMMETRIC:
        raise PackError(f"shape {list(record.shape)} is not [K, N] with 0 < K <= {K_LIMIT_SYMMETRIC}", where=where)
    if record.format == OWN_CODES:
        return _own(pack, record, where, made)
    if is_stored(pack, weight):
        return _stored(pack, record, where)
    codes, scales = (make_operands(pack, [weight]) if made is None else made())[weight]
    return Operand(codes, scales)


def _own(pack: Pack, record: TensorRecord, where: str, made: Callable[[], Arrays] | None) -> Operand:
    """Codes of the graph itself: mapped where they are int8 [K, N], shifted or transposed once where they are not."""
    found = record.fields.get("codes")
    dtype = "uint8" if found is not None and found.dtype == "uint8" else "int8"
    shape = record.shape[::-1] if record.params.get("transposed") else record.shape
    codes_at = _field(record, "codes", dtype, shape, where)
    scales, scales_at = _numbers(pack, record, "scales", "float32", where)
    zero_points: Array = np.zeros((), np.int64)
    if "zero_points" in record.fields:
        zero_points, _ = _numbers(pack, record, "zero_points", dtype, where)
    zero_points = signed_zero_points(zero_points, dtype)
    kept = zero_points if zero_points.any() else None
    if is_stored(pack, record.name):
        return Operand(pack.field(codes_at), scales, codes_at, scales_at, kept)
    codes, _ = (make_operands(pack, [record.name]) if made is None else made())[record.name]
    return Operand(codes, scales, None, scales_at, kept)


def _numbers(pack: Pack, record: TensorRecord, name: str, dtype: str, where: str) -> tuple[Array, FieldRecord | None]:
    """A field that is one number, as [], or one a column, as [N] with its place in the pack."""
    found = record.fields.get(name)
    single = found is not None and tuple(found.shape) in ((), (1,))
    shape = tuple(found.shape) if single and found is not None else record.shape[1:]
    at = _field(record, name, dtype, shape, where)
    values = pack.field(at)
    return (values.reshape(()), None) if single else (values, at)


def _stored(pack: Pack, record: TensorRecord, where: str) -> Operand:
    codes = _field(record, "codes", "int8", record.shape, where)
    scales = _field(record, "scales", "float32", record.shape[1:], where)
    return Operand(pack.field(codes), pack.field(scales), codes, scales)


def _field(record: TensorRecord, name: str, dtype: str, shape: tuple[int, ...], where: str) -> FieldRecord:
    found = record.fields.get(name)
    if found is None or found.dtype != dtype or tuple(found.shape) != tuple(shape):
        have = "missing" if found is None else f"{found.dtype}{list(found.shape)}"
        raise PackError(f"field {name} is {have}, not {dtype}{list(shape)}", where=where, hint="build the pack again")
    return found
