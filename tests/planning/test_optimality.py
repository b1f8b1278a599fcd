"""Against brute force: no choice of kernels within the budget is cheaper than the plan's."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from plan_tools import UNPLANNED, cheapest, of_families

from onnxpack.graph.load import load
from onnxpack.graph.sites import find_sites
from onnxpack.kernels.target import NPU2
from onnxpack.plan import Plan
from onnxpack.planning import select
from onnxpack.planning.candidates import candidates
from onnxpack.planning.costs import Costs
from onnxpack.planning.tiling import Unit
from onnxpack.shapes import Gemm


def cost_of(plan: Plan, price: float) -> float:
    left_out = UNPLANNED * len(plan.unplanned) * len(plan.rows)
    return plan.totals.predicted_us + price * plan.totals.kernels + left_out


@pytest.mark.parametrize("seed", range(40))
def test_a_library_with_random_times(plan_of: Any, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [32, 48, 64, 96, 128, 192]
    families = [
        (rng.choice(sizes), [rng.choice(sizes) for _ in range(rng.randint(1, 4))]) for _ in range(rng.randint(1, 4))
    ]
    families += families[:1] * rng.randint(0, 5)  # layers
    rows = rng.choice([(16,), (64,), (16, 100)])
    shapes = {(rng.choice([16, 32, 64]), rng.choice(sizes), rng.choice([*sizes, 256, 512])) for _ in range(9)}
    kernels = ["x".join(map(str, shape)) for shape in sorted(shapes)]
    times = {kernel: float(rng.randint(20, 400)) for kernel in kernels}
    price = rng.choice([0, 35, 500])
    model = load(of_families(families))
    sites = find_sites(model)
    for budget in (1, 2, 3):
        costs = Costs(kernel_us=price, kernels=times)
        plan = plan_of(model, ",".join(kernels), sites=sites, rows=rows, budget=budget, costs=costs)
        assert plan.totals.gap_percent == 0
        best = cheapest(families, rows, kernels, times.__getitem__, budget, price)
        assert cost_of(plan, price) == pytest.approx(best, rel=1e-9, abs=0.1)


@pytest.mark.parametrize("budget", [1, 2])
@pytest.mark.parametrize(
    "families", [[(96, (128, 64, 64)), (128, (96,))], [(64, (160, 160)), (160, (64,)), (64, (300,))]]
)
def test_kernels_to_be_built(plan_of: Any, families: Any, budget: int) -> None:
    units = [Unit(Gemm(128, k, sum(part)), len(part)) for k, widths in families for part in _runs(widths)]
    kernels = [str(kernel) for kernel in candidates(units, NPU2)]
    assert len(kernels) > 20
    plan = plan_of(of_families(families), budget=budget)
    costs = Costs()
    best = cheapest(families, (128,), kernels, lambda text: costs.launch(Gemm.parse(text)) / 1000, budget, 35)
    assert cost_of(plan, 35) == pytest.approx(best, rel=1e-9, abs=0.1)


def _runs(widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [widths[i:j] for i in range(len(widths)) for j in range(i + 1, len(widths) + 1)]


def test_hundreds_of_shapes_are_planned_in_bounded_time(plan_of: Any) -> None:
    rng = random.Random(1)
    families = [(rng.randint(8, 200), [rng.randint(8, 200) for _ in range(rng.randint(1, 3))]) for _ in range(200)]
    model = load(of_families(families))
    sites = find_sites(model)
    start = time.process_time()
    plan = plan_of(model, sites=sites, budget=8)
    assert time.process_time() - start < 5
    assert plan.totals.planned == len(sites)
    assert plan.totals.kernels <= 8
    assert 0 < plan.totals.gap_percent < 30


def random_problem(seed: int) -> select.Problem:
    rng = np.random.default_rng(seed)
    units, count, budget = 8, 14, int(rng.integers(2, 5))
    table = rng.integers(1, 1000, (units, count))
    table[rng.random((units, count)) < 0.5] = select.CANNOT
    on_host = rng.integers(500, 3000, units)
    options = [[[0, 1], [2, 3]], [[4], [5, 5]], [[6, 7], [0]]]
    return select.Problem(table, on_host, options, [3, 1, 2], int(rng.integers(0, 300)), budget)


HARD = (35, 51, 154, 166, 285)
"""Where exchanging one kernel at a time does not lead to the best choice."""


@pytest.mark.parametrize("seed", [*range(12), *HARD])
def test_the_search_alone_against_every_subset(seed: int) -> None:
    problem = random_problem(seed)
    choice = select.choose(problem, 10**6)
    assert choice.cost == choice.bound == _best(problem)
    assert choice.gap_percent == 0
    early = select.choose(problem, 1)
    assert early.bound <= choice.cost <= early.cost
    if seed in HARD:
        assert early.cost > choice.cost
        assert early.gap_percent > 0


def _best(problem: select.Problem) -> int:
    from itertools import combinations

    best = 10**18
    count = problem.on_kernel.shape[1]
    for size in range(problem.budget + 1):
        for chosen in combinations(range(count), size):
            units = [
                min([int(host), *(int(row[j]) for j in chosen)])
                for row, host in zip(problem.on_kernel, problem.on_host, strict=True)
            ]
            total = sum(
                weight * min(sum(units[u] for u in option) for option in options)
                for options, weight in zip(problem.options, problem.weights, strict=True)
            )
            best = min(best, total + size * problem.price)
    return best
