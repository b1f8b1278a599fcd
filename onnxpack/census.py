"""The census: every matrix product of a model, by shape, with the reason for each that will not run on the NPU.

Pure: it takes a loaded model and a kernel library and reads neither weights nor files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from onnxpack import records
from onnxpack.graph.load import Model
from onnxpack.graph.paths import foreign_operators
from onnxpack.graph.sites import Kind, Site, find_sites
from onnxpack.reasons import Reason
from onnxpack.shapes import Gemm

SCHEMA = "onnxpack/census/1.0"

Dim = int | str | None
Verdict = Literal["covered", "buildable", "host"]
_BEST_FIRST: tuple[Verdict, ...] = ("covered", "buildable", "host")


@dataclass(frozen=True)
class SiteEntry:
    """One matrix product. `reason` is null only for a covered one."""

    path: str
    op: str
    kind: Kind
    m: Dim
    k: Dim
    n: Dim
    dtype: str | None
    weight: str | None
    verdict: Verdict
    reason: str | None
    name: str
    """The node's own name in the model."""
    qdq: str | None
    """What a quantized product is (scales, zero points, bias), when it is taken as one."""
    detail: str | None
    """For a quantized product that is not: the node and the condition that failed."""


@dataclass(frozen=True)
class Group:
    """All weight sites of one (K, N)."""

    k: Dim
    n: Dim
    m: Dim
    """The M that all of them have; "8, seq" where they differ; null when unknown."""
    dtype: str | None
    bytes: int
    """Bytes of the distinct weights, as stored."""
    count: int
    weights: int
    """Distinct weights."""
    verdict: Verdict
    """The best verdict among the sites; `verdicts` has them all."""
    verdicts: dict[str, int]


@dataclass(frozen=True)
class Totals:
    """Counts of sites."""

    sites: int
    weight: int
    dynamic: int
    other: int
    covered: int
    buildable: int
    host: int


@dataclass(frozen=True)
class Census:
    """What `onnxpack census` prints."""

    schema: str
    model: str
    sites: list[SiteEntry]
    groups: list[Group]
    totals: Totals
    foreign_domains: dict[str, list[str]]
    """Operators outside ai.onnx, by domain: whatever is behind them may have unknown shapes."""

    @property
    def covered_percent(self) -> float:
        """Covered sites over weight sites, in percent; 100 when there are no weight sites."""
        return 100 * self.totals.covered / self.totals.weight if self.totals.weight else 100.0

    def to_dict(self) -> dict[str, Any]:
        """What `census --json` prints."""
        made = records.to_dict(self)
        assert isinstance(made, dict)
        return made


def take_census(model: Model, kernels: Collection[Gemm] = (), sites: Sequence[Site] | None = None) -> Census:
    """Count the products of a model against the (K, N) of `kernels`."""
    sites = find_sites(model) if sites is None else sites
    shapes = {kernel.kn for kernel in kernels}
    entries = [_entry(site, shapes) for site in sites]
    verdicts = [entry.verdict for entry in entries]
    kinds = [entry.kind for entry in entries]
    totals = Totals(
        len(entries),
        *(kinds.count(kind) for kind in ("weight", "dynamic", "other")),
        *(verdicts.count(verdict) for verdict in _BEST_FIRST),
    )
    return Census(SCHEMA, model.name, entries, _groups(sites, entries), totals, foreign_operators(model.ir.graph))


def _entry(site: Site, shapes: set[tuple[int, int]]) -> SiteEntry:
    verdict: Verdict = "host"
    reason: Reason | None = site.reason
    if reason is None:
        verdict = "covered" if (site.k, site.n) in shapes else "buildable"
        reason = None if verdict == "covered" else Reason.NO_KERNEL
    root = None if site.weight is None else site.weight.root.name
    return SiteEntry(
        site.path,
        site.op,
        site.kind,
        site.m,
        site.k,
        site.n,
        site.dtype,
        root,
        verdict,
        None if reason is None else reason.value,
        site.node.name or "",
        None if site.group is None else site.group.traits,
        site.detail,
    )


def _groups(sites: Sequence[Site], entries: Sequence[SiteEntry]) -> list[Group]:
    members: dict[tuple[Dim, Dim], list[int]] = {}
    for i, entry in enumerate(entries):
        if entry.kind == "weight":
            members.setdefault((entry.k, entry.n), []).append(i)
    groups = [_group(key, [sites[i] for i in ids], [entries[i] for i in ids]) for key, ids in members.items()]
    return sorted(groups, key=lambda g: (-g.count, str(g.k).zfill(12), str(g.n).zfill(12)))


def _group(key: tuple[Dim, Dim], sites: Sequence[Site], entries: Sequence[SiteEntry]) -> Group:
    roots = {site.weight.root.name: site.weight for site in sites if site.weight is not None}
    rows = {entry.m for entry in entries}
    dtypes = sorted({entry.dtype or "?" for entry in entries})
    verdicts = [entry.verdict for entry in entries]
    return Group(
        *key,
        m=next(iter(rows)) if len(rows) == 1 else ", ".join(sorted("?" if m is None else str(m) for m in rows)),
        dtype=", ".join(dtypes),
        bytes=sum(weight.root.nbytes for weight in roots.values()),
        count=len(entries),
        weights=len(roots),
        verdict=min(verdicts, key=_BEST_FIRST.index),
        verdicts={v: verdicts.count(v) for v in _BEST_FIRST if v in verdicts},
    )
