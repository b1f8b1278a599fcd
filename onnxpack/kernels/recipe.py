"""Everything that goes into one kernel, and the key that follows from it. One key, one kernel.

The key covers contents, never places or times: the design's bytes, its parameters, the core kernel's source with every
header that it reads, all flags, and each tool's version and bytes. A tool that changes under the same name changes the
key; a touched file does not.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onnxpack.errors import EnvironmentFault
from onnxpack.kernels import designs
from onnxpack.kernels.digests import Digests, combine
from onnxpack.kernels.process import Runner, tail
from onnxpack.kernels.target import Target
from onnxpack.kernels.toolchain import PEANO_TOOLS, Toolchain
from onnxpack.shapes import Gemm

SCHEME = 1
"""Counts up when what a key covers, or what is stored under it, changes meaning."""

DESIGN = "gemm_i8"
_PREPROCESS_SECONDS = 120.0
_COMPILE_FLAGS = (
    "-std=c++20",
    "-O2",
    "-DNDEBUG",
    "-D__AIE_API_AIE_ADF_HPP__",
    "-Wno-parentheses",
    "-Wno-attributes",
    "-Wno-macro-redefined",
    "-Wno-empty-body",
)


@dataclass(frozen=True)
class Recipe:
    """One kernel to be."""

    gemm: Gemm
    target: Target
    parameters: dict[str, int]
    design_key: str
    """Over shape, target, design and parameters: what does not depend on any tool."""
    key: str
    """Over everything."""
    provenance: dict[str, Any]
    """Versions, digests and command lines, without places."""

    @property
    def design(self) -> Any:
        """The design's module."""
        return designs.load(DESIGN)

    @property
    def tiling(self) -> Any:
        """Its parameters as the design's own type."""
        return self.design.Parameters(**self.parameters)

    @property
    def shape(self) -> Any:
        """Its shape as the design's own type."""
        return self.design.Shape(self.gemm.m, self.gemm.k, self.gemm.n)


@dataclass(frozen=True)
class Draft:
    """The part of a recipe that needs no toolchain."""

    gemm: Gemm
    target: Target
    parameters: dict[str, int]
    design_key: str


def draft(gemm: Gemm, target: Target) -> Draft | str:
    """Tile a shape; the reason as one line when no tiling fits."""
    design = designs.load(DESIGN)
    shape = design.Shape(gemm.m, gemm.k, gemm.n)
    chosen = design.choose(shape, target)
    if chosen is None:
        return str(design.refusal(shape, target))
    parameters = asdict(chosen)
    key = combine([SCHEME, asdict(gemm), target.name, DESIGN, designs.digest(DESIGN), parameters])
    return Draft(gemm, target, parameters, key)


