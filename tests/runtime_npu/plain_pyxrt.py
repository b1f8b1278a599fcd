"""Another stand-in for pyxrt, with nothing in common with the first one but the interface.

Functions instead of classes, plain integers for states, a numpy array for a mapping, one memory for host and device, no
list of devices, the shape from the name of the file. Whoever runs on both relies on the interface alone.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np


class Plain:
    """Counts what it does; `state` is what the next launches end in."""

    def __init__(self) -> None:
        self.started, self.state = 0, 4
        self.open: list[str] = []
        self.ert_cmd_state = SimpleNamespace(ERT_CMD_STATE_COMPLETED=4, ERT_CMD_STATE_TIMEOUT=8)
        self.xclBOSyncDirection = SimpleNamespace(XCL_BO_SYNC_BO_TO_DEVICE=0, XCL_BO_SYNC_BO_FROM_DEVICE=1)
        self.ext = SimpleNamespace(bo=self._bo, kernel=lambda context, name: SimpleNamespace(context=context))

    def device(self, index: int) -> str:
        return f"device {index}"

    def elf(self, path: str) -> tuple[int, ...]:
        found = re.search(r"(\d+)x(\d+)x(\d+)[^/]*$", path)
        assert found is not None
        return tuple(map(int, found.groups()))

    def hw_context(self, device: str, elf: tuple[int, ...]) -> tuple[int, ...]:
        assert device == "device 0"
        return elf

    def _bo(self, device: str, size: int) -> Any:
        memory = np.full(size + 64, 7, np.uint8)
        return SimpleNamespace(memory=memory, map=lambda: memory, sync=lambda direction: None)

    def run(self, kernel: Any) -> Any:
        arguments: dict[int, Any] = {}
        return SimpleNamespace(
            set_arg=arguments.__setitem__,
            start=lambda: self._start(kernel.context, arguments),
            wait=lambda milliseconds: self.state,
        )

    def _start(self, shape: tuple[int, ...], arguments: dict[int, Any]) -> None:
        self.started += 1
        if self.state != 4:
            return
        m, k, n = shape
        a, b, c = (arguments[index].memory for index in range(3))
        left = a[: m * k].view(np.int8).reshape(m, k).astype(np.int64)
        right = b[: k * n].view(np.int8).reshape(k, n).astype(np.int64)
        c[: 4 * m * n].view(np.int32).reshape(m, n)[...] = left @ right
