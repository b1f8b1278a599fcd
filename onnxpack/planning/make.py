"""Make a plan: what can be decided before anything is compiled or any weight is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnxpack.formats.select import Selection
from onnxpack.graph.load import Model
from onnxpack.graph.sites import Site, find_sites
from onnxpack.kernels.target import NPU2, Target
from onnxpack.planning.candidates import accepts
from onnxpack.planning.costs import Costs
from onnxpack.planning.decide import Accepts, decide
from onnxpack.planning.groups import groups_of, kernels_of, totals_of
from onnxpack.planning.limits import BUDGET, MIN_ROWS, Limits
from onnxpack.planning.records import SCHEMA, Plan, Unplanned
from onnxpack.planning.weights import plan_weights
from onnxpack.shapes import Gemm


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
    decided = decide(on_device, kernels, limits, costs, accepts)
    groups = groups_of(decided)
    planned = {path for group in groups for path in group.sites}
    return Plan(
        schema=SCHEMA,
        model=model.graph_sha256,
        target=target.name,
        rows=list(limits.rows),
        min_rows=min_rows,
        budget=budget,
        weights=plan_weights(model, bound, weights),
        kernels=kernels_of(groups, kernels),
        groups=groups,
        unplanned=[
            Unplanned(site.path, site.reason or decided.reasons[site.path])
            for site in sites
            if site.path not in planned
        ],
        totals=totals_of(groups, len(bound), decided.gap_percent),
        costs=costs,
    )
