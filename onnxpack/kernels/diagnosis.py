"""What this machine has and lacks for building kernels and for running them, each with its rule and the next step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onnxpack.kernels import toolchain
from onnxpack.kernels.cache import Cache
from onnxpack.kernels.target import NPU2, Target

State = Literal["ok", "missing", "problem", "note"]
BAD_DRIVERS = {"0.16.0": "is known to give garbage on fresh contexts"}
"""Versions of amdxdna, as reported in public, and what they do."""


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis."""

    part: Literal["build", "run", "cache"]
    name: str
    state: State
    detail: str
    """What was found, or what is wrong."""
    rule: str = ""
    """What it has to be, and what for."""
    next_step: str = ""

    @property
    def blocks(self) -> bool:
        """Whether its part cannot work like this."""
        return self.state in ("missing", "problem")


@dataclass(frozen=True)
class Places:
    """Where the operating system keeps what is looked at."""

    accelerators: Path = Path("/dev/accel")
    driver: Path = Path("/sys/module/amdxdna")
    xrt: Path = toolchain.XRT_FOLDER


def diagnose(cache: Path | None = None, target: Target = NPU2, places: Places | None = None) -> list[Finding]:
    """Look at everything. Never raises for what is missing."""
    where = places or Places()
    return [*_build(target), *_cache(Cache(cache)), *_run(where)]


def _build(target: Target) -> Iterator[Finding]:
    chain = toolchain.find(family=target.family)
    for tool in chain.tools.values():
        if tool.usable:
            version = f" ({tool.version})" if tool.version else ""
            yield Finding("build", tool.name, "ok", f"{tool.path}, from {tool.origin}{version}", tool.needed_for)
        else:
            state: State = "problem" if tool.problem else "missing" if tool.required else "note"
            detail = f"{tool.path}: {tool.problem}" if tool.problem else "not found"
            rule = tool.needed_for + ("" if tool.required else "; this aiecc may have it built in")
            yield Finding("build", tool.name, state, detail, rule, tool.remedy)
    if chain.generation is not None:
        yield Finding("build", "flags", "ok", " ".join(chain.flags), f"generation: {chain.generation}")


def _cache(cache: Cache) -> Iterator[Finding]:
    rule = "compiled kernels are kept there"
    if cache.writable():
        yield Finding("cache", "cache", "ok", str(cache.folder), rule)
    else:
        yield Finding("cache", "cache", "note", f"{cache.folder} cannot be written", rule, "set ONNXPACK_CACHE")


def _run(where: Places) -> Iterator[Finding]:
    yield _device_node(where)
    yield _driver(where)
    yield _xrt(where)
    yield from _pyxrt()
    yield _memory_lock()


def _device_node(where: Places) -> Finding:
    rule = "the driver makes /dev/accel/accel* for each NPU"
    nodes = sorted(where.accelerators.glob("accel*")) if where.accelerators.is_dir() else []
    if not nodes:
        return Finding(
            "run",
            "device",
            "missing",
            "no accelerator",
            rule,
            "load the amdxdna driver, on a machine with an XDNA2 NPU",
        )
    usable = [str(node) for node in nodes if os.access(node, os.R_OK | os.W_OK)]
    if not usable:
        return Finding("run", "device", "problem", f"{nodes[0]} may not be opened", rule, "join the group render")
    return Finding("run", "device", "ok", ", ".join(usable), rule)


def _driver(where: Places) -> Finding:
    rule = "amdxdna, from the kernel or from XRT's plugin"
    if not where.driver.is_dir():
        return Finding("run", "driver", "missing", "amdxdna is not loaded", rule, "modprobe amdxdna")
    version = _text(where.driver / "version") or "version unknown"
    if version in BAD_DRIVERS:
        step = "use another version of the driver"
        return Finding("run", "driver", "problem", f"amdxdna {version} {BAD_DRIVERS[version]}", rule, step)
    return Finding("run", "driver", "ok", f"amdxdna {version}", rule)


def driver_version(where: Places | None = None) -> str:
    """The version of the loaded driver; "unknown" when there is none, or it does not say."""
    return _text((where or Places()).driver / "version") or "unknown"


def _xrt(where: Places) -> Finding:
    rule = "contexts from ELFs need XRT of the branch 2026.1 or later"
    root = Path(os.environ["XILINX_XRT"]) if os.environ.get("XILINX_XRT") else where.xrt
    try:
        version = json.loads(_text(root / "version.json") or "{}").get("BUILD_VERSION")
    except (ValueError, AttributeError):
        version = None
    if version is None:
        return Finding("run", "xrt", "note", "version unknown", rule, "install XRT with the amdxdna plugin")
    return Finding("run", "xrt", "ok", f"{version} in {root}", rule)


def _pyxrt() -> Iterator[Finding]:
    from onnxpack.kernels.trial import probe_device

    found: dict[str, Any] = probe_device()
    rule = "XRT's Python module, with device, hw_context, elf, ext, run and bo"
    step = "put XRT's python folder on PYTHONPATH (its setup.sh does), for this Python version"
    if "error" in found:
        yield Finding("run", "pyxrt", "missing", str(found["error"]), rule, step)
        return
    if found["missing"]:
        lacks = ", ".join(found["missing"])
        yield Finding("run", "pyxrt", "problem", f"{found['file']} lacks {lacks}", rule, "update XRT")
    elif found["context_from_elf"] is False:
        detail = f"{found['file']} has no hw_context(device, elf)"
        yield Finding("run", "pyxrt", "problem", detail, "bound since January 2026", "update XRT")
    else:
        yield Finding("run", "pyxrt", "ok", str(found["file"]), rule)
    if found.get("devices") == 0:
        detail = "pyxrt finds 0 devices"
        step = "compare the versions of driver, firmware and XRT; `xrt-smi examine` tells more"
        yield Finding("run", "devices", "problem", detail, "driver, firmware and XRT must fit each other", step)
    elif "devices" in found:
        yield Finding("run", "devices", "ok", f"pyxrt finds {found['devices']}", "one NPU")


def _memory_lock() -> Finding:
    import resource

    rule = "buffers are locked in memory: the limit must be unlimited, or mapping them fails"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("run", "memlock", "ok", "unlimited", rule)
    step = "set LimitMEMLOCK=infinity, or memlock unlimited in limits.conf"
    return Finding("run", "memlock", "note", f"{soft} bytes", rule, step)


def _text(path: Path) -> str | None:
    try:
        with path.open(errors="replace") as file:
            return file.read(1 << 16).strip()
    except OSError:
        return None
