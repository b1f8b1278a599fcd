"""Figures against values worked out by hand, and against scipy-free restatements of the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxpack.verify.metrics import OutputFigures, OutputSums, cross_entropy, kl_divergence, log_softmax


def figures(*pairs: tuple[Any, Any], logits: bool = False) -> OutputFigures:
    sums = OutputSums(logits)
    for reference, found in pairs:
        sums.add(np.asarray(reference), np.asarray(found))
    return sums.figures()


def test_by_hand_over_two_runs() -> None:
    # errors 0, 1, 2, 0 against 1, -2, 10, 0: energies 105 and 1 + 1 + 144 + 0
    found = figures(([1.0, -2.0], [1.0, -1.0]), ([10.0, 0.0], [12.0, 0.0]))
    assert found.max_abs == 2
    assert found.max_rel == pytest.approx(0.2)
    assert found.mean_abs == pytest.approx(3 / 4)
    assert found.rel_rms == pytest.approx(math.sqrt(5 / 105))
    assert found.cosine == pytest.approx((1 + 2 + 120) / math.sqrt(105 * 146))
    assert found.equal == 0.5
    assert found.elements == 4
    assert found.kl is None
    assert found.top1 is None
    assert found.problems == ()
    assert found.vacuous is None


def test_kl_and_top1_by_hand() -> None:
    reference = np.log(np.array([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]]))
    found = np.log(np.array([[[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]])) + 7  # a shift of all logits changes nothing
    judged = figures((reference, found), logits=True)
    assert judged.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert judged.top1 == 0.5


def test_kl_is_of_the_reference_against_the_pack_and_not_the_reverse() -> None:
    p, q = np.log(np.array([[0.9, 0.1]])), np.log(np.array([[0.5, 0.5]]))
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert figures((p, q), logits=True).kl == pytest.approx(forward)
    assert figures((q, p), logits=True).kl != pytest.approx(forward)


def test_a_token_the_reference_rules_out_costs_nothing_and_one_the_pack_rules_out_is_infinite() -> None:
    masked, plain = np.array([[0.0, -np.inf]]), np.array([[0.0, 0.0]])
    assert kl_divergence(log_softmax(masked), log_softmax(plain)).tolist() == [math.log(2)]
    assert kl_divergence(log_softmax(plain), log_softmax(masked)).tolist() == [math.inf]
    assert figures((plain, masked), logits=True).kl is None


def test_cross_entropy_by_hand() -> None:
    logits = np.log(np.array([[[0.5, 0.5], [0.1, 0.9]]], np.float32))
    np.testing.assert_allclose(cross_entropy(logits, np.array([[0, 1]])), [[-math.log(0.5), -math.log(0.9)]], 1e-6)


def test_zeros_instead_of_the_output() -> None:
    found = figures(([3.0, -4.0], [0.0, 0.0]))
    assert (found.max_rel, found.rel_rms, found.cosine) == (1.0, 1.0, 0.0)


def test_nan_in_the_same_places_is_no_problem_and_elsewhere_is() -> None:
    assert figures(([np.nan, 1.0, 2.0], [np.nan, 1.0, 2.0])).problems == ()
    assert figures(([np.inf, 1.0, 2.0], [np.inf, 1.0, 2.0])).problems == ()
    for wrong in ([0.0, 1.0], [np.nan, 1.0]), ([np.nan, 1.0], [0.0, 1.0]), ([np.inf, 1.0], [-np.inf, 1.0]):
        assert figures(wrong).problems == ("has NaN or infinity in other places than the reference",)


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (np.zeros((0, 4), np.float32), "nothing was compared"),
        (np.full((2, 3), np.nan, np.float32), "no value is finite on both sides"),
        (np.zeros((2, 3), np.float32), "the reference is 0 everywhere"),
        (np.full((2, 3), 2.5, np.float32), "the reference is 2.5 everywhere"),
        (np.float32(0), "the reference is 0 everywhere"),
    ],
)
def test_what_proves_nothing(reference: Any, why: str) -> None:
    assert figures((reference, reference)).vacuous == why


def test_a_single_number_that_is_not_zero_is_a_comparison() -> None:
    assert figures(([2.5], [2.5])).vacuous is None


def test_another_shape_or_type_is_a_problem() -> None:
    x = np.ones((2, 3), np.float32)
    assert figures((x, x[:1])).problems == ("is float32[1, 3], the reference is float32[2, 3]",)
    assert figures((x, x.astype(np.float64))).problems == ("is float64[2, 3], the reference is float32[2, 3]",)
    sums = OutputSums(logits=False)
    sums.add([x], x)
    assert sums.figures().problems == ("is float32[2, 3], the reference is a list",)


def test_labels_and_texts_are_judged_by_equality() -> None:
    labels = figures(([1, 2, 3, 4], [1, 2, 3, 7]))
    assert (labels.exact, labels.equal) == (True, 0.75)
    texts = figures((["a", "b"], ["a", "c"]))
    assert (texts.exact, texts.equal, texts.max_abs, texts.vacuous) == (True, 0.5, None, None)


def test_ends_of_float64_give_null_and_no_warning() -> None:
    found = figures(([1e300, -1e300], [-1e300, 1e300]))
    assert found.rel_rms is None
    assert found.cosine is None
    assert found.max_abs == 2e300


def test_blocks_do_not_show() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((5, 300_001)).astype(np.float32)  # more than one block, the last one ragged
    found = reference + rng.standard_normal(reference.shape).astype(np.float32) / 100
    judged = figures((reference, found), logits=True)
    r, f = reference.astype(np.float64), found.astype(np.float64)
    assert judged.max_abs == np.abs(r - f).max()
    assert judged.mean_abs == pytest.approx(np.abs(r - f).mean())
    p = np.exp(log_softmax(r))
    assert judged.kl == pytest.approx((p * (log_softmax(r) - log_softmax(f))).sum(-1).mean())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    hnp.arrays(np.float32, (3, 5), elements=st.floats(-50, 50, width=32)),
    hnp.arrays(np.float32, (3, 5), elements=st.floats(-50, 50, width=32)),
)
def test_bounds(reference: Any, found: Any) -> None:
    judged = figures((reference, found), logits=True)
    assert judged.kl is not None
    assert judged.kl >= -1e-9
    assert judged.cosine is None or -1 <= judged.cosine <= 1
    assert judged.max_abs is not None
    assert judged.mean_abs is not None
    assert judged.max_abs >= judged.mean_abs >= 0
    same = figures((reference, reference), logits=True)
    assert (same.max_abs, same.equal, same.top1) == (0, 1, 1)
    assert same.kl == pytest.approx(0, abs=1e-12)
