"""A stand-in for XRT's Python module, with its interface and its traps, that multiplies on the CPU.

`Machine` is what is plugged in: devices, contexts, what is going to fail. `module(machine)` is a pyxrt for it. An ELF
says its shape in its configuration (see `elfs.py`); real int32 products come from the buffers as the device sees them.

What is like the real one: host and device memory of a buffer are apart until `sync`; fresh buffers hold garbage;
`map()` gives more bytes than were asked for; `wait` returns a state and raises nothing, and 0 means for ever; a launch
whose arguments were not set is COMPLETED and does nothing; `kernel(...)` swallows what it cannot convert; contexts are
few, and creating one too many raises err=-22; a context that was not used for a while is stale; plain `bo` is refused.
What is stricter: whatever goes in another order than runs, buffers, kernel, context, device is written down, as is a
second thread in the driver, and a view of a buffer that outlives it.
"""

from __future__ import annotations

import enum
import gc
import re
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = re.compile(rb"i8 gemm (\d+)x(\d+)x(\d+);")
PAGE = 4096


class ert_cmd_state(enum.Enum):  # noqa: N801
    ERT_CMD_STATE_NEW = 1
    ERT_CMD_STATE_RUNNING = 3
    ERT_CMD_STATE_COMPLETED = 4
    ERT_CMD_STATE_ERROR = 5
    ERT_CMD_STATE_ABORT = 6
    ERT_CMD_STATE_TIMEOUT = 8


class xclBOSyncDirection(enum.Enum):  # noqa: N801
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


STATES = {
    "timeout": ert_cmd_state.ERT_CMD_STATE_TIMEOUT,
    "error": ert_cmd_state.ERT_CMD_STATE_ERROR,
    "abort": ert_cmd_state.ERT_CMD_STATE_ABORT,
}
FAULTS = (*STATES, "raise", "untouched", "half", "garbage")
"""What a launch can do instead of its work. "half" writes a part and is COMPLETED; the states come with a part, too."""


@dataclass
class Machine:
    """An NPU and its driver."""

    devices: int = 1
    cap: int = 16
    """Contexts at once."""
    fault: Callable[[int], str | None] = lambda launch: None
    """What launch number n (from 1) does wrong."""
    garbage_from: int = 10**9
    """The context with this number and later ones compute garbage, and say COMPLETED."""
    stale_after: float | None = None
    """Idle seconds after which a context is dead: its launches time out."""
    memory: int = 1 << 40
    """Bytes that buffers may take."""
    old: bool = False
    """An XRT that makes contexts from xclbins only."""
    clock: float = 0.0

    launches: int = 0
    computed: Counter[str] = field(default_factory=Counter)
    """Launches that did their work, by shape."""
    made: Counter[str] = field(default_factory=Counter)
    alive: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    in_use: int = 0
    _inside: threading.Lock = field(default_factory=threading.Lock)

    def born(self, kind: str, thing: Any, gone: Callable[[], None] = lambda: None) -> None:
        self.made[kind] += 1
        self.alive[kind] += 1

        def forget() -> None:
            self.alive[kind] -= 1
            self.log.append(f"-{kind}")
            gone()

        weakref.finalize(thing, forget).atexit = False
        self.log.append(f"+{kind}")

    def left(self) -> dict[str, int]:
        """Objects of the driver that are still held."""
        gc.collect()
        return {kind: count for kind, count in self.alive.items() if count}

    def wrong(self, what: str) -> None:
        self.violations.append(what)


class _Device:
    def __init__(self, machine: Machine, index: int) -> None:
        if index >= machine.devices:
            raise RuntimeError(f"No such device with index '{index}'")
        self.machine = machine
        machine.born("device", self, self._check(machine))

    @staticmethod
    def _check(machine: Machine) -> Callable[[], None]:
        def check() -> None:
            for kind in ("context", "kernel", "run", "bo"):
                if machine.alive[kind]:
                    machine.wrong(f"device gone before {machine.alive[kind]} {kind}")

        return check


