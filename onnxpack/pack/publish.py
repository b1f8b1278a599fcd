"""A directory that appears whole or not at all.

It is written beside its goal, under a name that starts with a dot, and renamed once. Replacing exchanges the two
directories in one step where the system can, so that a reader never sees half a pack and a kill never loses the old
one. A build that was killed leaves its dotted directory behind; the next build into the same place removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxpack.errors import EnvironmentFault, UsageError

_RENAME_NOREPLACE, _RENAME_EXCHANGE, _AT_FDCWD = 1, 2, -100


def refuse_existing(goal: Path, force: bool) -> None:
    """Before any work: is the goal free, or ours to replace? UsageError otherwise."""
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
    finally:
        # After an exchange the draft's name holds the old pack; after a plain rename it is gone.
        shutil.rmtree(draft, ignore_errors=True)
        os.close(lock)


def _new_draft(goal: Path) -> tuple[Path, int]:
    """A directory and its lock. Another build's sweep may take it between the two steps: then another is made."""
    for _ in range(100):
        draft = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}.building")
        try:
            draft.mkdir()
        except OSError as error:
            raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(goal.parent)) from None
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
    for aside in goal.parent.glob(f".{_escape(goal.name)}.*.old"):
        with suppress(OSError):
            if os.path.lexists(goal):
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(goal)
    for draft in goal.parent.glob(f".{_escape(goal.name)}.*.building"):
        with suppress(OSError):
            fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(draft, ignore_errors=True)
            finally:
                os.close(fd)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _swap_in(draft: Path, goal: Path, force: bool) -> None:
    with suppress(OSError):
        goal.rmdir()  # an empty directory in the way holds nothing to lose
    try:
        if _renameat2(draft, goal, _RENAME_NOREPLACE):
            return
        if not force:
            raise UsageError("appeared while building", where=str(goal), hint="--force replaces it")
        if _renameat2(draft, goal, _RENAME_EXCHANGE):
            return
        _two_renames(draft, goal)
    except OSError as error:
        raise EnvironmentFault(f"cannot be published: {error.strerror}", where=str(goal)) from None


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
    aside = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}.old")
    goal.rename(aside)
    try:
        draft.rename(goal)
    except OSError:
        aside.rename(goal)
        raise
    shutil.rmtree(aside, ignore_errors=True)