class Inputs:
    """Digests of a toolchain and of the core kernel's sources, each worked out once for all shapes of a run."""

    def __init__(self, chain: Toolchain, digests: Digests, runner: Runner) -> None:
        self.chain = chain
        self.digests = digests
        self.runner = runner
        self._tools: dict[str, Any] | None = None
        self._sources: dict[tuple[str, ...], str] = {}

    def complete(self, drafted: Draft) -> Recipe:
        """The recipe of a draft with this toolchain. EnvironmentFault when a tool cannot be read or run."""
        tools = self.tools()
        flags = compile_flags(drafted.parameters, drafted.target)
        provenance = {
            "design_sha256": designs.digest(DESIGN),
            "design_key": drafted.design_key,
            "kernel_source_sha256": self.sources(flags),
            "kernel_flags": list(flags),
            "aiecc_flags": list(self.chain.flags),
            "tools": tools,
        }
        key = combine([SCHEME, drafted.design_key, provenance])
        return Recipe(drafted.gemm, drafted.target, drafted.parameters, drafted.design_key, key, provenance)

    def tools(self) -> dict[str, Any]:
        """Version and digest of every program and package that takes part."""
        if self._tools is None:
            self._tools = _guard(self._read_tools)
        return self._tools

    def _read_tools(self) -> dict[str, Any]:
        found = {}
        for name in ("aiecc", "aiebu-asm"):
            tool = self.chain.tools[name]
            if tool.usable:
                found[name] = {"version": tool.version, "sha256": self.digests.file(self.chain.path(name))}
        found["peano"] = {
            "version": self.chain.tools["clang++"].version,
            "sha256": self._peano(self.chain.path("clang++")),
        }
        found["aie"] = {"sha256": self._aie()}
        if self.chain.install is not None:  # whatever else aiecc calls or loads
            programs = self.digests.tree(self.chain.install / "bin", ("",))
            found["mlir-aie"] = {"sha256": combine([programs, self.digests.tree(self.chain.install / "lib", (".so",))])}
        return found

    def _peano(self, clang: Path) -> str:
        programs = {name: clang.with_name(name) for name in PEANO_TOOLS}
        parts = {name: self.digests.file(path) for name, path in programs.items() if path.is_file()}
        parts["lib"] = self.digests.tree(clang.parent.parent / "lib", (".a", ".o", ".so"))
        return combine(parts)

    def _aie(self) -> str:
        """The Python package that turns the design into MLIR, with its libraries."""
        if self.chain.aie is not None:
            return self.digests.tree(self.chain.aie, (".py", ".so"))
        code = "import importlib.util as u; print(list(u.find_spec('aie').submodule_search_locations)[0])"
        text = self._ask([str(self.chain.path("python")), "-c", code])
        folder = Path(text.strip().splitlines()[-1]) if text.strip() else Path()
        if not folder.is_dir() or not folder.name:
            raise EnvironmentFault(
                "package aie is not where its interpreter says", where=str(self.chain.path("python"))
            )
        return self.digests.tree(folder, (".py", ".so"))

    def sources(self, flags: tuple[str, ...]) -> str:
        """Digest over the core kernel's source and every header that these flags make it read."""
        if flags not in self._sources:
            self._sources[flags] = _guard(lambda: self._read_sources(flags))
        return self._sources[flags]

    def _read_sources(self, flags: tuple[str, ...]) -> str:
        command = [str(self.chain.path("clang++")), *flags, *include_flags(self.chain), "-M"]
        text = self._ask([*command, str(self.chain.path("mm.cc"))])
        files = parse_dependencies(text)
        if not files:
            raise EnvironmentFault("lists no dependencies of the core kernel", where=str(self.chain.path("clang++")))
        return combine(sorted((path.name, self.digests.file(path)) for path in files))

    def _ask(self, argv: list[str]) -> str:
        with tempfile.TemporaryDirectory(prefix="onnxpack-") as folder:
            log, out = Path(folder, "log"), Path(folder, "out")
            env = environment(self.chain)
            outcome = self.runner.run(argv, log, cwd=Path(folder), timeout=_PREPROCESS_SECONDS, env=env, stdout=out)
            if not outcome.ok:
                last = (tail(log) or ("",))[-1]
                raise EnvironmentFault(f"{outcome.describe()}: {last}", where=argv[0], hint="see `onnxpack doctor`")
            return out.read_text(errors="replace")


def _guard(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError as error:
        raise EnvironmentFault(f"cannot be read: {error.strerror}", where=str(error.filename)) from None


def environment(chain: Toolchain) -> dict[str, str]:
    """The environment that generator and tools run in."""
    env = dict(chain.environment)
    if chain.python_path:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [chain.python_path, env.get("PYTHONPATH", "")]))
    return env


def compile_flags(parameters: dict[str, int], target: Target) -> tuple[str, ...]:
    """Flags that decide what the core kernel becomes; include folders are places and stand apart."""
    design = designs.load(DESIGN)
    defines = design.defines(design.Parameters(**parameters))
    return (f"--target={target.family}-none-unknown-elf", *_COMPILE_FLAGS, *(f"-D{define}" for define in defines))


def include_flags(chain: Toolchain) -> tuple[str, ...]:
    """Where the core kernel's headers are."""
    return (f"-I{chain.include}",) if chain.include is not None else ()


def parse_dependencies(text: str) -> list[Path]:
    """Files of a make rule as compilers write it.

    >>> [str(p) for p in parse_dependencies("mm.o: /a/mm.cc /b\\\\ c/x.h \\\\\\n /d.h\\n")]
    ['/a/mm.cc', '/b c/x.h', '/d.h']
    """
    _, _, rest = text.replace("\\\n", " ").partition(": ")
    return [Path(name.replace("\\ ", " ")) for name in re.findall(r"(?:\\ |\S)+", rest)]