class _Elf:
    def __init__(self, path: str) -> None:
        if not isinstance(path, str):
            raise TypeError("__init__(): incompatible constructor arguments: a path")
        data = Path(path).read_bytes()
        found = SHAPE.search(data)
        if data[:4] != b"\x7fELF" or found is None:
            raise RuntimeError("Failed to open ELF")
        self.shape = tuple(map(int, found.groups()))


class _Context:
    def __init__(self, device: _Device, elf: Any) -> None:
        machine = device.machine
        if machine.old or not isinstance(elf, _Elf):
            raise TypeError("__init__(): incompatible constructor arguments. (arg0: pyxrt.device, arg1: pyxrt.uuid)")
        if machine.alive["context"] >= machine.cap:
            raise RuntimeError("DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-22): Invalid argument")
        self.machine, self.shape, self.used, self.dead = machine, elf.shape, machine.clock, False
        self.children: dict[str, int] = {"kernel": 0, "run": 0}
        children = self.children

        def gone() -> None:
            for kind in children:
                if children[kind]:
                    machine.wrong(f"context gone before its {kind}")

        machine.born("context", self, gone)
        self.number = machine.made["context"]


class _Kernel:
    def __init__(self, context: _Context, name: str) -> None:
        if name != "main:sequence":
            raise RuntimeError(f"No such kernel '{name}'")
        self.context = weakref.ref(context)
        self.machine, children = context.machine, context.children
        children["kernel"] += 1
        self.machine.born("kernel", self, lambda: children.update(kernel=children["kernel"] - 1))

    def __call__(self, *arguments: Any) -> _Run:
        made = _Run(self)
        for index, argument in enumerate(arguments):
            if isinstance(argument, _Bo):  # anything else is swallowed, and the argument stays unset
                made.set_arg(index, argument)
        made.start()
        return made


