"""Helpers of this room: the ELF writer and the stand-in toolchain live in `support` and are plain modules."""

from __future__ import annotations

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parent / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)

import pytest  # noqa: E402
from fake_toolchain import FakeToolchain  # noqa: E402

from onnxpack.kernels import toolchain  # noqa: E402

_VARIABLES = ("MLIR_AIE_INSTALL_DIR", "PEANO_INSTALL_DIR", "XILINX_XRT")


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own tools and cache, if it has any, play no part."""
    monkeypatch.setattr(toolchain, "_site_folders", list)
    monkeypatch.setattr(toolchain, "_has_aie", lambda: False)
    monkeypatch.setattr(toolchain, "XRT_FOLDER", tmp_path / "no-xrt")
    monkeypatch.setenv("ONNXPACK_CACHE", str(tmp_path / "cache"))
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_tools(nothing_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No toolchain, and no program on PATH that could be taken for one."""
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def tools(nothing_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolchain:
    """A stand-in toolchain that is found, and no other."""
    made = FakeToolchain(tmp_path / "tools")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made
