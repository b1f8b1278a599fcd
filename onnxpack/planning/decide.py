"""Decide: which kernels, which kernel for each unit, which partition for each kind, and why not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpack.graph.sites import Site
from onnxpack.kernels.target import Target
from onnxpack.planning import select
from onnxpack.planning.candidates import candidates
from onnxpack.planning.costs import Costs
from onnxpack.planning.demand import Demand, units_of
from onnxpack.planning.families import Kind, Partition, kinds_of
from onnxpack.planning.limits import Limits
from onnxpack.planning.tiling import CANNOT, Unit
from onnxpack.reasons import Reason
from onnxpack.shapes import Gemm

_LOOKED_AT = 160
"""Kernels that are compared in combination, beside the best few of each unit."""
_BEST_OF_UNIT = 6

Accepts = Callable[[Gemm, Target], bool]


@dataclass(frozen=True)
class Decision:
    """A kernel, or the host, for each unit, and a partition for each kind."""

    demand: Demand
    partitions: Sequence[Partition]
    kernels: dict[Unit, Gemm]
    times: dict[Unit, int]
    reasons: dict[str, Reason]
    gap_percent: float


def decide(
    sites: Sequence[Site], library: Collection[Gemm] | None, limits: Limits, costs: Costs, accepts: Accepts
) -> Decision:
    """Everything that a plan of these bound sites has to decide. A kernel is asked for (`accepts`) only once it is
    chosen; when the design refuses it, the choice is made again without it."""
    every = kinds_of(sites, limits.rows, limits.min_rows)
    reasons = {site.path: Reason.BELOW_ROW_THRESHOLD for kind in every if not kind.rows for site in _sites(kind)}
    demand = Demand([kind for kind in every if kind.rows], costs)
    possible = candidates(demand.units, limits.target) if library is None else sorted(set(library))
    refused: set[Gemm] = set()
    while True:
        looked_at = _promising(demand, [kernel for kernel in possible if kernel not in refused], limits.target)
        table = demand.on_kernels(looked_at, limits.target)
        price = round(1000 * costs.kernel_us)
        weights = [len(kind.families) for kind in demand.kinds]
        choice = select.choose(select.Problem(table, demand.on_host, demand.options, weights, price, limits.budget))
        chosen = [looked_at[j] for j in choice.kernels]
        unfit = [] if library is not None else [kernel for kernel in chosen if not accepts(kernel, limits.target)]
        if not unfit:
            break
        refused.update(unfit)
    return _assign(demand, chosen, table[:, list(choice.kernels)], table, library is None, reasons, choice.gap_percent)


def _promising(demand: Demand, possible: Sequence[Gemm], target: Target) -> list[Gemm]:
    """The best few kernels of each unit, and the best for all of them together, in order of size."""
    if len(possible) <= _LOOKED_AT:
        return list(possible)
    table = demand.on_kernels(possible, target)
    clipped = np.minimum(table, demand.on_host[:, None])
    alone = select.Tally(demand.options, [len(kind.families) for kind in demand.kinds]).total(clipped)
    kept = set(np.argsort(alone, kind="stable")[:_LOOKED_AT].tolist())
    for row in table:
        kept.update(np.argsort(row, kind="stable")[:_BEST_OF_UNIT].tolist())
    return [possible[j] for j in sorted(kept)]


def _assign(
    demand: Demand,
    chosen: Sequence[Gemm],
    on_chosen: select.Costs,
    table: select.Costs,
    building: bool,
    reasons: dict[str, Reason],
    gap_percent: float,
) -> Decision:
    """Every unit to the cheapest chosen kernel, every kind to its cheapest partition."""
    least = demand.on_host.copy()
    kernels: dict[Unit, Gemm] = {}
    for i, unit in enumerate(demand.units):
        j = int(np.argmin(on_chosen[i])) if chosen else -1
        if chosen and on_chosen[i, j] < least[i]:
            kernels[unit], least[i] = chosen[j], on_chosen[i, j]
    index = {unit: i for i, unit in enumerate(demand.units)}
    best = []
    for choices, options in zip(demand.partitions, demand.options, strict=True):
        totals = [sum(int(least[i]) for i in units) for units in options]
        best.append(choices[totals.index(min(totals))])
    for kind, partition in zip(demand.kinds, best, strict=True):
        for part in partition:
            units = units_of(kind, part)
            if not any(unit in kernels for unit in units):
                rows = [index[unit] for unit in units]
                why = _why_on_host(table[rows], demand.on_host[rows], building)
                reasons.update((family.sites[i].path, why) for family in kind.families for i in part)
    times = {unit: int(least[i]) for i, unit in enumerate(demand.units)}
    return Decision(demand, best, kernels, times, reasons, gap_percent)


def _why_on_host(table: select.Costs, on_host: select.Costs, building: bool) -> Reason:
    if table.size == 0 or (table.min(axis=1) == CANNOT).all():
        return Reason.NOT_TILEABLE if building else Reason.NO_KERNEL
    if (table.min(axis=1) < on_host).any():
        return Reason.OVER_BUDGET
    return Reason.HOST_IS_FASTER


def _sites(kind: Kind) -> Iterable[Site]:
    return (site for family in kind.families for site in family.sites)
