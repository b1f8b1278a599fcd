"""Plans and costs as files: there and back, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_maker import matmul
from plan_tools import of_families

from onnxpack import records
from onnxpack.errors import UsageError
from onnxpack.graph.load import load
from onnxpack.graph.sites import find_sites
from onnxpack.plan import Plan
from onnxpack.planning.costs import Costs
from onnxpack.planning.fits import check_plan
from onnxpack.planning.records import Program, blocks

FAMILIES = [(100, (48, 80)), (64, (300,))]


@pytest.fixture(scope="module")
def made(plan_of: Any) -> dict[str, Any]:
    plan: Plan = plan_of(of_families(FAMILIES), "16x64x128,128x64x128", rows=(50, 200))
    return plan.to_dict()


def test_there_and_back(made: dict[str, Any]) -> None:
    plan = Plan.from_dict(made)
    assert Plan.loads(records.dumps(plan)) == plan
    assert Plan.from_dict(json.loads(json.dumps(made))) == plan


def test_it_has_the_keys_that_scripts_rely_on(made: dict[str, Any]) -> None:
    assert {"rows", "groups", "unplanned", "totals"} <= made.keys()
    for group in made["groups"]:
        assert {"k", "n", "sites", "kernels", "launches", "predicted_us", "wasted_macs"} <= group.keys()
        assert all(kernel.count("x") == 2 for kernel in group["kernels"])
    assert {"planned", "launches", "kernels"} <= made["totals"].keys()
    assert made["totals"]["launches"] == sum(group["launches"] for group in made["groups"])
    for group in made["groups"]:
        assert group["launches"] == len(group["calls"]) * sum(len(p["launches"]) for p in group["programs"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not a plan"),
        (b"[]", "not a plan"),
        (b"{}", "missing required field"),
        (b"\xff\xfe", "not a plan"),
        (b"[" * 100_000, "not a plan"),
        (b'{"schema": 3}', r"\$.schema"),
    ],
)
def test_what_is_no_plan(text: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Plan.loads(text)


def test_other_versions(made: dict[str, Any]) -> None:
    assert Plan.from_dict({**made, "schema": "onnxpack/plan/1.99", "a key of the future": 1}).schema.endswith("1.99")
    with pytest.raises(UsageError, match="not one this version reads"):
        Plan.from_dict({**made, "schema": "onnxpack/plan/2.0"})


def test_a_reason_that_does_not_exist(made: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"unplanned.*reason"):
        Plan.from_dict({**made, "unplanned": [{"path": "p", "reason": "because"}]})


# --- plans that people edit -------------------------------------------------------------------------------------------


def first_launch(plan: Any) -> Any:
    return plan["groups"][0]["programs"][0]["launches"][0]


def joined(plan: Any) -> Any:
    return next(g for g in plan["groups"] if len(g["calls"][0]["members"]) > 1)


def alone(plan: Any) -> Any:
    return next(g for g in plan["groups"] if len(g["calls"][0]["members"]) == 1)


def mix_inputs(plan: Any) -> None:
    """Two products of K 64 and different inputs in one call."""
    group = alone(plan)
    group["k"], other = 100, joined(plan)["calls"][0]["members"].pop()
    group["calls"][0]["members"][0] = other


EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a launch is missing": (lambda p: p["groups"][0]["programs"][0]["launches"].pop(), "cover|twice"),
    "all launches are missing": (lambda p: p["groups"][0]["programs"][0]["launches"].clear(), "0 launches"),
    "a launch twice": (lambda p: p["groups"][0]["programs"][0]["launches"].append(first_launch(p)), "twice"),
    "one launch in place of another": (
        lambda p: joined(p)["programs"][1]["launches"].__setitem__(0, joined(p)["programs"][1]["launches"][-1]),
        "twice or not at all",
    ),
    "too many rows": (lambda p: first_launch(p).update(rows=[0, 300]), "cover rows"),
    "K from elsewhere": (lambda p: first_launch(p).update(k=[1, 64]), "cover K"),
    "columns beyond": (lambda p: first_launch(p).update(columns=[0, 10**9]), "cover columns"),
    "backwards": (lambda p: first_launch(p).update(columns=[128, 0]), "cover columns"),
    "empty": (lambda p: first_launch(p).update(k=[0, 0]), "cover K"),
    "a kernel that is too small": (lambda p: p["groups"][0]["programs"][0].update(kernel="1x1x1"), "cover"),
    "a kernel that is none": (lambda p: p["groups"][0]["programs"][0].update(kernel="big"), "not a shape"),
    "launches on the host": (lambda p: p["groups"][0]["programs"][0].update(kernel=None), "without a kernel"),
    "no programs": (lambda p: p["groups"][0]["programs"].clear(), "programs for"),
    "programs out of order": (lambda p: p["groups"][0]["programs"].reverse(), "programs for"),
    "no rows": (lambda p: p["groups"][0]["programs"][0].update(rows=0), "programs for"),
    "another K": (lambda p: p["groups"][0].update(k=99), "no site|cover"),
    "another N": (lambda p: p["groups"][0].update(n=7), "columns are joined"),
    "a site that is not there": (lambda p: alone(p)["calls"][0]["members"][0].update(site="MatMul_99"), "calls"),
    "another width": (lambda p: joined(p)["calls"][0]["members"][0].update(n=10), "no site"),
    "a gap between columns": (lambda p: joined(p)["calls"][0]["members"][1].update(column=81), "begins at column"),
    "a site twice": (lambda p: p["groups"].append(copy.deepcopy(p["groups"][0])), "planned twice"),
    "an empty call": (lambda p: p["groups"][0]["calls"].append({"members": []}), "0 columns"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_plan_that_a_hand_has_changed(made: dict[str, Any], name: str) -> None:
    edit, words = EDITS[name]
    sites = find_sites(load(of_families(FAMILIES)))
    check_plan(Plan.from_dict(made), sites)
    broken = copy.deepcopy(made)
    edit(broken)
    with pytest.raises(UsageError, match=f"cannot be executed.*({words})"):
        check_plan(Plan.from_dict(broken), sites)


def test_a_plan_of_many_ranges_is_refused_at_once(plan_of: Any) -> None:
    """4096 launches on a diagonal name 4096 ranges of each axis: their product must never be made."""
    source = of_families([(4096, (4096,))])
    plan = plan_of(source, rows=(4096,), kernels="512x4096x4096").to_dict()
    cuts = [[i, i + 1] for i in range(4096)]
    plan["groups"][0]["programs"][0]["launches"] = [{"rows": cut, "k": cut, "columns": cut} for cut in cuts]
    with pytest.raises(UsageError, match="twice or not at all"):
        check_plan(Plan.from_dict(plan), find_sites(load(source)))


def test_a_join_across_inputs_is_refused(plan_of: Any) -> None:
    two = of_families([(64, (48,)), (64, (80,))])
    joined_plan = plan_of(of_families([(64, (48, 80))]), "128x64x128").to_dict()
    with pytest.raises(UsageError, match="different inputs"):
        check_plan(Plan.from_dict(joined_plan), find_sites(load(two)))


def test_other_cuts_than_our_own_are_fine(made: dict[str, Any]) -> None:
    """What counts is that everything is computed once, not how a plan came to be."""
    other = copy.deepcopy(made)
    program = alone(other)["programs"][0]
    rows = [[0, 10], [10, 50]]
    columns = [[0, 100], [100, 200], [200, 300]]
    program.update(
        kernel="64x64x128", launches=[{"rows": r, "k": [0, 64], "columns": c} for c in columns for r in rows]
    )
    check_plan(Plan.from_dict(other), find_sites(load(of_families(FAMILIES))))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True), st.integers(0, 2000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_blocks_cover_every_row_once(sizes: list[int], rows: int) -> None:
    programs = [Program(size, None, []) for size in sorted(sizes)]
    at = 0
    for start, count, program in blocks(programs, rows):
        assert start == at
        assert 0 < count <= program.rows
        assert not any(p.rows >= rows - start for p in programs if p.rows < program.rows), "the smallest that holds it"
        at += count
    assert at == rows


# --- costs ------------------------------------------------------------------------------------------------------------


def test_costs_there_and_back() -> None:
    costs = Costs(launch_us=99, kernels={"128x64x64": 12.5}, host_call_us=0)
    assert Costs.loads(records.dumps(costs)) == costs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a record of costs"),
        ('{"launch_us": "soon"}', "launch_us"),
        ('{"launch_us": -1}', "launch_us is -1"),
        ('{"bytes_per_us": 0}', "bytes_per_us is 0"),
        ('{"host_products_per_us": 0}', "host_products_per_us is 0"),
        ('{"kernels": {"big": 1}}', "not a shape"),
        ('{"kernels": {"1x2x3": -5}}', "1x2x3 is -5"),
        ('{"schema": "onnxpack/costs/2.0"}', "not one this version reads"),
        ('{"launch_us": 1e400}', "launch_us|not a record"),
    ],
)
def test_costs_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Costs.loads(text)


def test_measured_times_decide(plan_of: Any) -> None:
    source = matmul(k=64, n=64)
    for slow, wanted in (("128x64x64", "128x64x128"), ("128x64x128", "128x64x64")):
        plan = plan_of(source, "128x64x64,128x64x128", costs=Costs(kernels={slow: 1000.0}))
        assert [entry.kernel for entry in plan.kernels] == [wanted]
        assert plan.costs.kernels == {slow: 1000.0}
