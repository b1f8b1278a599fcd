"""Find and load the designs: Python files shipped beside the package, whose bytes are part of a cache key.

>>> load("gemm_i8").NAME
'gemm_i8'
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from onnxpack.errors import EnvironmentFault, UsageError

PROGRAM = "design.py"


def folder() -> Path:
    """Where the designs are: `_designs` inside an installed package, `designs` beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "_designs", package.parent / "designs"):
        if place.is_dir():
            return place
    raise EnvironmentFault("the designs are not installed", where=str(package), hint="reinstall onnxpack")


def names() -> list[str]:
    """Every design there is."""
    return sorted(path.parent.name for path in folder().glob(f"*/{PROGRAM}"))


def program(name: str) -> Path:
    """The file of one design; UsageError when there is none of that name."""
    if name not in names():
        raise UsageError(f"unknown design {name!r}", hint=f"known: {', '.join(names())}")
    return folder() / name / PROGRAM


@cache
def load(name: str) -> ModuleType:
    """The design as a module. Only its planning half runs: importing it imports nothing of a toolchain."""
    title = f"onnxpack_design_{name}"
    spec = importlib.util.spec_from_file_location(title, program(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def digest(name: str) -> str:
    """sha256 over the bytes of a design."""
    return hashlib.sha256(program(name).read_bytes()).hexdigest()
