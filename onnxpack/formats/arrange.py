"""Named axes: "kw n i -> n (kw i)" says how stored axes become logical ones, and back.

The left side names every axis of an array; a group in parentheses on the right is one axis made of several, the last
one running fastest. A literal 1 is an axis of one element.

>>> plan = arrangement("kw n i -> n (kw i) 1", {"kw": 2, "n": 3, "i": 4})
>>> plan.split, plan.perm, plan.merged
((2, 3, 4), (1, 0, 2), (3, 8, 1))
>>> x = np.arange(24).reshape(2, 3, 4)
>>> plan.apply(x)[0, :, 0].tolist(), np.array_equal(plan.undo(plan.apply(x)), x)
([0, 1, 2, 3, 12, 13, 14, 15], True)
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.formats.layout import require

Array = npt.NDArray[Any]

_TOKEN = re.compile(r"\(|\)|[a-z]\w*|1|\S")


@dataclass(frozen=True)
class Arrangement:
    """Reshape to `split`, transpose by `perm`, reshape to `merged`."""

    split: tuple[int, ...]
    perm: tuple[int, ...]
    merged: tuple[int, ...]

    @property
    def permuted(self) -> tuple[int, ...]:
        """The shape between transpose and the last reshape."""
        return tuple(self.split[p] for p in self.perm)

    @property
    def moves(self) -> bool:
        """Whether elements change their order (axes of one element do not count)."""
        order = [p for p in self.perm if self.split[p] > 1]
        return order != sorted(order)

    def apply(self, array: Array) -> Array:
        """The array, arranged."""
        return moved(array.reshape(self.split), self.perm).reshape(self.merged)

    def undo(self, array: Array) -> Array:
        """The array of shape `split` that `apply` arranges into this one."""
        return moved(array.reshape(self.permuted), tuple(int(p) for p in np.argsort(self.perm)))


_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def moved(array: Array, perm: tuple[int, ...]) -> Array:
    """The array transposed, in C order if it moves: last axes that stay last are moved as one word, where they fit one.

    >>> moved(np.arange(12, dtype=np.uint8).reshape(2, 3, 2), (1, 0, 2)).reshape(-1).tolist()
    [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    """
    order = [p for p in perm if array.shape[p] > 1]
    if order == sorted(order):
        return array.transpose(perm)
    last, size = len(perm), array.itemsize
    while last > 0 and perm[last - 1] == last - 1 and size * array.shape[last - 1] <= 8:
        size *= array.shape[last - 1]
        last -= 1
    if last == len(perm) or size not in _WORDS or size == array.itemsize or not array.flags.c_contiguous:
        return np.ascontiguousarray(array.transpose(perm))
    words = array.reshape(*array.shape[:last], -1).view(_WORDS[size])[..., 0]
    turned = np.ascontiguousarray(words.transpose(perm[:last]))
    return turned.view(array.dtype).reshape(tuple(array.shape[p] for p in perm))


def axes(side: str) -> list[list[str]]:
    """One side of a pattern: the names that make up each axis.

    >>> axes("n (kw i) 1")
    [['n'], ['kw', 'i'], []]
    """
    found: list[list[str]] = []
    inside = False
    for token in _TOKEN.findall(side):
        if token in "()":
            require(inside == (token == ")"), "axes", f"parentheses of {side!r} do not match")
            inside = token == "("
            if inside:
                found.append([])
        elif token == "1":
            found.append([])
        else:
            require(token.isidentifier(), "axes", f"{token!r} in {side!r} is not a name")
            found[-1].append(token) if inside else found.append([token])
    require(not inside, "axes", f"parentheses of {side!r} do not match")
    return found


def names(side: str) -> list[str]:
    """All names of one side, in order."""
    return [name for axis in axes(side) for name in axis]


def arrangement(pattern: str, extents: Mapping[str, int]) -> Arrangement:
    """The pattern with every axis as long as `extents` says."""
    return _arrangement(pattern, tuple(sorted((n, extents[n]) for n in names(pattern.partition("->")[0]))))


@functools.lru_cache(maxsize=1024)
def _arrangement(pattern: str, extents: tuple[tuple[str, int], ...]) -> Arrangement:
    left, _, right = pattern.partition("->")
    stored, size = names(left), dict(extents)
    check(pattern)
    perm = tuple(stored.index(name) for name in names(right))
    merged = tuple(math.prod(size[name] for name in axis) for axis in axes(right))
    return Arrangement(tuple(size[name] for name in stored), perm, merged)


def check(pattern: str) -> None:
    """ProfileError unless both sides name the same axes, once each."""
    left, arrow, right = pattern.partition("->")
    stored = names(left)
    require(bool(arrow) and len(set(stored)) == len(stored), "axes", f"{pattern!r} names an axis twice")
    require(sorted(stored) == sorted(names(right)), "axes", f"the sides of {pattern!r} name different axes")
