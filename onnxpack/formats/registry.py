"""The one table of formats. Adding a format is one entry (and one module)."""

from __future__ import annotations

import importlib
from typing import Any

from onnxpack.errors import UsageError
from onnxpack.formats.base import Format

_TABLE: dict[str, str] = {
    "int8": "onnxpack.formats.int8:Int8",
}
"""Name to "module:class"; a module is imported when its format is first asked for."""


def names() -> list[str]:
    """All formats, sorted."""
    return sorted(_TABLE)


def get(name: str, **params: Any) -> Format:
    """The format called `name`, with its parameters. UsageError for an unknown name or parameter."""
    try:
        module, cls = _TABLE[name].split(":")
    except KeyError:
        raise UsageError(f"no format is called {name!r}", hint="`onnxpack formats` lists them") from None
    try:
        made = getattr(importlib.import_module(module), cls)(**params)
    except TypeError as error:
        raise UsageError(f"format {name}: {error}") from None
    assert isinstance(made, Format)
    return made
