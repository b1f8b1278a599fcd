"""A directory that appears whole or not at all.

It is written beside its goal, under a name that starts with a dot, and renamed once. Replacing exchanges the two
directories in one step where the system can, so that a reader never sees half a pack and a kill never loses the old
one. A build that was killed leaves its dotted directory behind; the next build into the same place removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxpack.errors import EnvironmentFault, UsageError

_RENAME_NOREPLACE, _RENAME_EXCHANGE, _AT_FDCWD = 1, 2, -100


def refuse_existing(goal: Path, force: bool) -> None:
    """Before any work: is the goal free, or ours to replace? UsageError otherwise."""
    if goal.name in ("", "..") or "\0" in str(goal):
        raise UsageError("is not the name of a directory to make", where=repr(str(goal)), hint="name the pack itself")
    if not goal.parent.is_dir():
        raise UsageError("its directory does not exist", where=str(goal), hint=f"mkdir -p {goal.parent}")
    if not os.path.lexists(goal):
        return
    if goal.is_symlink() or not goal.is_dir():
        raise UsageError("exists and is not a pack", where=str(goal), hint="choose another path")
    if not any(goal.iterdir()):
        return
    if not (goal / "pack.json").exists():
        raise UsageError("exists and is not a pack", where=str(goal), hint="choose another path")
    if not force:
        raise UsageError("exists already", where=str(goal), hint="--force replaces it")


@contextmanager
def publishing(goal: Path, force: bool) -> Iterator[Path]:
    """A new directory to fill; when the block ends well it becomes `goal`, otherwise nothing is left of it."""
    _sweep(goal)
    draft, lock = _new_draft(goal)
    try:
        yield draft
        _swap_in(draft, goal, force)
    except OSError as error:
        raise _fault(error, goal) from None
    finally:
        # After an exchange the draft's name holds the old pack; after a plain rename it is gone.
        shutil.rmtree(draft, ignore_errors=True)
        os.close(lock)


def _fault(error: OSError, goal: Path) -> EnvironmentFault:
    what = f"cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = f"no space: {error.strerror}, {shutil.disk_usage(goal.parent).free} bytes are free"
    return EnvironmentFault(what, where=str(goal), hint="nothing was changed there")


def _beside(goal: Path, kind: str) -> Path:
    """A new dotted name next to the goal."""
    return goal.with_name(f".{_stem(goal)}.{secrets.token_hex(4)}.{kind}")


def _stem(goal: Path) -> str:
    """The goal's name, shortened where the dotted one would be too long for a file system."""
    name = os.fsencode(goal.name)
    return goal.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()


def _left_behind(goal: Path, kind: str) -> list[Path]:
    """What earlier builds into this goal left, and nothing else that a person may have put there."""
    ours = re.compile(rf"\.{re.escape(_stem(goal))}\.[0-9a-f]{{8}}\.{kind}")
    try:
        return sorted(path for path in goal.parent.iterdir() if ours.fullmatch(path.name) and path.is_dir())
    except OSError:
        return []


def _new_draft(goal: Path) -> tuple[Path, int]:
    """A directory and its lock. Another build's sweep may take it between the two steps: then another is made."""
    for _ in range(100):
        draft = _beside(goal, "building")
        try:
            draft.mkdir()
        except OSError as error:
            raise _fault(error, goal) from None
        with suppress(OSError):
            fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if draft.stat().st_ino == os.fstat(fd).st_ino:
                    return draft, fd
            os.close(fd)
    raise EnvironmentFault("no directory to build in can be kept", where=str(goal.parent))


def _sweep(goal: Path) -> None:
    """Clean up after killed builds: drafts whose lock nobody holds, and an old pack that had stepped aside."""
    for aside in _left_behind(goal, "old"):
        with suppress(OSError):
            if os.path.lexists(goal):
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(goal)
    for draft in _left_behind(goal, "building"):
        with suppress(OSError):
            fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(draft, ignore_errors=True)
            finally:
                os.close(fd)


def _swap_in(draft: Path, goal: Path, force: bool) -> None:
    with suppress(OSError):
        goal.rmdir()  # an empty directory in the way holds nothing to lose
    if _renameat2(draft, goal, _RENAME_NOREPLACE):
        return
    if not force:
        raise UsageError("appeared while building", where=str(goal), hint="--force replaces it")
    if not _renameat2(draft, goal, _RENAME_EXCHANGE):
        _two_renames(draft, goal)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """One rename with flags; False when the target is in the way or the file system has no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return _plain(source, target, flags)
    if libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        return False
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return _plain(source, target, flags)
    raise OSError(code, os.strerror(code), str(target))


def _plain(source: Path, target: Path, flags: int) -> bool:
    if flags == _RENAME_EXCHANGE or os.path.lexists(target):
        return False
    source.rename(target)
    return True


def _two_renames(draft: Path, goal: Path) -> None:
    """Without exchange: the old pack steps aside, the new one in; if that fails, the old one steps back."""
    aside = _beside(goal, "old")
    goal.rename(aside)
    try:
        draft.rename(goal)
    except OSError:
        aside.rename(goal)
        raise
    shutil.rmtree(aside, ignore_errors=True)
