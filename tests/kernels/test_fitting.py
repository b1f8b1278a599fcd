"""Kernels for planning: exact, padded, or none."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpack.kernels.fitting import exact, fit, refusal
from onnxpack.shapes import Gemm


def test_a_shape_that_fits_is_not_padded() -> None:
    gemm = Gemm(128, 3072, 1024)
    found = fit(gemm)
    assert found is not None
    assert found.kernel == gemm
    assert found == exact(gemm)
    assert found.wasted(gemm) == 0


def test_a_shape_that_does_not_is_padded_and_says_what_that_costs() -> None:
    gemm = Gemm(128, 1000, 1000)
    assert exact(gemm) is None
    assert "multiple of" in refusal(gemm)
    found = fit(gemm)
    assert found is not None
    assert 0 < found.wasted(gemm) < 0.05


def test_a_product_too_large_for_one_launch_has_none() -> None:
    assert fit(Gemm(128, 1024, 151_936)) is None
    assert "control code" in refusal(Gemm(128, 1024, 151_936))


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_fit_holds_the_product(m: int, k: int, n: int) -> None:
    gemm = Gemm(m, k, n)
    found = fit(gemm)
    assert found is not None
    assert found.kernel.m >= m
    assert found.kernel.k >= k
    assert found.kernel.n >= n
    assert exact(found.kernel) is not None
