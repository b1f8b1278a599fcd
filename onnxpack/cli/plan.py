"""`onnxpack plan`: how each product will run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from onnxpack.planning.records import Plan, PlanGroup


@click.command("plan")
@click.argument("model", type=click.Path())
@click.option("--kernels", metavar="DIR|LIST", help="Use these kernels only; default: all that can be built.")
@click.option(
    "--rows", multiple=True, metavar="M,...", help="Numbers of rows to plan for; may be repeated.  [default: 128]"
)
@click.option("--budget", type=int, default=8, show_default=True, help="Distinct kernels at most; the device holds 16.")
@click.option("--min-rows", type=int, default=16, show_default=True, help="Calls with fewer rows stay on the host.")
@click.option("--weights", default="q4nx", show_default=True, metavar="FORMAT|PATTERN=FORMAT,...", help="How to store.")
@click.option("--costs", type=click.Path(), metavar="FILE", help="Measured figures in place of the cost model's.")
@click.option("-o", "--out", type=click.Path(), metavar="FILE", help="Write the plan, for `onnxpack build --plan`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str,
    kernels: str | None,
    rows: tuple[str, ...],
    budget: int,
    min_rows: int,
    weights: str,
    costs: str | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Decide how every matrix product of MODEL runs: kernels, padding, splits, joins. Reads no weights."""
    import onnxpack
    from onnxpack.cli.output import note, print_json

    made = onnxpack.plan(model, kernels, _rows(rows), budget, weights=weights, min_rows=min_rows, costs=costs)
    if out is not None:
        _write(made, out)
    if as_json:
        print_json(made.to_dict())
    else:
        _print(made)
    if made.totals.kernels > 8:
        note("hint: more than 8 kernels: all processes of a machine share its 16 hardware contexts")


def _rows(texts: tuple[str, ...]) -> list[int]:
    words = [word.strip() for text in texts or ("128",) for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise click.BadParameter(f"{','.join(words)!r} is not a list of numbers", param_hint="--rows")
    return [int(word) for word in words]


def _write(plan: Plan, path: str) -> None:
    from pathlib import Path

    from onnxpack import records

    Path(path).write_text(records.dumps(plan, indent=1))


def _print(plan: Plan) -> None:
    from collections import Counter

    from onnxpack.cli.output import human_bytes, print_table

    if plan.groups:
        lines = [
            (g.k, g.n, len(g.sites), program.rows, program.kernel or "host", len(g.calls) * len(program.launches), how)
            for g in plan.groups
            for program, how in zip(g.programs, _how(g), strict=True)
        ]
        print_table(("K", "N", "sites", "rows", "kernel", "launches", "how"), lines, right=(0, 1, 2, 3, 5))
        click.echo()
        sums = [
            (g.k, g.n, g.launches, f"{g.predicted_us / 1000:.2f}", _share(g), human_bytes(g.wasted_bytes))
            for g in plan.groups
        ]
        headers = ("K", "N", "launches", "predicted ms", "wasted products", "wasted bytes")
        print_table(headers, sums, right=tuple(range(6)))
        click.echo()
    t = plan.totals
    click.echo(f"planned: {t.planned} of {t.bound} bound products, {t.launches} launches, {t.kernels} kernels "
               f"(budget {plan.budget})")  # fmt: skip
    click.echo(f"predicted: {t.predicted_us / 1000:.2f} ms a pass ({plan.costs.source})")
    if t.gap_percent:
        click.echo(f"not proved to be the best choice of kernels; at most {t.gap_percent:g} % above it")
    _print_kernels(plan)
    reasons = Counter(site.reason for site in plan.unplanned)
    if reasons:
        click.echo()
        rows = [(n, reason, reason.sentence) for reason, n in sorted(reasons.items(), key=lambda x: (-x[1], x[0]))]
        print_table(("not planned", "reason", "meaning"), rows, right=(0,))


def _print_kernels(plan: Plan) -> None:
    from onnxpack.cli.output import print_table

    if plan.kernels:
        click.echo()
        rows = [(k.kernel, "to build" if k.build else "library", k.sites, k.launches) for k in plan.kernels]
        print_table(("kernel", "from", "sites", "launches"), rows, right=(2, 3))


def _share(group: PlanGroup) -> str:
    """Products that padding adds, and their share of all."""
    from onnxpack.shapes import Gemm

    every = sum(
        len(group.calls) * len(p.launches) * Gemm.parse(p.kernel).macs for p in group.programs if p.kernel is not None
    )
    return f"{group.wasted_macs} ({100 * group.wasted_macs / every:.1f} %)"


def _how(group: PlanGroup) -> list[str]:
    """One line for each program: what is joined, cut and padded."""
    from onnxpack.shapes import Gemm

    joined = len(group.calls[0].members)
    lines = []
    for program in group.programs:
        words = [f"{joined} sites joined"] if joined > 1 else []
        if program.kernel is not None:
            kernel = Gemm.parse(program.kernel)
            axes = (("rows", program.rows, kernel.m), ("K", group.k, kernel.k), ("N", group.n, kernel.n))
            for name, size, step in axes:
                count = -(-size // step)
                words += [f"{name} in {count} parts"] if count > 1 else []
                words += [f"{name} {size}->{count * step}"] if count * step != size else []
        lines.append(", ".join(words) or "exact")
    return lines
