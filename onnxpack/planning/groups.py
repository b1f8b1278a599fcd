"""Write a decision down: groups of calls, programs, launches, counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnxpack.planning.decide import Decision
from onnxpack.planning.demand import units_of
from onnxpack.planning.families import Kind, natural
from onnxpack.planning.records import Call, Member, PlanGroup, PlannedKernel, PlanTotals, Program
from onnxpack.planning.tiling import Unit, launches, wasted_bytes, wasted_macs
from onnxpack.shapes import Gemm


def groups_of(decision: Decision) -> list[PlanGroup]:
    """Bins that a kernel runs, equal ones of a kind together; the longest first."""
    made: dict[tuple[object, ...], tuple[Kind, Sequence[int], list[Call]]] = {}
    for kind, partition in zip(decision.demand.kinds, decision.partitions, strict=True):
        for part in partition:
            if any(unit in decision.kernels for unit in units_of(kind, part)):
                widths = tuple(kind.widths[i] for i in part)
                calls = [_call(kind, number, part) for number in range(len(kind.families))]
                made.setdefault((kind.k, widths, kind.rows), (kind, part, []))[2].extend(calls)
    groups = [_group(decision, *found) for found in made.values()]
    return sorted(groups, key=lambda g: (-g.predicted_us, g.k, g.n, natural(g.sites[0])))


def _group(decision: Decision, kind: Kind, part: Sequence[int], calls: list[Call]) -> PlanGroup:
    units = units_of(kind, part)
    on_kernel = [unit for unit in units if unit in decision.kernels]
    programs = [_program(unit, decision.kernels.get(unit)) for unit in units]
    counts = {unit: len(program.launches) for unit, program in zip(units, programs, strict=True)}
    calls = sorted(calls, key=lambda call: natural(call.members[0].site))
    return PlanGroup(
        k=kind.k,
        n=units[0].shape.n,
        sites=[member.site for call in calls for member in call.members],
        kernels=[str(kernel) for kernel in sorted({decision.kernels[unit] for unit in on_kernel})],
        launches=len(calls) * sum(counts.values()),
        predicted_us=_us(len(calls) * sum(decision.times[unit] for unit in on_kernel)),
        wasted_macs=len(calls) * sum(wasted_macs(u.shape, decision.kernels[u], counts[u]) for u in on_kernel),
        wasted_bytes=len(calls) * sum(wasted_bytes(u.shape, decision.kernels[u], counts[u]) for u in on_kernel),
        calls=calls,
        programs=programs,
    )


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


def kernels_of(groups: Sequence[PlanGroup], library: Collection[Gemm] | None) -> list[PlannedKernel]:
    """The distinct kernels of the groups, by size."""
    made = []
    for shape in sorted({Gemm.parse(kernel) for group in groups for kernel in group.kernels}):
        users = [group for group in groups if str(shape) in group.kernels]
        count = sum(
            len(group.calls) * sum(len(p.launches) for p in group.programs if p.kernel == str(shape)) for group in users
        )
        made.append(PlannedKernel(str(shape), library is None, count, sum(len(group.sites) for group in users)))
    return made


def totals_of(groups: Sequence[PlanGroup], bound: int, gap_percent: float) -> PlanTotals:
    """Counts over the groups."""
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
