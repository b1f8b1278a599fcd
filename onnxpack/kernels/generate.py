"""Make the kernels that are missing: look in the library, then in the cache, then compile. No failure stops another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onnxpack.kernels.library import Kernel, Library
from onnxpack.kernels.target import NPU2, Target
from onnxpack.shapes import Gemm

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
    raise NotImplementedError
