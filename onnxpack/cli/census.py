"""`onnxpack census`: every matrix product, by shape, with reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from onnxpack.errors import GateError

if TYPE_CHECKING:
    from onnxpack.census import Census


@click.command("census")
@click.argument("model", type=click.Path())
@click.option("--kernels", metavar="DIR|LIST", help="Kernels to count against: a directory, or MxKxN[=path],...")
@click.option("--sites", "show_sites", is_flag=True, help="List every product, not only the shapes.")
@click.option("--qdq", "show_qdq", is_flag=True, help="List every quantized product: taken as one site, or why not.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--fail-under", type=click.FloatRange(0, 100), metavar="PCT", help="Exit 4 when fewer weight products are covered."
)
def command(
    model: str, kernels: str | None, show_sites: bool, show_qdq: bool, as_json: bool, fail_under: float | None
) -> None:
    """List every matrix product of MODEL by shape. Reads no weights, so it is fast on models of any size."""
    import onnxpack
    from onnxpack.cli.output import print_json

    census = onnxpack.census(model, kernels)
    if as_json:
        print_json(census.to_dict())
    else:
        _print(census, show_sites)
        if show_qdq:
            _print_qdq(census)
    if fail_under is not None and census.covered_percent < fail_under:
        raise GateError(
            f"{census.covered_percent:.1f} % of the weight products are covered, {fail_under:g} % are asked for",
            where=model,
            hint="build the missing kernels",
        )


def _print(census: Census, show_sites: bool) -> None:
    from onnxpack.cli.output import human_bytes, print_table, unknown

    if census.groups:
        rows = [
            (unknown(g.k), unknown(g.n), unknown(g.m), g.count, g.weights, human_bytes(g.bytes), g.dtype, _verdict(g))
            for g in census.groups
        ]
        print_table(("K", "N", "M", "count", "weights", "bytes", "dtype", "verdict"), rows, right=(0, 1, 3, 4, 5))
        click.echo()
    if show_sites and census.sites:
        listed = [
            (s.path, s.kind, f"{unknown(s.m)} x {unknown(s.k)} x {unknown(s.n)}", s.verdict, s.reason or "")
            for s in census.sites
        ]
        print_table(("site", "kind", "M x K x N", "verdict", "reason"), listed)
        click.echo()
    _print_totals(census)


def _print_qdq(census: Census) -> None:
    from onnxpack.cli.output import print_table

    quantized = [site for site in census.sites if site.qdq is not None or site.detail is not None]
    claimed = sum(site.qdq is not None for site in quantized)
    click.echo(f"\nquantized products: {claimed} taken as one site, {len(quantized) - claimed} refused")
    rows = [(s.path, "claimed" if s.qdq else s.reason, s.qdq or s.detail) for s in quantized]
    if rows:
        print_table(("site", "verdict", "what"), rows)


def _verdict(group: object) -> str:
    verdicts: dict[str, int] = group.verdicts  # type: ignore[attr-defined]
    return next(iter(verdicts)) if len(verdicts) == 1 else ", ".join(f"{n} {v}" for v, n in verdicts.items())


def _print_totals(census: Census) -> None:
    from collections import Counter

    from onnxpack.cli.output import print_table, say
    from onnxpack.reasons import Reason

    t = census.totals
    click.echo(f"{t.sites} products: {t.weight} with a weight, {t.dynamic} dynamic, {t.other} other")
    if t.sites:
        of_all = 100 * t.covered / t.sites
        click.echo(
            f"covered by a kernel: {t.covered} ({census.covered_percent:.1f} % of weights, {of_all:.1f} % of all)"
        )
    reasons = Counter(site.reason for site in census.sites if site.reason is not None)
    if reasons:
        click.echo()
        rows = [(n, code, Reason(code).sentence) for code, n in sorted(reasons.items(), key=lambda x: (-x[1], x[0]))]
        print_table(("count", "reason", "meaning"), rows, right=(0,))
    for domain, ops in census.foreign_domains.items():
        click.echo()
        say(f"operators of domain {domain}: {', '.join(ops)}")
