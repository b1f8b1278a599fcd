"""A plan's launches, replayed in numpy, give every product exactly, and every site is planned or says why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_tools import Families, of_families, replay

from onnxpack.graph.load import load
from onnxpack.graph.sites import find_sites
from onnxpack.plan import Plan

WIDTHS = st.lists(st.sampled_from([1, 7, 32, 48, 80, 96, 160]), min_size=1, max_size=7)
FAMILIES = st.lists(st.tuples(st.sampled_from([1, 8, 40, 64, 100, 200]), WIDTHS), min_size=1, max_size=3)
KERNELS = st.lists(
    st.builds("{}x{}x{}".format, st.sampled_from([1, 16, 24, 64]), st.sampled_from([8, 64, 128]),
              st.sampled_from([16, 32, 96, 256])), max_size=5, unique=True,
)  # fmt: skip
SETTINGS = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(plan: Plan, families: Families, rows: int) -> None:
    rng = np.random.default_rng(rows)
    a_of: dict[str, Any] = {}
    b_of: dict[str, Any] = {}
    for site in (path for group in plan.groups for path in group.sites):
        i, j = map(int, NAMES[site].removeprefix("p").split("_"))
        k, widths = families[i]
        a_of[site] = np.random.default_rng(i).integers(-128, 128, (rows, k), np.int8)
        b_of[site] = rng.integers(-128, 128, (k, widths[j]), np.int8)
    results = replay(plan.to_dict(), a_of, b_of, rows)
    for site, result in results.items():
        assert result is not None
        assert result.dtype == np.int32
        np.testing.assert_array_equal(result, a_of[site].astype(np.int64) @ b_of[site])
    assert set(results) == set(a_of)


NAMES: dict[str, str] = {}
"""Node names by path, of the model at hand."""


def planned(plan_of: Any, families: Families, kernels: list[str] | None, **how: Any) -> Plan:
    model = load(of_families(families))
    sites = find_sites(model)
    NAMES.clear()
    NAMES.update((site.path, site.node.name or "") for site in sites)
    plan: Plan = plan_of(model, None if kernels is None else ",".join(kernels), sites=sites, **how)
    done = [path for group in plan.groups for path in group.sites] + [entry.path for entry in plan.unplanned]
    assert sorted(done) == sorted(site.path for site in sites)
    assert len({k for group in plan.groups for k in group.kernels}) <= plan.budget
    return plan


@given(families=FAMILIES, kernels=KERNELS, budget=st.integers(0, 4), rows=st.sampled_from([(16,), (40, 20), (129,)]),
       real=st.integers(1, 300))  # fmt: skip
@SETTINGS
def test_a_library(
    plan_of: Any, families: Families, kernels: list[str], budget: int, rows: tuple[int, ...], real: int
) -> None:
    plan = planned(plan_of, families, kernels, budget=budget, rows=rows)
    assert {k for group in plan.groups for k in group.kernels} <= set(kernels)
    if not kernels:
        assert {entry.reason.value for entry in plan.unplanned} == {"no-kernel"}
    check(plan, families, real)


@given(families=FAMILIES, budget=st.integers(1, 4), rows=st.sampled_from([(16,), (16, 130), (600,)]),
       real=st.integers(1, 200))  # fmt: skip
@SETTINGS
def test_kernels_to_be_built(plan_of: Any, families: Families, budget: int, rows: tuple[int, ...], real: int) -> None:
    plan = planned(plan_of, families, None, budget=budget, rows=rows)
    assert not plan.unplanned, "one kernel can always be built, and it can always run everything"
    check(plan, families, real)


def test_padding_splitting_and_joining_together(plan_of: Any) -> None:
    families = [(200, (48, 80)), (100, (300,)), (64, (32, 32, 32))]
    plan = planned(plan_of, families, ["24x64x128"], rows=(50,))
    how = {(g.k, g.n): [len(p.launches) for p in g.programs] for g in plan.groups}
    assert how == {(200, 128): [3 * 4], (100, 300): [3 * 2 * 3], (64, 96): [3]}
    for real in (1, 24, 25, 49, 50, 51, 101):
        check(plan, families, real)


def test_what_is_wasted_is_counted(plan_of: Any) -> None:
    plan = planned(plan_of, [(100, (300,))], ["24x64x128"], rows=(50,))
    (group,) = plan.groups
    assert group.wasted_macs == 18 * 24 * 64 * 128 - 50 * 100 * 300
    one = 24 * 64 + 64 * 128 + 4 * 24 * 128
    assert group.wasted_bytes == 18 * one - (50 * 100 + 100 * 300 + 4 * 50 * 300)


def test_the_sum_of_a_split_k_stays_within_int32(plan_of: Any) -> None:
    k = 133_144
    plan = planned(plan_of, [(k, (1,))], ["16x8192x16"], rows=(16,))
    (path,) = (s for g in plan.groups for s in g.sites)
    worst = {path: np.full((16, k), 127, np.int8)}, {path: np.full((k, 1), 127, np.int8)}
    result = replay(plan.to_dict(), *worst, 16)[path]
    assert (result == 127 * 127 * k).all()


@pytest.mark.parametrize("n", [1, 31, 33, 129, 1000])
def test_any_width_can_be_built(plan_of: Any, n: int) -> None:
    check(planned(plan_of, [(70, (n,))], None), [(70, (n,))], 128)
