"""Make the kernels that are missing: look in the library, then in the cache, then compile. No failure stops another."""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from onnxpack import records
from onnxpack.errors import EnvironmentFault, KernelError, UsageError
from onnxpack.kernels.cache import Cache
from onnxpack.kernels.compile import ELF, LOG, TIMEOUT_SECONDS, CompileError, compile_kernel
from onnxpack.kernels.digests import Digests
from onnxpack.kernels.elf_report import check
from onnxpack.kernels.files import write_file
from onnxpack.kernels.fitting import fit
from onnxpack.kernels.library import Kernel, Library, elf_name, read_directory, read_record
from onnxpack.kernels.process import Runner, tail
from onnxpack.kernels.recipe import Draft, Inputs, Recipe, draft
from onnxpack.kernels.target import NPU2, Target, require_elf
from onnxpack.kernels.target import get as get_target
from onnxpack.kernels.toolchain import Toolchain, find
from onnxpack.shapes import Gemm

TIMEOUT_VARIABLE = "ONNXPACK_TOOL_TIMEOUT"
"""Seconds that one step of one kernel may take."""

Status = Literal["library", "cached", "built", "missing", "failed", "refused"]
"""library: the given library has it. cached: made before from the same inputs. built: compiled now. missing: there is
no toolchain to make it. failed: the toolchain ran and made nothing usable. refused: no tiling of it fits the array."""


@dataclass(frozen=True)
class Result:
    """What became of one shape."""

    gemm: Gemm
    status: Status
    kernel: Kernel | None = None
    """Path and record; None when missing, failed or refused."""
    reason: str | None = None
    """One line: why there is no kernel."""
    log_tail: tuple[str, ...] = ()
    """Last lines of the failing tool's output."""
    log: Path | None = None
    """The whole of it."""
    command: str = ""
    """The command line that would make this kernel."""

    @property
    def ok(self) -> bool:
        """Whether there is a kernel."""
        return self.kernel is not None


@dataclass(frozen=True)
class Progress:
    """One event: a shape was taken up (`started`) or is settled (its `result`)."""

    gemm: Gemm
    done: int
    total: int
    result: Result | None = None


def ensure(
    shapes: Iterable[Gemm],
    target: Target | str = NPU2,
    out_dir: Path | None = None,
    library: Library | None = None,
    cache: Path | None = None,
    jobs: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Result]:
    """One result per distinct shape, sorted by shape. Never raises for a shape that cannot be made: its result says so.

    Compiled ELFs and their records are published into `out_dir` (default: they stay in the cache and are used from
    there). `cache` is the folder of the cache (default: the user's). `jobs` compiles run at once (default: cores).
    `on_progress` is called from this thread only.

    UsageError: the target cannot have ELFs. EnvironmentFault: neither `out_dir` nor the cache can be written.
    KeyboardInterrupt leaves no child process and no half-written file; the next call goes on where this one stopped.
    """
    settled = get_target(target) if isinstance(target, str) else target
    require_elf(settled)
    wanted = sorted(set(shapes))
    store = Cache(cache)
    digests = Digests(store.digests)
    work = _Work(settled, out_dir, library or Library(), store, digests)
    if not wanted:
        return []
    if out_dir is not None:
        _make_folder(out_dir)
    try:
        return _run_all(work, wanted, jobs or os.cpu_count() or 1, on_progress)
    finally:
        digests.save()


def _time_limit() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else TIMEOUT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{text!r} is not a number of seconds", where=TIMEOUT_VARIABLE)
    return seconds


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(folder)) from None


def _run_all(
    work: _Work, wanted: list[Gemm], jobs: int, on_progress: Callable[[Progress], None] | None
) -> list[Result]:
    report = on_progress or (lambda progress: None)
    results: dict[Gemm, Result] = {}
    with ThreadPoolExecutor(max_workers=min(jobs, len(wanted)), thread_name_prefix="kernel") as pool:
        try:
            waiting = {}
            for gemm in wanted:
                waiting[pool.submit(work.settle, gemm)] = gemm
                report(Progress(gemm, 0, len(wanted)))
            while waiting:
                # A short wait, again and again: the interpreter delivers Ctrl-C to this thread only between waits.
                done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda f: waiting[f]):
                    gemm = waiting.pop(future)
                    results[gemm] = future.result()
                    report(Progress(gemm, len(results), len(wanted), results[gemm]))
        except BaseException:
            work.runner.cancel()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [results[gemm] for gemm in wanted]


