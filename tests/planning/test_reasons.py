"""Why a product is not planned."""

from __future__ import annotations

from typing import Any

import pytest
from model_maker import matmul
from plan_tools import of_families

from onnxpack.errors import UsageError
from onnxpack.kernels.target import NPU1
from onnxpack.plan import Plan
from onnxpack.planning.costs import Costs


def reasons(plan: Plan) -> list[str]:
    return [entry.reason.value for entry in plan.unplanned]


def test_no_budget(plan_of: Any) -> None:
    plan = plan_of(matmul(), budget=0)
    assert reasons(plan) == ["over-budget"]
    assert plan.groups == plan.kernels == []
    assert plan.totals.bound == 1


def test_an_empty_library(plan_of: Any) -> None:
    assert reasons(plan_of(matmul(), "")) == ["no-kernel"]


def test_a_library_that_needs_too_many_launches(plan_of: Any) -> None:
    families = [(512, (512,)), (8, (8,))]
    plan = plan_of(of_families(families), "1x8x8")
    assert reasons(plan) == ["no-kernel"]
    assert plan.totals.planned == 1


def test_a_design_that_accepts_nothing(plan_of: Any) -> None:
    assert reasons(plan_of(matmul(), accepts=lambda kernel, target: False)) == ["not-tileable"]


def test_a_target_without_elfs(plan_of: Any) -> None:
    plan = plan_of(matmul(), target=NPU1)
    assert reasons(plan) == ["not-tileable"]
    assert plan.target == "npu1"


def test_what_the_design_refuses_is_not_planned(plan_of: Any) -> None:
    asked = []

    def accepts(kernel: Any, target: Any) -> bool:
        asked.append(kernel)
        return bool(kernel.n % 256 == 0)

    plan = plan_of(of_families([(64, (160, 96, 40)), (96, (300,))]), accepts=accepts)
    assert plan.totals.planned == 4
    assert all(int(entry.kernel.split("x")[2]) % 256 == 0 for entry in plan.kernels)
    assert any(kernel.n % 256 for kernel in asked)


def test_rows_that_the_graph_states(plan_of: Any) -> None:
    model = of_families([(64, (96,)), (64, (96,)), (64, (96,))], rows=[8, 40, "M"])
    plan = plan_of(model, rows=(128, 8))
    assert reasons(plan) == ["below-row-threshold"]
    assert sorted([program.rows for program in group.programs] for group in plan.groups) == [[40], [128]]
    assert reasons(plan_of(model, rows=(128,), min_rows=8)) == []


@pytest.mark.parametrize("rows", [100_000, 1 << 40, 1 << 62])
def test_more_rows_than_any_program_has(plan_of: Any, rows: int) -> None:
    plan = plan_of(of_families([(64, (96,))], rows=[rows]))
    assert [program.rows for program in plan.groups[0].programs] == [8192]
    assert plan.totals.planned == 1


def test_only_rows_below_the_threshold(plan_of: Any) -> None:
    assert reasons(plan_of(matmul(), rows=(1, 15))) == ["below-row-threshold"]
    assert reasons(plan_of(matmul(), rows=(1, 15, 16))) == []


def test_a_host_that_is_faster(plan_of: Any) -> None:
    costs = Costs(host_call_us=1, host_products_per_us=1e5)
    plan = plan_of(of_families([(512, (2048,)), (16, (16,))]), costs=costs, rows=(128,))
    assert reasons(plan) == ["host-is-faster"]
    assert plan.groups[0].k == 512


def test_a_host_that_is_faster_for_few_rows(plan_of: Any) -> None:
    plan = plan_of(of_families([(256, (512,))]), costs=Costs(host_call_us=1, host_products_per_us=2e4), rows=(16, 256))
    (group,) = plan.groups
    few, many = group.programs
    assert (few.rows, few.kernel, few.launches) == (16, None, [])
    assert many.kernel is not None
    assert group.kernels == [many.kernel]
    assert not plan.unplanned


def test_over_budget_beside_a_host_that_is_known(plan_of: Any) -> None:
    """One kernel may be made, and it is too large for the small product to be worth it."""
    costs = Costs(host_call_us=300, host_products_per_us=2e4, launch_us=10)
    families = [(2048, (2048,)), (32, (32,))]
    plan = plan_of(of_families(families), "128x2048x2048,128x32x32", budget=1, costs=costs)
    assert reasons(plan) == ["over-budget"]
    assert [entry.kernel for entry in plan.kernels] == ["128x2048x2048"]
    assert reasons(plan_of(of_families(families), "128x2048x2048,128x32x32", budget=2, costs=costs)) == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"budget": 17}, "budget of 17"),
        ({"budget": -1}, "budget of -1"),
        ({"rows": ()}, "rows must be"),
        ({"rows": (0,)}, "rows must be"),
        ({"rows": (128, 8193)}, "rows must be"),
        ({"min_rows": 0}, "not a number of rows"),
    ],
)
def test_limits_that_are_none(plan_of: Any, how: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of(matmul(), **how)


def test_a_model_without_products(plan_of: Any) -> None:
    from model_maker import model, node

    plan = plan_of(model([node("Relu", ["x"], ["y"])]))
    assert plan.groups == plan.unplanned == []
    assert plan.totals.gap_percent == 0
