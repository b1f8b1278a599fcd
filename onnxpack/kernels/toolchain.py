"""Find mlir-aie, Peano and XRT's assembler, and learn how this generation of them wants to be called.

Each tool has one environment variable of ours that overrides everything, then the variables that the tools' own set-up
scripts define, then installed packages, then PATH. Nothing is cached between processes except file digests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnxpack.kernels.process import Runner

PROBE_SECONDS = 60.0
KERNEL_FOLDER = "aie_kernels"
PEANO_TOOLS = ("clang++", "opt", "llc", "ld.lld")
XRT_FOLDER = Path("/opt/xilinx/xrt")
"""Where XRT's packages install to."""

CLASSIC, DECLARATIVE = "classic", "declarative"
_REMOVED_FLAGS = ("--no-xchesscc", "--no-xbridge", "--no-compile-host")
_USEFUL_FLAGS = ("--unified", "--dynamic-objFifos")


@dataclass(frozen=True)
class Tool:
    """One program, or file, that a build needs."""

    name: str
    path: Path | None
    origin: str
    """What it was found through; "" when it was not."""
    needed_for: str
    remedy: str
    """The next step for whoever misses it."""
    version: str = ""
    required: bool = True
    problem: str | None = None
    """Why it cannot be used although it was found."""

    @property
    def usable(self) -> bool:
        """Found, and nothing against it."""
        return self.path is not None and self.problem is None


