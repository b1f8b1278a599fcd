"""What can go wrong with a device, by kind; counting it; and saying it once per shape."""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum

from onnxpack.shapes import Gemm

_log = logging.getLogger("onnxpack")


class Fault(StrEnum):
    """Why a call did not run on the device."""

    TIMEOUT = "timeout"
    STATE = "state"
    RAISED = "raised"
    UNTOUCHED = "untouched"
    CANARY = "canary"
    CONTEXT = "context"
    OLD = "old"
    MEMORY = "memory"
    KERNEL = "kernel"
    PAUSED = "paused"
    CLOSED = "closed"

    @property
    def sentence(self) -> str:
        """What it means, for a person."""
        return _SENTENCES[self]

    @property
    def passes(self) -> bool:
        """Whether a new context may help."""
        return self in (Fault.TIMEOUT, Fault.STATE, Fault.RAISED, Fault.UNTOUCHED)


_SENTENCES = {
    Fault.TIMEOUT: "a launch did not end in time",
    Fault.STATE: "a launch ended in another state than COMPLETED",
    Fault.RAISED: "the driver raised an error during a launch",
    Fault.UNTOUCHED: "a launch was reported as completed and its result was not written",
    Fault.CANARY: "the kernel does not give the known product of its canary",
    Fault.CONTEXT: "no hardware context could be made",
    Fault.OLD: "this XRT cannot make a context from an ELF (bound in pyxrt since January 2026)",
    Fault.MEMORY: "no device buffer could be made",
    Fault.KERNEL: "the ELF is not the one of the manifest, or cannot be bound",
    Fault.PAUSED: "after repeated failures the device is left alone for a while",
    Fault.CLOSED: "the device was closed, or opened before this process was forked",
}


class DeviceFault(Exception):
    """A step on the device failed; whoever called it runs the product on the host, or raises under `strict`."""

    def __init__(self, fault: Fault, what: str) -> None:
        super().__init__(f"{fault.sentence}: {what}")
        self.fault, self.what = fault, what


class Tally:
    """Counters of one session, by name. Whoever counts holds the session's lock."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.launches = self.on_device = 0
        """Launches, and sites that ran on the device: counted too often for a dictionary."""
        self._said: set[Gemm] = set()

    def fault(self, shape: Gemm, error: DeviceFault, *, again: bool = False, quiet: bool = False) -> None:
        """Count a fault. The first of a shape is logged, and only that one. `again`: a new context is tried now;
        `quiet`: it is going to be raised."""
        self.counts[f"fault:{error.fault}"] += 1
        if shape not in self._said and not quiet:
            self._said.add(shape)
            then = "trying once more in a new context" if again else "this call runs on the host"
            # As text: whoever keeps log records must not keep the frames of the error with them.
            _log.warning("NPU: kernel %s: %s; %s (said once per shape)", shape, str(error), then)
