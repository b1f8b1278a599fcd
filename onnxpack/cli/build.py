"""`onnxpack build`: pack a model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import click

from onnxpack.errors import GateError

if TYPE_CHECKING:
    from onnxpack.pack.weights import Stored
    from onnxpack.pipeline import BuildReport


@click.command("build")
@click.argument("model", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(), metavar="PACK", help="Directory to make.")
@click.option(
    "--weights",
    default="q4nx",
    show_default=True,
    metavar="FORMAT|PATTERN=FORMAT,...",
    help="How float weights are stored; `onnxpack formats` lists the formats. First matching pattern wins.",
)
@click.option(
    "--min-cosine",
    type=click.FloatRange(0, 1),
    default=0.99,
    show_default=True,
    help="Exit 4 when a stored weight is further from its source than this.",
)
@click.option("--kernels", metavar="DIR|LIST", help="Kernels to bind: a directory, or MxKxN=path,...")
@click.option("--elfs-out", metavar="DIR", type=click.Path(), help="Compile the kernels that are missing, into DIR.")
@click.option("--no-elfs", is_flag=True, help="Bind and compile no kernels, whatever else is said.")
@click.option("--elf-cache", metavar="DIR", type=click.Path(), help="The kernel cache to use instead of the user's.")
@click.option("--rows", default="128", show_default=True, metavar="M,...", help="Rows to plan kernels for.")
@click.option("--budget", type=click.IntRange(1), default=8, show_default=True, help="Distinct kernels at most.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Compiles at once; default: one for each core.")
@click.option("--plan", metavar="FILE", type=click.Path(), help="Execute exactly this plan (see `onnxpack plan -o`).")
@click.option("--force", is_flag=True, help="Replace an existing pack.")
@click.option("--quiet", is_flag=True, help="No line per weight.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    context: click.Context,
    model: str,
    out: str,
    weights: str,
    min_cosine: float,
    kernels: str | None,
    elfs_out: str | None,
    no_elfs: bool,
    elf_cache: str | None,
    rows: str,
    budget: int,
    jobs: int | None,
    plan: str | None,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Pack MODEL into the directory PACK, which appears whole or not at all."""
    import onnxpack
    from onnxpack.cli.kernels import progress as kernel_progress
    from onnxpack.cli.output import note, print_json
    from onnxpack.kernels.listing import parse_rows

    if plan is not None and context.get_parameter_source("weights") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--weights: the plan says how weights are stored; give it to `onnxpack plan`")
    progress = None if quiet else _Progress()
    report = onnxpack.build(
        model,
        out,
        weights=weights,
        plan=plan,
        kernels=None if no_elfs else kernels,
        elfs_out=None if no_elfs else elfs_out,
        force=force,
        rows=parse_rows(rows),
        budget=budget,
        elf_cache=elf_cache,
        jobs=jobs,
        min_cosine=min_cosine,
        on_kernel=None if quiet else kernel_progress,
        on_weight=progress,
    )
    for hint in report.hints:
        note(f"hint: {hint}")
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)
    _raise_for_kernels(report)


class _Progress:
    """One line per weight on stderr, whole lines from whichever thread is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, stored: Stored) -> None:
        from onnxpack.cli.output import human_bytes, note, shortened

        record = stored.record
        after = sum(field.nbytes for field in record.fields.values())
        shape = "x".join(map(str, record.shape))
        error = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in record.error.items())
        sizes = f"{human_bytes(record.source_nbytes)} -> {human_bytes(after)}"
        with self._lock:
            note(f"{shortened(record.name)}  {shape}  {sizes} {record.format}  {error}")


def _print(report: BuildReport) -> None:
    from onnxpack.cli.output import human_bytes, print_table, say

    _print_worst(report)
    _print_kernels(report)
    rows = [(name, f"{seconds:.3f}") for name, seconds in report.passes.items()]
    print_table(("pass", "seconds"), [*rows, ("total", f"{report.seconds:.3f}")], right=(1,))
    c = report.coverage
    ratio = report.bytes_before / report.bytes_after if report.bytes_after else 0.0
    click.echo()
    sizes = f"{human_bytes(report.bytes_before)} -> {human_bytes(report.bytes_after)} ({ratio:.2f} times smaller)"
    say(f"{report.pack}: {len(report.weights)} weights, {sizes}")
    click.echo(
        f"bound to int8: {c.bound} of {c.weight} weight products ({c.sites} products in all); on a kernel: {c.covered}"
    )
    click.echo(f"content digest: {report.content_digest}")
    click.echo(f"files digest:   {report.files_digest}")


_WORST = 10


def _print_worst(report: BuildReport) -> None:
    """The weights that lost most, worst first."""
    from onnxpack.cli.output import print_table

    lossy = sorted((w for w in report.weights if w["relative_rms"]), key=lambda w: (-w["relative_rms"], w["name"]))
    if not lossy:
        return
    rows = [
        (w["name"], "x".join(map(str, w["shape"])), w["format"], f"{w['relative_rms']:g}", w.get("cosine", "-"))
        for w in lossy[:_WORST]
    ]
    print_table(("largest loss", "K x N", "format", "relative rms", "cosine"), rows, right=(3, 4))
    click.echo()


def _print_kernels(report: BuildReport) -> None:
    """What became of each kernel of the plan; for one that is missing, the command that would make it."""
    from onnxpack.cli.output import note, print_table

    if not report.kernels:
        return
    rows = [(k["shape"], k["status"], k["reason"] or "") for k in report.kernels]
    print_table(("kernel", "status", "why"), rows)
    click.echo()
    for kernel in report.kernels:
        if kernel["status"] == "missing":
            note(f"to make it: {kernel['command']}")


def _raise_for_kernels(report: BuildReport) -> None:
    """The pack is there and complete; a kernel that failed to compile is a gate that was not met all the same."""
    failed = [kernel for kernel in report.kernels if kernel["status"] == "failed"]
    if failed:
        raise GateError(
            f"{len(failed)} of {len(report.kernels)} kernels failed to compile: {failed[0]['shape']}: "
            f"{failed[0]['reason']}",
            where=report.pack,
            hint="the pack is written; these products run on the host",
        )