@dataclass(frozen=True)
class Toolchain:
    """What was found. `flags` are aiecc's for a full ELF; `{elf}`, `{peano}` and `{tmp}` stand for paths."""

    tools: dict[str, Tool]
    generation: str | None
    flags: tuple[str, ...]
    install: Path | None
    """Root of mlir-aie's installation, where it is known."""
    python_path: str = ""
    """What the generator's interpreter needs on PYTHONPATH."""
    aie: Path | None = None
    """Folder of package aie, where it is known without asking that interpreter."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def include(self) -> Path | None:
        """Folder of headers of mlir-aie."""
        return self.install / "include" if self.install is not None else None

    @property
    def missing(self) -> list[Tool]:
        """Tools without which nothing can be built."""
        return [tool for tool in self.tools.values() if tool.required and not tool.usable]

    @property
    def complete(self) -> bool:
        """Whether a kernel can be built."""
        return not self.missing

    def path(self, name: str) -> Path:
        """Path of a tool that was found."""
        found = self.tools[name].path
        assert found is not None
        return found


MLIR_AIE = "install mlir-aie's wheel (from its releases) into this environment, or set MLIR_AIE_INSTALL_DIR"
PEANO = "install Peano's wheel, llvm-aie (from its releases), or set PEANO_INSTALL_DIR"
XRT = "install XRT with the amdxdna plugin, or build aiebu, and put aiebu-asm on PATH or set XILINX_XRT"


def find(environment: Mapping[str, str] | None = None, family: str = "aie2p") -> Toolchain:
    """Look for everything, probe versions and flags. Never raises for what is missing: the result says so."""
    env = dict(os.environ if environment is None else environment)
    install = _install_folder(env)
    aiecc = _tool(
        "aiecc",
        "lowers the design and assembles the ELF",
        MLIR_AIE,
        *_aiecc_places(env, install),
        env_name="ONNXPACK_AIECC",
        env=env,
    )
    peano_root, peano_origin = _peano_folder(env)
    clang = _tool(
        "clang++",
        "compiles the core kernel and the cores",
        PEANO,
        (peano_root / "bin" / "clang++" if peano_root else None, peano_origin),
    )
    include = install / "include" if install is not None else None
    source = _kernel_source(env, include, family)
    python = _python(env, install, aiecc.path)
    asm = _tool("aiebu-asm", "assembles the full ELF", XRT, *_xrt_places(env), env_name="ONNXPACK_AIEBU_ASM", env=env)
    with ThreadPoolExecutor() as pool:  # the tools take their time to say who they are
        asked = pool.submit(_help, aiecc, env)
        aiecc, clang, asm = pool.map(lambda tool: _probed(tool, env), (aiecc, clang, asm))
        help_text, problem = asked.result()
    generation, flags = choose_flags(help_text)
    if aiecc.usable and problem is None and generation is None:
        problem = "it knows neither --get-full-elf nor --generate-full-elf: too old for full ELFs"
    if aiecc.usable and problem is not None:
        aiecc = replace(aiecc, problem=problem)
    # Newer drivers may have the assembler built in; then the program itself is not needed.
    asm = replace(asm, required=generation != DECLARATIVE)
    tools = {tool.name: tool for tool in (python, aiecc, clang, source, asm)}
    run_environment = _run_environment(env, tools, peano_root)
    return Toolchain(
        tools, generation, flags, install, _python_path(install), _aie_folder(install, python), run_environment
    )


def _aie_folder(install: Path | None, python: Tool) -> Path | None:
    if install is not None and (install / "python" / "aie").is_dir():
        return install / "python" / "aie"
    if python.origin == "this environment":
        spec = importlib.util.find_spec("aie")
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]) if places else None
    return None


def choose_flags(help_text: str) -> tuple[str | None, tuple[str, ...]]:
    """Generation and full-ELF flags from the text of `aiecc --help`. Only flags that it lists are used: older drivers
    ignore what they do not know, without a word, and newer ones stop.

    >>> choose_flags("  --get-full-elf --full-elf-name --tmpdir --peano --unified")[0]
    'declarative'
    >>> choose_flags("--generate-full-elf --full-elf-name --no-xchesscc --peano")[1][0]
    '--generate-full-elf'
    >>> choose_flags("--aie-generate-xclbin")
    (None, ())
    """
    known = set(re.findall(r"--?([A-Za-z][\w-]*)", help_text))
    if {"get-full-elf", "full-elf-name"} <= known:
        generation, selector = DECLARATIVE, "--get-full-elf"
    elif {"generate-full-elf", "full-elf-name"} <= known:
        generation, selector = CLASSIC, "--generate-full-elf"
    else:
        return None, ()
    wanted = (*_REMOVED_FLAGS, *_USEFUL_FLAGS)
    flags = [selector, "--full-elf-name={elf}", *(flag for flag in wanted if flag.lstrip("-") in known)]
    flags.append("--peano={peano}")
    if "tmpdir" in known:
        flags.append("--tmpdir={tmp}")
    return generation, tuple(flags)


def _tool(
    name: str,
    needed_for: str,
    remedy: str,
    *places: tuple[Path | None, str],
    env_name: str = "",
    env: Mapping[str, str] | None = None,
    required: bool = True,
) -> Tool:
    """The first place that holds an executable file; an override that does not is a problem, not skipped."""
    override = (env or {}).get(env_name, "")
    if override:
        found = shutil.which(override)
        problem = None if found else f"{env_name} names {override!r}, which is no program"
        return Tool(name, Path(found or override), env_name, needed_for, remedy, required=required, problem=problem)
    for path, origin in places:
        if path is not None and path.is_file() and os.access(path, os.X_OK):
            return Tool(name, path, origin, needed_for, remedy, required=required)
    return Tool(name, None, "", needed_for, remedy, required=required)


def _on_path(name: str, env: Mapping[str, str]) -> tuple[Path | None, str]:
    found = shutil.which(name, path=env.get("PATH", ""))
    return (Path(found) if found else None), "PATH"


def _site_folders() -> list[Path]:
    return [Path(p) for p in dict.fromkeys(sysconfig.get_paths()[key] for key in ("platlib", "purelib"))]


def _install_folder(env: Mapping[str, str]) -> Path | None:
    """The root of mlir-aie: it has bin, include and python."""
    named = env.get("MLIR_AIE_INSTALL_DIR")
    places = [Path(named)] if named else [folder / "mlir_aie" for folder in _site_folders()]
    return next((place for place in places if place.is_dir()), None)


def _aiecc_places(env: Mapping[str, str], install: Path | None) -> list[tuple[Path | None, str]]:
    inside = (install / "bin" / "aiecc" if install else None, "mlir-aie's folder")
    return [inside, _on_path("aiecc", env)] if env.get("MLIR_AIE_INSTALL_DIR") else [_on_path("aiecc", env), inside]


def _peano_folder(env: Mapping[str, str]) -> tuple[Path | None, str]:
    for name in ("ONNXPACK_PEANO", "PEANO_INSTALL_DIR"):
        if env.get(name):
            return Path(env[name]), name
    for folder in _site_folders():
        if (folder / "llvm-aie").is_dir():
            return folder / "llvm-aie", "package llvm-aie"
    return None, ""


def _xrt_places(env: Mapping[str, str]) -> list[tuple[Path | None, str]]:
    places = [_on_path("aiebu-asm", env)]
    if env.get("XILINX_XRT"):
        places.append((Path(env["XILINX_XRT"]) / "bin" / "aiebu-asm", "XILINX_XRT"))
    return [*places, (XRT_FOLDER / "bin" / "aiebu-asm", "XRT's default folder")]


def _kernel_source(env: Mapping[str, str], include: Path | None, family: str) -> Tool:
    named = env.get("ONNXPACK_AIE_KERNELS")
    root = Path(named) if named else include / KERNEL_FOLDER if include is not None else None
    path = root / family / "mm.cc" if root is not None else None
    origin = "ONNXPACK_AIE_KERNELS" if named else "mlir-aie's headers"
    found = path is not None and path.is_file()
    remedy = "set ONNXPACK_AIE_KERNELS to the aie_kernels folder of mlir-aie's source"
    return Tool("mm.cc", path if found else None, origin if found else "", "is the core kernel's source", remedy)


def _python(env: Mapping[str, str], install: Path | None, aiecc: Path | None) -> Tool:
    """The interpreter that has mlir-aie's Python package: it runs the design program."""
    needed, remedy = "runs the design program (package aie)", MLIR_AIE
    if env.get("ONNXPACK_AIE_PYTHON"):
        return _tool("python", needed, remedy, env_name="ONNXPACK_AIE_PYTHON", env=env)
    if install is not None and (install / "python" / "aie").is_dir():
        return Tool("python", Path(sys.executable), "mlir-aie's folder", needed, remedy)
    if _has_aie():
        return Tool("python", Path(sys.executable), "this environment", needed, remedy)
    beside = aiecc.with_name("python3") if aiecc is not None else None
    return _tool("python", needed, remedy, (beside, "beside aiecc"))


