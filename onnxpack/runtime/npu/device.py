"""The NPU of this process: one handle, contexts in an LRU under a cap, operands resident up to a budget.

Everything happens between `begin` and `end`, one thread at a time. A failure is a DeviceFault; after it the context is
given up, because nobody knows what it is good for, and the next call makes a new one.
"""

from __future__ import annotations

import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from traceback import clear_frames
from typing import Any

import numpy as np

from onnxpack.errors import EnvironmentFault
from onnxpack.kernels import canary
from onnxpack.runtime.npu.faults import DeviceFault, Fault, Tally
from onnxpack.runtime.npu.lock import DeviceLock, default_path
from onnxpack.runtime.npu.slot import Context, KernelFile, Slot, Token, guarded_message
from onnxpack.runtime.npu.switches import Switches
from onnxpack.runtime.npu.xrt import HINT, INDEX, Xrt, import_pyxrt, mapped
from onnxpack.shapes import Gemm
from onnxpack.types import I8, I32

IDLE_SECONDS = 4.0
"""A context that was not used for so long may have gone stale: its first timeout is answered with a new context."""
PAUSE_SECONDS = 60.0
"""A blocked NPU comes back after a minute or two; until then calls do not wait for it."""
_TIMEOUTS_BEFORE_PAUSE = 2
_FAILURES_BEFORE_PAUSE = 8
_FINAL = (Fault.CANARY, Fault.KERNEL, Fault.OLD)
_STALE = 0xA5

Key = tuple[Any, ...]
"""Of an image: its owner, its kernel, and what it holds."""


@dataclass
class _Image:
    """An operand in a buffer of the device."""

    buffer: Any
    nbytes: int
    kernel: tuple[Gemm, str]


