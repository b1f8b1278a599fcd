"""Codebooks that a closed form gives: 65536 values of EXL3's three trellis codes, each the sum of hashed halves.

>>> rule_table("mul1").shape, float(rule_table("3inst")[0])
((65536,), 0.76806640625)
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

RULES = ("3inst", "mcg", "mul1")
"""Names that Codebook.rule may have."""


@functools.cache
def rule_table(rule: str) -> F32:
    """float32 values (all of them float16 numbers) of the 65536 states."""
    x = np.arange(1 << 16, dtype=np.uint64)
    if rule == "mul1":
        hashed = (x * np.uint64(0x83DCD12D)).astype(np.uint32)
        total = sum((hashed >> np.uint32(8 * i)) & np.uint32(255) for i in range(4))
        step, least = (np.array(bits, np.uint16).view(np.float16).astype(np.float64) for bits in (0x1EEE, 0xC931))
        # float16 with bits 0x6400 + S is 1024 + S; the products and sums are exact in float64, then rounded once.
        values = ((np.asarray(total, np.float64) + 1024) * step + least).astype(np.float16)
    else:
        hashed = (x * np.uint64(0xCBAC1FED) if rule == "mcg" else x * np.uint64(89226354) + np.uint64(64248484)).astype(
            np.uint32
        )
        halves = ((hashed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.uint16).reshape(-1, 2)
        values = halves.view(np.float16)[:, 0] + halves.view(np.float16)[:, 1]
    table: F32 = values.astype(np.float32)
    table.setflags(write=False)
    return table
