"""A known product for each shape: operands that anyone can make again from a seed, and the digest of their result.

A device that reports success and wrote nothing, half of it, or another shape's result is caught by comparing digests.

>>> from onnxpack.shapes import Gemm
>>> canary = make(Gemm(2, 3, 4), seed=1)
>>> a, b = operands(Gemm(2, 3, 4), canary.seed)
>>> digest(product(a, b)) == canary.sha256
True
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.kernels.library import Canary
from onnxpack.shapes import Gemm

SEED = 20
"""Seed of the canaries that we make. Any seed works: it stands in the record."""

_EXACT_IN_FLOAT32 = 1024
"""Products of this many int8 pairs sum up exactly in float32: 1024 * 128 * 128 = 2^24."""


def make(gemm: Gemm, seed: int = SEED) -> Canary:
    """The canary of a shape."""
    return Canary(seed, digest(product(*operands(gemm, seed))))


def operands(gemm: Gemm, seed: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """A [M, K] and B [K, N]: every code from -128 to 127, none predictable from its neighbours.

    The definition does not rest on any library's random numbers: the n-th code of A is the top byte of a mixed 64-bit
    counter (see `_mix`) starting at 2*seed, that of B of one starting at 2*seed + 1.
    """
    a = _codes(2 * seed, gemm.m * gemm.k).reshape(gemm.m, gemm.k)
    b = _codes(2 * seed + 1, gemm.k * gemm.n).reshape(gemm.k, gemm.n)
    return a, b


def _codes(stream: int, count: int) -> npt.NDArray[np.int8]:
    start = np.uint64((stream * 0x9E3779B97F4A7C15) % 2**64)
    out = np.empty(count, np.int8)
    block = 1 << 20  # bounds the memory of the 64-bit counters
    for first in range(0, count, block):
        last = min(first + block, count)
        counter = np.arange(first, last, dtype=np.uint64)
        counter += start
        out[first:last] = (_mix(counter) >> np.uint64(56)).astype(np.uint8).view(np.int8)
    return out


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A well-known 64-bit finaliser: multiply and fold, twice. Arithmetic is modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def product(a: npt.NDArray[np.int8], b: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
    """A @ B exactly, int32. K up to 131,071; in blocks of K that float32 sums without rounding."""
    total = np.zeros((a.shape[0], b.shape[1]), np.int32)
    for first in range(0, a.shape[1], _EXACT_IN_FLOAT32):
        block = slice(first, first + _EXACT_IN_FLOAT32)
        total += (a[:, block].astype(np.float32) @ b[block].astype(np.float32)).astype(np.int32)
    return total


def digest(c: npt.NDArray[Any]) -> str:
    """sha256 of an int32 result: little-endian, row-major."""
    return hashlib.sha256(np.ascontiguousarray(c, dtype="<i4").tobytes()).hexdigest()
