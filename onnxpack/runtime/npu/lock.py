"""One lock file per device: two processes on one NPU at once corrupt each other's data."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from threading import Lock

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

from onnxpack.errors import EnvironmentFault

_guard = Lock()
_held: dict[Path, DeviceLock] = {}


def default_path(index: int) -> Path:
    """The lock file of device `index`, the same for every user."""
    return Path(tempfile.gettempdir()) / f"onnxpack-npu{index}.lock"


class DeviceLock:
    """Held by a process as often as it likes, by no two processes at once."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor, self._pid, self._holders = path, descriptor, os.getpid(), 1

    @staticmethod
    def acquire(path: Path) -> DeviceLock:
        """EnvironmentFault when another process has it, or when the file cannot be used."""
        with _guard:
            held = _held.get(path)
            if held is not None and held._pid == os.getpid():
                held._holders += 1
                return held
            descriptor = _open(path)
            try:
                if fcntl is not None:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                what = "another process uses the NPU" if isinstance(error, BlockingIOError) else str(error.strerror)
                raise EnvironmentFault(what, where=str(path), hint="wait for it, or use device='host'") from None
            _held[path] = DeviceLock(path, descriptor)
            return _held[path]

    def release(self) -> None:
        """Give it up once; the last holder frees it."""
        with _guard:
            self._holders -= 1
            if not self._holders and _held.get(self._path) is self:
                del _held[self._path]
                if self._pid == os.getpid():  # after a fork the lock is the parent's
                    os.close(self._descriptor)


def _open(path: Path) -> int:
    # Reading is enough to lock, so a file that another user made serves as well.
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise EnvironmentFault(f"cannot be opened: {error.strerror}", where=str(path), hint=_ELSEWHERE) from None
    try:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise EnvironmentFault(f"cannot be made: {error.strerror}", where=str(path), hint=_ELSEWHERE) from None


_ELSEWHERE = "name another file with ONNXPACK_NPU_LOCK"
