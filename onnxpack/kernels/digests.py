"""Digests of files, remembered by what the file system says about them, so that large tools are not read every time.

A file counts as unchanged while device, inode, size and both its change times are; a changed modification time alone
costs one more reading and changes no digest. The memory is a hint: it may be lost, or not be writable.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path


class Digests:
    """sha256 of files, with a memory in `store` (None: only in this process). Safe to share between threads."""

    def __init__(self, store: Path | None = None) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known = _read(store)
        self._changed = False

    def file(self, path: Path) -> str:
        """Digest of one file's content. OSError when it cannot be read."""
        real = path.resolve()
        status = real.stat()
        stamp = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        with self._lock:
            known = self._known.get(str(real))
        if isinstance(known, list) and known[:-1] == stamp:
            return str(known[-1])
        with real.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with self._lock:
            self._known[str(real)] = [*stamp, digest]
            self._changed = True
        return digest

    def tree(self, root: Path, suffixes: Iterable[str]) -> str:
        """Digest over names and contents of all files with these suffixes below `root`; linked folders not followed.

        The suffix ".so" stands for versioned names as well (`libx.so.21`), the empty one for every file.
        """
        wanted = tuple(suffixes)
        total = hashlib.sha256()
        for folder, below, names in os.walk(root):
            below[:] = sorted(name for name in below if name != "__pycache__")
            for name in sorted(names):
                path = Path(folder, name)
                if (name.endswith(wanted) or (".so" in wanted and ".so." in name)) and path.is_file():
                    total.update(f"{path.relative_to(root).as_posix()}\0{self.file(path)}\n".encode())
        return total.hexdigest()

    def save(self) -> None:
        """Write the memory, if there is anything new and the place can be written."""
        with self._lock:
            if self._store is None or not self._changed:
                return
            text = json.dumps(self._known)
            self._changed = False
        try:
            self._store.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._store.parent, prefix=".digests-", suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(name).replace(self._store)
        except OSError:
            return


def _read(store: Path | None) -> dict[str, list[object]]:
    try:
        found = json.loads(store.read_bytes()) if store is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def combine(parts: object) -> str:
    """Digest of a JSON value: same content, same digest, whatever the order of keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
