"""The QDQ part of the numbers section: against Python integers and Fractions, at extremes, ties and by property."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from onnxpack.quant.bounds import K_LIMIT_ZERO_POINT
from onnxpack.quant.qdq import (
    accumulate,
    column_sums,
    correct,
    dequantize,
    multiplier,
    quantize,
    requantize,
    row_sums,
    signed_zero_points,
    to_signed,
    to_unsigned,
)

Array = npt.NDArray[Any]
F32 = np.float32
bounded = settings(max_examples=150, deadline=None, derandomize=True, database=None)
int8s = st.integers(-128, 127)


@bounded
@given(st.data())
def test_the_corrected_accumulator_is_the_sum_of_products_of_differences(data: st.DataObject) -> None:
    m, k, n = (data.draw(st.integers(1, size)) for size in (4, 9, 5))
    a = data.draw(arrays.arrays(np.int8, (m, k)))
    w = data.draw(arrays.arrays(np.int8, (k, n)))
    zx = np.array(data.draw(st.lists(int8s, min_size=m, max_size=m) | st.lists(int8s, min_size=1, max_size=1)))
    zw = np.array(data.draw(st.lists(int8s, min_size=n, max_size=n) | int8s))
    sums = data.draw(st.sampled_from([None, column_sums(w)]))
    found = correct(accumulate(a, w), a, zx.astype(np.int64), w, zw.astype(np.int64), sums)
    zx_of, zw_of = np.broadcast_to(zx, m).tolist(), np.broadcast_to(zw, n).tolist()
    for i in range(m):
        for j in range(n):
            wanted = sum((int(a[i, c]) - zx_of[i]) * (int(w[c, j]) - zw_of[j]) for c in range(k))
            assert int(found[i, j]) == wanted


@pytest.mark.parametrize("zx", [-128, 0, 127])
@pytest.mark.parametrize("zw", [-128, 0, 127])
def test_the_longest_k_at_the_extremes(zx: int, zw: int) -> None:
    k = K_LIMIT_ZERO_POINT
    for x in (-128, 127):
        for y in (-128, 127):
            a, w = np.full((1, k), x, np.int8), np.full((k, 1), y, np.int8)
            found = correct(accumulate(a, w), a, np.array([zx]), w, np.array(zw), None)
            assert found.tolist() == [[k * (x - zx) * (y - zw)]]
            assert abs(int(found[0, 0])) < 2**31


def test_wide_weights_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, w = rng.integers(-128, 128, (3, 50)).astype(np.int8), rng.integers(-128, 128, (50, 33)).astype(np.int8)
    whole = accumulate(a, w)
    monkeypatch.setattr("onnxpack.quant.qdq._BAND_BYTES", 8 * 50 * 7)
    np.testing.assert_array_equal(accumulate(a, w), whole)
    np.testing.assert_array_equal(whole, a.astype(np.int64) @ w.astype(np.int64))


def test_sums() -> None:
    w = np.full((K_LIMIT_ZERO_POINT, 2), -128, np.int8)
    assert column_sums(w).tolist() == [-128 * K_LIMIT_ZERO_POINT] * 2
    assert row_sums(w.T).tolist() == [[-128 * K_LIMIT_ZERO_POINT]] * 2


def test_shifting_keeps_every_difference() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for zero in (0, 1, 127, 128, 255):
        shifted = to_signed(codes).astype(int) - signed_zero_points(zero, "uint8")
        np.testing.assert_array_equal(shifted, codes.astype(int) - zero)
    signed = np.arange(-128, 128).astype(np.int8)
    np.testing.assert_array_equal(to_signed(to_unsigned(signed)), signed)
    np.testing.assert_array_equal(to_signed(codes[::-1][:, None].T), to_signed(codes)[::-1][None])
    with pytest.raises(ValueError, match="int16"):
        to_signed(np.zeros(3, np.int16))


def _nearest_even(value: Fraction) -> int:
    return round(value)  # Python rounds Fractions half to even


@bounded
@given(
    st.integers(-(2**31) + 1, 2**31 - 1),
    st.floats(2.0**-40, 4.0, width=32),
    st.sampled_from(["int8", "uint8"]),
    st.integers(0, 255),
)
def test_requantizing_rounds_the_float32_product_exactly(acc: int, m: float, dtype: str, zero: int) -> None:
    limits = np.iinfo(dtype)
    point = zero + limits.min
    found = requantize(np.array([acc]), F32(m), point, dtype)
    product = Fraction(float(F32(F32(acc) * F32(m))))
    assert found.dtype == dtype
    assert int(found[0]) == min(max(_nearest_even(product) + point, limits.min), limits.max)


def test_ties_to_even_and_then_the_zero_point() -> None:
    acc = np.arange(-9, 10, 2)
    assert requantize(acc, F32(0.5), 0, "int8").tolist() == [-4, -4, -2, -2, 0, 0, 2, 2, 4, 4]
    assert requantize(acc, F32(0.5), -7, "int8").tolist() == [-11, -11, -9, -9, -7, -7, -5, -5, -3, -3]
    assert quantize(acc.astype(F32), F32(2), 3, "uint8").tolist() == [0, 0, 1, 1, 3, 3, 5, 5, 7, 7]


def test_a_product_just_below_a_tie_is_no_tie() -> None:
    """-3090 * m is -3.499998 in float32: -3, where a sum that lands on -3.5 gives -4."""
    m = multiplier(F32(1), F32(0.0011326855), F32(1))
    assert float(F32(-3090) * m) == pytest.approx(-3.499998, abs=1e-7)
    assert requantize(np.array([-3090]), m, 0, "int8").tolist() == [-3]


def test_the_multiplier_is_rounded_after_each_step() -> None:
    x, w, y = F32(0.1), np.array([0.3, 1e-30], F32), F32(0.7)
    wanted = [F32(F32(x * value) / y) for value in w]
    np.testing.assert_array_equal(multiplier(x, w, y), wanted)
    np.testing.assert_array_equal(multiplier(x, w), [F32(x * value) for value in w])
    assert multiplier(F32(1e30), F32(1e30)).tolist() == np.inf
    assert multiplier(np.array([[1], [2]], F32), w, y).shape == (2, 2)


def test_large_accumulators_are_rounded_to_float32_once() -> None:
    acc = np.array([2**24 + 1, 2**24 + 3, 2**31 - 1, -(2**31) + 1])
    np.testing.assert_array_equal(dequantize(acc, F32(1)), acc.astype(F32))
    assert dequantize(acc, F32(1)).tolist() == [2**24, 2**24 + 4, 2**31, -(2**31)]


@pytest.mark.parametrize(("dtype", "low", "high"), [("int8", -128, 127), ("uint8", 0, 255)])
def test_what_has_no_code_goes_to_an_end(dtype: str, low: int, high: int) -> None:
    values = np.array([np.inf, -np.inf, 1e38, -1e38, np.nan], F32)
    for zero in (low, (low + high) // 2, high):
        assert quantize(values, F32(1), zero, dtype).tolist() == [high, low, high, low, low]
