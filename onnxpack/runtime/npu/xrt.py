"""pyxrt, reduced to the calls that the full-ELF route needs. Nothing else in this package touches it.

Its traps are met here: every name is looked up before anything is opened; arguments are set with `set_arg`, never by
calling the kernel; a launch is always waited for with a timeout, and what `wait` returns is handed on, not trusted.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.errors import EnvironmentFault
from onnxpack.runtime.npu.faults import Fault

INDEX = 0
"""The device that is used."""

_NAMES = (
    "device",
    "elf",
    "hw_context",
    "run",
    "ext.bo",
    "ext.kernel",
    "ert_cmd_state.ERT_CMD_STATE_COMPLETED",
    "xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE",
    "xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE",
)
HINT = "see `onnxpack doctor`, or use device='host': it gives the same numbers"


def import_pyxrt() -> ModuleType:
    """EnvironmentFault when it is not installed or does not load."""
    try:
        return importlib.import_module("pyxrt")
    except ModuleNotFoundError as error:
        if error.name == "pyxrt":
            raise EnvironmentFault("no NPU device: XRT's Python module pyxrt is not installed", hint=HINT) from None
        raise EnvironmentFault(f"no NPU device: pyxrt cannot be imported: {first_line(error)}", hint=HINT) from None
    except Exception as error:  # an extension module fails as it likes
        raise EnvironmentFault(f"no NPU device: pyxrt cannot be imported: {first_line(error)}", hint=HINT) from None


class Xrt:
    """One pyxrt module. Every method may raise whatever the driver raises."""

    def __init__(self, module: Any) -> None:
        missing = [name for name in _NAMES if _attribute(module, name) is None]
        if missing:
            raise EnvironmentFault(f"this pyxrt has no {', '.join(missing)}: XRT is too old", hint=HINT)
        signature = str(getattr(module.hw_context.__init__, "__doc__", None) or "")
        if "pyxrt" in signature and re.search(r"\belf\b", signature) is None:
            raise EnvironmentFault(f"no NPU device: {Fault.OLD.sentence}", hint=HINT)
        self._module = module
        self.completed = module.ert_cmd_state.ERT_CMD_STATE_COMPLETED
        self.timeout = getattr(module.ert_cmd_state, "ERT_CMD_STATE_TIMEOUT", None)
        self.to_device = module.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
        self.from_device = module.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE

    def open(self) -> Any:
        """The device. EnvironmentFault when there is none."""
        try:
            count = self._module.enumerate_devices() if hasattr(self._module, "enumerate_devices") else None
            if count is None or int(count) > INDEX:
                return self._module.device(INDEX)
        except Exception as error:
            raise EnvironmentFault(f"no NPU device: it cannot be opened: {first_line(error)}", hint=HINT) from None
        raise EnvironmentFault("no NPU device: XRT sees none", hint=HINT)

    def context(self, device: Any, path: str) -> Any:
        """A hardware context with the configuration of the ELF at `path`."""
        return self._module.hw_context(device, self._module.elf(path))

    def kernel(self, context: Any, name: str) -> Any:
        """The kernel `<device>:<sequence>` of a context."""
        return self._module.ext.kernel(context, name)

    def buffer(self, device: Any, nbytes: int) -> Any:
        """A buffer of the device that the host can map."""
        return self._module.ext.bo(device, nbytes)

    def run(self, kernel: Any, buffers: Sequence[Any]) -> Any:
        """A launch of `kernel` on these buffers, ready to be started as often as one likes."""
        made = self._module.run(kernel)
        for index, buffer in enumerate(buffers):
            made.set_arg(index, buffer)
        return made


def mapped(buffer: Any, nbytes: int) -> npt.NDArray[np.uint8]:
    """The host's view of a buffer, which the driver may have rounded up. It must go before the buffer does."""
    return np.frombuffer(buffer.map(), np.uint8)[:nbytes]


def first_line(error: BaseException) -> str:
    """What an exception says, in one line of bounded length."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]


def _attribute(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
