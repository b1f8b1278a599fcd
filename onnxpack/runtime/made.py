"""Operands that have to be made: weights not stored as int8 [K, N], decoded and quantized once, or shifted, at load.

They go, a band of columns at a time, into a mapped file and not into memory: the device that reads them keeps its own
copy (onnxruntime prepacks), and two would be one too many. The file is temporary and has no name once it is open,
unless the environment variable ONNXPACK_OPERAND_CACHE names a folder to keep it in ("1": the user's cache folder).
A kept file is found again by the pack's content digest and by size and time of the files it was made from, so it is
never stale; it is never needed either.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from onnxpack import formats
from onnxpack.errors import EnvironmentFault, OnnxpackError, PackError, UsageError
from onnxpack.formats.base import Encoded, FieldSpec, Format, Orientation
from onnxpack.pack.container import Layout, create, layout
from onnxpack.pack.manifest import TensorRecord
from onnxpack.pack.read import Pack
from onnxpack.planning.records import OWN_CODES
from onnxpack.quant.int8 import quantize_columns
from onnxpack.quant.qdq import to_signed
from onnxpack.threads import in_threads
from onnxpack.types import F32, Array

CACHE_VARIABLE = "ONNXPACK_OPERAND_CACHE"
_VERSION = "operands-1"  # of what is computed here: part of the key
_BAND = 512  # columns

Arrays = Mapping[str, tuple[Array, Array]]
"""codes int8 [K, N] and scales float32 [N], by weight."""


def make_operands(pack: Pack, weights: list[str]) -> Arrays:
    """Operands of the named weights, mapped read-only. PackError for a format that cannot be decoded."""
    if not weights:
        return {}
    chosen = {name: pack.tensors[name] for name in weights}
    plan = _layout(chosen)
    kept = _kept_file(pack, chosen)
    if kept is not None:
        found = _open(kept, plan, chosen)
        if found is not None:
            return found
        with suppress(OSError, EnvironmentFault):  # a cache that cannot be written is no cache
            kept.parent.mkdir(parents=True, exist_ok=True)
            _fill(pack, chosen, plan, kept)
            found = _open(kept, plan, chosen)
            if found is not None:
                return found
    with tempfile.TemporaryDirectory(prefix="onnxpack-operands-") as folder:
        file = Path(folder) / "operands"
        _fill(pack, chosen, plan, file)
        made = _open(file, plan, chosen)
    if made is None:
        raise EnvironmentFault("the operands that were just written cannot be read", where=tempfile.gettempdir())
    return made


def _layout(chosen: Mapping[str, TensorRecord]) -> Layout:
    entries = {}
    for index, record in enumerate(chosen.values()):
        entries[f"{index}.codes"] = FieldSpec(np.dtype(np.int8), tuple(record.shape))
        entries[f"{index}.scales"] = FieldSpec(np.dtype(np.float32), tuple(record.shape[1:]))
    return layout(entries)


def _kept_file(pack: Pack, chosen: Mapping[str, TensorRecord]) -> Path | None:
    wanted = os.environ.get(CACHE_VARIABLE, "")
    if not wanted or wanted == "0":
        return None
    if wanted == "1":
        import platformdirs

        folder = platformdirs.user_cache_path("onnxpack") / "operands"
    else:
        folder = Path(wanted)
    state = hashlib.sha256(f"{_VERSION}\0{pack.manifest.content_digest}".encode())
    for record in chosen.values():
        state.update(repr((record.name, record.shape, record.format, sorted(record.params.items()))).encode())
        for stored in record.fields.values():
            seen = (pack.path / stored.file).stat()
            state.update(f"{stored.file}\0{stored.offset}\0{seen.st_size}\0{seen.st_mtime_ns}\0".encode())
    return folder / f"{state.hexdigest()}.safetensors"


def _open(file: Path, plan: Layout, chosen: Mapping[str, TensorRecord]) -> Arrays | None:
    """Map a file of this layout; None when it is not there, or not one."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(plan.header)) != plan.header or os.fstat(opened.fileno()).st_size != plan.nbytes:
                return None
            data = np.memmap(opened, np.uint8, "r")
    except (OSError, ValueError):
        return None

    def field(name: str) -> Array:
        place = plan.places[name]
        raw = data[place.offset : place.offset + place.nbytes]
        return raw.view(place.spec.dtype).reshape(place.spec.shape)

    return {name: (field(f"{i}.codes"), field(f"{i}.scales")) for i, name in enumerate(chosen)}


