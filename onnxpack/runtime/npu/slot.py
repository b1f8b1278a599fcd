"""One kernel on the device: its file, its A and C buffers, and, while it has one, its hardware context.

Buffers belong to the device and outlive contexts. Whatever refers to a buffer goes before the buffer, and what was made
of a context before the context: runs, buffers, kernel, context, device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from onnxpack.errors import KernelError
from onnxpack.kernels import canary
from onnxpack.kernels.elf_report import check
from onnxpack.kernels.library import Canary
from onnxpack.runtime.npu.faults import DeviceFault, Fault
from onnxpack.runtime.npu.xrt import Xrt, first_line, mapped
from onnxpack.shapes import Gemm
from onnxpack.types import I8, I32, Array

SENTINEL = np.int32(-(2**31))
"""No product of int8 codes that an int32 accumulator holds can be this: 131071 * 128 * 128 is less in size."""

_PROBES = 512
"""So many elements of C are looked at after each launch, evenly over the whole."""

_smallest = np.minimum.reduce

Token = tuple[int, ...]
"""What A holds: which codes, which rows, which range of K."""


@dataclass(frozen=True)
class KernelFile:
    """A kernel of a pack."""

    gemm: Gemm
    path: Path
    sha256: str
    canary: Canary | None

    @cached_property
    def key(self) -> tuple[Gemm, str]:
        """The same for equal files, wherever they are."""
        return self.gemm, self.sha256

    @cached_property
    def name(self) -> str:
        """`<kernel>:<instance>`, read from the file. DeviceFault for a bad file, or not the manifest's."""
        try:
            report = check(self.path, self.gemm)
        except KernelError as error:
            raise DeviceFault(Fault.KERNEL, error.render()) from None
        if report.sha256 != self.sha256:
            raise DeviceFault(Fault.KERNEL, f"{self.path}: its sha256 is not the manifest's")
        return report.kernels[0]

    @cached_property
    def known_product(self) -> Canary:
        """The canary of the record, or one made here: then the product is computed on the host, once."""
        return self.canary if self.canary is not None else canary.make(self.gemm)


@dataclass
class Context:
    """A hardware context, and what was made of it."""

    handle: Any
    kernel: Any
    runs: dict[Any, Any]
    """By key of the operand's image."""
    verified: bool = False
    """Whether the canary passed since the last context of this process was made."""
    used: float = 0.0

    def release(self) -> None:
        """In the order that the driver needs."""
        self.runs.clear()
        self.kernel = None
        self.handle = None


class Slot:
    """A kernel with its buffers. DeviceFault when they cannot be made."""

    def __init__(self, xrt: Xrt, file: KernelFile, a: Any, c: Any) -> None:
        m, k, n = file.gemm.m, file.gemm.k, file.gemm.n
        self.xrt, self.file = xrt, file
        self.a, self.c = a, c
        self.a_view: I8 = mapped(a, m * k).view(np.int8).reshape(m, k)
        self.c_view: I32 = mapped(c, 4 * m * n).view(np.int32).reshape(m, n)
        self.a_view[...] = 0
        self.c_view[...] = 0
        # Odd, so that it meets every column in turn.
        step = max(1, m * n // _PROBES) | 1
        self._probe: Array = self.c_view.reshape(-1)[min(step, m * n) - 1 :: step]
        self.token: Token | None = None
        self.context: Context | None = None
        self.broken: tuple[Fault, str] | None = None
        """Why it is never used again."""

    def write(self, codes: I8) -> None:
        """Put codes [rows, k] into A, zeros into the rest of it, and hand it to the device."""
        self.token = None
        rows, k = codes.shape
        view = self.a_view
        view[:rows, :k] = codes
        view[rows:] = 0  # rows of an earlier call
        if k < view.shape[1]:
            view[:rows, k:] = 0
        self.a.sync(self.xrt.to_device)

    def launch(self, run: Any, timeout_ms: int) -> None:
        """Start, wait, check the state, and check that C was written. DeviceFault, or what the driver raises."""
        xrt = self.xrt
        self._probe.fill(SENTINEL)
        self.c.sync(xrt.to_device)
        run.start()
        state = run.wait(timeout_ms)
        if state != xrt.completed:
            kind = Fault.TIMEOUT if xrt.timeout is not None and state == xrt.timeout else Fault.STATE
            raise DeviceFault(kind, f"{state}")
        self.c.sync(xrt.from_device)
        if _smallest(self._probe) == SENTINEL:
            raise DeviceFault(Fault.UNTOUCHED, f"{self.file.gemm}")

    def drop_context(self) -> None:
        """Give the context up; the buffers stay."""
        context, self.context = self.context, None
        if context is not None:
            context.release()

    def drop_runs(self) -> None:
        """Give up every prepared launch."""
        if self.context is not None:
            self.context.runs.clear()

    def drop_buffers(self) -> None:
        """Give the buffers up; nothing may refer to them any more."""
        self.token = None
        del self._probe, self.a_view, self.c_view
        del self.a, self.c


def guarded_message(error: Exception) -> str:
    """What a driver's exception says."""
    return f"{type(error).__name__}: {first_line(error)}"
