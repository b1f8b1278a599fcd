"""bfloat16 as bit patterns: rounding to nearest even and widening, on planes of scales and minimums.

>>> [hex(b) for b in to_bits(np.array([1.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8], np.float32))]
['0x3f80', '0x8000', '0x3f80', '0x3f82']
>>> to_float(np.array([0x3F80, 0xC080], np.uint16)).tolist()
[1.0, -4.0]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]


def to_bits(x: F32) -> U16:
    """Nearest bfloat16, ties to even, of finite values (the largest become infinity)."""
    bits = x.view(np.uint32)
    half = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return np.asarray((bits + half) >> np.uint32(16)).astype("<u2")


def to_float(bits: npt.NDArray[Any]) -> F32:
    """The float32 of each pattern, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