def _fill(pack: Pack, chosen: Mapping[str, TensorRecord], plan: Layout, file: Path) -> None:
    with create(file, plan) as out:
        tasks = [
            partial(_make, pack, record, out[f"{index}.codes"], out[f"{index}.scales"])
            for index, record in enumerate(chosen.values())
        ]
        in_threads(tasks, [int(np.prod(record.shape)) for record in chosen.values()])
        tasks.clear()


def _make(pack: Pack, record: TensorRecord, codes: Array, scales: Array) -> None:
    """Decode a band of columns, quantize it, next band: columns do not depend on each other."""
    where = f"{pack.path}: tensor {record.name}"
    if record.format == OWN_CODES:
        _shift(pack, record, codes, scales)
        return
    form = _format(record, where)
    transposed = form.orientation is Orientation.NK
    shape = tuple(record.shape[::-1] if transposed else record.shape)
    n = record.shape[1]
    try:
        encoded = Encoded(record.format, shape, _fields(pack, form, shape, record), record.params)
        for start in range(0, n, _BAND):
            stop = min(n, start + _BAND)
            band: F32 = form.decode_columns(encoded, start, stop)
            if band.shape != (record.shape[0], stop - start):
                raise PackError(f"decodes to {list(band.shape)} for columns {start} to {stop}")
            quantize_columns(band, codes[:, start:stop], scales[start:stop])
    except OnnxpackError as error:  # whatever a format finds wrong with its bytes, it is the pack that is damaged
        raise PackError(error.what, where=where, hint="build the pack again") from None


def _fields(pack: Pack, form: Format, shape: tuple[int, ...], record: TensorRecord) -> Mapping[str, Array]:
    """The stored tensors, when they are of exactly the types and sizes that the format computes for this shape."""
    wanted = {name: (spec.dtype.name, spec.shape) for name, spec in form.fields(shape).items()}
    held = {name: (stored.dtype, tuple(stored.shape)) for name, stored in record.fields.items()}
    if held != wanted:
        odd = next(name for name in (*wanted, *held) if held.get(name) != wanted.get(name))
        raise PackError(f"field {odd} of format {form.name} is {held.get(odd)}, it has to be {wanted.get(odd)}")
    return {name: pack.field(stored) for name, stored in record.fields.items()}


def _shift(pack: Pack, record: TensorRecord, codes: Array, scales: Array) -> None:
    """Codes that the graph brought, as int8 [K, N]; they are never quantized again."""
    fields = {name: pack.field(record.fields[name]) for name in ("codes", "scales") if name in record.fields}
    stored, own_scales = fields.get("codes", np.empty(0)), fields.get("scales", np.empty(0)).reshape(-1)
    stored = stored.T if record.params.get("transposed") else stored
    if (
        stored.dtype not in (np.int8, np.uint8)
        or stored.shape != codes.shape
        or own_scales.size not in (1, scales.size)
    ):
        raise PackError("its fields are not those of codes", where=f"{pack.path}: tensor {record.name}")
    for start in range(0, codes.shape[1], _BAND):
        codes[:, start : start + _BAND] = to_signed(stored[:, start : start + _BAND])
    scales[...] = own_scales


def _format(record: TensorRecord, where: str) -> Format:
    try:
        return formats.get(record.format, **record.params)
    except UsageError as error:
        raise PackError(error.what, where=where, hint="update onnxpack") from None
