"""Compile one kernel: design to MLIR, core kernel to an object, both to a full ELF, and then do not believe it.

Everything happens in a private folder; the paths of no two builds ever meet. Every tool's output goes into one log. An
exit code of 0 proves nothing: the file must be there, be a whole full ELF, and move as many buffers as the design does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from onnxpack import records
from onnxpack.errors import KernelError
from onnxpack.kernels import canary, designs
from onnxpack.kernels.elf import CORE
from onnxpack.kernels.elf_report import check, inspect
from onnxpack.kernels.library import SCHEMA, Record
from onnxpack.kernels.process import Runner, tail
from onnxpack.kernels.recipe import DESIGN, Recipe, compile_flags, environment, include_flags
from onnxpack.kernels.toolchain import Toolchain

ELF, RECORD, LOG, MLIR = "kernel.elf", "kernel.json", "build.log", "design.mlir"
TIMEOUT_SECONDS = 1800.0
LICENCE = "Apache-2.0 WITH LLVM-exception"
"""Of the core kernel and of the libraries that are linked into the cores; the design itself is Apache-2.0."""


class CompileError(Exception):
    """A step failed: the message is one line, the log holds the rest."""


def compile_kernel(recipe: Recipe, chain: Toolchain, work: Path, runner: Runner, timeout: float) -> Record:
    """Make kernel.elf, kernel.json and build.log in `work`, an empty private folder.

    CompileError says which step failed and how. Cancelled when the runner was called off.
    """
    build = _Build(recipe, chain, work, runner, timeout)
    text = build.mlir()
    build.core_object()
    build.full_elf()
    if _sha256(work / MLIR) != text:
        raise CompileError("the design's text changed while it was being compiled")
    record = build.record(text)
    (work / RECORD).write_text(records.dumps(record, indent=2))
    return record


class _Build:
    def __init__(self, recipe: Recipe, chain: Toolchain, work: Path, runner: Runner, timeout: float) -> None:
        self.recipe = recipe
        self.chain = chain
        self.work = work
        self.runner = runner
        self.timeout = timeout
        self.object_name = recipe.design.object_name(recipe.tiling)

    def mlir(self) -> str:
        """Run the design program; returns the digest of its text."""
        gemm = self.recipe.gemm
        wanted = {"M": gemm.m, "K": gemm.k, "N": gemm.n, "device": self.recipe.target.device} | self.recipe.parameters
        argv = [str(self.chain.path("python")), str(designs.program(DESIGN)), json.dumps(wanted)]
        self._run("the design program", argv, stdout=self.work / MLIR)
        text = (self.work / MLIR).read_text(errors="replace")
        if "load_pdi" not in text or "aie.core" not in text:
            raise CompileError("the design program printed no design (no cores, or no load_pdi)")
        return _sha256(self.work / MLIR)

    def core_object(self) -> None:
        """Compile the core kernel."""
        flags = compile_flags(self.recipe.parameters, self.recipe.target)
        source = str(self.chain.path("mm.cc"))
        argv = [str(self.chain.path("clang++")), *flags, *include_flags(self.chain)]
        self._run("the core kernel's compiler", [*argv, "-c", source, "-o", self.object_name])
        report = inspect(self._output(self.object_name))
        if report.facts.get("machine") != CORE:
            raise CompileError(f"the core kernel's compiler made no object for the cores: {report.what}")

    def full_elf(self) -> None:
        """Run aiecc."""
        places = {
            "elf": str(self.work / ELF),
            "peano": str(self.chain.path("clang++").parent.parent),
            "tmp": str(self.work / "aiecc.tmp"),
        }
        (self.work / "aiecc.tmp").mkdir()
        flags = [flag.format(**places) for flag in self.chain.flags]
        self._run("aiecc", [str(self.chain.path("aiecc")), *flags, MLIR])
        self._output(ELF)

    def record(self, text: str) -> Record:
        """Check the ELF and write down what it is."""
        recipe = self.recipe
        path = self.work / ELF
        descriptors = recipe.design.descriptors(recipe.shape, recipe.tiling)
        try:
            report = check(path, recipe.gemm, target=recipe.target)
        except KernelError as error:
            raise CompileError(f"aiecc wrote {ELF}, but {error.what}") from None
        record = Record(
            SCHEMA,
            recipe.key,
            *(recipe.gemm.m, recipe.gemm.k, recipe.gemm.n),
            report.sha256,
            report.nbytes,
            recipe.target.name,
            DESIGN,
            report.kernels[0],
            {**recipe.parameters, "descriptors": descriptors},
            {**recipe.provenance, "mlir_sha256": text},
            LICENCE,
            canary.make(recipe.gemm),
        )
        try:
            check(path, recipe.gemm, record, recipe.target)
        except KernelError as error:
            raise CompileError(f"aiecc wrote {ELF}, but {error.what}") from None
        return record

    def _run(self, who: str, argv: Sequence[str], stdout: Path | None = None) -> None:
        log = self.work / LOG
        outcome = self.runner.run(
            argv, log, cwd=self.work, timeout=self.timeout, env=environment(self.chain), stdout=stdout
        )
        if outcome.timed_out:
            raise CompileError(f"{who} ran into its time limit of {self.timeout:g} s")
        if not outcome.ok:
            last = next((line for line in reversed(tail(log)) if "error" in line.lower()), "")
            raise CompileError(f"{who} {outcome.describe()}" + (f": {last.strip()}" if last else ""))

    def _output(self, name: str) -> Path:
        path = self.work / name
        if not path.is_file() or not path.stat().st_size:
            what = "is empty" if path.exists() else "was not written"
            raise CompileError(
                f"the tool exited with 0 but {name} {what}: it may have ignored a flag that it does not know"
            )
        return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
