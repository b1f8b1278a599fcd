"""A pack appears whole or not at all, replaces in one step, and cleans up after builds that were killed."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxpack.errors import EnvironmentFault, UsageError
from onnxpack.pack import publish
from onnxpack.pack.publish import publishing, refuse_existing


def fill(draft: Path, text: str = "new") -> None:
    for name in ("pack.json", "model.onnx"):
        (draft / name).write_text(text)


def publish_one(goal: Path, text: str = "new", *, force: bool = False) -> None:
    with publishing(goal, force) as draft:
        fill(draft, text)


def fail(goal: Path, error: BaseException, *, force: bool = False) -> None:
    with publishing(goal, force) as draft:
        fill(draft)
        raise error


def content(goal: Path) -> set[str]:
    return {(goal / name).read_text() for name in ("pack.json", "model.onnx")}


class WithoutCall:
    """A C library without renameat2, as other systems have it."""


class Refusing:
    """A file system that knows renameat2 but not its flags."""

    def renameat2(self, *_: Any) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


SYSTEMS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "exchange": lambda _: None,
    "no such call": lambda m: m.setattr(publish.ctypes, "CDLL", lambda *_, **__: WithoutCall()),
    "no such flags": lambda m: m.setattr(publish.ctypes, "CDLL", lambda *_, **__: Refusing()),
}


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    SYSTEMS[request.param](monkeypatch)
    return str(request.param)


def test_a_new_pack_and_a_replaced_one(tmp_path: Path, system: str) -> None:
    goal = tmp_path / "model.pack"
    publish_one(goal, "old")
    assert content(goal) == {"old"}
    publish_one(goal, "new", force=True)
    assert content(goal) == {"new"}
    assert list(tmp_path.iterdir()) == [goal], system


def test_an_empty_directory_is_taken(tmp_path: Path, system: str) -> None:
    goal = tmp_path / "model.pack"
    goal.mkdir()
    refuse_existing(goal, force=False)
    publish_one(goal)
    assert content(goal) == {"new"}, system


def test_nothing_is_left_after_a_failure(tmp_path: Path, system: str) -> None:
    goal = tmp_path / "model.pack"
    for error in (ValueError("x"), KeyboardInterrupt(), SystemExit(3), MemoryError()):
        with pytest.raises(type(error)):
            fail(goal, error)
        assert list(tmp_path.iterdir()) == [], system


def test_the_old_pack_stays_when_the_new_one_fails(tmp_path: Path, system: str) -> None:
    goal = tmp_path / "model.pack"
    publish_one(goal, "old")
    with pytest.raises(ValueError, match="x"):
        fail(goal, ValueError("x"), force=True)
    assert content(goal) == {"old"}
    assert list(tmp_path.iterdir()) == [goal], system


def test_a_pack_that_appears_while_building_is_not_overwritten(tmp_path: Path, system: str) -> None:
    goal = tmp_path / "model.pack"

    def meanwhile() -> None:
        with publishing(goal, force=False) as draft:
            fill(draft)
            goal.mkdir()
            fill(goal, "theirs")

    with pytest.raises(UsageError, match="appeared while building"):
        meanwhile()
    assert content(goal) == {"theirs"}
    assert list(tmp_path.iterdir()) == [goal], system


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pack", "--force replaces it"),
        ("other directory", "exists and is not a pack"),
        ("file", "exists and is not a pack"),
        ("link to a pack", "exists and is not a pack"),
        ("broken link", "exists and is not a pack"),
        ("no parent", "mkdir -p"),
    ],
)
def test_what_is_refused_before_any_work(tmp_path: Path, kind: str, message: str) -> None:
    goal = tmp_path / "model.pack"
    if kind == "pack":
        publish_one(goal)
    elif kind == "other directory":
        goal.mkdir()
        (goal / "thesis.txt").write_text("years of work")
    elif kind == "file":
        goal.write_text("x")
    elif kind == "link to a pack":
        publish_one(tmp_path / "real")
        goal.symlink_to("real")
    elif kind == "broken link":
        goal.symlink_to("nowhere")
    else:
        goal = tmp_path / "no" / "parent" / "model.pack"
    for force in (False, True):
        if kind == "pack" and force:
            refuse_existing(goal, force=True)
            continue
        with pytest.raises(UsageError) as caught:
            refuse_existing(goal, force)
        assert message in caught.value.render()
        assert str(goal) in caught.value.render()


@pytest.mark.parametrize("goal", [".", "", "/", "..", "a/..", "a\0b"])
def test_what_names_no_directory(goal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="not the name of a directory"):
        refuse_existing(Path(goal), force=True)


@pytest.mark.parametrize("length", [200, 201, 230, 255])
def test_names_as_long_as_a_file_system_takes(tmp_path: Path, length: int) -> None:
    goal = tmp_path / ("n" * length)
    publish_one(goal, "old")
    publish_one(goal, "new", force=True)
    assert content(goal) == {"new"}
    assert list(tmp_path.iterdir()) == [goal]


def test_a_name_that_no_file_system_takes(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="File name too long"):
        publish_one(tmp_path / ("n" * 300))


@pytest.mark.parametrize("name", ["model[1].pack", "model*.pack", "m?.pack", "é ✓.pack", "-rf", "a\nb"])
def test_odd_names(tmp_path: Path, name: str) -> None:
    goal = tmp_path / name
    for text in ("old", "new"):
        leftover = tmp_path / f".{name}.0123abcd.building"
        leftover.mkdir()
        publish_one(goal, text, force=True)
        assert content(goal) == {text}
        assert list(tmp_path.iterdir()) == [goal]


def test_leftovers_of_killed_builds_are_swept(tmp_path: Path) -> None:
    goal = tmp_path / "model.pack"
    leftover = tmp_path / ".model.pack.0123abcd.building"
    leftover.mkdir()
    fill(leftover, "half")
    publish_one(goal)
    assert list(tmp_path.iterdir()) == [goal]


def test_an_old_pack_that_had_stepped_aside_comes_back(tmp_path: Path) -> None:
    """Killed between the two renames of a system without exchange."""
    goal, aside = tmp_path / "model.pack", tmp_path / ".model.pack.0123abcd.old"
    aside.mkdir()
    fill(aside, "old")
    with pytest.raises(ValueError, match="x"):
        fail(goal, ValueError("x"), force=True)
    assert content(goal) == {"old"}
    aside.mkdir()
    publish_one(goal, "new", force=True)
    assert list(tmp_path.iterdir()) == [goal]


def test_nothing_else_is_swept(tmp_path: Path) -> None:
    """Only names that we make ourselves: a person may have kept something beside the pack."""
    kept = [
        ".model.pack.backup.old",
        ".model.pack.2024.old",
        ".model.pack.0123ABCD.old",
        ".model.pack.0123abcde.building",
        ".other.pack.0123abcd.building",
        ".model.packs.0123abcd.old",
        "model.pack.0123abcd.old",
        "xmodel.pack.0123abcd.building",
    ]
    for name in kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("x")
    (tmp_path / ".model.pack.0123abcd.old").write_text("a file")
    (tmp_path / ".model.pack.89abcdef.building").symlink_to(".other.pack.0123abcd.building")
    publish_one(tmp_path / "model.pack")
    publish_one(tmp_path / "model.pack", force=True)
    for name in kept:
        assert (tmp_path / name / "precious").read_text() == "x"
    assert (tmp_path / ".model.pack.0123abcd.old").read_text() == "a file"


def test_a_build_that_still_runs_is_not_swept(tmp_path: Path) -> None:
    goal = tmp_path / "model.pack"
    with publishing(goal, force=True) as first:
        fill(first, "first")
        with publishing(goal, force=True) as second:
            fill(second, "second")
        assert content(goal) == {"second"}
        assert first.is_dir()
    assert content(goal) == {"first"}
    assert list(tmp_path.iterdir()) == [goal]


def test_a_reader_never_sees_half_a_pack(tmp_path: Path) -> None:
    """A reader that holds the directory open reads one pack, old or new, whichever; the name always exists."""
    goal, seen, stop = tmp_path / "model.pack", [], threading.Event()
    publish_one(goal, "0")

    def read() -> None:
        while not stop.is_set():
            fd = os.open(goal, os.O_RDONLY | os.O_DIRECTORY)
            try:
                parts = []
                for name in ("pack.json", "model.onnx"):
                    file = os.open(name, os.O_RDONLY, dir_fd=fd)
                    parts.append(os.read(file, 9))
                    os.close(file)
                seen.append(len(set(parts)) == 1)
            except FileNotFoundError:
                pass  # opened just before it was replaced, and the old one is already gone: the reader asks again
            finally:
                os.close(fd)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(1, 60):
            publish_one(goal, str(i), force=True)
            assert goal.is_dir()
    finally:
        stop.set()
        reader.join()
    assert seen
    assert all(seen)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_faults_of_the_file_system_are_one_line_and_leave_nothing(tmp_path: Path, code: int) -> None:
    goal = tmp_path / "model.pack"
    with pytest.raises(EnvironmentFault) as caught:
        fail(goal, OSError(code, os.strerror(code), "model.onnx"))
    line = caught.value.render()
    assert caught.value.exit_code == 5
    assert line.startswith(str(goal))
    assert os.strerror(code) in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(EnvironmentFault, match="Permission denied"):
            publish_one(tmp_path / "model.pack")
    finally:
        tmp_path.chmod(0o755)


def test_a_draft_that_vanishes_is_a_fault(tmp_path: Path) -> None:
    goal = tmp_path / "model.pack"
    with pytest.raises(EnvironmentFault), publishing(goal, force=False) as draft:
        shutil.rmtree(draft)
    assert list(tmp_path.iterdir()) == []
