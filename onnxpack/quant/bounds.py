"""How long K may be while an int32 accumulator stays exact.

>>> k_limit(127, 127), k_limit(128, 128), k_limit(255, 255)
(133144, 131071, 33025)
"""

from __future__ import annotations

INT32_MAX = 2**31 - 1


def k_limit(a_max: int, w_max: int) -> int:
    """Longest K such that K products of codes with |a| <= a_max and |w| <= w_max fit int32."""
    return INT32_MAX // (a_max * w_max)


K_LIMIT_SYMMETRIC = k_limit(127, 127)
"""Codes in [-127, 127], as quant.int8 makes them."""

K_LIMIT_FULL_RANGE = k_limit(128, 128)
"""Codes in [-128, 127], as a graph may bring them."""

K_LIMIT_ZERO_POINT = k_limit(255, 255)
"""Codes minus an arbitrary zero point of the same type."""
