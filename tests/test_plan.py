"""Which weights a plan stores, under which names and in which formats."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_maker import chain, model, node, normal, tensor

import onnxpack
from onnxpack.errors import UsageError
from onnxpack.formats.select import Selection
from onnxpack.plan import Plan


def stored(proto: Any, weights: str = "int8") -> dict[str, tuple[str, list[str]]]:
    return {w.name: (w.format, w.sites) for w in onnxpack.plan(proto, weights=weights).weights}


def test_one_weight_however_many_sites_use_it() -> None:
    nodes = [
        node("MatMul", ["x", "W"], ["a"]),
        node("Identity", ["W"], ["V"]),
        node("MatMul", ["a", "V"], ["b"]),
        node("Gemm", ["b", "W"], ["c"]),
        node("Transpose", ["W"], ["Wt"]),
        node("MatMul", ["c", "Wt"], ["y"]),
    ]
    found = stored(model(nodes, [tensor("W", normal(48, 48))]))
    assert found == {"W": ("int8", ["MatMul_0", "MatMul_1", "Gemm_0"]), "W#2": ("int8", ["MatMul_2"])}


def test_made_up_names_never_meet_real_ones() -> None:
    nodes = [
        node("MatMul", ["x", "W"], ["a"]),
        node("Transpose", ["W"], ["Wt"]),
        node("MatMul", ["a", "Wt"], ["b"]),
        node("MatMul", ["b", "W#2"], ["y"]),
    ]
    found = stored(model(nodes, [tensor("W", normal(48, 48)), tensor("W#2", normal(48, 8))]))
    assert list(found) == ["W", "W#2", "W#2#2"]


def test_the_first_rule_that_matches_decides() -> None:
    proto = chain(normal(48, 64), normal(64, 64), normal(64, 32))
    found = stored(proto, "W1=int8,W?=q4nx,*=int8")
    assert {name: form for name, (form, _) in found.items()} == {"W0": "q4nx", "W1": "int8", "W2": "q4nx"}


def test_below_opset_13_weights_are_int8() -> None:
    assert {form for form, _ in stored(chain(normal(48, 64), opset=12), "q4nx").values()} == {"int8"}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("nothing", "no format is called 'nothing'"),
        ("", "no format is called ''"),
        ("int8,", "no format is called ''"),
        ("W0=int8", "no pattern of --weights matches 'W1'"),
        ("int8:bits=4", "int8"),
        ("int8:bits", "'bits' is not key=value"),
    ],
)
def test_rules_that_are_none(weights: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxpack.plan(chain(normal(48, 64), normal(64, 8)), weights=weights)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(alphabet="int8q4nx*?=:,[]_ab\n é", max_size=20))
def test_any_text_is_rules_or_a_usage_error(text: str) -> None:
    try:
        choice = Selection.parse(text)
        choice.of("W")
    except UsageError as error:
        assert error.render().isprintable()  # noqa: PT017


def test_a_plan_reads_no_weights(tmp_path) -> None:
    """A model whose weights are not even numbers is planned."""
    w = np.full((48, 64), np.nan, np.float32)
    assert stored(chain(w)) == {"W0": ("int8", ["MatMul_0"])}


def test_a_plan_is_data() -> None:
    plan = onnxpack.plan(chain(normal(48, 64), normal(64, 8)), kernels="16x48x64")
    again = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(again) == plan
    assert set(again) >= {"rows", "groups", "unplanned", "totals"}
    assert set(again["totals"]) >= {"planned", "launches", "kernels"}
    for bad in ([], 1, None, {**again, "weights": 3}, {**again, "schema": "onnxpack/plan/2.0"}, {}):
        with pytest.raises(UsageError):
            Plan.from_dict(bad)
