"""Room on the disk: known before the work, reserved before the bytes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from onnxpack.errors import EnvironmentFault


def require(folder: Path, nbytes: int) -> None:
    """EnvironmentFault when the file system of `folder` has less than `nbytes` free."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise EnvironmentFault(
            f"no space: {nbytes} bytes are needed, {free} are free", where=str(folder), hint="make room"
        )


def reserve(fd: int, path: Path, nbytes: int) -> None:
    """Give an open file its space now, so that running out of it is an error here and not a signal later."""
    if not nbytes:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            os.truncate(fd, nbytes)  # this file system cannot reserve; the size is right at least
            return
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(path.parent).free
            what = f"no space: {nbytes} bytes are needed, {free} are free ({error.strerror})"
            raise EnvironmentFault(what, where=str(path), hint="make room, or choose another place") from None
        raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(path)) from None
