"""`onnxpack bench`: a pack and the float model, timed side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxpack.cli.parameters import DEVICE, DIMS

if TYPE_CHECKING:
    from onnxpack.verify.bench import Result


@click.command("bench")
@click.argument("pack", type=click.Path())
@click.option(
    "--calibrate",
    metavar="FILE",
    type=click.Path(),
    help="Measure instead, for `onnxpack plan --costs FILE`: PACK's kernels (or a directory of kernels) on the device.",
)
@click.option("--model", type=click.Path(), help="The float model. Default: the pack's graph, decoded to float32.")
@click.option("--input", "inputs", multiple=True, metavar="X.npz|X.npy|NAME=X.npy", help="Inputs; made up by default.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of random inputs.")
@DIMS
@click.option("--runs", type=click.IntRange(5), default=20, show_default=True, help="Pairs of runs.")
@click.option("--threads", type=click.IntRange(1), help="Threads of each side. Default: one for each processor.")
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    pack: str,
    calibrate: str | None,
    model: str | None,
    inputs: tuple[str, ...],
    seed: int,
    dims: dict[str, int],
    runs: int,
    threads: int | None,
    device: Any,
    as_json: bool,
) -> None:
    """Time PACK beside the float model: alternating runs in one process, median of their ratios, spread, conditions.

    Nothing that is measured is written into the pack.
    """
    import os

    import onnxpack

    if calibrate is not None:
        _calibrate(pack, calibrate, as_json)
        return
    from onnxpack.cli.output import print_json
    from onnxpack.pack.read import open_pack
    from onnxpack.records import to_dict
    from onnxpack.verify.bench import bench, bench_options
    from onnxpack.verify.feeding import session_feed

    threads = threads or os.cpu_count() or 1
    session = onnxpack.load(pack, device, bench_options(threads))
    feed = session_feed(pack, session, inputs, random=not inputs, seed=seed, sizes=dims)
    found = bench(open_pack(pack), session, model, feed, runs=runs, threads=threads)
    if as_json:
        print_json({"pack": pack, "device": session.coverage().device, **to_dict(found)})
    else:
        _print(pack, session.coverage().device, found)


def _calibrate(kernels: str, out: str, as_json: bool) -> None:
    from pathlib import Path

    from onnxpack import records
    from onnxpack.calibrate import calibrate
    from onnxpack.cli.output import print_json, print_table

    held = Path(kernels) / "kernels"
    costs = calibrate(str(held if held.is_dir() else kernels))
    Path(out).write_text(records.dumps(costs, indent=1))
    if as_json:
        print_json(records.to_dict(costs))
        return
    print_table(("kernel", "us a launch"), sorted(costs.kernels.items()), right=(1,))
    click.echo(f"\nhost: {costs.host_call_us} us a call, {costs.host_products_per_us} products a us")
    click.echo(f"{out}: {costs.source}")


def _print(pack: str, device: str, found: Result) -> None:
    from onnxpack.cli.output import print_table

    click.echo(f"{found.ratio} times as fast as {found.baseline}")
    click.echo(f"{found.cpu_ratio} times by processor time\n")
    rows = [
        (side, *(f"{value:.3f}" for value in (s.median, s.low, s.high)))
        for side, s in ((f"{pack} on {device}", found.pack_ms), (found.baseline, found.baseline_ms))
    ]
    print_table(("one run", "median ms", "min", "max"), rows, right=(1, 2, 3))
    click.echo()
    for line in found.conditions.lines():
        click.echo(line)
