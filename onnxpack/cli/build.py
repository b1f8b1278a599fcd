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
@click.option("--weights", default="int8", show_default=True, metavar="FORMAT|PATTERN=FORMAT,...", help="How to store.")
@click.option("--kernels", metavar="DIR|LIST", help="Kernels to bind: a directory, or MxKxN=path,...")
@click.option("--force", is_flag=True, help="Replace an existing pack.")
@click.option("--quiet", is_flag=True, help="No line per weight.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, out: str, weights: str, kernels: str | None, force: bool, quiet: bool, as_json: bool) -> None:
    """Pack MODEL into the directory PACK, which appears whole or not at all."""
    import onnxpack
    from onnxpack.cli.output import print_json

    progress = None if quiet else _Progress()
    report = onnxpack.build(model, out, weights=weights, kernels=kernels, force=force, on_weight=progress)
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)


class _Progress:
    """One line per weight on stderr, whole lines from whichever thread is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, stored: Stored) -> None:
        from onnxpack.cli.output import human_bytes, note

        record = stored.record
        after = sum(field.nbytes for field in record.fields.values())
        shape = "x".join(map(str, record.shape))
        error = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in record.error.items())
        sizes = f"{human_bytes(record.source_nbytes)} -> {human_bytes(after)}"
        with self._lock:
            note(f"{record.name}  {shape}  {sizes} {record.format}  {error}")


def _print(report: BuildReport) -> None:
    from onnxpack.cli.output import human_bytes, print_table

    rows = [(name, f"{seconds:.3f}") for name, seconds in report.passes.items()]
    print_table(("pass", "seconds"), [*rows, ("total", f"{report.seconds:.3f}")], right=(1,))
    c = report.coverage
    ratio = report.bytes_before / report.bytes_after if report.bytes_after else 0.0
    click.echo()
    click.echo(f"{report.pack}: {len(report.weights)} weights, {human_bytes(report.bytes_before)} -> "
               f"{human_bytes(report.bytes_after)} ({ratio:.2f} times smaller)")  # fmt: skip
    click.echo(
        f"bound to int8: {c.bound} of {c.weight} weight products ({c.sites} products in all); on a kernel: {c.covered}"
    )
    click.echo(f"content digest: {report.content_digest}")
    click.echo(f"files digest:   {report.files_digest}")
