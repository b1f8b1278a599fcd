"""How far one output is from its reference: sums over any number of runs, then figures.

Everything is summed in float64, a block at a time, so that logits over a large vocabulary cost no second copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.types import Array

F64 = npt.NDArray[np.float64]

_BLOCK = 1 << 20  # elements


@dataclass(frozen=True)
class OutputFigures:
    """One output of the pack beside the reference's. Null: not defined for this output, or not finite."""

    max_abs: float | None
    """Largest |reference - pack|."""
    max_rel: float | None
    """max_abs over the largest |reference|."""
    cosine: float | None
    """Of the two outputs as one long vector each."""
    kl: float | None
    """Mean KL(reference || pack) over positions, nats; for logits."""
    top1: float | None
    """Share of positions with the same largest logit."""
    mean_abs: float | None
    rel_rms: float | None
    """Root of sum (reference - pack)**2 over sum reference**2."""
    equal: float | None
    """Share of elements that are the same value; NaN is the same as NaN."""
    elements: int
    exact: bool = False
    """Whole numbers, truth values or texts (labels, masks): only `equal` says anything about them."""
    problems: tuple[str, ...] = ()
    """Why the output fails, whatever the gates are."""
    vacuous: str | None = None
    """Why this output proves nothing: nothing was compared, or the reference is one and the same number."""


