"""Encoders that search: grids of candidate scales, each with its least-squares fit; the smallest squared error wins.

All take groups x [.., groups, values] (a super-block is the last-but-one axis) and work on all of them at once. Given
the codes, scales are a linear least-squares problem; given the scales, codes are a rounding; so the two alternate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from onnxpack.formats.base import F32, Array

_ROUNDS = 3
"""Alternations of neighbouring scale codes and the super-block's scale; more do not pay."""


def inverse_of(x: F32) -> F32:
    safe = np.where(x == 0, np.float32(1), x)
    return np.asarray(np.where(x == 0, np.float32(0), np.float32(1) / safe), np.float32)


def _sum(x: F32) -> F32:
    return np.asarray(np.add.reduce(x, axis=-1), np.float32)


def _keep(better: npt.NDArray[np.bool_], new: Array, old: Array) -> Array:
    return np.where(better[(...,) + (None,) * (new.ndim - better.ndim)], new, old)


def half(x: F32) -> F32:
    """The float32 that x is after a trip through float16."""
    return x.astype(np.float16).astype(np.float32)


# Scale and minimum: Q2_K, Q4_K, Q5_K


def with_minimum(x: F32, bits: int, scale_bits: int) -> dict[str, Array]:
    """d, dmin float16 [.., 1]; scales, mins, codes uint8: value = (d * scales) * codes - dmin * mins."""
    top, most = (1 << bits) - 1, (1 << scale_bits) - 1
    scale, minimum = _fit_groups(x, top)
    d = half(scale.max(axis=-1, keepdims=True) / np.float32(most))
    dmin = half(minimum.max(axis=-1, keepdims=True) / np.float32(most))
    best = _Affine(x, top, most, d, dmin)
    best.start(np.rint(scale * inverse_of(d)), np.rint(minimum * inverse_of(dmin)))
    for _ in range(_ROUNDS):
        best.improve_groups()
        best.improve_super()
    best.improve_groups()
    stored = {"d": best.d.astype(np.float16), "dmin": best.dmin.astype(np.float16)}
    whole = {"scales": best.scale, "mins": best.minimum, "codes": best.codes()}
    return stored | {name: value.astype(np.uint8) for name, value in whole.items()}


_SPREADS = np.linspace(-1.0, 1.6, 14, dtype=np.float32)
"""Candidate steps: the span of a group divided by top + spread."""


def _fit_groups(x: F32, top: int) -> tuple[F32, F32]:
    """Real scale and minimum of each group: the best least-squares fit over candidate roundings."""
    low = np.minimum(x.min(axis=-1), 0)
    span = x.max(axis=-1) - low
    best_scale, best_minimum = span / np.float32(top), -low
    best = np.full(low.shape, np.inf, np.float32)
    for spread in _SPREADS:
        step = (top + spread) * inverse_of(span)
        codes = np.clip(np.rint((x - low[..., None]) * step[..., None]), 0, top)
        scale, minimum = _affine_fit(x, codes)
        lost = _sum(np.square(scale[..., None] * codes - minimum[..., None] - x))
        better = (lost < best) & (scale > 0)
        best = np.where(better, lost, best)
        best_scale, best_minimum = _keep(better, scale, best_scale), _keep(better, minimum, best_minimum)
    return best_scale, best_minimum


def _affine_fit(x: F32, codes: F32) -> tuple[F32, F32]:
    """Least squares of x = scale * codes - minimum with minimum >= 0."""
    n = np.float32(x.shape[-1])
    q, qq, xq, sx = _sum(codes), _sum(codes * codes), _sum(codes * x), _sum(x)
    det = n * qq - q * q
    inverse = inverse_of(det)
    scale = (n * xq - sx * q) * inverse
    minimum = (q * xq - qq * sx) * inverse
    alone = (minimum < 0) | (det == 0)
    return np.where(alone, xq * inverse_of(qq), scale), np.where(alone, np.float32(0), minimum)


