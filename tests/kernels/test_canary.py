"""Canaries: the same everywhere, exact, and hard to satisfy by accident."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpack.kernels import canary
from onnxpack.shapes import Gemm

SHAPE = Gemm(16, 64, 256)


def mixed(x: int) -> int:
    """The definition again, in whole numbers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def code(stream: int, index: int) -> int:
    byte = mixed((stream * 0x9E3779B97F4A7C15 + index) % 2**64) >> 56
    return byte - 256 if byte > 127 else byte


def test_operands_are_fixed_for_ever() -> None:
    a, b = canary.operands(Gemm(2, 4, 3), 20)
    assert a.tolist() == [[79, -85, 57, 94], [50, 0, -127, 45]]
    assert a.reshape(-1).tolist() == [code(40, i) for i in range(8)]
    assert b.reshape(-1).tolist() == [code(41, i) for i in range(12)]
    assert canary.make(SHAPE).sha256 == "fa9b73d6ec70ee97588de9a4f2b98ff0968ba4906423e576b50aa6dd27709ffb"


def test_operands_use_the_whole_range_and_do_not_repeat() -> None:
    a, b = canary.operands(Gemm(128, 128, 128), 1)
    assert (a.min(), a.max()) == (b.min(), b.max()) == (-128, 127)
    assert len(np.unique(a, axis=0)) == 128
    assert len(np.unique(b, axis=1).T) == 128
    assert not np.array_equal(a, b)


@given(st.integers(1, 20), st.integers(1, 3000), st.integers(1, 20), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_product_is_exact(m: int, k: int, n: int, seed: int) -> None:
    a, b = canary.operands(Gemm(m, k, n), seed)
    np.testing.assert_array_equal(canary.product(a, b), a.astype(np.int64) @ b.astype(np.int64))


def test_the_product_of_extremes_is_exact() -> None:
    a, b = np.full((2, 131_071), -128, np.int8), np.full((131_071, 2), -128, np.int8)
    assert set(canary.product(a, b).reshape(-1)) == {131_071 * 16_384}


@pytest.mark.parametrize("fault", ["nothing", "zeros", "swapped tiles", "half of k", "one element", "transposed"])
def test_every_usual_fault_changes_the_digest(fault: str) -> None:
    a, b = canary.operands(SHAPE, canary.SEED)
    c = canary.product(a, b)
    if fault == "nothing":
        c = np.full_like(c, 0xA5)
    elif fault == "zeros":
        c = np.zeros_like(c)
    elif fault == "swapped tiles":
        c = np.concatenate([c[:, 128:], c[:, :128]], axis=1)
    elif fault == "half of k":
        c = canary.product(a[:, :32], b[:32])
    elif fault == "one element":
        c[3, 5] += 1
    else:
        c = np.ascontiguousarray(c.T)
    assert canary.digest(c) != canary.make(SHAPE).sha256
