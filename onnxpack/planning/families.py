"""Sites that have the same input, and the kinds of such families: what can be joined, and what is planned only once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxpack.graph.constants import structure
from onnxpack.graph.sites import Site

Widths = tuple[int, ...]
"""N of each site of a family, widest first."""

Bin = tuple[int, ...]
"""Positions in a family that run together: one, or several joined."""

Partition = tuple[Bin, ...]
"""A way to run a family: every position in one bin."""

ALL_PARTITIONS_UP_TO = 5
"""Members of a family whose partitions are all looked at; larger families are cut into runs of equal length."""
LONGEST_RUN = 64
MOST_ROWS = 8192
"""Of one program. Longer calls repeat it."""


@dataclass(frozen=True)
class Family:
    """Sites with one input, that is with the same rows of int8 codes; widest first, then by path."""

    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Kind:
    """Families that nothing tells apart: planned once."""

    k: int
    widths: Widths
    rows: tuple[int, ...]
    """Numbers of rows to plan for."""
    families: tuple[Family, ...]

    @property
    def key(self) -> tuple[int, Widths, tuple[int, ...]]:
        """What the families share."""
        return self.k, self.widths, self.rows


def natural(path: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key of a path, numbers by value: ``MatMul_9`` before ``MatMul_10``.

    >>> sorted(["MatMul_10", "MatMul_9", "Gemm_1"], key=natural)
    ['Gemm_1', 'MatMul_9', 'MatMul_10']
    """
    parts = re.split(r"([0-9]+)", path)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts if part)


def rows_of(site: Site, rows: Iterable[int], min_rows: int) -> tuple[int, ...]:
    """The numbers of rows to plan a site for: its own, where the graph states them; nothing below the threshold."""
    wanted = {min(site.m, MOST_ROWS)} if isinstance(site.m, int) else set(rows)
    return tuple(sorted(r for r in wanted if r >= min_rows))


def kinds_of(sites: Sequence[Site], rows: Sequence[int], min_rows: int) -> list[Kind]:
    """Families of the sites by kind. Neither depends on the order of the sites."""
    families: dict[tuple[object, ...], list[Site]] = {}
    for site in sites:
        families.setdefault(input_of(site), []).append(site)
    kinds: dict[tuple[int, Widths, tuple[int, ...]], list[Family]] = {}
    for members in families.values():
        family = Family(tuple(sorted(members, key=lambda s: (-width(s), natural(s.path)))))
        first = family.sites[0]
        assert isinstance(first.k, int)
        key = (first.k, tuple(map(width, family.sites)), rows_of(first, rows, min_rows))
        kinds.setdefault(key, []).append(family)
    return [
        Kind(*key, tuple(sorted(members, key=lambda f: natural(f.sites[0].path))))
        for key, members in sorted(kinds.items())
    ]


def width(site: Site) -> int:
    """N of a bound site."""
    assert isinstance(site.n, int)
    return site.n


def input_of(site: Site) -> tuple[object, ...]:
    """Equal for sites that hand the same codes to a kernel: one float tensor, or one quantized tensor with the same
    parameters."""
    if site.a is None:
        return ("alone", site.path)
    act = None if site.group is None else site.group.activation
    common = (site.k, site.m, site.transposed_a)
    if act is None:
        return ("float", id(site.a), *common)
    zero = None if act.zero_point is None else structure(act.zero_point)
    return ("codes", id(act.value), act.dtype.name, structure(act.scale), zero, act.axis, *common)


def partitions(widths: Widths) -> list[Partition]:
    """The ways to run a family that are looked at, up to equal widths; every site alone comes first.

    >>> partitions((2048, 1024, 1024))
    [((0,), (1,), (2,)), ((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),)]
    """
    if len(widths) > ALL_PARTITIONS_UP_TO:
        return [_runs(len(widths), length) for length in range(1, min(len(widths), LONGEST_RUN) + 1)]
    found: dict[tuple[Widths, ...], Partition] = {}
    for partition in _partitions(len(widths)):
        found.setdefault(tuple(sorted(tuple(widths[i] for i in part) for part in partition)), partition)
    return sorted(found.values(), key=lambda p: -len(p))


def _runs(count: int, length: int) -> Partition:
    return tuple(tuple(range(start, min(start + length, count))) for start in range(0, count, length))


def _partitions(count: int) -> Iterable[Partition]:
    """Every partition of 0..count-1, smallest positions first."""
    if count == 0:
        yield ()
        return
    last = count - 1
    for smaller in _partitions(last):
        for i, part in enumerate(smaller):
            yield (*smaller[:i], (*part, last), *smaller[i + 1 :])
        yield (*smaller, (last,))
