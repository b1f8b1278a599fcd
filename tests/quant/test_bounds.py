"""The bounds on K, as the design states them."""

from __future__ import annotations

import numpy as np

from onnxpack.quant.bounds import INT32_MAX, K_LIMIT_FULL_RANGE, K_LIMIT_SYMMETRIC, K_LIMIT_ZERO_POINT, k_limit


def test_limits_of_the_design() -> None:
    assert (K_LIMIT_SYMMETRIC, K_LIMIT_FULL_RANGE, K_LIMIT_ZERO_POINT) == (133_144, 131_071, 33_025)


def test_a_limit_is_the_last_k_that_fits() -> None:
    for a, w in ((127, 127), (128, 128), (255, 255), (127, 128), (1, 1), (255, 128)):
        k = k_limit(a, w)
        assert k * a * w <= INT32_MAX < (k + 1) * a * w
        assert np.int64(k) * a * w == np.int32(k * a * w)
