"""Check a whole library: structure everywhere, and on a machine with an NPU the product itself."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onnxpack import records
from onnxpack.errors import EnvironmentFault, GateError, KernelError
from onnxpack.kernels.diagnosis import diagnose, driver_version
from onnxpack.kernels.elf_report import check, inspect
from onnxpack.kernels.files import write_file
from onnxpack.kernels.library import Kernel, Library, Proof, parse_kernels
from onnxpack.kernels.trial import Trial, try_kernel


@dataclass(frozen=True)
class Checked:
    """One kernel."""

    path: str
    shape: str | None
    structure: str
    """`ok` or `refused`."""
    problem: str | None
    proof: str
    """`proved`, `canary` or `unproved`: what its record says, before this check."""
    trial: Trial | None = None
    """What the device did; None when it was not asked."""


def check_library(text: str, *, on_device: bool = False) -> list[Checked]:
    """Check every kernel of a directory, a list, or one file. UsageError when `text` is none of them."""
    if Path(text).is_file():
        return [_check_file(Path(text))]
    library = parse_kernels(text)
    left_out = [
        Checked(problem.partition(": ")[0], None, "refused", problem, "unproved") for problem in library.problems
    ]
    return [_check_kernel(kernel, on_device) for kernel in library.kernels] + left_out


def _check_file(path: Path) -> Checked:
    report = inspect(path)
    problem = report.problems[0] if report.problems else None
    return Checked(str(path), None, "refused" if problem else "ok", problem, "unproved")


def _check_kernel(kernel: Kernel, on_device: bool) -> Checked:
    record, shape = kernel.record, str(kernel.gemm)
    if kernel.path is None:
        return Checked("-", shape, "refused", "no file is named for this shape", kernel.proof)
    try:
        report = check(kernel.path, kernel.gemm, record)
    except KernelError as error:
        return Checked(str(kernel.path), shape, "refused", error.what, kernel.proof)
    trial = None
    if on_device:
        canary = record.canary if record is not None else None
        gemm = (kernel.gemm.m, kernel.gemm.k, kernel.gemm.n)
        seed, expected = (canary.seed, canary.sha256) if canary is not None else (None, None)
        trial = try_kernel(kernel.path, report.kernels[0], gemm, seed, expected)
    return Checked(str(kernel.path), shape, "ok", None, kernel.proof, trial)


def record_proofs(library: Library, checks: Sequence[Checked]) -> int:
    """Write a proof into the record of each kernel that passed on the device; returns how many.

    EnvironmentFault when a record cannot be written. Foreign kernels have no record, and stay unproved.
    """
    passed = {checked.path for checked in checks if checked.trial is not None and checked.trial.passed}
    driver = driver_version()
    written = 0
    for kernel in library.kernels:
        record = kernel.record
        if kernel.path is None or str(kernel.path) not in passed or record is None or record.canary is None:
            continue
        proof = Proof(record.sha256, record.key, record.canary.sha256, driver)
        text = records.dumps(replace(record, proof=proof), indent=2)
        try:
            write_file(kernel.path.with_suffix(".json"), text.encode())
        except OSError as error:
            raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(kernel.path)) from None
        written += 1
    return written


def summary(checks: Sequence[Checked], on_device: bool) -> dict[str, Any]:
    """A report to send: every kernel, and with the device the versions that decide what it does."""
    found: dict[str, Any] = {"kernels": [asdict(checked) for checked in checks]}
    if on_device:
        machine = [asdict(finding) for finding in diagnose() if finding.part == "run"]
        found["machine"] = {"kernel": platform.release(), "findings": machine}
    return found


def raise_for_checks(checks: Sequence[Checked], on_device: bool) -> None:
    """KernelError (exit 3) when a file cannot be bound, GateError (4) when a product was not the known one."""
    bad = [checked for checked in checks if checked.problem is not None]
    if bad:
        raise KernelError(f"{len(bad)} of {len(checks)} kernels cannot be bound: {bad[0].path}: {bad[0].problem}")
    failed = [checked for checked in checks if checked.trial is not None and not checked.trial.passed]
    if on_device and failed:
        reason = failed[0].trial.reason if failed[0].trial is not None else ""
        raise GateError(f"{len(failed)} of {len(checks)} kernels did not run with the known product: {reason}")
