"""A stand-in for XRT's Python module: it reads the ELF's path and sizes, and multiplies on the CPU, or misbehaves.

FAKE_PYXRT names the behaviour: "", "wrong", "nothing", "timeout", "crash", "raise", "hang", "old", "none" (0 devices).
"""

from __future__ import annotations

import os
import time
from enum import Enum
from types import SimpleNamespace

import numpy as np

MODE = os.environ.get("FAKE_PYXRT", "")
SHAPE = tuple(int(x) for x in os.environ.get("FAKE_PYXRT_SHAPE", "16,64,256").split(","))

if MODE == "broken":
    raise ImportError("libxrt_coreutil.so.2: cannot open shared object file")


class xclBOSyncDirection(Enum):  # noqa: N801
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


class ert_cmd_state(Enum):  # noqa: N801
    ERT_CMD_STATE_COMPLETED = 4
    ERT_CMD_STATE_TIMEOUT = 8


def enumerate_devices():
    return 0 if MODE == "none" else 1


class device:  # noqa: N801
    def __init__(self, index):
        if MODE == "none":
            raise RuntimeError("No such device with index '0'")


class elf:  # noqa: N801
    def __init__(self, path):
        if not isinstance(path, str):
            raise TypeError("a path")
        with open(path, "rb") as file:
            self.data = file.read()


class hw_context:  # noqa: N801
    def __init__(self, device, elf_or_uuid):
        """__init__(self: pyxrt.hw_context, arg0: pyxrt.device, arg1: pyxrt.elf) -> None"""
        if MODE == "old":
            raise TypeError("incompatible constructor arguments")


if MODE == "old":
    hw_context.__init__.__doc__ = "__init__(self: pyxrt.hw_context, arg0: pyxrt.device, arg1: pyxrt.uuid) -> None"


class _Bo:
    def __init__(self, device, size):
        self.host, self.device = np.zeros(size, np.uint8), np.zeros(size, np.uint8)

    def map(self):
        return memoryview(self.host)

    def sync(self, direction):
        if direction is xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE:
            self.device[:] = self.host
        else:
            self.host[:] = self.device


class _Kernel:
    def __init__(self, context, name):
        if name != "main:sequence":
            raise RuntimeError(f"No such kernel '{name}'")


ext = SimpleNamespace(bo=_Bo, kernel=_Kernel)
bo = _Bo


class run:  # noqa: N801
    def __init__(self, kernel):
        self.args = {}

    def set_arg(self, index, buffer):
        self.args[index] = buffer

    def start(self):
        if MODE == "crash":
            os.abort()
        if MODE == "raise":
            raise RuntimeError("DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-22): Invalid argument")
        if MODE == "hang":
            time.sleep(600)
        if MODE in ("nothing", "timeout"):
            return
        m, k, n = SHAPE
        a = self.args[0].device.view(np.int8).reshape(m, k).astype(np.int64)
        b = self.args[1].device.view(np.int8).reshape(k, n).astype(np.int64)
        c = (a @ b).astype(np.int32)
        if MODE == "wrong":
            c[0, 0] += 1
        self.args[2].device[:] = c.reshape(-1).view(np.uint8)

    def wait(self, timeout):
        return ert_cmd_state.ERT_CMD_STATE_TIMEOUT if MODE == "timeout" else ert_cmd_state.ERT_CMD_STATE_COMPLETED
