"""What a device multiplies with: the int8 codes and column scales of a packed weight, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxpack import formats
from onnxpack.errors import PackError, UsageError
from onnxpack.pack.manifest import FieldRecord, TensorRecord
from onnxpack.pack.read import Pack
from onnxpack.quant.bounds import K_LIMIT_SYMMETRIC
from onnxpack.quant.int8 import F32, I8, quantize_columns


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


def operand(pack: Pack, weight: str) -> Operand:
    """The operand of the packed weight called `weight`.

    int8 is taken as it is stored. Any other format is decoded and quantized per column, which costs K*N int8 of memory
    and one float32 copy while it runs. PackError for an unknown weight or format, and for shapes that do not fit.
    """
    try:
        record = pack.tensors[weight]
    except KeyError:
        raise PackError(f"the pack has no weight {weight!r}", where=str(pack.path)) from None
    where = f"{pack.path}: tensor {weight}"
    if len(record.shape) != 2 or not 0 < record.shape[0] <= K_LIMIT_SYMMETRIC:
        raise PackError(f"shape {list(record.shape)} is not [K, N] with 0 < K <= {K_LIMIT_SYMMETRIC}", where=where)
    return _stored(pack, record, where) if record.format == "int8" else _decoded(pack, record, where)


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


def _decoded(pack: Pack, record: TensorRecord, where: str) -> Operand:
    try:
        form = formats.get(record.format, **record.params)
    except UsageError as error:
        raise PackError(error.what, where=where, hint="update onnxpack") from None
    transposed = form.orientation is formats.Orientation.NK
    shape = record.shape[::-1] if transposed else record.shape
    fields = {name: pack.field(stored) for name, stored in record.fields.items()}
    w: npt.NDArray[np.float32] = form.decode(formats.Encoded(record.format, tuple(shape), fields, record.params))
    w = w.T if transposed else w
    if w.shape != tuple(record.shape):
        raise PackError(f"decodes to {list(w.shape)}, not {list(record.shape)}", where=where)
    codes, scales = np.empty(w.shape, np.int8), np.empty(w.shape[1], np.float32)
    quantize_columns(w, codes, scales)
    return Operand(codes, scales)
