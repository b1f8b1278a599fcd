"""The plan: how each site runs and how each weight is stored. Pure data, made by a pure function.

`build` executes exactly a plan; what it decides is here for everybody to read before anything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from onnxpack import records
from onnxpack.errors import UsageError
from onnxpack.formats.select import Selection
from onnxpack.graph.constants import structure
from onnxpack.graph.load import Model
from onnxpack.graph.sites import Site, find_sites
from onnxpack.reasons import Reason
from onnxpack.shapes import Gemm

SCHEMA = "onnxpack/plan/1.0"
OWN_CODES = "graph-int8"
"""Format id of a weight whose codes, scales and zero points are the graph's own, bit for bit."""


@dataclass(frozen=True)
class PlannedWeight:
    """One weight to store, and the sites that use it."""

    name: str
    k: int
    n: int
    format: str
    params: dict[str, Any]
    sites: list[str]


@dataclass(frozen=True)
class PlanGroup:
    """Bound sites of one (K, N) and the kernels that run them; no kernels means the host."""

    k: int
    n: int
    sites: list[str]
    kernels: list[str]
    launches: int
    """Per pass, at the planned rows; 0 on the host."""
    predicted_us: float | None
    wasted_macs: int


@dataclass(frozen=True)
class Unplanned:
    """A site that is not bound, or runs on the host only, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class PlanTotals:
    """Counts over the plan."""

    planned: int
    """Sites that a kernel runs."""
    launches: int
    kernels: int
    bound: int
    """Sites that run on int8 operands, on whatever device."""


@dataclass(frozen=True)
class Plan:
    """Everything that build needs to know beside the model itself."""

    schema: str
    model: str
    """sha256 of the graph file that the plan was made for."""
    rows: list[int]
    weights: list[PlannedWeight]
    groups: list[PlanGroup]
    unplanned: list[Unplanned]
    totals: PlanTotals

    def to_dict(self) -> dict[str, Any]:
        """What `plan --json` prints."""
        made = records.to_dict(self)
        assert isinstance(made, dict)
        return made

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Inverse of to_dict. UsageError names the path of what does not fit."""
        try:
            plan = records.from_dict(data, cls)
        except records.RecordError as error:
            raise UsageError(f"not a plan: {error}") from None
        if plan.schema.rpartition(".")[0] != SCHEMA.rpartition(".")[0]:
            raise UsageError(f"schema {plan.schema!r} is not one this version reads ({SCHEMA})")
        return plan


def make_plan(
    model: Model,
    weights: Selection,
    kernels: Collection[Gemm] = (),
    rows: Sequence[int] = (128,),
    sites: Sequence[Site] | None = None,
) -> Plan:
    """Decide for every site of a model. Reads no weights."""
    sites = find_sites(model) if sites is None else sites
    bound = [site for site in sites if site.bindable]
    groups = _groups(bound, kernels, rows)
    on_kernel = {path for group in groups if group.kernels for path in group.sites}
    totals = PlanTotals(
        planned=len(on_kernel),
        launches=sum(group.launches for group in groups),
        kernels=len({kernel for group in groups for kernel in group.kernels}),
        bound=len(bound),
    )
    unplanned = [
        Unplanned(site.path, (site.reason or Reason.NO_KERNEL).value) for site in sites if site.path not in on_kernel
    ]
    return Plan(SCHEMA, model.graph_sha256, list(rows), _weights(model, bound, weights), groups, unplanned, totals)


def weights_of(bound: Sequence[Site]) -> dict[str, list[Site]]:
    """The distinct weights of bound sites by name: one root through equal views is one weight, wherever it is used.

    A weight is called after its root tensor; further weights made of the same root get "#2", "#3".
    """
    by_structure: dict[tuple[str, ...], list[Site]] = {}
    for site in bound:
        assert site.weight is not None
        parts = [site.weight] if site.group is None else list(site.group.weight.constants)
        key = (*map(structure, parts), f"{site.k}x{site.n}", str(site.transposed_b), str(site.group is None))
        by_structure.setdefault(key, []).append(site)
    named: dict[str, list[Site]] = {}
    for users in by_structure.values():
        assert users[0].weight is not None
        base = name = users[0].weight.root.name
        count = 1
        while name in named:
            count += 1
            name = f"{base}#{count}"
        named[name] = users
    return named


def _weights(model: Model, bound: Sequence[Site], choice: Selection) -> list[PlannedWeight]:
    planned = []
    for name, users in weights_of(bound).items():
        k, n = users[0].k, users[0].n
        assert isinstance(k, int)
        assert isinstance(n, int)
        paths = [site.path for site in users]
        if users[0].group is not None:  # the graph's own codes are never quantized again
            planned.append(PlannedWeight(name, k, n, OWN_CODES, {}, paths))
            continue
        made = choice.of(name)
        if made.min_opset > model.opset:
            made = Selection.parse("int8").of(name)
        planned.append(PlannedWeight(name, k, n, made.name, dict(made.params), paths))
    return planned


def _groups(bound: Sequence[Site], kernels: Collection[Gemm], rows: Sequence[int]) -> list[PlanGroup]:
    members: dict[tuple[int, int], list[Site]] = {}
    for site in bound:
        assert isinstance(site.k, int)
        assert isinstance(site.n, int)
        members.setdefault((site.k, site.n), []).append(site)
    return [_group(k, n, users, kernels, rows) for (k, n), users in members.items()]


def _group(k: int, n: int, users: Sequence[Site], kernels: Collection[Gemm], rows: Sequence[int]) -> PlanGroup:
    """Exact kernels only: rows are cut into blocks of M, the last one padded."""
    fitting = sorted(kernel for kernel in kernels if kernel.kn == (k, n))
    if not fitting:
        return PlanGroup(k, n, [site.path for site in users], [], 0, None, 0)
    best, launches, wasted = None, 0, 0
    for count in rows:
        best = min(fitting, key=lambda kernel: (-(-count // kernel.m) * kernel.m, -kernel.m))
        blocks = -(-count // best.m)
        launches += blocks * len(users)
        wasted += (blocks * best.m - count) * k * n * len(users)
    return PlanGroup(k, n, [site.path for site in users], [str(best)], launches, None, wasted)
