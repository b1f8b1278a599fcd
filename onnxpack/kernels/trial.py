"""Try a kernel on the device: its canary, several timed launches, in a process of its own.

XRT can hang, or take its process down with it. So each kernel runs in a child with a time limit, and what comes back is
one JSON object. `python -m onnxpack.kernels.trial '{...}'` is that child.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnxpack.kernels.cache import default_folder
from onnxpack.kernels.process import Runner, tail

LAUNCHES = 10
WAIT_MS = 5000
"""How long one launch may take; 0 would wait for ever."""
CHILD_SECONDS = 120.0
STALE = 0xA5
"""What C holds before a launch: a device that writes nothing must not look right."""


@dataclass(frozen=True)
class Trial:
    """What happened."""

    route: str
    """`npu` when the device ran it, `none` when it did not."""
    canary: str
    """`equal`, `different`, `unknown` (no canary in the record) or `not run`."""
    reason: str | None = None
    """Why it did not run, or what was wrong."""
    launches_us: list[float] = field(default_factory=list)
    """Time of each launch with its wait, microseconds."""

    @property
    def passed(self) -> bool:
        """The device ran it and the product is the known one."""
        return self.route == "npu" and self.canary == "equal"


def try_kernel(path: Path, name: str, shape: tuple[int, int, int], seed: int | None, expected: str | None) -> Trial:
    """Run a kernel in a child process. Never raises for what the device or its driver does."""
    wanted = {"path": str(path), "name": name, "shape": shape, "seed": seed, "expected": expected}
    with device_lock():
        answer, problem = _child(wanted)
    return Trial(**answer) if problem is None else Trial("none", "not run", problem)


def probe_device() -> dict[str, Any]:
    """What pyxrt says about itself and the machine, asked in a child process; {"error": ...} when it says nothing."""
    answer, problem = _child({"probe": True})
    return answer if problem is None else {"error": problem}


@contextlib.contextmanager
def device_lock() -> Iterator[None]:
    """Hold the NPU for this user: two processes on it at once, with large buffers, are known to disturb each other."""
    from filelock import FileLock

    folder = default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "device-0.lock")
        lock.acquire()
    except OSError:  # nowhere to put a lock: go without
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _child(wanted: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    with tempfile.TemporaryDirectory(prefix="onnxpack-trial-") as name:
        folder = Path(name)
        out, log = folder / "out", folder / "log"
        argv = [sys.executable, "-m", "onnxpack.kernels.trial", json.dumps(wanted)]
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), package]))
        env = dict(os.environ) | {"PYTHONPATH": path}
        outcome = Runner().run(argv, log, cwd=folder, timeout=CHILD_SECONDS, env=env, stdout=out)
        try:
            return json.loads(out.read_text().splitlines()[-1]), None
        except (OSError, ValueError, IndexError):
            last = (tail(log) or ("",))[-1]
            return {}, f"the trial {outcome.describe()}: {last}"


# --- the child --------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Answer one question with one line of JSON."""
    wanted = json.loads(argv[0])
    print(json.dumps(_probe() if "probe" in wanted else asdict(_run(**wanted))))
    return 0


def _probe() -> dict[str, Any]:
    try:
        import pyxrt
    except ImportError as error:
        return {"error": f"pyxrt cannot be imported: {error}"}
    found: dict[str, Any] = {
        "file": str(getattr(pyxrt, "__file__", "")),
        "missing": [name for name in ("device", "hw_context", "elf", "ext", "run", "bo") if not hasattr(pyxrt, name)],
    }
    signature = str(getattr(getattr(pyxrt, "hw_context", None), "__init__", None).__doc__ or "")
    found["context_from_elf"] = re.search(r"\belf\b", signature) is not None if signature else None
    if hasattr(pyxrt, "enumerate_devices"):
        found["devices"] = int(pyxrt.enumerate_devices())
    return found


def _run(path: str, name: str, shape: list[int], seed: int | None, expected: str | None) -> Trial:
    from onnxpack.kernels import canary
    from onnxpack.shapes import Gemm

    try:
        import pyxrt
    except ImportError as error:
        return Trial("none", "not run", f"pyxrt cannot be imported: {error}")
    gemm = Gemm(*shape)
    a, b = canary.operands(gemm, seed if seed is not None else canary.SEED)
    try:
        c, times = _launch(pyxrt, path, name, a, b)
    except _Failed as error:
        return Trial("none", "not run", str(error))
    except Exception as error:  # a driver raises what it likes
        return Trial("none", "not run", f"{type(error).__name__}: {error}"[:300])
    found = canary.digest(c)
    known = expected if expected is not None else canary.make(gemm).sha256
    if found == known:
        return Trial("npu", "equal", None, times)
    return Trial("npu", "different", "the product is not the known one", times)


class _Failed(Exception):
    """A step of the launch did not do what it must."""


def _launch(pyxrt: Any, path: str, name: str, a: Any, b: Any) -> tuple[Any, list[float]]:
    """C and the time of each launch. Everything is released in the order that the driver needs: runs before buffers
    before kernel before context before device."""
    import numpy as np

    device = pyxrt.device(0)
    try:
        context = pyxrt.hw_context(device, pyxrt.elf(path))
    except TypeError:
        raise _Failed("this XRT cannot make a context from an ELF (bound since January 2026): update it") from None
    kernel = pyxrt.ext.kernel(context, name)
    sizes = (a.nbytes, b.nbytes, 4 * a.shape[0] * b.shape[1])
    buffers = [pyxrt.ext.bo(device, size) for size in sizes]
    views = [np.frombuffer(buffer.map(), np.uint8)[:size] for buffer, size in zip(buffers, sizes, strict=True)]
    to_device = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
    views[0][:] = a.view(np.uint8).reshape(-1)
    views[1][:] = b.view(np.uint8).reshape(-1)
    views[2][:] = STALE
    for buffer in buffers:
        buffer.sync(to_device)
    run = pyxrt.run(kernel)
    for index, buffer in enumerate(buffers):
        run.set_arg(index, buffer)
    times = []
    for _ in range(LAUNCHES):
        start = time.perf_counter()
        run.start()
        state = run.wait(WAIT_MS)
        times.append(round(1e6 * (time.perf_counter() - start), 1))
        if state != pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
            raise _Failed(f"the launch ended as {state}")
    buffers[2].sync(pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE)
    c = views[2].copy().view(np.int32).reshape(a.shape[0], b.shape[1])
    del run, views, buffers, buffer, kernel, context, device
    return c, times


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
