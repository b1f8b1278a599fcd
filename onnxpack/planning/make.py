"""Make a plan: what can be decided before anything is compiled or any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpack.errors import UsageError
from onnxpack.formats.select import Selection
from onnxpack.graph.load import Model
from onnxpack.graph.sites import Site, find_sites
from onnxpack.kernels.target import NPU2, Target
from onnxpack.planning import select
from onnxpack.planning.candidates import accepts, candidates
from onnxpack.planning.costs import Costs
from onnxpack.planning.families import MOST_ROWS, Kind, Partition, kinds_of, natural, partitions
from onnxpack.planning.records import (
    SCHEMA,
    Call,
    Member,
    Plan,
    PlanGroup,
    PlannedKernel,
    PlanTotals,
    Program,
    Unplanned,
)
from onnxpack.planning.tiling import CANNOT, Unit, cost_table, launches, wasted_bytes, wasted_macs
from onnxpack.planning.weights import plan_weights
from onnxpack.reasons import Reason
from onnxpack.shapes import Gemm

BUDGET = 8
"""Distinct kernels: each holds a hardware context, and all processes of a machine share 16 (on some parts 32)."""
MIN_ROWS = 16
"""Below it a launch costs more than the host's product: at 12 rows the gain vanishes on a busy machine, at 16 it is
1.5 times (published for Strix Halo)."""
_LOOKED_AT = 160
"""Kernels that are compared in combination, beside the best few of each unit."""
_BEST_OF_UNIT = 6

Accepts = Callable[[Gemm, Target], bool]


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to."""

    rows: Sequence[int] = (128,)
    budget: int = BUDGET
    min_rows: int = MIN_ROWS
    target: Target = NPU2

    def __post_init__(self) -> None:
        if not self.rows or not all(1 <= r <= MOST_ROWS for r in self.rows):
            hint = "longer calls repeat the largest program"
            raise UsageError(f"rows must be between 1 and {MOST_ROWS}", where="--rows", hint=hint)
        if not 0 <= self.budget <= self.target.contexts:
            raise UsageError(
                f"a budget of {self.budget} kernels",
                where="--budget",
                hint=f"between 0 and {self.target.contexts}: the device has no more contexts, for all processes",
            )
        if self.min_rows < 1:
            raise UsageError(f"{self.min_rows} is not a number of rows", where="--min-rows")


def make_plan(
    model: Model,
    weights: Selection,
    kernels: Collection[Gemm] | None = None,
    rows: Sequence[int] = (128,),
    sites: Sequence[Site] | None = None,
    *,
    budget: int = BUDGET,
    min_rows: int = MIN_ROWS,
    costs: Costs | None = None,
    target: Target = NPU2,
    accepts: Accepts = accepts,
) -> Plan:
    """Decide for every site of a model. Reads no weights.

    `kernels`: nothing but these; None: whatever `accepts` says could be made. UsageError for limits that are none.
    """
    limits = Limits(sorted(set(rows)), budget, min_rows, target)
    costs = costs or Costs()
    sites = find_sites(model) if sites is None else sites
    bound = [site for site in sites if site.bindable]
    on_device = [site for site in bound if site.reason is None]
    decided = _decide(on_device, kernels, limits, costs, accepts)
    groups = decided.groups()
    planned = {path for group in groups for path in group.sites}
    return Plan(
        schema=SCHEMA,
        model=model.graph_sha256,
        target=target.name,
        rows=list(limits.rows),
        min_rows=min_rows,
        budget=budget,
        weights=plan_weights(model, bound, weights),
        kernels=_kernels(groups, kernels),
        groups=groups,
        unplanned=[
            Unplanned(site.path, site.reason or decided.reasons[site.path])
            for site in sites
            if site.path not in planned
        ],
        totals=_totals(groups, len(bound), decided.gap_percent),
        costs=costs,
    )


# --- what is to be decided --------------------------------------------------------------------------------------------


class _Demand:
    """The units of all kinds, and the partitions they make up."""

    def __init__(self, kinds: Sequence[Kind], costs: Costs) -> None:
        self.kinds = kinds
        self.costs = costs
        self.partitions = [partitions(kind.widths) for kind in kinds]
        index: dict[Unit, int] = {}
        self.options = [
            [
                [index.setdefault(unit, len(index)) for part in partition for unit in units_of(kind, part)]
                for partition in choices
            ]
            for kind, choices in zip(kinds, self.partitions, strict=True)
        ]
        self.units = list(index)
        self.on_host = self._on_host()

    def _on_host(self) -> select.Costs:
        figures = [self.costs.host(unit.shape, unit.members) for unit in self.units]
        never = [select.NEVER * unit.members for unit in self.units]
        return np.array([n if f is None else f for f, n in zip(figures, never, strict=True)], np.int64)

    def on_kernels(self, kernels: Sequence[Gemm], target: Target) -> select.Costs:
        """[units, kernels]: nanoseconds, or CANNOT."""
        return cost_table(self.units, kernels, self.costs, target)


def units_of(kind: Kind, part: Sequence[int]) -> list[Unit]:
    """The units of one bin of a family, one for each number of rows."""
    n = sum(kind.widths[i] for i in part)
    return [Unit(Gemm(rows, kind.k, n), len(part)) for rows in kind.rows]


