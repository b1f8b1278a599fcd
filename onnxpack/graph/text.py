"""Strings of a protobuf, which may hold bytes that are no text."""

from __future__ import annotations

from typing import Any

from onnxpack.errors import ModelError


def text_of(value: Any) -> str:
    """The string, or ModelError when it is not UTF-8 (the protobuf library then gives bytes).

    >>> text_of("é")
    'é'
    """
    if isinstance(value, bytes):
        raise ModelError(f"{value[:40]!r} is not UTF-8", hint="file is damaged")
    return str(value)
