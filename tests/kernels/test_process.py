"""Tools run apart: logged, limited, and never left behind."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from onnxpack.kernels.process import Cancelled, Outcome, Runner, tail

SPAWNS = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '300']).pid, flush=True); time.sleep({})"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid: int) -> bool:
    limit = time.monotonic() + 5
    while alive(pid) and time.monotonic() < limit:
        time.sleep(0.01)
    return not alive(pid)


def python(tmp_path: Path, code: str, timeout: float = 30, runner: Runner | None = None) -> Outcome:
    argv = [sys.executable, "-SE", "-c", code]
    return (runner or Runner()).run(argv, tmp_path / "log", cwd=tmp_path, timeout=timeout)


def child_of(log: Path) -> int:
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        lines = log.read_text().splitlines() if log.exists() else []
        if lines and lines[-1].isdigit():
            return int(lines[-1])
        time.sleep(0.01)
    raise AssertionError("the child never said its number")


def test_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    outcome = python(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (outcome.code, outcome.ok, outcome.describe()) == (3, False, "exited with 3")
    assert {"out", "err"} <= set((tmp_path / "log").read_text().splitlines())


def test_what_a_tool_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    assert python(tmp_path, SPAWNS.format(0)).ok
    assert gone(child_of(tmp_path / "log"))


def test_a_time_limit_ends_the_tool_and_its_children(tmp_path: Path) -> None:
    outcome = python(tmp_path, SPAWNS.format(300), timeout=0.5)
    assert outcome.timed_out
    assert not outcome.ok
    assert gone(child_of(tmp_path / "log"))


def test_a_deaf_tool_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    start = time.monotonic()
    assert python(tmp_path, code, timeout=0.3).code == -9
    assert time.monotonic() - start < 20


def test_cancelling_ends_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    runner = Runner()
    seen: list[BaseException] = []

    def work() -> None:
        try:
            python(tmp_path, SPAWNS.format(300), runner=runner)
        except Cancelled as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    child = child_of(tmp_path / "log")
    runner.cancel()
    thread.join(10)
    assert seen
    assert gone(child)
    with pytest.raises(Cancelled):
        python(tmp_path, "pass", runner=runner)


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    outcome = Runner().run([str(tmp_path / "none")], tmp_path / "log", cwd=tmp_path, timeout=5)
    assert outcome.code is None
    assert "could not be started" in outcome.describe()


def test_the_end_of_a_log_is_short_and_printable(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 10**6 + b"\n" + b"a\x1b[31m\xff\n\n" * 50)
    lines = tail(log)
    assert len(lines) == 12
    assert "\x1b" not in "".join(lines)
    assert tail(tmp_path / "none") == ()
