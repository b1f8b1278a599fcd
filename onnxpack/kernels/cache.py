"""The cache of kernels: content-addressed, shared by processes and users, never half-written.

``entries/ab/<key>/`` holds kernel.elf, kernel.json and build.log and appears by one rename; ``locks/<key>.lock`` is
held while a key is being made, so that of many processes one compiles and the others find its result; ``work/`` holds
the private folders of builds that run or were killed; ``logs/`` keeps the output of the last failure of a key. A cache
that cannot be written is still read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onnxpack.errors import EnvironmentFault, KernelError
from onnxpack.kernels.compile import ELF, LOG, RECORD
from onnxpack.kernels.elf_report import check
from onnxpack.kernels.library import Kernel, Record, read_record
from onnxpack.kernels.process import Cancelled, Runner

VARIABLE = "ONNXPACK_CACHE"
LAYOUT = "kernels-1"
_LOCK_POLL_SECONDS = 0.05


def default_folder() -> Path:
    """Where the user's cache is: $ONNXPACK_CACHE, or the platform's place for caches."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    import platformdirs

    return Path(platformdirs.user_cache_dir("onnxpack", appauthor=False))


@dataclass(frozen=True)
class Entry:
    """One kernel in the cache."""

    key: str
    folder: Path
    nbytes: int
    used: float
    """Seconds since the epoch when it was last used: only `prune` looks at it."""

    @property
    def elf(self) -> Path:
        """The kernel."""
        return self.folder / ELF

    def record(self) -> Record | None:
        """Its record; None when it is damaged or gone."""
        try:
            return read_record(self.folder / RECORD)
        except KernelError:
            return None


