"""What quantizing cost: sums per band of 32 output features and the worst group, so that one bad tile cannot hide."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onnxpack.formats.base import ErrorSums, significant
from onnxpack.formats.q4nx.tile import GROUP, ROWS

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class WorstGroup:
    """The group with the largest relative error: values [k .. k + 32) of column n."""

    k: int
    n: int
    relative_rms: float


@dataclass(frozen=True)
class BandedErrorSums(ErrorSums):
    """Sums per band of 32 output features as well, float64 [ceil(N / 32)].

    >>> sums = BandedErrorSums(1.0, 100.0, np.array([1.0, 0]), np.array([100.0, 0]), np.array([0.0, 0]), None)
    >>> sums.band_relative_rms.tolist(), sums.relative_rms, [round(c, 3) for c in sums.band_cosine.tolist()]
    ([0.1, 0.0], 0.1, [0.995, 1.0])
    """

    band_residual: F64
    band_energy: F64
    band_cross: F64
    """Sum of w * (w - decoded)."""
    worst_group: WorstGroup | None
    """None when every value is exact."""

    @property
    def band_relative_rms(self) -> F64:
        """Relative RMS per band; 0 for an all-zero band."""
        return np.sqrt(_ratio(self.band_residual, self.band_energy, 0.0))

    @property
    def band_cosine(self) -> F64:
        """Cosine between source and decoded weight per band; 1 for an all-zero band."""
        return _cosine(self.band_residual, self.band_energy, self.band_cross)

    def figures(self) -> dict[str, float]:
        worst = 0.0 if self.worst_group is None else self.worst_group.relative_rms
        more = {"cosine": significant(self.cosine), "worst_group": significant(worst)}
        return {**super().figures(), **more}

    def bands(self) -> dict[str, list[float]]:
        return {
            "relative_rms": [significant(v) for v in self.band_relative_rms.tolist()],
            "cosine": [significant(v) for v in self.band_cosine.tolist()],
        }

    @property
    def cosine(self) -> float:
        """Cosine over the whole weight."""
        cross = np.array([self.band_cross.sum()])
        return float(_cosine(np.array([self.residual]), np.array([self.energy]), cross)[0])


def _ratio(a: F64, b: F64, empty: float) -> F64:
    return np.divide(a, b, out=np.full_like(a, empty), where=b > 0)


def _cosine(residual: F64, energy: F64, cross: F64) -> F64:
    decoded = np.maximum(energy - 2 * cross + residual, 0)
    return np.clip(_ratio(energy - cross, np.sqrt(energy) * np.sqrt(decoded), 1.0), -1, 1)


@dataclass
class Totals:
    """Adds up group sums, block after block in a fixed order."""

    bands: int
    residual: F64 = field(init=False)
    energy: F64 = field(init=False)
    cross: F64 = field(init=False)
    worst: WorstGroup | None = None

    def __post_init__(self) -> None:
        self.residual, self.energy, self.cross = (np.zeros(self.bands) for _ in range(3))

    def add(self, k: int, n: int, residual: F64, energy: F64, cross: F64) -> None:
        """Sums per group [groups, columns] of the block that starts at value [k, n]."""
        first, count = n // ROWS, residual.shape[1] // ROWS
        for total, part in ((self.residual, residual), (self.energy, energy), (self.cross, cross)):
            total[first : first + count] += part.reshape(-1, count, ROWS).sum(axis=(0, 2))
        ratio = residual / np.maximum(energy, _TINY)  # no energy, no residual
        at = int(ratio.argmax())
        value = float(np.sqrt(ratio.flat[at]))
        if value > (self.worst.relative_rms if self.worst else 0):
            group, column = divmod(at, residual.shape[1])
            self.worst = WorstGroup(k + group * GROUP, n + column, value)

    def sums(self) -> BandedErrorSums:
        """The figures of everything added."""
        total = float(self.residual.sum()), float(self.energy.sum())
        return BandedErrorSums(*total, self.residual, self.energy, self.cross, self.worst)
