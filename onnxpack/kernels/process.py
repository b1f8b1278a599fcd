"""Run a tool: in its own folder, all output into a log, with a time limit, and without ever leaving a child behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 12
_TAIL_BYTES = 16 << 10
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Outcome:
    """How a tool ended."""

    code: int | None
    """Exit code, negative for a signal; None when it could not be started."""
    timed_out: bool = False
    error: str | None = None
    """Why it could not be started."""

    @property
    def ok(self) -> bool:
        """Exit code 0. Whether it did what was asked is another question: look at its output."""
        return self.code == 0

    def describe(self) -> str:
        """For a person: how it ended."""
        if self.error is not None:
            return f"could not be started: {self.error}"
        if self.timed_out:
            return "ran into its time limit"
        if self.code is not None and self.code < 0:
            return f"was ended by signal {-self.code}"
        return f"exited with {self.code}"


class Cancelled(Exception):
    """The run was called off from another thread."""


class Runner:
    """Starts tools; `cancel` makes every running one end and refuses new ones. Safe to share between threads."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Call everything off. Each `run` ends its own tool, with all that it started, and raises Cancelled."""
        self._cancelled.set()

    def run(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        cwd: Path,
        timeout: float,
        env: Mapping[str, str] | None = None,
        stdout: Path | None = None,
    ) -> Outcome:
        """Run to the end. Output is appended to `log` (standard output to `stdout` instead, when that is given).

        Raises Cancelled when `cancel` was called before or during the run.
        """
        if self.cancelled:
            raise Cancelled
        with log.open("ab") as sink, contextlib.ExitStack() as stack:
            sink.write(f"$ {shlex.join(argv)}\n".encode(errors="replace"))
            sink.flush()
            out = sink if stdout is None else stack.enter_context(stdout.open("wb"))
            try:
                child = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=sink,
                    cwd=cwd,
                    env=None if env is None else dict(env),
                    start_new_session=True,  # a process group of its own, so that its children can be ended with it
                )
            except OSError as error:
                sink.write(f"{error}\n".encode(errors="replace"))
                return Outcome(None, error=error.strerror or str(error))
            try:
                timed_out = self._wait(child, timeout)
            finally:
                code = _end(child)
            return Outcome(code, timed_out)

    def _wait(self, child: subprocess.Popen[bytes], timeout: float) -> bool:
        limit, pause = time.monotonic() + timeout, 0.001
        while not _exited(child):
            if self.cancelled:
                raise Cancelled
            if time.monotonic() > limit:
                return True
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)
        return False


def _exited(child: subprocess.Popen[bytes]) -> bool:
    """Whether it is over. It is not reaped yet: while it is a zombie its process group's number cannot be reused."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(child: subprocess.Popen[bytes]) -> int:
    """End a child and its whole process group, politely first; returns its exit code when it is gone."""
    if not _exited(child):
        _signal(child, signal.SIGTERM)
        limit = time.monotonic() + _GRACE_SECONDS
        while not _exited(child) and time.monotonic() < limit:
            time.sleep(0.005)
    _signal(child, signal.SIGKILL)  # what it started and did not end itself
    return child.wait()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def tail(log: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log, safe to print; reads no more than its end."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    shown = ("".join(c if c.isprintable() or c == "\t" else "?" for c in line)[:400] for line in text.splitlines())
    return tuple(line for line in shown if line.strip())[-lines:]
