"""`onnxpack run`: run a pack once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxpack.cli.parameters import DEVICE, DIMS

if TYPE_CHECKING:
    from onnxpack.runtime.session import PackSession
    from onnxpack.verify.inputs import Feed
    from onnxpack.verify.outputs import Placement, Summary


@click.command("run")
@click.argument("pack", type=click.Path())
@click.option("--input", "inputs", multiple=True, metavar="X.npz|X.npy|NAME=X.npy", help="Inputs; may be repeated.")
@click.option("--random", is_flag=True, help="Make the inputs up.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of random inputs.")
@DIMS
@DEVICE
@click.option("--save", type=click.Path(), metavar="OUT.npz", help="Keep the outputs.")
@click.option("--repeat", type=click.IntRange(1), default=1, metavar="N", help="Run N times; say if results differ.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    pack: str,
    inputs: tuple[str, ...],
    random: bool,
    seed: int,
    dims: dict[str, int],
    device: Any,
    save: str | None,
    repeat: int,
    as_json: bool,
) -> None:
    """Run PACK and show its outputs in short, and where its products ran."""
    import onnxpack
    from onnxpack.cli.output import note, print_json
    from onnxpack.records import to_dict
    from onnxpack.runtime.session import basic_options
    from onnxpack.verify import outputs as out
    from onnxpack.verify.inputs import describe
    from onnxpack.verify.refusal import quiet

    session = onnxpack.load(pack, device, quiet(basic_options() if device == "reference" else None))
    feed = _feed(pack, session, inputs, random, seed, dims)
    for line in describe(feed):
        note(line)
    names = [value.name for value in session.get_outputs()]
    results, same = out.repeated(session, feed, repeat)
    if save is not None:
        out.save(save, dict(zip(names, results, strict=True)))
    summaries = [out.summarize(name, value) for name, value in zip(names, results, strict=True)]
    placed = out.placements(session.trace())
    if as_json:
        print_json(
            {
                "pack": pack,
                "outputs": to_dict(summaries),
                "sites": to_dict(placed),
                "runs": repeat,
                "same_every_run": same,
            }
        )
    else:
        _print(summaries, placed, repeat, same)


def _feed(
    pack: str, session: PackSession, inputs: tuple[str, ...], random: bool, seed: int, dims: dict[str, int]
) -> Feed:
    from onnxpack.verify.feeding import session_feed

    return session_feed(pack, session, inputs, random=random, seed=seed, sizes=dims)


def _print(summaries: list[Summary], placed: list[Placement], repeat: int, same: bool) -> None:
    from onnxpack.cli.output import print_table

    rows = [
        (
            s.name,
            s.type,
            "-" if s.shape is None else "x".join(map(str, s.shape)) or "scalar",
            *("-" if value is None else f"{value:.6g}" for value in (s.min, s.max, s.mean)),
            s.nan,
            s.infinite,
            " ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in s.first),
        )
        for s in summaries
    ]
    print_table(
        ("output", "type", "shape", "min", "max", "mean", "NaN", "inf", "first values"), rows, right=(3, 4, 5, 6, 7)
    )
    if placed:
        click.echo()
        listed = [(p.sites, p.where, "?" if p.rows is None else p.rows, p.reason or "") for p in placed]
        print_table(("sites", "ran on", "rows", "why not the NPU"), listed, right=(0, 2))
    if repeat > 1:
        click.echo(f"\n{repeat} runs, {'all outputs the same bytes' if same else 'outputs differ between runs'}")