def _has_aie() -> bool:
    try:
        return importlib.util.find_spec("aie.dialects") is not None
    except (ImportError, ValueError):
        return False


def _python_path(install: Path | None) -> str:
    folder = install / "python" if install is not None else None
    return str(folder) if folder is not None and folder.is_dir() else ""


def _run_environment(env: dict[str, str], tools: Mapping[str, Tool], peano: Path | None) -> dict[str, str]:
    """The environment that the tools run in: the assembler on PATH, Peano where aiecc looks for it."""
    result = dict(env)
    asm = tools["aiebu-asm"].path
    if asm is not None:
        result["PATH"] = os.pathsep.join([str(asm.parent), result.get("PATH", "")])
    if peano is not None:
        result["PEANO_INSTALL_DIR"] = str(peano)
    return result


def _help(tool: Tool, env: Mapping[str, str]) -> tuple[str, str | None]:
    return _output([str(tool.path), "--help"], env) if tool.usable else ("", None)


def _probed(tool: Tool, env: Mapping[str, str]) -> Tool:
    """With the version that it states. Who cannot even do that is not usable (the assembler may lack --version)."""
    if not tool.usable:
        return tool
    text, problem = _output([str(tool.path), "--version"], env)
    if problem is not None and tool.name != "aiebu-asm":
        return replace(tool, problem=problem)
    lines = [line.strip() for line in text.splitlines() if re.search(r"\d", line)]
    return replace(tool, version="".join(c for c in (lines[0] if lines else "")[:120] if c.isprintable()))


def _output(argv: list[str], env: Mapping[str, str]) -> tuple[str, str | None]:
    """What a program prints, and what is wrong with it if it does not end well."""
    shown = f"`{Path(argv[0]).name} {argv[1]}`"
    with tempfile.TemporaryDirectory(prefix="onnxpack-probe-") as folder:
        log = Path(folder, "log")
        outcome = Runner().run(argv, log, cwd=Path(folder), timeout=PROBE_SECONDS, env=env)
        with log.open("rb") as file:
            file.readline()  # the command line itself
            text = file.read(1 << 20).decode(errors="replace")
    return text, None if outcome.ok else f"{shown} {outcome.describe()}"
