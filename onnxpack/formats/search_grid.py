"""IQ1_S's encoder: for each 8 values a vector of the grid, for each 32 a scale of 8 and a shift of 2.

A scaled vector is first rounded to ternary. The 6561 ternary vectors have their nearest grid vectors tabulated, and
those few are compared exactly with the weights; so nothing is searched through 2048 entries.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.formats.base import F32, Array
from onnxpack.formats.data import load
from onnxpack.formats.search import half, inverse_of

_NEAR, _FEW = 6, 2
"""Grid vectors that are compared for each ternary vector: when codes are chosen, and when scales are estimated."""
_DELTAS = (0.125, -0.125)
_SCALES = np.arange(1, 16, 2, dtype=np.float32)
_TRIES = np.linspace(0.5, 1.1, 7, dtype=np.float32)
_POWERS = 3 ** np.arange(8, dtype=np.int32)


@functools.cache
def neighbours() -> npt.NDArray[np.int16]:
    """Indices of the nearest grid vectors of each of the 6561 ternary vectors, int16 [6561, 6], nearest first."""
    grid = load("iq1_s_grid").astype(np.int32)
    vectors = (np.arange(3**8)[:, None] // _POWERS % 3 - 1).astype(np.int32)
    distance = (grid * grid).sum(axis=1) - 2 * (vectors @ grid.T)
    order = np.argsort(distance, axis=1, kind="stable")[:, :_NEAR]
    near = np.ascontiguousarray(order.astype(np.int16))
    near.setflags(write=False)
    return near


def best_vectors(y: F32, delta: float, near: int) -> tuple[Array, F32]:
    """Of the `near` first neighbours, the grid index nearest to each vector y [.., 8] less delta; squared distance."""
    grid = load("iq1_s_grid").astype(np.float32) + np.float32(delta)
    trits = np.clip(np.rint(y - np.float32(delta)), -1, 1).astype(np.int32) + 1
    candidates = neighbours()[np.add.reduce(trits * _POWERS, axis=-1)]
    best, index = np.full(y.shape[:-1], np.inf, np.float32), np.zeros(y.shape[:-1], np.int16)
    for i in range(near):
        candidate = candidates[..., i]
        distance = np.add.reduce(np.square(y - np.take(grid, candidate, axis=0)), axis=-1)
        better = distance < best
        best, index = np.where(better, distance, best), np.where(better, candidate, index)
    return index, best


def encode(x: F32) -> dict[str, Array]:
    """Codes for blocks x [.., 256]: d float16 [.., 1], scales, deltas uint8 [.., 8], codes uint16 [.., 32]."""
    groups = x.reshape(*x.shape[:2], 8, 4, 8)
    real = _real_scales(groups)
    state = _State(groups, half(real.max(axis=-1, keepdims=True) / np.float32(15)))
    start = np.clip(np.rint((real * inverse_of(state.d) - 1) / 2), 0, 7).astype(np.int32)
    for change in (0, -1, 1):
        state.try_scales(np.clip(start + change, 0, 7))
    for _ in range(1):
        state.improve_d()
        start = state.scale
        for change in (0, -1, 1):
            state.try_scales(np.clip(start + change, 0, 7))
    return state.result()


def _real_scales(groups: F32) -> F32:
    """For each 32 values the scale that fits best, over candidates relative to a typical magnitude and both shifts."""
    top = np.abs(groups).max(axis=(-1, -2))
    best, found = np.full(top.shape, np.inf, np.float32), np.zeros(top.shape, np.float32)
    grid = load("iq1_s_grid").astype(np.float32)
    for ratio in _TRIES:
        step = top * ratio
        scaled = groups * inverse_of(step)[..., None, None]
        for delta in _DELTAS:
            index, _ = best_vectors(scaled, delta, _FEW)
            value = np.take(grid, index, axis=0) + np.float32(delta)
            xv, vv = (np.add.reduce(u * value, axis=(-1, -2)) for u in (groups, value))
            fitted = np.maximum(xv * inverse_of(vv), 0)
            lost = np.add.reduce(np.square(groups - fitted[..., None, None] * value), axis=(-1, -2))
            better = lost < best
            best, found = np.where(better, lost, best), np.where(better, fitted, found)
    return found


class _State:
    """The best codes so far for every group, and their squared error."""

    def __init__(self, groups: F32, d: F32) -> None:
        self.groups, self.d = groups, d
        shape: Any = groups.shape[:3]
        self.lost = np.full(shape, np.inf, np.float32)
        self.scale, self.shift = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
        self.index = np.zeros(groups.shape[:4], np.int16)

    def try_scales(self, scale: npt.NDArray[np.int32]) -> None:
        step = self.d * _SCALES[scale]
        scaled = self.groups * inverse_of(step)[..., None, None]
        for shift, delta in enumerate(_DELTAS):
            index, distance = best_vectors(scaled, delta, _NEAR)
            lost = np.where(step == 0, np.float32(0), np.add.reduce(distance, axis=-1) * step * step)
            better = lost < self.lost
            self.lost = np.where(better, lost, self.lost)
            self.scale, self.shift = np.where(better, scale, self.scale), np.where(better, np.uint8(shift), self.shift)
            self.index = np.where(better[..., None], index, self.index)

    def improve_d(self) -> None:
        """d by least squares given all codes, kept where it helps."""
        value = np.take(load("iq1_s_grid").astype(np.float32), self.index, axis=0)
        value = value + np.asarray(_DELTAS, np.float32)[self.shift][..., None, None]
        value = value * _SCALES[self.scale][..., None, None]
        xv, vv = (np.add.reduce(u * value, axis=(-1, -2, -3))[..., None] for u in (self.groups, value))
        d = half(xv * inverse_of(vv))
        lost = np.add.reduce(np.square(self.groups - d[..., None, None] * value), axis=(-1, -2))
        better = np.add.reduce(lost, axis=-1, keepdims=True) < np.add.reduce(self.lost, axis=-1, keepdims=True)
        better &= d > 0
        self.d, self.lost = np.where(better, d, self.d), np.where(better, lost, self.lost)

    def result(self) -> dict[str, Array]:
        return {
            "d": self.d.astype(np.float16),
            "scales": self.scale.astype(np.uint8),
            "deltas": self.shift,
            "codes": self.index.astype(np.uint16).reshape(*self.index.shape[:2], 32),
        }