@dataclass
class OutputSums:
    """Adds up the runs of one output.

    >>> sums = OutputSums(logits=False)
    >>> sums.add(np.array([3.0, -4.0]), np.array([3.0, -3.0]))
    >>> found = sums.figures()
    >>> found.max_abs, found.max_rel, found.mean_abs, found.rel_rms, found.equal
    (1.0, 0.25, 0.5, 0.2, 0.5)
    """

    logits: bool
    count: int = 0
    equal: int = 0
    texts: int = 0
    exact: bool = False
    compared: int = 0
    """Numbers that are finite on both sides."""
    max_abs: float = 0.0
    sum_abs: float = 0.0
    residual: float = 0.0
    energy: float = 0.0
    energy_found: float = 0.0
    product: float = 0.0
    largest: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    positions: int = 0
    kl: float = 0.0
    same_top: int = 0
    problems: dict[str, None] = field(default_factory=dict)

    def add(self, reference: Any, found: Any) -> None:
        """One run. What cannot be compared (shape, type, infinities in other places) is kept as a problem."""
        if _kind(reference) != _kind(found):
            self.problems.setdefault(f"is {_kind(found)}, the reference is {_kind(reference)}")
            return
        if not isinstance(reference, np.ndarray) or not isinstance(found, np.ndarray):
            return  # sequences and maps: nothing is counted, so the output proves nothing
        self.count += reference.size
        self.exact = reference.dtype.kind in "biuSUO"
        if reference.dtype.kind not in "biuf" and reference.dtype.name != "bfloat16":
            self.equal += int(np.count_nonzero(reference == found))
            self.texts += reference.size
            return
        flat, other = reference.reshape(-1), found.reshape(-1)
        for start in range(0, len(flat), _BLOCK):
            block = slice(start, start + _BLOCK)
            self._elements(flat[block].astype(np.float64), other[block].astype(np.float64))
        if self.logits and reference.ndim >= 2 and reference.size:
            self._distributions(reference, found)

    def _elements(self, reference: F64, found: F64) -> None:
        same = (reference == found) | (np.isnan(reference) & np.isnan(found))
        self.equal += int(np.count_nonzero(same))
        finite = np.isfinite(reference)
        both = finite & np.isfinite(found)
        if not (both | same).all():
            self.problems.setdefault("has NaN or infinity in other places than the reference")
        r, f = (reference, found) if both.all() else (reference[both], found[both])
        if not r.size:
            return
        self.compared += r.size
        with np.errstate(over="ignore"):  # float64 outputs may be near its end; such a figure becomes null
            difference = np.abs(r - f)
            self.max_abs = max(self.max_abs, float(difference.max()))
            self.sum_abs += float(difference.sum())
            self.residual += float(np.square(difference).sum())
            self.energy += float(np.square(r).sum())
            self.energy_found += float(np.square(f).sum())
            self.product += float((r * f).sum())
        self.low, self.high = min(self.low, float(r.min())), max(self.high, float(r.max()))
        self.largest = max(self.largest, -self.low, self.high)

    def _distributions(self, reference: Array, found: Array) -> None:
        width = reference.shape[-1]
        rows, others = reference.reshape(-1, width), found.reshape(-1, width)
        step = max(1, _BLOCK // width)
        for start in range(0, len(rows), step):
            r, f = rows[start : start + step], others[start : start + step]
            self.positions += len(r)
            self.same_top += int(np.count_nonzero(r.argmax(-1) == f.argmax(-1)))
            self.kl += float(kl_divergence(log_softmax(r), log_softmax(f)).sum())

    def figures(self) -> OutputFigures:
        """What the sums say."""
        numbers = self.compared > 0
        norms = math.sqrt(self.energy) * math.sqrt(self.energy_found)
        distributions = self.positions > 0
        return OutputFigures(
            max_abs=_finite(self.max_abs) if numbers else None,
            max_rel=_ratio(self.max_abs, self.largest) if numbers else None,
            cosine=_cosine(self.product, norms, self.residual) if numbers else None,
            kl=_finite(self.kl / self.positions) if distributions else None,
            top1=self.same_top / self.positions if distributions else None,
            mean_abs=_finite(self.sum_abs / self.compared) if numbers else None,
            rel_rms=_ratio(math.sqrt(self.residual), math.sqrt(self.energy)) if numbers else None,
            equal=self.equal / self.count if self.count else None,
            elements=self.count,
            exact=self.exact,
            problems=tuple(self.problems),
            vacuous=self._vacuous(),
        )

    def _vacuous(self) -> str | None:
        if self.count == 0:
            return "nothing was compared"
        if self.texts:
            return None
        if not self.compared:
            return "no value is finite on both sides"
        if self.low == self.high and (self.compared > 1 or self.low == 0):
            return f"the reference is {self.low:g} everywhere"
        return None


def log_softmax(logits: Array) -> F64:
    """log of the softmax over the last axis, float64.

    >>> log_softmax(np.array([0.0, 0.0])).tolist() == [-math.log(2)] * 2
    True
    """
    z = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # a row of infinities has no distribution: NaN
        z -= z.max(-1, keepdims=True)
        return np.asarray(z - np.log(np.exp(z).sum(-1, keepdims=True)))


def kl_divergence(reference: F64, found: F64) -> F64:
    """KL(reference || found) over the last axis, nats, from log probabilities. Where the reference has no probability
    the term is 0; where only `found` has none it is infinite.

    >>> half, skewed = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    >>> round(float(kl_divergence(half, skewed)), 6) == round(0.5 * math.log(4 / 3), 6)
    True
    """
    p = np.exp(reference)
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (reference - found), 0.0)
    return np.asarray(terms.sum(-1))


def cross_entropy(logits: Array, targets: Array) -> F64:
    """-log p(target), nats, for logits [..., V] and integer targets [...].

    >>> cross_entropy(np.zeros((1, 4)), np.array([2])).tolist() == [math.log(4)]
    True
    """
    picked = np.take_along_axis(log_softmax(logits), targets[..., None].astype(np.int64), -1)
    return np.asarray(-picked[..., 0])


def _ratio(part: float, whole: float) -> float | None:
    if whole == 0:
        return 0.0 if part == 0 else None
    return _finite(part / whole)


def _cosine(product: float, norms: float, residual: float) -> float | None:
    if norms == 0:
        return 1.0 if residual == 0 else 0.0
    if not math.isfinite(norms) or not math.isfinite(product):
        return None
    return max(-1.0, min(1.0, product / norms))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name}{list(value.shape)}"
    return "missing" if value is None else f"a {type(value).__name__}"
