"""Kernels into a pack: checked, copied beside the graph, and told to the sites that the plan runs on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnxpack import records
from onnxpack.errors import KernelError
from onnxpack.kernels.elf_report import check
from onnxpack.kernels.library import Kernel
from onnxpack.pack.manifest import FileRecord, KernelRecord
from onnxpack.planning.records import Execution
from onnxpack.shapes import Gemm

FOLDER = "kernels"


@dataclass(frozen=True)
class Bound:
    """Kernels that are in the pack."""

    records: tuple[KernelRecord, ...] = ()
    files: tuple[FileRecord, ...] = ()


def bind(kernels: Iterable[Kernel], draft: Path) -> Bound:
    """Copy kernels into a pack that is being written. KernelError when one is not an ELF of its shape."""
    made, files = [], []
    for kernel in sorted(kernels, key=lambda kernel: kernel.gemm):
        if kernel.path is None:
            continue
        check(kernel.path, kernel.gemm, kernel.record)
        (draft / FOLDER).mkdir(exist_ok=True)
        data = kernel.path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if kernel.record is not None and kernel.record.sha256 != digest:
            raise KernelError("changed while it was read", where=str(kernel.path))
        key = kernel.record.key if kernel.record is not None and kernel.record.key else digest
        file = f"{FOLDER}/{kernel.gemm}-{key[:16]}.elf"
        (draft / file).write_bytes(data)
        files.append(FileRecord(file, len(data), digest))
        made.append(_record(kernel, key, file, digest))
    return Bound(tuple(made), tuple(files))


def _record(kernel: Kernel, key: str, file: str, digest: str) -> KernelRecord:
    gemm, record = kernel.gemm, kernel.record
    if record is None:  # a foreign ELF: nothing but its name vouches for its shape
        return KernelRecord(key, gemm.m, gemm.k, gemm.n, file, digest, "unknown", provenance={"proof": "unproved"})
    return KernelRecord(
        key, gemm.m, gemm.k, gemm.n, file, digest, record.design, dict(record.parameters),
        {**record.provenance, "kernel_name": record.kernel_name, "licence": record.licence, "proof": kernel.proof},
        None if record.canary is None else records.to_dict(record.canary),
    )  # fmt: skip


def kernels_of_sites(plan: Execution, bound: Bound) -> dict[str, str]:
    """Path of each site that runs on kernels wholly, to the key of the one for most rows."""
    keys: Mapping[str, str] = {str(Gemm(k.m, k.k, k.n)): k.key for k in bound.records}
    found: dict[str, str] = {}
    for group in plan.groups:
        wanted = [program.kernel for program in group.programs if program.kernel is not None]
        if wanted and all(kernel in keys for kernel in wanted):
            found |= dict.fromkeys(group.sites, keys[wanted[-1]])
    return found
