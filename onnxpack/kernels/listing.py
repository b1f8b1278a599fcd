"""What the commands about kernels print: plain data, and which outcome is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnxpack.errors import EnvironmentFault, GateError, UsageError
from onnxpack.kernels.library import Kernel
from onnxpack.shapes import Gemm

if TYPE_CHECKING:
    from onnxpack.kernels.elf_report import ElfReport
    from onnxpack.kernels.generate import Result


def describe(kernel: Kernel) -> dict[str, Any]:
    """One kernel of a library."""
    record = kernel.record
    return {
        "shape": str(kernel.gemm),
        "m": kernel.gemm.m,
        "k": kernel.gemm.k,
        "n": kernel.gemm.n,
        "proof": kernel.proof,
        "file": None if kernel.path is None else str(kernel.path),
        "design": None if record is None else record.design,
        "key": None if record is None else record.key[:12],
        "licence": None if record is None else record.licence,
    }


def report_dict(report: ElfReport) -> dict[str, Any]:
    """What `kernels inspect --json` prints."""
    return asdict(report) | {"bindable": report.bindable, "what": report.what}


def plan_shapes(plan: Mapping[str, Any]) -> list[Gemm]:
    """The kernels that a plan wants, padded, split or joined as it decided. `plan` is what `Plan.to_dict` gives."""
    return sorted({Gemm.parse(kernel) for group in plan["groups"] for kernel in group["kernels"]})


def parse_shape(text: str) -> Gemm:
    """Read ``M,K,N`` or ``MxKxN``.

    >>> parse_shape("16,1024,2048")
    Gemm(m=16, k=1024, n=2048)
    """
    return Gemm.parse(text.replace(",", "x"))


def parse_rows(text: str) -> list[int]:
    """Read ``16,128``; UsageError otherwise.

    >>> parse_rows("128,16")
    [16, 128]
    """
    try:
        rows = sorted({int(word) for word in text.split(",")})
    except ValueError:
        rows = []
    if not rows or rows[0] < 1 or rows[-1] > 1 << 20:
        raise UsageError(f"{text!r} is not a list of row counts", where="--rows", hint="write 16,128")
    return rows


def report(results: Sequence[Result], target: str) -> dict[str, Any]:
    """What `kernels build --json` prints."""
    return {
        "target": target,
        "kernels": [result_dict(result) for result in results],
        "totals": dict(sorted(Counter(result.status for result in results).items())),
    }


def result_dict(result: Result) -> dict[str, Any]:
    """One shape of a build."""
    kernel = result.kernel
    return {
        "shape": str(result.gemm),
        "m": result.gemm.m,
        "k": result.gemm.k,
        "n": result.gemm.n,
        "status": result.status,
        "file": None if kernel is None or kernel.path is None else str(kernel.path),
        "key": None if kernel is None or kernel.record is None else kernel.record.key,
        "reason": result.reason,
        "log": None if result.log is None else str(result.log),
        "log_tail": list(result.log_tail),
        "command": result.command,
    }


def raise_for(results: Sequence[Result], *, refused_fails: bool = True) -> None:
    """GateError (exit 4) when a shape failed, or was refused and that counts; EnvironmentFault (5) when tools lack."""
    failed = [r for r in results if r.status == "failed" or (refused_fails and r.status == "refused")]
    missing = [r for r in results if r.status == "missing"]
    if failed:
        raise GateError(
            f"{len(failed)} of {len(results)} kernels could not be built: {failed[0].gemm}", hint="see above"
        )
    if missing:
        raise EnvironmentFault(f"{len(missing)} of {len(results)} kernels are missing: {missing[0].reason}")
