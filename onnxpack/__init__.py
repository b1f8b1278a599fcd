"""onnxpack: plain ONNX to int8 packs for AMD XDNA2 NPUs that run, with the same numbers, on any CPU.

>>> import onnxpack
>>> onnxpack.errors.ModelError.exit_code
3
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxpack import errors, formats, kernels
    from onnxpack.api import build, census, load, plan

    __version__: str

_API = ("build", "census", "load", "plan")
_MODULES = ("errors", "formats", "kernels")

__all__ = ["__version__", "build", "census", "errors", "formats", "kernels", "load", "plan"]


class _Package(ModuleType):
    """Keeps `onnxpack.census` and `onnxpack.plan` functions: importing the modules of those names, as Python does it,
    would put the modules in their place from then on."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _API or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Everything is imported when it is first used: `import onnxpack` costs nothing."""
    if name in _API:
        return getattr(importlib.import_module("onnxpack.api"), name)
    if name in _MODULES:
        return importlib.import_module(f"onnxpack.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("onnxpack")
    raise AttributeError(f"module 'onnxpack' has no attribute {name!r}")
