"""`onnxpack kernels`: list, build, inspect and check kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from onnxpack.kernels.checking import Checked
    from onnxpack.kernels.elf_report import ElfReport
    from onnxpack.kernels.generate import Progress, Result


@click.group("kernels")
def command() -> None:
    """Kernels: one NPU ELF for each (M, K, N)."""


@command.command("list")
@click.argument("library", metavar="DIR|LIST")
@click.option("--env", "as_env", is_flag=True, help="Print one MxKxN=path,... line, as ONEBIT_EP_NPU_ELFS takes it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(library: str, as_env: bool, as_json: bool) -> None:
    """List the kernels of a directory, or of an MxKxN=path,... list."""
    from onnxpack.cli.output import note, print_json, print_table
    from onnxpack.kernels.library import parse_kernels
    from onnxpack.kernels.listing import describe

    found = parse_kernels(library)
    for problem in found.problems:
        note(f"left out: {problem}")
    rows = [describe(kernel) for kernel in found.kernels]
    if as_json:
        print_json({"kernels": rows, "problems": list(found.problems)})
    elif as_env:
        click.echo(found.to_list())
    else:
        columns = ("shape", "proof", "design", "key", "file")
        print_table(columns, [[row[name] or "-" for name in columns] for row in rows])


@command.command("build")
@click.argument("model", required=False, type=click.Path())
@click.option("--shape", "shapes", multiple=True, metavar="M,K,N", help="A shape to build; may be given several times.")
@click.option("--rows", default="128", show_default=True, metavar="M,...", help="Rows to plan MODEL's products for.")
@click.option(
    "--budget", type=click.IntRange(1), default=8, show_default=True, help="Distinct kernels for MODEL at most."
)
@click.option("-o", "--elfs-out", type=click.Path(), metavar="DIR", help="Where ELFs and records go (default: cache).")
@click.option("--kernels", metavar="DIR|LIST", help="Kernels that exist already.")
@click.option("--elf-cache", type=click.Path(), metavar="DIR", help="The cache to use instead of the user's.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Compiles at once (default: one for each core).")
@click.option("--target", default="npu2", show_default=True, help="The array to build for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def build_command(
    model: str | None,
    shapes: tuple[str, ...],
    rows: str,
    budget: int,
    elfs_out: str | None,
    kernels: str | None,
    elf_cache: str | None,
    jobs: int | None,
    target: str,
    as_json: bool,
) -> None:
    """Build the kernels that `onnxpack plan` chooses for MODEL, or those of the given shapes; only what is missing is
    compiled.

    Exit 4 when a shape failed or a given shape fits no tiling; exit 5 when there is no toolchain.
    """
    import onnxpack
    from onnxpack.cli.output import print_json
    from onnxpack.kernels.generate import ensure
    from onnxpack.kernels.library import parse_kernels
    from onnxpack.kernels.listing import parse_rows, parse_shape, plan_shapes, raise_for, report

    if bool(shapes) == (model is not None):
        raise click.UsageError("name a model, or shapes with --shape M,K,N")
    if model is not None:
        wanted = plan_shapes(onnxpack.plan(model, rows=parse_rows(rows), budget=budget).to_dict())
    else:
        wanted = [parse_shape(text) for text in shapes]
    results = ensure(
        wanted,
        target,
        Path(elfs_out) if elfs_out else None,
        parse_kernels(kernels) if kernels else None,
        Path(elf_cache) if elf_cache else None,
        jobs,
        progress,
    )
    if as_json:
        print_json(report(results, target))
    else:
        _print_results(results)
    raise_for(results, refused_fails=bool(shapes))


def progress(event: Progress) -> None:
    """One line on stderr for each kernel that is settled."""
    from onnxpack.cli.output import note

    if event.result is not None:
        reason = f": {event.result.reason}" if event.result.reason else ""
        note(f"[{event.done}/{event.total}] {event.gemm} {event.result.status}{reason}")


def _print_results(results: list[Result]) -> None:
    from onnxpack.cli.output import note, print_table

    rows = [(r.gemm, r.status, r.kernel.path if r.kernel is not None else "-") for r in results]
    print_table(("shape", "status", "file"), rows)
    said = None
    for result in results:
        if result.ok:
            continue
        if result.reason != said:  # without a toolchain all say the same
            note(f"{result.gemm} {result.status}: {result.reason}")
        said = result.reason
        for line in result.log_tail:
            note(f"  | {line}")
        if result.log is not None:
            note(f"  whole log: {result.log}")
        if result.status != "refused":
            note(f"  make it with: {result.command}")


@command.command("inspect")
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(file: str, as_json: bool) -> None:
    """Say what FILE is, and whether and why (not) it can be bound. Any file will do."""
    from onnxpack.cli.output import print_json
    from onnxpack.errors import KernelError
    from onnxpack.kernels.elf_report import inspect
    from onnxpack.kernels.listing import report_dict

    found = inspect(file)
    if found.kind == "unreadable":
        raise KernelError(found.problems[0], where=file)
    if as_json:
        print_json(report_dict(found))
    else:
        _print_report(found)


def _print_report(found: ElfReport) -> None:
    click.echo(f"{found.path}: {found.what}")
    click.echo(f"bindable: {'yes' if found.bindable else 'no'}")
    for problem in found.problems:
        click.echo(f"  problem: {problem}")
    for warning in found.warnings:
        click.echo(f"  warning: {warning}")
    facts: dict[str, Any] = {"bytes": found.nbytes, "sha256": found.sha256}
    if found.kernels:
        facts["kernels"] = ", ".join(found.kernels)
    for name, value in (facts | found.facts).items():
        click.echo(f"{name.replace('_', ' ')}: {_plain(value)}")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value)


@command.command("check")
@click.argument("library", metavar="DIR|LIST|FILE")
@click.option("--run", "on_device", is_flag=True, help="Run each kernel on the device: canary, route and times.")
@click.option("--record", "keep", is_flag=True, help="With --run: mark what passed as proved, in its record.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(library: str, on_device: bool, keep: bool, as_json: bool) -> None:
    """Check the structure of every kernel against its record; with --run, its product on this machine's NPU.

    Exit 3 when a file cannot be bound, exit 4 when a kernel did not give the known product.
    """
    from onnxpack.cli.output import note, print_json
    from onnxpack.kernels.checking import check_library, raise_for_checks, record_proofs, summary
    from onnxpack.kernels.library import parse_kernels

    checks = check_library(library, on_device=on_device)
    if keep and on_device:
        note(f"proved: {record_proofs(parse_kernels(library), checks)} kernels")
    if as_json:
        print_json(summary(checks, on_device))
    else:
        _print_checks(checks)
    raise_for_checks(checks, on_device)


def _print_checks(checks: list[Checked]) -> None:
    from onnxpack.cli.output import note, print_table

    rows = []
    for check in checks:
        trial = check.trial
        times = f"{min(trial.launches_us):.0f}" if trial is not None and trial.launches_us else "-"
        route, canary = (trial.route, trial.canary) if trial is not None else ("-", "-")
        rows.append((check.shape or "-", check.structure, check.proof, route, canary, times, check.path))
    print_table(("shape", "structure", "record", "route", "canary", "best us", "file"), rows, right=(5,))
    for check in checks:
        for line in filter(None, (check.problem, check.trial.reason if check.trial is not None else None)):
            note(f"{check.path}: {line}")
