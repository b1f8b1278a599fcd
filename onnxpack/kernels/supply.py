"""Where a build gets its kernels: a library, and the toolchain for what the library lacks, when it may be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onnxpack.kernels.library import Library
from onnxpack.shapes import Gemm

if TYPE_CHECKING:
    from onnxpack.kernels.generate import Progress, Result


@dataclass(frozen=True)
class Supply:
    """Without `compile`, only what the library holds."""

    library: Library = field(default_factory=Library)
    compile: bool = False
    out_dir: Path | None = None
    """Where new ELFs and their records go; None: they stay in the cache."""
    cache: Path | None = None
    jobs: int | None = None
    on_progress: Callable[[Progress], None] | None = None

    @property
    def shapes(self) -> frozenset[Gemm] | None:
        """What may be planned: the library's shapes, or None, whatever can be made."""
        return None if self.compile or not self.library.kernels else self.library.shapes

    def get(self, shapes: Iterable[Gemm]) -> list[Result]:
        """One result per distinct shape, sorted by shape. A shape that cannot be had says why."""
        wanted = sorted(set(shapes))
        if self.compile:
            from onnxpack.kernels.generate import ensure

            return ensure(
                wanted,
                out_dir=self.out_dir,
                library=self.library,
                cache=self.cache,
                jobs=self.jobs,
                on_progress=self.on_progress,
            )
        return [self._held(gemm) for gemm in wanted]

    def _held(self, gemm: Gemm) -> Result:
        from onnxpack.kernels.generate import Result

        kernel = self.library.find(gemm)
        if kernel is None or kernel.path is None:
            command = f"onnxpack kernels build --shape {gemm.m},{gemm.k},{gemm.n} --elfs-out DIR"
            return Result(gemm, "missing", reason="no library has it, and nothing was to be compiled", command=command)
        return Result(gemm, "library", kernel)
