"""Frozen dataclasses to JSON and back, with the path of whatever does not fit.

Every record that leaves the process (manifest, plan, kernel record) goes through these functions.

>>> from onnxpack.shapes import Gemm
>>> dumps(Gemm(1, 2, 3))
'{"m": 1, "k": 2, "n": 3}\\n'
>>> loads('{"m": 1, "k": 2, "n": 3}', Gemm)
Gemm(m=1, k=2, n=3)
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class RecordError(ValueError):
    """The data is not JSON, or does not fit the record; the message carries the path (``$.sites[3].k``)."""


def to_dict(record: Any) -> Any:
    """Plain lists, dicts, strings and numbers."""
    return msgspec.to_builtins(record)


def from_dict(data: Any, kind: type[T]) -> T:
    """The record of `kind` that `data` describes. Unknown keys are ignored: keys may be added within a version."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise RecordError(str(error)) from None


def dumps(record: Any, *, indent: int | None = None) -> str:
    """JSON text with a final newline, ASCII only, keys in order of declaration: the same record, the same bytes."""
    return json.dumps(to_dict(record), indent=indent, allow_nan=False) + "\n"


def loads(text: str | bytes, kind: type[T]) -> T:
    """Parse JSON into a record; RecordError when it is not one."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(str(error)) from None


def schema(kind: type[Any]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a record."""
    return msgspec.json.schema(kind)
