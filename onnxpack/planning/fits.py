"""Whether a plan fits a model: asked before it is executed, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from onnxpack.errors import UsageError
from onnxpack.graph.sites import Site
from onnxpack.planning.check import problems
from onnxpack.planning.families import input_of
from onnxpack.planning.records import Plan


def check_plan(plan: Plan, sites: Sequence[Site]) -> None:
    """UsageError when a plan cannot be executed for these sites of its model."""
    known = {site.path: site for site in sites if site.bindable and site.reason is None}
    shapes = {path: (site.k, site.n) for path, site in known.items()}
    problem = next(problems(plan.execution, shapes), None) or next(_mixed_inputs(plan, known), None)
    if problem is not None:
        raise UsageError(f"the plan cannot be executed: {problem}", hint="run `onnxpack plan` again")


def _mixed_inputs(plan: Plan, known: Mapping[str, Site]) -> Iterator[str]:
    for group in plan.groups:
        for call in group.calls:
            if len({input_of(known[member.site]) for member in call.members}) > 1:
                yield f"{[member.site for member in call.members]} are joined and have different inputs"
