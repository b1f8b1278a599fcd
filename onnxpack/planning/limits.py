"""What a plan has to keep to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxpack.errors import UsageError
from onnxpack.kernels.target import NPU2, Target
from onnxpack.planning.families import MOST_ROWS

BUDGET = 8
"""Distinct kernels: each holds a hardware context, and all processes of a machine share 16 (on some parts 32)."""
MIN_ROWS = 16
"""Below it a launch costs more than the host's product: at 12 rows the gain vanishes on a busy machine, at 16 it is
1.5 times (published for Strix Halo)."""


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to."""

    rows: Sequence[int] = (128,)
    budget: int = BUDGET
    min_rows: int = MIN_ROWS
    target: Target = NPU2

    def __post_init__(self) -> None:
        if not self.rows or not all(1 <= r <= MOST_ROWS for r in self.rows):
            hint = "longer calls repeat the largest program"
            raise UsageError(f"rows must be between 1 and {MOST_ROWS}", where="--rows", hint=hint)
        if not 0 <= self.budget <= self.target.contexts:
            raise UsageError(
                f"a budget of {self.budget} kernels",
                where="--budget",
                hint=f"between 0 and {self.target.contexts}: the device has no more contexts, for all processes",
            )
        if self.min_rows < 1:
            raise UsageError(f"{self.min_rows} is not a number of rows", where="--min-rows")
