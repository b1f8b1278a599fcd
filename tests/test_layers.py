"""Imports never reach up: what each room may import, read from the source by ast."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "onnxpack"

GROUND = {"errors", "reasons", "records", "shapes", "threads", "types"}
_GRAPH = GROUND | {"quant", "formats"}
_PACK = _GRAPH | {"graph", "planning", "plan"}
_RUNTIME = _PACK | {"pack", "kernels"}
_VERIFY = _RUNTIME | {"runtime"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "reasons": set(),
    "types": set(),
    "records": {"shapes"},  # in its doctest
    "shapes": {"errors"},
    "threads": {"errors"},
    "quant": GROUND,
    "formats": GROUND | {"quant"},
    "prepack": GROUND | {"quant", "formats"},
    "kernels": GROUND | {"quant"},
    "graph": _GRAPH,
    "census": _GRAPH | {"graph"},
    "planning": _GRAPH | {"graph", "kernels"},
    "plan": {"planning"},
    "pack": _PACK | {"kernels"},
    "pipeline": _PACK | {"pack", "kernels", "census"},
    "runtime": _RUNTIME,
    "verify": _VERIFY,
    "calibrate": _VERIFY | {"api"},
    "api": _VERIFY | {"census", "pipeline", "verify"},
    "cli": _VERIFY | {"census", "pipeline", "verify", "api", "calibrate"},
    "__init__": {"errors", "formats", "kernels", "api"},
    "__main__": {"cli"},
}
"""Room (a package or a module) to the rooms it may know. A room always may know itself; cli may import the package."""

PURE = ("census.py", "plan.py", "planning", "shapes.py", "reasons.py", "graph/views.py", "quant")
TOUCHES_FILES = {"os", "pathlib", "tempfile", "shutil", "io", "mmap", "subprocess", "socket"}

LIGHT = ("__init__.py", "__main__.py", "api.py", "errors.py", "reasons.py", "cli")
HEAVY = {"numpy", "onnx", "onnx_ir", "onnxruntime", "ml_dtypes", "safetensors", "rich", "elftools", "msgspec"}


def modules() -> list[Path]:
    return sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)


def room(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else path.stem


def imports(path: Path, *, everywhere: bool = True) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import; only those outside functions and TYPE_CHECKING unless `everywhere`."""
    pending: list[ast.AST] = [ast.parse((PACKAGE / path).read_text(), str(path))]
    while pending:
        at = pending.pop()
        if not everywhere:
            if isinstance(at, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(at, ast.If) and "TYPE_CHECKING" in ast.dump(at.test):
                pending += at.orelse
                continue
        if isinstance(at, ast.Import):
            yield from ((at.lineno, alias.name) for alias in at.names)
        elif isinstance(at, ast.ImportFrom):
            assert not at.level, f"{path}:{at.lineno}: relative import"
            own = at.module == "onnxpack"
            yield from ((at.lineno, f"onnxpack.{a.name}" if own else str(at.module)) for a in at.names)
        pending += ast.iter_child_nodes(at)


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_never_reach_up(path: Path) -> None:
    own = room(path)
    assert own in MAY_IMPORT, f"{own} is a new room: say in MAY_IMPORT what it may know"
    allowed = MAY_IMPORT[own] | {own}
    if own == "cli":  # commands call the public API
        allowed |= {"build", "census", "load", "plan"}
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        if top == "onnxpack" and rest:
            assert rest.split(".")[0] in allowed, f"{path}:{line} imports {name}"


def test_the_table_has_no_cycle() -> None:
    from graphlib import TopologicalSorter

    list(TopologicalSorter({name: deps - {name, "shapes"} for name, deps in MAY_IMPORT.items()}).static_order())


@pytest.mark.parametrize("path", [p for p in modules() if str(p).startswith(PURE)], ids=str)
def test_pure_rooms_do_not_touch_files(path: Path) -> None:
    for line, name in imports(path):
        assert name.split(".")[0] not in TOUCHES_FILES, f"{path}:{line} imports {name}"


@pytest.mark.parametrize("path", [p for p in modules() if str(p).startswith(LIGHT)], ids=str)
def test_heavy_imports_happen_inside_functions(path: Path) -> None:
    for line, name in imports(path, everywhere=False):
        assert name.split(".")[0] not in HEAVY, f"{path}:{line} imports {name}"