class _Affine:
    """State of one search over super-blocks: quantized scales and minimums, and what they cost."""

    def __init__(self, x: F32, top: int, most: int, d: F32, dmin: F32) -> None:
        self.x, self.top, self.most, self.d, self.dmin = x, top, most, d, dmin

    def start(self, scale: F32, minimum: F32) -> None:
        self.scale, self.minimum = np.clip(scale, 0, self.most), np.clip(minimum, 0, self.most)
        self.lost = self._cost(self.scale, self.minimum, self.d, self.dmin)[0]

    def codes(self) -> F32:
        return self._cost(self.scale, self.minimum, self.d, self.dmin)[1]

    def _cost(self, scale: F32, minimum: F32, d: F32, dmin: F32) -> tuple[F32, F32]:
        step, base = (d * scale)[..., None], (dmin * minimum)[..., None]
        codes = np.clip(np.rint((self.x + base) * inverse_of(step)), 0, self.top)
        return _sum(np.square(step * codes - base - self.x)), codes

    def improve_groups(self) -> None:
        """Neighbouring scale and minimum codes of each group."""
        scale, minimum = self.scale, self.minimum
        for ds in (-1, 0, 1):
            for dm in (-1, 0, 1):
                if ds or dm:
                    s, m = np.clip(scale + ds, 0, self.most), np.clip(minimum + dm, 0, self.most)
                    self._take_groups(s, m)

    def _take_groups(self, scale: F32, minimum: F32) -> None:
        lost = self._cost(scale, minimum, self.d, self.dmin)[0]
        better = lost < self.lost
        self.lost = np.where(better, lost, self.lost)
        self.scale, self.minimum = np.where(better, scale, self.scale), np.where(better, minimum, self.minimum)

    def improve_super(self) -> None:
        """d and dmin by least squares over the super-block, given all codes."""
        a, b = self.scale[..., None] * self.codes(), np.broadcast_to(self.minimum[..., None], self.x.shape)
        aa, bb, ab = (_super_sum(u * v) for u, v in ((a, a), (b, b), (a, b)))
        xa, xb = _super_sum(self.x * a), _super_sum(self.x * b)
        inverse = inverse_of(aa * bb - ab * ab)
        d, dmin = half((xa * bb - xb * ab) * inverse), half((xa * ab - xb * aa) * inverse)
        lost = self._cost(self.scale, self.minimum, d, dmin)[0]
        total, before = (np.add.reduce(v, axis=-1, keepdims=True) for v in (lost, self.lost))
        better = (total < before) & (d > 0) & (dmin >= 0)
        self.d, self.dmin = np.where(better, d, self.d), np.where(better, dmin, self.dmin)
        self.lost = np.where(better, lost, self.lost)


def _super_sum(x: F32) -> F32:
    return np.asarray(np.add.reduce(x, axis=(-1, -2))[..., None])


# Scale of both signs: Q3_K, Q6_K


def symmetric(x: F32, bits: int, scale_bits: int) -> tuple[Array, Array, Array]:
    """d float16 [.., 1], scales and codes uint8: value = (d * (scales - half)) * (codes - half) of either width."""
    scale = _fit_symmetric(x, bits)
    reach = np.float32(1 << (scale_bits - 1))
    extreme = np.take_along_axis(scale, np.abs(scale).argmax(axis=-1)[..., None], axis=-1)
    best = _Linear(x, bits, scale_bits, half(-extreme / reach))
    best.start(np.rint(scale * inverse_of(best.d)))
    for _ in range(_ROUNDS):
        best.improve_groups()
        best.improve_super()
    best.improve_groups()
    codes = best.codes() + np.float32(1 << (bits - 1))
    return best.d.astype(np.float16), (best.scale + reach).astype(np.uint8), codes.astype(np.uint8)


_REACHES = np.linspace(-0.9, 0.9, 13, dtype=np.float32)


def _symmetric_candidates(x: F32, bits: int) -> Iterator[F32]:
    """Codes per unit of weight: the extreme value at or near either end of the range."""
    low, high = x.min(axis=-1), x.max(axis=-1)
    extreme = np.where(-low > high, low, high)
    for reach in _REACHES:
        yield -(np.float32(1 << (bits - 1)) + reach) * inverse_of(extreme)
    yield np.float32((1 << (bits - 1)) - 1) * inverse_of(extreme)


