"""Kernels for tests: ELFs that are structurally whole and say, in their configuration, which product they stand for."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "support"))
import npu_elf_writer as writer

from onnxpack import records
from onnxpack.kernels import canary
from onnxpack.kernels.library import SCHEMA, Record
from onnxpack.shapes import Gemm


def elf(gemm: Gemm) -> bytes:
    """The ELF of a shape."""
    moves = [(0, 0, gemm.m * gemm.k), (1, 0, gemm.k * gemm.n), (2, 0, 4 * gemm.m * gemm.n)]
    return writer.full_elf(pdi=f"i8 gemm {gemm};".encode(), moves=moves).to_bytes()


def library(folder: Path, shapes: Iterable[Gemm]) -> Path:
    """A directory with kernels of these shapes, each with its record."""
    folder.mkdir(parents=True, exist_ok=True)
    for gemm in shapes:
        data = elf(gemm)
        path = folder / f"i8_{gemm}.elf"
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        record = Record(
            SCHEMA, digest, gemm.m, gemm.k, gemm.n, digest, len(data), "npu2", "gemm_i8", "main:sequence",
            canary=canary.make(gemm),
        )  # fmt: skip
        path.with_suffix(".json").write_text(records.dumps(record))
    return folder