class Cache:
    """One cache folder. It is made when something is first written."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (
            folder if folder is not None else default_folder()
        ).absolute()  # tools run in folders of their own
        self.root = self.folder / LAYOUT

    @property
    def digests(self) -> Path:
        """Where file digests are remembered."""
        return self.root / "digests.json"

    def log(self, key: str) -> Path:
        """Where the output of a failed build of this key is kept."""
        return self.root / "logs" / f"{key[:16]}.log"

    def get(self, key: str) -> Kernel | None:
        """The kernel of a key, if it is there and as its record says (size and digest). Damage counts as absence."""
        folder = self._place(key)
        try:
            record = read_record(folder / RECORD)
            if record is None or record.key != key:
                return None
            check(folder / ELF, record.gemm, record)
        except KernelError:
            return None
        with contextlib.suppress(OSError):  # so that prune knows what is in use; a read-only cache has no prune
            os.utime(folder / ELF)
        return Kernel(record.gemm, folder / ELF, record)

    def writable(self) -> bool:
        """Whether kernels can be put in."""
        try:
            for name in ("entries", "locks", "work", "logs"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root / "work"):
                return True
        except OSError:
            return False

    @contextlib.contextmanager
    def lock(self, key: str, runner: Runner) -> Iterator[None]:
        """Hold a key while making it. Waits for whoever holds it; Cancelled when the runner is called off meanwhile."""
        from filelock import FileLock, Timeout

        held = FileLock(self.root / "locks" / f"{key}.lock", thread_local=False)
        while True:
            if runner.cancelled:
                raise Cancelled
            try:
                held.acquire(timeout=0.5, poll_interval=_LOCK_POLL_SECONDS)
                break
            except Timeout:
                continue
        try:
            yield
        finally:
            held.release()

    @contextlib.contextmanager
    def work(self, key: str) -> Iterator[Path]:
        """A private folder for one build; what is left in it afterwards is thrown away."""
        folder = Path(tempfile.mkdtemp(prefix=f"{key[:16]}-", dir=self.root / "work"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def put(self, key: str, work: Path) -> Kernel:
        """Publish what a build left in `work`, by one rename. The caller holds the lock of the key."""
        staged = work / "entry"
        staged.mkdir()
        for name in (ELF, RECORD, LOG):
            if (work / name).exists():
                (work / name).rename(staged / name)
                _sync(staged / name)
        place = self._place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():  # damaged, or we would not be here
            place.rename(work / "damaged")
        staged.rename(place)
        kernel = self.get(key)
        if kernel is None:
            raise EnvironmentFault("a kernel that was just written cannot be read back", where=str(place))
        return kernel

    def keep_log(self, key: str, work: Path) -> Path | None:
        """Keep the log of a failed build."""
        try:
            kept = self.log(key)
            shutil.copyfile(work / LOG, kept)
        except OSError:
            return None
        return kept

    def _place(self, key: str) -> Path:
        return self.root / "entries" / key[:2] / key

    # --- what the user does with it ---

    def entries(self) -> list[Entry]:
        """Everything in it, by key."""
        found = []
        for folder in sorted(self.root.glob("entries/??/*")):
            try:
                files = [file.stat() for file in folder.iterdir()]
                used = (folder / ELF).stat().st_mtime if (folder / ELF).exists() else 0.0
            except OSError:
                continue
            found.append(Entry(folder.name, folder, sum(file.st_size for file in files), used))
        return found

    def find_design(self, design_key: str) -> Kernel | None:
        """A kernel of the same shape, design and parameters, made by whatever tools: for machines that have none."""
        for entry in self.entries():
            record = entry.record()
            if record is not None and record.provenance.get("design_key") == design_key:
                kernel = self.get(entry.key)
                if kernel is not None:
                    return kernel
        return None

    def verify(self) -> list[tuple[str, str]]:
        """(key, problem) of every damaged entry."""
        bad = []
        for entry in self.entries():
            try:
                record = read_record(entry.folder / RECORD)
                if record is None:
                    raise KernelError("it has no record")
                if record.key != entry.key:
                    raise KernelError("its record is of another key")
                check(entry.elf, record.gemm, record)
            except KernelError as error:
                bad.append((entry.key, error.what))
        return bad

    def prune(self, max_bytes: int | None = None, days: float | None = None, damaged: bool = True) -> list[Entry]:
        """Remove entries: damaged ones, those unused for `days`, and the longest unused until `max_bytes` are left.

        Left-overs of killed builds go as well. Returns what was removed. A key that is being made is left alone.
        """
        self._sweep()
        bad = {key for key, _ in self.verify()} if damaged else set()
        entries = sorted(self.entries(), key=lambda entry: (entry.used, entry.key))
        total = sum(entry.nbytes for entry in entries)
        removed = []
        for entry in entries:
            old = days is not None and time.time() - entry.used > days * 86_400
            if not (entry.key in bad or old or (max_bytes is not None and total > max_bytes)):
                continue
            if self._remove(entry):
                removed.append(entry)
                total -= entry.nbytes
        return removed

    def _remove(self, entry: Entry) -> bool:
        """Take an entry away by one rename, so that no reader meets half of it."""
        with self._try_lock(entry.key) as free:
            if not free:
                return False
            trash = Path(tempfile.mkdtemp(prefix=f"{entry.key[:16]}-", dir=self.root / "work"))
            try:
                entry.folder.rename(trash / "entry")
            except OSError as error:
                raise EnvironmentFault(f"cannot be removed: {error.strerror}", where=str(entry.folder)) from None
            finally:
                shutil.rmtree(trash, ignore_errors=True)
            return True

    def _sweep(self) -> None:
        """Remove the work folders of builds that are gone: those whose key nobody holds."""
        held = {path.name[:16]: path.stem for path in self.root.glob("locks/*.lock")}
        for folder in self.root.glob("work/*"):
            key = held.get(folder.name[:16])
            with self._try_lock(key) if key else contextlib.nullcontext(True) as free:
                if free:
                    shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _try_lock(self, key: str) -> Iterator[bool]:
        from filelock import FileLock, Timeout

        (self.root / "locks").mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.root / "locks" / f"{key}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def _sync(path: Path) -> None:
    """Bring a file to the disk before its name appears: a power cut must not leave an empty kernel."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