class _Work:
    """One call of `ensure`: what all its shapes share."""

    def __init__(self, target: Target, out_dir: Path | None, library: Library, store: Cache, digests: Digests) -> None:
        self.target = target
        self.out_dir = out_dir
        self.library = library
        self.store = store
        self.digests = digests
        self.runner = Runner()
        self.timeout = _time_limit()
        self._lock = threading.Lock()
        self._chain: Toolchain | None = None
        self._inputs: Inputs | None = None

    def settle(self, gemm: Gemm) -> Result:
        """What becomes of one shape."""
        command = self.command(gemm)
        listed = self.library.find(gemm)
        note = ""
        if listed is not None and listed.path is not None:
            try:
                check(listed.path, gemm, listed.record, self.target)
                return Result(gemm, "library", listed, command=command)
            except KernelError as error:
                note = f"the library's file is unusable: {error.render()}; "
        drafted = draft(gemm, self.target)
        if isinstance(drafted, str):
            return Result(gemm, "refused", reason=note + drafted + self._padding(gemm), command=command)
        try:
            result = self._make(drafted)
        except OSError as error:  # the disk is full, the cache was taken away, ...
            raise EnvironmentFault(error.strerror or str(error), where=error.filename) from None
        return replace(result, command=command, reason=note + result.reason if result.reason else None)

    def _padding(self, gemm: Gemm) -> str:
        larger = fit(gemm, self.target)
        if larger is None:
            return "; no larger kernel holds it either: split it"
        return f"; {larger.kernel} would hold it ({100 * larger.wasted(gemm):.1f} % of its work is padding)"

    def command(self, gemm: Gemm) -> str:
        """The command line that makes this kernel."""
        words = ["onnxpack", "kernels", "build", "--shape", f"{gemm.m},{gemm.k},{gemm.n}"]
        if self.out_dir is not None:
            words += ["--elfs-out", str(self.out_dir)]
        return shlex.join(words)

    def _make(self, drafted: Draft) -> Result:
        chain, inputs = self._toolchain()
        if inputs is None:
            return self._without_tools(drafted, chain)
        try:
            with self._lock:  # the first shape asks the tools, the others find the answers
                recipe = inputs.complete(drafted)
        except EnvironmentFault as error:  # a tool is there and broken
            return Result(drafted.gemm, "missing", reason=error.render())
        kernel = self._published(recipe.key, recipe.gemm) or self.store.get(recipe.key)
        if kernel is not None:
            return Result(drafted.gemm, "cached", self._publish(kernel))
        if not self.store.writable():
            return self._build_aside(recipe, chain)
        with self.store.lock(recipe.key, self.runner):
            kernel = self.store.get(recipe.key)  # another process may have made it while we waited
            if kernel is not None:
                return Result(drafted.gemm, "cached", self._publish(kernel))
            with self.store.work(recipe.key) as folder:
                return self._build(recipe, chain, folder)

    def _toolchain(self) -> tuple[Toolchain, Inputs | None]:
        with self._lock:
            if self._chain is None:
                self._chain = find(family=self.target.family)
                if self._chain.complete:
                    self._inputs = Inputs(self._chain, self.digests, self.runner)
            return self._chain, self._inputs

    def _without_tools(self, drafted: Draft, chain: Toolchain) -> Result:
        """No toolchain, no key: but what the same design made earlier, with whatever tools, can still be used."""
        for kernel in read_directory(self.out_dir).kernels if self.out_dir is not None else ():
            record = kernel.record
            if record is not None and record.provenance.get("design_key") == drafted.design_key:
                try:
                    check(kernel_path(kernel), drafted.gemm, record, self.target)
                except KernelError:
                    continue
                return Result(drafted.gemm, "cached", kernel)
        kept = self.store.find_design(drafted.design_key)
        if kept is not None:
            return Result(drafted.gemm, "cached", self._publish(kept))
        names = ", ".join(f"{tool.name} ({tool.problem or 'not found'})" for tool in chain.missing)
        return Result(drafted.gemm, "missing", reason=f"no toolchain: {names}; see `onnxpack doctor`")

    def _build(self, recipe: Recipe, chain: Toolchain, folder: Path) -> Result:
        try:
            compile_kernel(recipe, chain, folder, self.runner, self.timeout)
        except CompileError as error:
            log = self.store.keep_log(recipe.key, folder)
            return Result(recipe.gemm, "failed", reason=str(error), log_tail=tail(folder / LOG), log=log)
        return Result(recipe.gemm, "built", self._publish(self.store.put(recipe.key, folder)))

    def _build_aside(self, recipe: Recipe, chain: Toolchain) -> Result:
        """The cache is read-only: build in a temporary folder and publish to `out_dir` alone."""
        if self.out_dir is None:
            hint = "give --elfs-out, or another --elf-cache"
            raise EnvironmentFault("the cache cannot be written", where=str(self.store.folder), hint=hint)
        with tempfile.TemporaryDirectory(prefix="onnxpack-") as name:
            folder = Path(name)
            try:
                record = compile_kernel(recipe, chain, folder, self.runner, self.timeout)
            except CompileError as error:
                return Result(recipe.gemm, "failed", reason=str(error), log_tail=tail(folder / LOG))
            return Result(recipe.gemm, "built", self._publish(Kernel(recipe.gemm, folder / ELF, record)))

    def _published(self, key: str, gemm: Gemm) -> Kernel | None:
        """The kernel of this key in `out_dir`, when it is whole."""
        if self.out_dir is None:
            return None
        path = self.out_dir / elf_name(gemm, key)
        try:
            record = read_record(path.with_suffix(".json"))
            if record is None or record.key != key:
                return None
            check(path, gemm, record, self.target)
        except KernelError:
            return None
        return Kernel(gemm, path, record)

    def _publish(self, kernel: Kernel) -> Kernel:
        """Copy a kernel and its record into `out_dir`: the record first, so that no ELF is ever seen without it."""
        record, source = kernel.record, kernel_path(kernel)
        if self.out_dir is None or source.parent == self.out_dir:
            return kernel
        assert record is not None
        path = self.out_dir / elf_name(kernel.gemm, record.key)
        try:
            write_file(path.with_suffix(".json"), records.dumps(record, indent=2).encode())
            write_file(path, source.read_bytes())
        except OSError as error:
            raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(path)) from None
        return Kernel(kernel.gemm, path, record)


def kernel_path(kernel: Kernel) -> Path:
    """Path of a kernel that has a file."""
    assert kernel.path is not None
    return kernel.path
