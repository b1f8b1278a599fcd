"""`onnxpack verify`: a pack beside its source model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxpack.cli.parameters import DEVICE, DIMS
from onnxpack.errors import GateError, UsageError

if TYPE_CHECKING:
    from onnxpack.verify.api import Verification
    from onnxpack.verify.sites import SiteError

_SHARE = click.FloatRange(0, 1)
_POSITIVE = click.FloatRange(0)


@click.command("verify")
@click.argument("pack", type=click.Path())
@click.option("--model", type=click.Path(), help="The float model that the pack was made from.")
@click.option("--inputs", type=click.Path(), metavar="DIR|X.npz|X.npy", help="What both are fed.")
@click.option(
    "--random", type=click.IntRange(1), metavar="N", help="N made-up inputs instead. Default without --inputs: 3."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of random inputs.")
@DIMS
@click.option("--windows", type=click.IntRange(1), metavar="N", help="Use only the first N rows of each input file.")
@click.option(
    "--next-token",
    is_flag=True,
    help="Inputs are rows of tokens: feed each row but its last token, and report the perplexity on the tokens after.",
)
@DEVICE
@click.option(
    "--logits",
    multiple=True,
    metavar="NAME",
    help="Output that holds logits; may be repeated. Default: the one called logits.",
)
@click.option("--max-kl", type=_POSITIVE, metavar="NATS", help="Gate: mean KL(model || pack) of logits.")
@click.option("--min-top1", type=_SHARE, metavar="SHARE", help="Gate: positions of logits with the same best token.")
@click.option("--max-rel-error", type=_POSITIVE, metavar="X", help="Gate: largest error over the largest value.")
@click.option(
    "--max-rel-rms",
    type=_POSITIVE,
    metavar="X",
    help="Gate: RMS of the error over RMS of the values. Without any gate: 0.1 + 4 times the largest loss of a weight.",
)
@click.option("--min-cosine", type=click.FloatRange(-1, 1), metavar="X", help="Gate: cosine of the outputs.")
@click.option(
    "--min-equal",
    type=_SHARE,
    metavar="SHARE",
    help="Gate: equal elements of outputs that are not float. Without any gate: 0.98.",
)
@click.option(
    "--sites",
    is_flag=True,
    help="Also compare each bound product with its float form on real activations, and each weight with its source.",
)
@click.option(
    "--max-site-error",
    type=_POSITIVE,
    metavar="X",
    help="Gate of --sites: largest error over largest result. Default: 0.02.",
)
@click.option("--files", is_flag=True, help="Hash every file of the pack.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    pack: str,
    model: str | None,
    inputs: str | None,
    random: int | None,
    seed: int,
    dims: dict[str, int],
    windows: int | None,
    next_token: bool,
    device: Any,
    logits: tuple[str, ...],
    max_kl: float | None,
    min_top1: float | None,
    max_rel_error: float | None,
    max_rel_rms: float | None,
    min_cosine: float | None,
    min_equal: float | None,
    sites: bool,
    max_site_error: float | None,
    files: bool,
    as_json: bool,
) -> None:
    """Compare PACK with the model it was made from: every output, on the same inputs, at ORT_ENABLE_BASIC.

    Exits with 4 when a gate is not met, and when nothing was compared that could have differed. Gates that are given
    replace the default ones.
    """
    from onnxpack.cli.output import note, print_json
    from onnxpack.verify.accuracy import Gates
    from onnxpack.verify.api import Inputs, verify
    from onnxpack.verify.sites import MAX_SITE_ERROR

    if max_site_error is not None and not sites:
        raise UsageError("--max-site-error is a gate of --sites", hint="add --sites")
    gates = Gates(max_kl, min_top1, max_rel_error, max_rel_rms, min_cosine, min_equal)
    found = verify(
        pack,
        model,
        inputs=Inputs(inputs, random, seed, dims, windows, next_token),
        device=device,
        logits=logits,
        gates=None if gates == Gates() else gates,
        sites=sites,
        max_site_error=MAX_SITE_ERROR if max_site_error is None else max_site_error,
        files=files,
    )
    for line in found.inputs:
        note(line)
    if found.from_this_model is False:
        note(f"{model} is not the file that the pack was made from")
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    if found.failures:
        more = f" (and {len(found.failures) - 3} more)" if len(found.failures) > 3 else ""
        raise GateError("; ".join(found.failures[:3]) + more, where=pack)


def _print(found: Verification) -> None:
    if found.files is not None:
        click.echo(f"files: {found.files}, every digest agrees")
    if found.comparison is not None:
        _print_outputs(found)
    if found.sites is not None:
        click.echo()
        _print_sites(found.sites)
    if found.comparison is not None and found.passed:
        click.echo("\npassed")


def _print_outputs(found: Verification) -> None:
    from onnxpack.cli.output import print_table

    assert found.comparison is not None
    rows = [
        (
            name,
            *(_figure(v) for v in (f.max_abs, f.mean_abs, f.max_rel, f.rel_rms)),
            "-" if f.cosine is None else f"{f.cosine:.6f}",
            _figure(f.kl),
            "-" if f.top1 is None else f"{f.top1:.4f}",
            "-" if f.equal is None else f"{f.equal:.4f}",
            f.vacuous or "",
        )
        for name, f in found.comparison.outputs.items()
    ]
    headers = ("output", "max abs", "mean abs", "max rel", "rel RMS", "cosine", "KL", "top-1", "equal", "")
    print_table(headers, rows, right=range(1, 9))
    p = found.comparison.perplexity
    if p is not None:
        change = 100 * (p.pack / p.reference - 1)
        click.echo(f"\nperplexity over {p.tokens} tokens: model {p.reference:.4f}, pack {p.pack:.4f} ({change:+.2f} %)")


def _print_sites(errors: list[SiteError]) -> None:
    from onnxpack.cli.output import print_table

    rows = [
        (
            e.path,
            e.weight,
            _figure(e.weight_rms),
            e.rows,
            *map(_figure, (e.max_abs, e.max_rel, e.rel_rms)),
            e.unmeasured or "",
        )
        for e in errors
    ]
    headers = ("site", "weight", "weight RMS", "rows", "max abs", "max rel", "rel RMS", "")
    print_table(headers, rows, right=range(2, 7))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
