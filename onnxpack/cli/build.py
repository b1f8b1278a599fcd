"""`onnxpack build`: pack a model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import click

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
    plan: str | None,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Pack MODEL into the directory PACK, which appears whole or not at all."""
    import onnxpack
    from onnxpack.cli.output import note, print_json

    if plan is not None and context.get_parameter_source("weights") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--weights: the plan says how weights are stored; give it to `onnxpack plan`")
    progress = None if quiet else _Progress()
    report = onnxpack.build(
        model, out, weights=weights, plan=plan, kernels=kernels, force=force, min_cosine=min_cosine, on_weight=progress
    )
    for hint in report.hints:
        note(f"hint: {hint}")
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)


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
