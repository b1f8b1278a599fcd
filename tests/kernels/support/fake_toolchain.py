"""A stand-in for the toolchain: programs that take the flags of a generation of mlir-aie and write structurally whole
ELFs. They never make anything that a device could run.

`FakeToolchain(folder, generation)` writes them below `folder`; `.environment()` makes them found; `.set(...)` changes
how they behave without changing their bytes; `.edit(...)` changes their bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from fake_flags import CLASSIC, DECLARATIVE, EARLY, TRANSITIONAL

__all__ = ["CLASSIC", "DECLARATIVE", "EARLY", "TRANSITIONAL", "FakeToolchain"]

SUPPORT = Path(__file__).resolve().parent

_SCRIPT = """#!{python} -SE
import sys
sys.path.insert(0, {support!r})
import fake_programs
sys.exit(fake_programs.{program}({folder!r}, sys.argv[1:]))
# version 1
"""

MM_CC = """// int8 matrix product for tests
#include <aie_api/aie.hpp>
#include "zero.cc"
"""


class FakeToolchain:
    """Install folder of mlir-aie, Peano and an assembler."""

    def __init__(self, folder: Path, generation: str = DECLARATIVE) -> None:
        self.folder = folder
        self.install = folder / "mlir_aie"
        self.peano = folder / "llvm-aie"
        self.xrt = folder / "xrt"
        kernels = self.install / "include" / "aie_kernels" / "aie2p"
        headers = self.install / "include" / "aie_api"
        libraries = self.install / "lib"
        for place in (
            libraries,
            self.install / "bin",
            self.peano / "bin",
            self.peano / "lib",
            self.xrt / "bin",
            kernels,
            headers,
        ):
            place.mkdir(parents=True)
        (kernels / "mm.cc").write_text(MM_CC)
        (kernels / "zero.cc").write_text("// zero\n")
        (headers / "aie.hpp").write_text("// vectors\n")
        (self.peano / "lib" / "libc.a").write_bytes(b"!<arch>\n")
        (libraries / "libAIE.so.21").write_text("")
        (self.install / "bin" / "aie-opt").write_text("")
        shutil.copytree(SUPPORT / "fake_aie" / "aie", self.install / "python" / "aie")
        self.aiecc = self._program(self.install / "bin" / "aiecc", "aiecc")
        self.clang = self._program(self.peano / "bin" / "clang++", "clang")
        self._program(self.peano / "bin" / "opt", "clang")
        self.asm = self._program(self.xrt / "bin" / "aiebu-asm", "asm")
        self.settings: dict[str, Any] = {}
        self.set(generation=generation)

    def _program(self, path: Path, program: str) -> Path:
        text = _SCRIPT.format(python=sys.executable, support=str(SUPPORT), program=program, folder=str(self.folder))
        path.write_text(text)
        path.chmod(0o755)
        return path

    def set(self, **settings: Any) -> None:
        """Change behaviour: see `fake_programs`."""
        self.settings |= settings
        (self.folder / "settings.json").write_text(json.dumps(self.settings))

    def edit(self, path: Path) -> None:
        """Another version of a file: one more line."""
        path.write_text(path.read_text() + "# changed\n")

    def environment(self) -> dict[str, str]:
        """Variables that make it found, and nothing else."""
        return {
            "MLIR_AIE_INSTALL_DIR": str(self.install),
            "PEANO_INSTALL_DIR": str(self.peano),
            "XILINX_XRT": str(self.xrt),
            "PATH": os.environ.get("PATH", os.defpath),
        }

    def calls(self, program: str = "aiecc") -> list[str]:
        """One line for each compile (not for questions like --help)."""
        log = self.folder / "calls.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.startswith(program)]