class Device:
    """See the module. `counts`: contexts, canaries, launches, uploads; `resident` is bytes of operands now."""

    def __init__(self, xrt: Xrt, switches: Switches, lock: DeviceLock) -> None:
        self._xrt, self._lock_file = xrt, lock
        self._cap, self._budget, self._timeout = switches.contexts, switches.operand_bytes, switches.timeout_ms
        self._handle: Any = xrt.open()
        self._pid = os.getpid()
        self._guard = Lock()
        self._slots: dict[tuple[Gemm, str], Slot] = {}
        self._live: OrderedDict[tuple[Gemm, str], Slot] = OrderedDict()
        """Those with a context, the least recently used first."""
        self._images: OrderedDict[Key, _Image] = OrderedDict()
        self._users = Counter[tuple[Gemm, str]]()
        self._leaving: deque[tuple[object, tuple[KernelFile, ...]]] = deque()
        self._timeouts = self._failures = 0
        self._paused_until = 0.0
        self.clock: Callable[[], float] = time.monotonic
        self.counts = Counter[str]()
        self.resident = 0

    @property
    def mine(self) -> bool:
        """Whether it is open, and was opened by this process and not by one that this was forked from."""
        return self._handle is not None and self._pid == os.getpid()

    # --- who uses it --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Exclusive use by this thread, until `end`. DeviceFault when there is nothing to use."""
        self._guard.acquire()
        if self._leaving:
            self._settle()
        if self._handle is None or self._pid != os.getpid():
            self._guard.release()
            raise DeviceFault(Fault.CLOSED, "")

    def end(self) -> None:
        """Counterpart of begin."""
        if self._leaving:
            self._settle()
        self._guard.release()

    def enter(self, kernels: tuple[KernelFile, ...]) -> None:
        """A session is going to use these kernels."""
        with self._guard:
            self._users.update(kernel.key for kernel in kernels)

    def try_context(self, kernel: KernelFile) -> None:
        """Make the context of a kernel now, if that is possible. EnvironmentFault when XRT does not know how to."""
        try:
            self.begin()
        except DeviceFault:
            return
        try:
            slot = self._slots.get(kernel.key) or self._slot(kernel)
            if slot.context is None:
                self._context(slot)
        except DeviceFault as fault:  # the first call finds it again, counts it and runs on the host
            if fault.fault is Fault.OLD:
                raise EnvironmentFault(f"no NPU device: {fault}", hint=HINT) from None
        finally:
            self.end()

    def leave(self, owner: object, kernels: tuple[KernelFile, ...]) -> None:
        """The session is gone. May be called by the garbage collector, at any moment of any thread."""
        self._leaving.append((owner, kernels))
        if self._guard.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._guard.release()

    def _settle(self) -> None:
        while self._leaving:
            owner, kernels = self._leaving.popleft()
            if not self.mine:
                continue
            for key in [key for key in self._images if key[0] == owner]:
                self._evict(key)
            for kernel in kernels:
                self._users[kernel.key] -= 1
                if self._users[kernel.key] <= 0:
                    self._forget(kernel)

    def _forget(self, kernel: KernelFile) -> None:
        del self._users[kernel.key]
        slot = self._slots.pop(kernel.key, None)
        if slot is None:
            return
        slot.drop_runs()
        for key in [key for key, image in self._images.items() if image.kernel == kernel.key]:
            self._evict(key)
        slot.drop_buffers()
        self._live.pop(kernel.key, None)
        slot.drop_context()

    def close(self) -> None:
        """Release runs, buffers, kernels, contexts and the device, in this order. No call may follow."""
        if self._handle is None:
            return
        if self._pid == os.getpid():
            for slot in self._slots.values():
                slot.drop_runs()
            self._images.clear()
            for slot in self._slots.values():
                slot.drop_buffers()
            for slot in self._live.values():
                slot.drop_context()
        self._slots.clear()
        self._live.clear()
        self.resident = 0
        self._handle = None
        self._lock_file.release()

    # --- products -----------------------------------------------------------------------------------------------------

    def product(
        self, file: KernelFile, token: Token, codes: I8, image: Key, fill: Callable[[I8], None], tally: Tally
    ) -> I32:
        """codes [rows <= M, k <= K] times the operand called `image`: the kernel's C, int32 [M, N], until the next one.

        `fill` writes the operand into int8 [K, N], where it is not resident; `token` names the codes.

        DeviceFault when it cannot be had. The caller is between `begin` and `end`.
        """
        now = self.clock()
        if now < self._paused_until:
            raise DeviceFault(Fault.PAUSED, f"{file.gemm}")
        try:
            slot = self._slots.get(file.key) or self._slot(file)
            context = slot.context
            idle = context is not None and now - context.used > IDLE_SECONDS
            try:
                self._attempt(slot, context, token, codes, image, fill)
            except DeviceFault as fault:
                if not (idle and fault.fault.passes):
                    raise
                tally.fault(file.gemm, fault, again=True)
                self.counts["recreated"] += 1
                self._attempt(slot, slot.context, token, codes, image, fill)
        except DeviceFault as fault:
            self._failed(fault)
            raise
        self._timeouts = self._failures = 0
        return slot.c_view

    def _attempt(
        self, slot: Slot, context: Context | None, token: Token, codes: I8, image: Key, fill: Callable[[I8], None]
    ) -> None:
        try:
            if context is None:
                context = self._context(slot)
            if not context.verified:
                self._verify(slot, context)
            if slot.token != token:
                slot.write(codes)
                slot.token = token
            self._launch(slot, context, image, fill)
        except BaseException as error:
            # Frames of the failed call still hold the launch, which must go before its context.
            clear_frames(error.__traceback__)
            self._drop(slot)
            if isinstance(error, DeviceFault):
                if error.fault in _FINAL:
                    slot.broken = error.fault, error.what
                raise
            if isinstance(error, Exception):  # a driver raises what it likes
                raise DeviceFault(Fault.RAISED, guarded_message(error)) from None
            raise  # interrupted: the launch may still be under way

    def _failed(self, fault: DeviceFault) -> None:
        self._failures += 1
        self._timeouts = self._timeouts + 1 if fault.fault is Fault.TIMEOUT else 0
        if fault.fault in _FINAL:  # that kernel is at fault, and stays off
            self._failures -= 1
        if self._timeouts >= _TIMEOUTS_BEFORE_PAUSE or self._failures >= _FAILURES_BEFORE_PAUSE:
            self._paused_until = self.clock() + PAUSE_SECONDS
            self._timeouts = self._failures = 0

    def _launch(self, slot: Slot, context: Context, key: Key, fill: Callable[[I8], None]) -> None:
        run = context.runs.get(key)
        if run is None or key not in self._images:
            image = self._image(key, slot, fill)
            run = context.runs[key] = self._xrt.run(context.kernel, (slot.a, image.buffer, slot.c))
        else:
            self._images.move_to_end(key)
        self._live.move_to_end(slot.file.key)
        self.counts["launches"] += 1
        slot.launch(run, self._timeout)
        context.used = self.clock()

    # --- contexts -----------------------------------------------------------------------------------------------------

    def _slot(self, file: KernelFile) -> Slot:
        gemm = file.gemm
        a, c = self._buffer(gemm.m * gemm.k), self._buffer(4 * gemm.m * gemm.n)
        slot = self._slots[file.key] = Slot(self._xrt, file, a, c)
        return slot

    def _context(self, slot: Slot) -> Context:
        if slot.broken is not None:
            raise DeviceFault(*slot.broken)
        name = slot.file.name
        while len(self._live) >= self._cap:
            self._drop(next(iter(self._live.values())))
        try:
            slot.context = self._make_context(slot, name)
        except TypeError as error:
            raise DeviceFault(Fault.OLD, guarded_message(error)) from None
        except Exception as error:
            if not self._live:
                raise DeviceFault(Fault.CONTEXT, guarded_message(error)) from None
            # The device may have fewer than we think, and other processes some of them: give one up, try once more.
            self._drop(next(iter(self._live.values())))
            try:
                slot.context = self._make_context(slot, name)
            except Exception as again:
                raise DeviceFault(Fault.CONTEXT, guarded_message(again)) from None
            self._cap = len(self._live) + 1
        self._live[slot.file.key] = slot
        for other in self._live.values():
            if other.context is not None:
                other.context.verified = False  # a new context has been seen to break others
        return slot.context

    def _make_context(self, slot: Slot, name: str) -> Context:
        handle = self._xrt.context(self._handle, str(slot.file.path))
        made = Context(handle, self._xrt.kernel(handle, name), {}, used=self.clock())
        self.counts["contexts"] += 1
        return made

    def _drop(self, slot: Slot) -> None:
        self._live.pop(slot.file.key, None)
        slot.drop_context()

    def _verify(self, slot: Slot, context: Context) -> None:
        """Run the canary: a known product, into a C full of stale bytes."""
        file, known = slot.file, slot.file.known_product
        gemm = file.gemm

        def fill(view: I8) -> None:
            view[...] = canary.operands(gemm, known.seed)[1]

        a, _ = canary.operands(Gemm(gemm.m, gemm.k, 1), known.seed)
        slot.write(a)
        slot.c_view.view(np.uint8)[...] = _STALE
        self.counts["canaries"] += 1
        self._launch(slot, context, ("canary", file.key), fill)
        if canary.digest(slot.c_view) != known.sha256:
            raise DeviceFault(Fault.CANARY, f"{file.path}")
        context.verified = True

    # --- buffers ------------------------------------------------------------------------------------------------------

    def _image(self, key: Key, slot: Slot, fill: Callable[[I8], None]) -> _Image:
        found = self._images.get(key)
        if found is None:
            gemm = slot.file.gemm
            nbytes, buffer = gemm.k * gemm.n, None
            while self._images and self.resident + nbytes > self._budget:
                last = self._evict(next(iter(self._images)))
                if last.nbytes == nbytes:  # allocating costs more than filling
                    buffer = last.buffer
                    break
            found = _Image(self._buffer(nbytes) if buffer is None else buffer, nbytes, slot.file.key)
            fill(mapped(found.buffer, nbytes).view(np.int8).reshape(gemm.k, gemm.n))
            found.buffer.sync(self._xrt.to_device)
            self._images[key] = found
            self.resident += nbytes
            self.counts["uploads"] += 1
        self._images.move_to_end(key)
        return found

    def _evict(self, key: Key) -> _Image:
        image = self._images.pop(key)
        self.resident -= image.nbytes
        slot = self._slots.get(image.kernel)
        if slot is not None and slot.context is not None:
            slot.context.runs.pop(key, None)
        return image

    def _buffer(self, nbytes: int) -> Any:
        try:
            return self._xrt.buffer(self._handle, nbytes)
        except Exception:
            for key in list(self._images):
                self._evict(key)
        try:
            return self._xrt.buffer(self._handle, nbytes)
        except Exception as error:
            raise DeviceFault(Fault.MEMORY, f"{nbytes} bytes: {guarded_message(error)}") from None