def _fit_symmetric(x: F32, bits: int) -> F32:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    best, gain = np.zeros(x.shape[:-1], np.float32), np.full(x.shape[:-1], -1, np.float32)
    for step in _symmetric_candidates(x, bits):
        codes = np.clip(np.rint(x * step[..., None]), low, high)
        xq, inverse = _sum(x * codes), inverse_of(_sum(codes * codes))
        # With the fitted scale the squared error falls by exactly this much.
        better = xq * xq * inverse > gain
        gain = np.where(better, xq * xq * inverse, gain)
        best = np.where(better, xq * inverse, best)
    return best


class _Linear:
    """State of one search over super-blocks without minimums."""

    def __init__(self, x: F32, bits: int, scale_bits: int, d: F32) -> None:
        self.x, self.d = x, d
        self.low, self.high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        self.least, self.most = -(1 << (scale_bits - 1)), (1 << (scale_bits - 1)) - 1

    def start(self, scale: F32) -> None:
        self.scale = np.clip(scale, self.least, self.most)
        self.lost = self._cost(self.scale, self.d)[0]

    def codes(self) -> F32:
        return self._cost(self.scale, self.d)[1]

    def _cost(self, scale: F32, d: F32) -> tuple[F32, F32]:
        step = (d * scale)[..., None]
        codes = np.clip(np.rint(self.x * inverse_of(step)), self.low, self.high)
        return _sum(np.square(step * codes - self.x)), codes

    def improve_groups(self) -> None:
        scale = self.scale
        for change in (-1, 1):
            moved = np.clip(scale + change, self.least, self.most)
            lost = self._cost(moved, self.d)[0]
            better = lost < self.lost
            self.lost, self.scale = np.where(better, lost, self.lost), np.where(better, moved, self.scale)

    def improve_super(self) -> None:
        a = self.scale[..., None] * self.codes()
        d = half(_super_sum(self.x * a) * inverse_of(_super_sum(a * a)))
        lost = self._cost(self.scale, d)[0]
        total, before = (np.add.reduce(v, axis=-1, keepdims=True) for v in (lost, self.lost))
        better = total < before
        self.d, self.lost = np.where(better, d, self.d), np.where(better, lost, self.lost)


# Uneven levels: IQ4_NL


@functools.cache
def _level_index(table: tuple[int, ...]) -> tuple[Array, int]:
    """Nearest level of floor(2 y): the midpoints of integer levels are halves. And the index of y = 0."""
    levels = np.asarray(table, np.float64)
    zero = 2 * int(-levels[0]) + 4
    at = (np.arange(2 * zero + 1) - zero) / 2 + 0.25
    return np.abs(at[:, None] - levels).argmin(axis=1).astype(np.uint8), zero


def nearest_level(y: F32, table: tuple[int, ...]) -> Array:
    """Index of the nearest level.

    >>> nearest_level(np.array([-200, 0.9, 2.0, 500], np.float32), (-10, 1, 13)).tolist()
    [0, 1, 1, 2]
    """
    index, zero = _level_index(table)
    place = np.clip(np.floor(y + y), -zero, zero).astype(np.int16)
    place += np.int16(zero)
    return np.asarray(np.take(index, place))


def levels(x: F32, table: tuple[int, ...]) -> tuple[Array, Array]:
    """d float16 [.., 1] and codes uint8: value = d * table[code]."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    extreme = np.where(-low > high, low, high)
    entries = np.asarray(table, np.float32)
    best, gain = np.zeros(extreme.shape, np.float32), np.full(extreme.shape, -1, np.float32)
    ends = np.concatenate([entries[0] + np.arange(-9, 19, 2), entries[-1] + np.arange(-15, 8, 2)])
    for end in ends.astype(np.float32):
        value = np.take(entries, nearest_level(x * (end * inverse_of(extreme)), table))
        xv = np.add.reduce(x * value, axis=-1, keepdims=True)
        inverse = inverse_of(np.add.reduce(value * value, axis=-1, keepdims=True))
        better = xv * xv * inverse > gain
        gain, best = np.where(better, xv * xv * inverse, gain), np.where(better, xv * inverse, best)
    d = half(best)
    return d.astype(np.float16), nearest_level(x * inverse_of(d), table)
