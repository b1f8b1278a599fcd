"""Profiles and structure types as JSON and back: one reader for all frozen dataclasses, errors with the path.

>>> from onnxpack.formats.profiles import QuantizationProfile
>>> text = '{"linear": {"storage_type": "INT8", "bits": 8, "axes": 0}}'
>>> from_json(text, QuantizationProfile)
Traceback (most recent call last):
...
onnxpack.formats.layout.ProfileError: linear.axes: unknown field (known: storage_type, bits, symmetric, scale_float, \
scale_int, zero_point, axis, scale, zero, minimum, quant_min, quant_max, rounding, codes)
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from enum import Enum, IntEnum
from typing import Any, TypeVar

from onnxpack.formats.layout import ProfileError

T = TypeVar("T")

_DEPTH = 64


def to_data(value: Any) -> Any:
    """Plain lists, dicts, strings and numbers; fields that have their default are left out, types go by name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: to_data(v) for f, v in fields if not _is_default(f, v)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple):
        return [to_data(v) for v in value]
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text with a final newline: the same profile, the same bytes."""
    return json.dumps(to_data(value), indent=indent, allow_nan=False) + "\n"


def from_json(text: str | bytes, kind: type[T]) -> T:
    """The record that the text describes. ProfileError with the path of whatever does not fit."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError("$", f"not JSON: {error}") from None
    return from_data(data, kind)


def from_data(data: Any, kind: type[T]) -> T:
    """The record of `kind` that plain data describes: unknown, missing and inconsistent fields are refused."""
    value: T = _read(data, kind, "", 0)
    return value


def _is_default(f: dataclasses.Field[Any], value: Any) -> bool:
    return f.default is not dataclasses.MISSING and bool(f.default == value) and type(f.default) is type(value)


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _read(data: Any, kind: Any, path: str, depth: int) -> Any:
    if depth > _DEPTH:
        raise ProfileError(path, f"nested deeper than {_DEPTH}")
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(data, typing.get_args(kind), path, depth)
    if origin is tuple:
        return _read_tuple(data, typing.get_args(kind), path, depth)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _read_record(data, kind, path, depth)
    return _read_scalar(data, kind, path)


def _read_union(data: Any, options: tuple[Any, ...], path: str, depth: int) -> Any:
    if data is None and type(None) in options:
        return None
    options = tuple(o for o in options if o is not type(None))
    if len(options) == 1:
        return _read(data, options[0], path, depth)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(data, dict):
            names = {f.name for f in dataclasses.fields(option)}
            required = {f.name for f in dataclasses.fields(option) if f.default is dataclasses.MISSING}
            if required <= set(data) <= names:
                return _read(data, option, path, depth)
        elif not dataclasses.is_dataclass(option) and isinstance(data, option):
            return data
    names_of = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise ProfileError(path or "$", f"fits none of {names_of}")


def _read_tuple(data: Any, args: tuple[Any, ...], path: str, depth: int) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise ProfileError(path or "$", f"a list, not {_name(data)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_read(x, args[0], f"{path}[{i}]", depth + 1) for i, x in enumerate(data))
    if len(data) != len(args):
        raise ProfileError(path or "$", f"{len(args)} elements, not {len(data)}")
    return tuple(_read(x, a, f"{path}[{i}]", depth + 1) for i, (x, a) in enumerate(zip(data, args, strict=True)))


def _read_record(data: Any, kind: type[Any], path: str, depth: int) -> Any:
    if not isinstance(data, dict):
        raise ProfileError(path or "$", f"an object, not {_name(data)}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    prefix = f"{path}." if path else ""
    for key in data:
        if key not in fields:
            raise ProfileError(f"{prefix}{key}", f"unknown field (known: {', '.join(fields)})")
    for name, f in fields.items():
        if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ProfileError(f"{prefix}{name}", "missing")
    hints = _hints(kind)
    values = {key: _read(value, hints[key], f"{prefix}{key}", depth + 1) for key, value in data.items()}
    try:
        return kind(**values)
    except ProfileError as error:
        raise ProfileError(f"{prefix}{error.path}", error.what) from None


def _read_scalar(data: Any, kind: Any, path: str) -> Any:
    where = path or "$"
    if isinstance(kind, type) and issubclass(kind, Enum):
        if isinstance(data, str) and data in kind.__members__:
            return kind[data]
        if issubclass(kind, IntEnum) and type(data) is int and data in [m.value for m in kind]:
            return kind(data)
        raise ProfileError(where, f"{data!r} is not one of {', '.join(kind.__members__)}"[:300])
    if kind is float and type(data) in (int, float):
        try:
            number = float(data)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ProfileError(where, "not a finite number")
        # A whole number stays what it was, so that zero_point 0 and 0.0 write themselves back unchanged.
        return data if type(data) is int else number
    if type(data) is not kind:
        raise ProfileError(where, f"{getattr(kind, '__name__', kind)}, not {_name(data)}")
    return data


def _name(data: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(data), "a number")