# --- deciding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decided:
    """What was chosen: a kernel, or the host, for each unit, and a partition for each kind."""

    demand: _Demand
    partitions: Sequence[Partition]
    kernels: dict[Unit, Gemm]
    times: dict[Unit, int]
    reasons: dict[str, Reason]
    gap_percent: float

    def groups(self) -> list[PlanGroup]:
        """Bins that a kernel runs, equal ones of a kind together; the longest first."""
        made: dict[tuple[object, ...], tuple[Kind, Sequence[int], list[Call]]] = {}
        for kind, partition in zip(self.demand.kinds, self.partitions, strict=True):
            for part in partition:
                if any(unit in self.kernels for unit in units_of(kind, part)):
                    widths = tuple(kind.widths[i] for i in part)
                    calls = [_call(kind, number, part) for number in range(len(kind.families))]
                    made.setdefault((kind.k, widths, kind.rows), (kind, part, []))[2].extend(calls)
        groups = [self._group(*found) for found in made.values()]
        return sorted(groups, key=lambda g: (-g.predicted_us, g.k, g.n, natural(g.sites[0])))

    def _group(self, kind: Kind, part: Sequence[int], calls: list[Call]) -> PlanGroup:
        units = units_of(kind, part)
        on_kernel = [unit for unit in units if unit in self.kernels]
        programs = [_program(unit, self.kernels.get(unit)) for unit in units]
        counts = {unit: len(program.launches) for unit, program in zip(units, programs, strict=True)}
        calls = sorted(calls, key=lambda call: natural(call.members[0].site))
        return PlanGroup(
            k=kind.k,
            n=units[0].shape.n,
            sites=[member.site for call in calls for member in call.members],
            kernels=[str(kernel) for kernel in sorted({self.kernels[unit] for unit in on_kernel})],
            launches=len(calls) * sum(counts.values()),
            predicted_us=_us(len(calls) * sum(self.times[unit] for unit in on_kernel)),
            wasted_macs=len(calls) * sum(wasted_macs(u.shape, self.kernels[u], counts[u]) for u in on_kernel),
            wasted_bytes=len(calls) * sum(wasted_bytes(u.shape, self.kernels[u], counts[u]) for u in on_kernel),
            calls=calls,
            programs=programs,
        )


def _decide(
    sites: Sequence[Site], library: Collection[Gemm] | None, limits: Limits, costs: Costs, accepts: Accepts
) -> _Decided:
    every = kinds_of(sites, limits.rows, limits.min_rows)
    reasons = {site.path: Reason.BELOW_ROW_THRESHOLD for kind in every if not kind.rows for site in _sites(kind)}
    demand = _Demand([kind for kind in every if kind.rows], costs)
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


def _promising(demand: _Demand, possible: Sequence[Gemm], target: Target) -> list[Gemm]:
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
    demand: _Demand,
    chosen: Sequence[Gemm],
    on_chosen: select.Costs,
    table: select.Costs,
    building: bool,
    reasons: dict[str, Reason],
    gap_percent: float,
) -> _Decided:
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
    return _Decided(demand, best, kernels, times, reasons, gap_percent)


def _why_on_host(table: select.Costs, on_host: select.Costs, building: bool) -> Reason:
    if table.size == 0 or (table.min(axis=1) == CANNOT).all():
        return Reason.NOT_TILEABLE if building else Reason.NO_KERNEL
    if (table.min(axis=1) < on_host).any():
        return Reason.OVER_BUDGET
    return Reason.HOST_IS_FASTER


# --- writing it down --------------------------------------------------------------------------------------------------


def _sites(kind: Kind) -> Iterable[Site]:
    return (site for family in kind.families for site in family.sites)


def _call(kind: Kind, number: int, part: Sequence[int]) -> Call:
    members, column = [], 0
    for i in part:
        members.append(Member(kind.families[number].sites[i].path, column, kind.widths[i]))
        column += kind.widths[i]
    return Call(members)


def _program(unit: Unit, kernel: Gemm | None) -> Program:
    if kernel is None:
        return Program(unit.shape.m, None, [])
    return Program(unit.shape.m, str(kernel), launches(unit.shape, kernel))


def _kernels(groups: Sequence[PlanGroup], library: Collection[Gemm] | None) -> list[PlannedKernel]:
    made = []
    for shape in sorted({Gemm.parse(kernel) for group in groups for kernel in group.kernels}):
        users = [group for group in groups if str(shape) in group.kernels]
        count = sum(
            len(group.calls) * sum(len(p.launches) for p in group.programs if p.kernel == str(shape)) for group in users
        )
        made.append(PlannedKernel(str(shape), library is None, count, sum(len(group.sites) for group in users)))
    return made


def _totals(groups: Sequence[PlanGroup], bound: int, gap_percent: float) -> PlanTotals:
    return PlanTotals(
        planned=sum(len(group.sites) for group in groups),
        launches=sum(group.launches for group in groups),
        kernels=len({kernel for group in groups for kernel in group.kernels}),
        bound=bound,
        predicted_us=round(sum(group.predicted_us for group in groups), 3),
        gap_percent=gap_percent,
    )


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
