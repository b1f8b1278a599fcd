"""What a device multiplies with: the int8 codes and column scales of a packed weight, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxpack.errors import PackError
from onnxpack.pack.manifest import FieldRecord, TensorRecord
from onnxpack.pack.read import Pack
from onnxpack.quant.bounds import K_LIMIT_SYMMETRIC
from onnxpack.runtime.made import Arrays, make_operands
from onnxpack.types import F32, I8


@dataclass(frozen=True)
class Operand:
    """codes int8 [K, N] row-major and scales float32 [N].

    When the pack stores exactly these bytes, `codes_at` and `scales_at` say where, so that a session can map the file
    instead of copying; the arrays are then maps of it too.
    """

    codes: I8
    scales: F32
    codes_at: FieldRecord | None = None
    scales_at: FieldRecord | None = None


def is_stored(pack: Pack, weight: str) -> bool:
    """Whether a weight lies in the pack as the codes that are multiplied."""
    return pack.tensors[weight].format == "int8"


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
    if is_stored(pack, weight):
        return _stored(pack, record, where)
    codes, scales = (make_operands(pack, [weight]) if made is None else made())[weight]
    return Operand(codes, scales)


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