class _Bo:
    def __init__(self, device: _Device, size: int) -> None:
        machine = device.machine
        rounded = -(-size // PAGE) * PAGE
        if machine.in_use + rounded > machine.memory:
            raise RuntimeError("DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed (err=-12): Cannot allocate memory")
        machine.in_use += rounded
        self.machine = machine
        host = bytearray(b"\xcd" * rounded)
        self.host, self.memory = host, np.full(rounded, 0xEE, np.uint8)
        self.users: dict[str, int] = {"runs": 0}
        users = self.users

        def gone() -> None:
            machine.in_use -= rounded
            if users["runs"]:
                machine.wrong("bo gone before a run that has it as an argument")
            try:
                host.append(0)
            except BufferError:
                machine.wrong("bo gone before a view of it")

        machine.born("bo", self, gone)

    def map(self) -> memoryview:
        return memoryview(self.host)

    def size(self) -> int:
        return len(self.host)

    def sync(self, direction: xclBOSyncDirection, size: int | None = None, offset: int = 0) -> None:
        host = np.frombuffer(self.host, np.uint8)
        stop = len(host) if size is None else offset + size
        if direction is xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE:
            self.memory[offset:stop] = host[offset:stop]
        elif direction is xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE:
            host[offset:stop] = self.memory[offset:stop]
        else:
            raise TypeError("sync(): incompatible function arguments")


class _Run:
    def __init__(self, kernel: _Kernel) -> None:
        context = kernel.context()
        if context is None:
            raise RuntimeError("the context of this kernel is gone")
        self.context = weakref.ref(context)
        self.machine, self.state = kernel.machine, ert_cmd_state.ERT_CMD_STATE_NEW
        self.arguments: dict[int, Any] = {}
        held: list[dict[str, int]] = []
        self.held, children = held, context.children
        children["run"] += 1

        def gone() -> None:
            children["run"] -= 1
            for users in held:
                users["runs"] -= 1

        self.machine.born("run", self, gone)

    def set_arg(self, index: int, argument: Any) -> None:
        if type(index) is not int or not isinstance(argument, _Bo | int):
            raise TypeError("set_arg(): incompatible function arguments")
        if isinstance(argument, _Bo):
            argument.users["runs"] += 1
            self.held.append(argument.users)
        self.arguments[index] = weakref.ref(argument) if isinstance(argument, _Bo) else argument

    def start(self) -> None:
        machine, context = self.machine, self.context()
        if not machine._inside.acquire(blocking=False):
            machine.wrong("two launches at once")
            raise RuntimeError("busy")
        try:
            if context is None:
                raise RuntimeError("the context of this run is gone")
            if self.state is ert_cmd_state.ERT_CMD_STATE_RUNNING:
                raise RuntimeError("the run is still under way")
            machine.launches += 1
            self.state = self._launch(machine, context)
        finally:
            machine._inside.release()

    def _launch(self, machine: Machine, context: _Context) -> ert_cmd_state:
        idle, context.used = machine.clock - context.used, machine.clock
        if machine.stale_after is not None and idle > machine.stale_after:
            context.dead = True
        fault = "timeout" if context.dead else machine.fault(machine.launches)
        if fault == "raise":
            raise RuntimeError("DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-5): Input/output error")
        buffers = [self.arguments.get(index) for index in range(3)]
        if any(buffer is None for buffer in buffers):
            return ert_cmd_state.ERT_CMD_STATE_COMPLETED
        a, b, c = (buffer() for buffer in buffers if buffer is not None)
        if a is None or b is None or c is None:
            machine.wrong("a run's buffer was gone when it was started")
            return ert_cmd_state.ERT_CMD_STATE_COMPLETED
        m, k, n = context.shape
        left = a.memory[: m * k].view(np.int8).reshape(m, k).astype(np.float64)
        right = b.memory[: k * n].view(np.int8).reshape(k, n).astype(np.float64)
        product = (left @ right).astype(np.int32)
        if context.number >= machine.garbage_from or fault == "garbage":
            product ^= 0x55
        written = product.reshape(-1).view(np.uint8)
        if fault == "half" or fault in STATES:
            written = written[: len(written) // 2]
        if fault != "untouched":
            c.memory[: len(written)] = written
        if fault is None:
            machine.computed["x".join(map(str, context.shape))] += 1
        return STATES.get(fault or "", ert_cmd_state.ERT_CMD_STATE_COMPLETED)

    def wait(self, timeout_ms: int = 0) -> ert_cmd_state:
        if type(timeout_ms) is not int:
            raise TypeError("wait(): incompatible function arguments")
        if timeout_ms == 0:
            self.machine.wrong("wait(0) waits for ever")
        return self.state

    def wait2(self, timeout_ms: int = 0) -> None:
        if self.wait(timeout_ms) is not ert_cmd_state.ERT_CMD_STATE_COMPLETED:
            raise RuntimeError("bad command state, can't launch")


def module(machine: Machine) -> types.ModuleType:
    """The module `pyxrt` of a machine."""
    made, ext = types.ModuleType("pyxrt"), types.ModuleType("pyxrt.ext")

    def refused(*arguments: Any) -> None:
        raise RuntimeError("unsupported buffer type: none flag")

    parts: dict[str, Any] = {
        "device": lambda index: _Device(machine, index),
        "enumerate_devices": lambda: machine.devices,
        "elf": _Elf,
        "hw_context": type("hw_context", (_Context,), {}),
        "kernel": _Kernel,
        "run": _Run,
        "bo": refused,
        "ert_cmd_state": ert_cmd_state,
        "xclBOSyncDirection": xclBOSyncDirection,
        "ext": ext,
    }
    for name, part in parts.items():
        setattr(made, name, part)
    ext.bo, ext.kernel = _Bo, _Kernel  # type: ignore[attr-defined]
    return made
