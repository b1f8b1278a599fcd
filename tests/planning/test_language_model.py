"""The figures of Qwen3-0.6B."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from model_maker import cli

from onnxpack.graph.load import Model
from onnxpack.graph.sites import Site
from onnxpack.plan import Plan

Qwen3 = tuple[Model, list[Site]]
OUTPUT = (1024, 151936)


def layers_and_output(plan: Plan) -> tuple[int, int]:
    """Launches of the layers, and of the output layer."""
    output = sum(group.launches for group in plan.groups if (group.k, group.n) == OUTPUT)
    return plan.totals.launches - output, output


@pytest.mark.parametrize("budget", range(1, 17))
def test_every_weight_product_is_planned_whatever_the_budget(qwen3: Qwen3, plan_of: Any, budget: int) -> None:
    plan = plan_of(qwen3[0], sites=qwen3[1], budget=budget)
    assert plan.totals.planned == 197
    assert {entry.reason.value for entry in plan.unplanned} == {"dynamic-weight"}
    assert len(plan.unplanned) == 57
    assert plan.totals.kernels == len({k for group in plan.groups for k in group.kernels}) <= min(budget, 5)
    assert plan.totals.gap_percent == 0


def test_joins_bring_the_layers_to_four_launches_each(qwen3: Qwen3, plan_of: Any) -> None:
    plan = plan_of(qwen3[0], sites=qwen3[1])
    layers, output = layers_and_output(plan)
    assert layers == 112
    assert 1 < output <= 40
    wanted = {"128x1024x4096", "128x1024x6144", "128x2048x1024", "128x3072x1024"}
    assert wanted < {entry.kernel for entry in plan.kernels}
    joined = {(g.k, g.n): [len(call.members) for call in g.calls] for g in plan.groups}
    assert joined[1024, 4096] == [3] * 28
    assert joined[1024, 6144] == [2] * 28
    assert all(entry.build for entry in plan.kernels)


def test_one_kernel_is_enough(qwen3: Qwen3, plan_of: Any) -> None:
    plan = plan_of(qwen3[0], sites=qwen3[1], budget=1)
    assert plan.totals.kernels == 1
    assert plan.totals.planned == 197


def test_more_budget_is_never_slower(qwen3: Qwen3, plan_of: Any) -> None:
    times = [plan_of(qwen3[0], sites=qwen3[1], budget=b).totals.predicted_us for b in range(1, 9)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_a_fixed_library_is_used_and_nothing_else(qwen3: Qwen3, plan_of: Any) -> None:
    singles = "128x1024x2048,128x1024x1024,128x2048x1024,128x1024x3072,128x3072x1024"
    plan = plan_of(qwen3[0], singles, sites=qwen3[1])
    assert plan.totals.planned == 197
    assert {k for group in plan.groups for k in group.kernels} <= set(singles.split(","))
    assert all(group.n <= 3072 for group in plan.groups if (group.k, group.n) != OUTPUT)
    assert layers_and_output(plan)[0] <= 196
    assert not any(entry.build for entry in plan.kernels)


def test_two_small_kernels_reach_every_product(qwen3: Qwen3, plan_of: Any) -> None:
    plan = plan_of(qwen3[0], "16x1024x2048,16x1024x1024", sites=qwen3[1])
    assert plan.totals.planned == 197
    q = next(g for g in plan.groups if (g.k, g.n) == (1024, 2048))
    assert q.launches == len(q.calls) * 8, "128 rows are 8 blocks of 16"


def test_several_numbers_of_rows(qwen3: Qwen3, plan_of: Any) -> None:
    plan = plan_of(qwen3[0], sites=qwen3[1], rows=(16, 128))
    assert plan.totals.planned == 197
    assert all([program.rows for program in group.programs] == [16, 128] for group in plan.groups)
    assert plan.totals.kernels <= 8
    with_one = plan_of(qwen3[0], sites=qwen3[1], rows=(128, 16, 128), budget=1)
    assert with_one.totals.planned == 197
    assert with_one.rows == [16, 128]


def test_planning_two_numbers_of_rows_together_is_no_worse_than_apart(qwen3: Qwen3, plan_of: Any) -> None:
    model, sites = qwen3
    apart = sum(plan_of(model, sites=sites, rows=(rows,), budget=4).totals.predicted_us for rows in (16, 128))
    together = plan_of(model, sites=sites, rows=(16, 128), budget=8).totals
    assert together.predicted_us <= apart
    assert together.gap_percent < 2


def test_the_order_of_the_sites_decides_nothing(qwen3: Qwen3, plan_of: Any) -> None:
    model, sites = qwen3
    for budget in (8, 2):
        plan = plan_of(model, sites=sites, budget=budget)
        for seed in range(3):
            other = random.Random(seed).sample(sites, len(sites))
            shuffled = plan_of(model, sites=other, budget=budget)
            assert shuffled.execution == plan.execution
            assert shuffled.totals == plan.totals
            assert shuffled.kernels == plan.kernels


@pytest.mark.parametrize(
    ("budget", "rows"), [(8, (128,)), (1, (128,)), (3, (128,)), (8, (16, 128)), (4, (16, 128, 512))]
)
def test_254_sites_are_planned_at_once(qwen3: Qwen3, plan_of: Any, budget: int, rows: tuple[int, ...]) -> None:
    plan_of(qwen3[0], sites=qwen3[1])  # the design is loaded once
    start = time.process_time()
    plan_of(qwen3[0], sites=qwen3[1], budget=budget, rows=rows)
    assert time.process_time() - start < 0.5


def test_the_command_prints_the_same_every_time(qwen3_path: Path) -> None:
    runs = [cli("plan", qwen3_path, "--json", env={"PYTHONHASHSEED": seed}) for seed in ("0", "7")]
    assert [run.returncode for run in runs] == [0, 0]
    assert runs[0].stdout == runs[1].stdout
    totals = json.loads(runs[0].stdout)["totals"]
    assert (totals["planned"], totals["kernels"]) == (197, 5)
