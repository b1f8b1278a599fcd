"""Where each site ran: one record per bound site and run, kept for the last runs only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple

from onnxpack.pack.manifest import Dim, SiteRecord

Where = Literal["host", "reference", "npu", "unbound"]

KEPT_RUNS = 64


@dataclass(frozen=True)
class TraceRecord:
    """One decision."""

    run: int
    """Number of the run, from 1; 0 for what was decided when the pack was loaded."""
    site: str | None
    """Path of the site; null for a decision about the whole session."""
    where: Where
    rows: int | None
    """Rows that were multiplied; null where only the session inside onnxruntime knows (bodies, computed shapes)."""
    reason: str | None
    """Why it did not run on the NPU."""
    facts: str | None = None
    """What a quantized site is: ``qdq sx=1 zp_x=-40 sw=80 zp_w=80 zp_y=-7``."""
    event: str | None = None
    """The word for it in traces of the NPU: ``float matmul``, ``qdq``, ``npu_qdq_host_rows``, ``npu_qdq_fallback``."""


class SiteOutcome(NamedTuple):
    """Where rows of a site ran, and why not on the NPU."""

    where: Where
    rows: int | None
    reason: str | None
    event: str | None = None


def runs_as_product(site: SiteRecord) -> bool:
    """Whether this runtime replaces the site: it has a packed weight."""
    return site.weight is not None


@dataclass(frozen=True)
class Placed:
    """A bound site and the device that runs it."""

    site: SiteRecord
    where: Where
    in_main_graph: bool
    """False in bodies: how often they run, and with which shapes, is not visible from outside."""
    facts: str | None = None


class Rows(ABC):
    """What one run knows about its sites."""

    @abstractmethod
    def of(self, placed: Placed) -> int | None:
        """Rows of A at the site, if known."""

    def at(self, placed: Placed) -> list[SiteOutcome]:
        """Where the site ran: as it was placed when the pack was loaded, unless a device chose again."""
        return [SiteOutcome(placed.where, self.of(placed), placed.site.reason)]


@dataclass(frozen=True)
class SymbolRows(Rows):
    """Row counts from the symbols that the shapes of the fed arrays bind.

    >>> SymbolRows({"batch": 2, "seq": 8}).value("batch*seq")
    16
    """

    symbols: Mapping[str, int]

    def of(self, placed: Placed) -> int | None:
        return self.value(placed.site.m) if placed.in_main_graph else None

    def value(self, dim: Dim) -> int | None:
        """A number, a symbol, or a product of them written with ``*``."""
        if dim is None or isinstance(dim, int):
            return dim
        if dim in self.symbols:
            return self.symbols[dim]
        product = 1
        for factor in dim.split("*"):
            name = factor.strip()
            known = int(name) if name.isdecimal() else self.symbols.get(name)
            if known is None:
                return None
            product *= known
        return product


@dataclass(frozen=True)
class CountedRows(Rows):
    """Row counts by node name, as they were multiplied."""

    counts: Mapping[str, int]

    def of(self, placed: Placed) -> int | None:
        return self.counts.get(placed.site.node)


class Trace:
    """The decisions of one session. Thread-safe; memory does not grow with the number of runs."""

    def __init__(self, at_load: Iterable[TraceRecord], bound: Iterable[Placed]) -> None:
        self._at_load = tuple(at_load)
        self._bound = tuple(bound)
        self._runs: deque[tuple[int, Rows]] = deque(maxlen=KEPT_RUNS)
        self._count = 0
        self._lock = Lock()

    def add(self, rows: Rows) -> None:
        """One run is over."""
        with self._lock:
            self._count += 1
            self._runs.append((self._count, rows))

    def records(self) -> list[TraceRecord]:
        """What was decided at load, then what became of each bound site in each run that is kept, oldest first."""
        with self._lock:
            runs = list(self._runs)
        made = [
            TraceRecord(number, placed.site.path, found.where, found.rows, found.reason, placed.facts, found.event)
            for number, rows in runs
            for placed in self._bound
            for found in rows.at(placed)
        ]
        return [*self._at_load, *made]