# --- the one of this process ------------------------------------------------------------------------------------------

_guard = Lock()
_devices: dict[int, _Opened] = {}
"""By identity of the pyxrt module."""
_leaving: deque[Device] = deque()


@dataclass
class _Opened:
    module: Any
    device: Device
    users: int = 1


def acquire(switches: Switches) -> Device:
    """The device, opened by the first who asks. EnvironmentFault when there is none, or another process has it."""
    module = import_pyxrt()
    with _guard:
        _settle()
        opened = _devices.get(id(module))
        if opened is not None and opened.device.mine:
            opened.users += 1
            return opened.device
        xrt = Xrt(module)
        lock = DeviceLock.acquire(Path(switches.lock) if switches.lock else default_path(INDEX))
        try:
            device = Device(xrt, switches, lock)
        except BaseException:
            lock.release()
            raise
        _devices[id(module)] = _Opened(module, device)
    return device


def release(device: Device) -> None:
    """Counterpart of acquire; the last one closes it. May be called by the garbage collector, at any moment."""
    _leaving.append(device)
    if _guard.acquire(blocking=False):
        try:
            _settle()
        finally:
            _guard.release()


def _settle() -> None:
    while _leaving:
        device = _leaving.popleft()
        for key, opened in list(_devices.items()):
            if opened.device is device:
                opened.users -= 1
                if not opened.users:
                    del _devices[key]
                    device.close()
