"""Everything between "shape (M, K, N) is missing" and "a checked ELF with its record is in the library".

Importing this package imports nothing heavy; each name below is loaded when it is first used.

>>> from onnxpack import kernels
>>> sorted(str(s) for s in kernels.parse_kernels("16x1024x2048,16x1024x1024").shapes)
['16x1024x1024', '16x1024x2048']
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "ElfReport": "elf_report",
    "Kernel": "library",
    "Library": "library",
    "Record": "library",
    "check": "elf_report",
    "ensure": "generate",
    "inspect": "elf_report",
    "parse_kernels": "library",
}
"""Public name to the module of this package that defines it."""

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"onnxpack.kernels.{_WHERE[name]}"), name)
