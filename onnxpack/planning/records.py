"""The records of a plan: what runs where, launch by launch. Whoever executes a plan decides nothing.

How a call with `rows` real rows runs, for one group: `blocks` cuts it by the group's programs, and each program is a
list of launches. A launch takes rows, a range of K and a range of columns, each padded with zeros to the kernel's size;
launches of the same rows and columns but other ranges of K are summed in int32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onnxpack import records
from onnxpack.errors import UsageError
from onnxpack.planning.costs import Costs
from onnxpack.reasons import Reason

SCHEMA = "onnxpack/plan/1.1"
OWN_CODES = "graph-int8"
"""Format id of a weight whose codes, scales and zero points are the graph's own, bit for bit."""

Range = tuple[int, int]
"""Start and stop."""


@dataclass(frozen=True)
class PlannedWeight:
    """One weight to store, and the sites that use it."""

    name: str
    k: int
    n: int
    format: str
    params: dict[str, Any]
    sites: list[str]
    note: str | None = None
    """Why it is not in the format that was asked for."""


@dataclass(frozen=True)
class Launch:
    """One run of a kernel: C[rows, columns] (+)= A[rows, k] @ B[k, columns]. Ranges are of real elements; what a kernel
    has beyond them is zero."""

    rows: Range
    k: Range
    columns: Range
    """Of the joined columns."""


@dataclass(frozen=True)
class Program:
    """How up to `rows` rows run. Launches whose rows begin at or after the real ones are left out."""

    rows: int
    kernel: str | None
    """MxKxN of every launch; None: so many rows stay on the host."""
    launches: list[Launch]


@dataclass(frozen=True)
class Member:
    """One site of a call: its N columns begin at `column` of the joined ones."""

    site: str
    column: int
    n: int


@dataclass(frozen=True)
class Call:
    """Sites that run together because they have the same input: usually one."""

    members: list[Member]


@dataclass(frozen=True)
class PlanGroup:
    """Calls that run in the same way: the same K, columns and programs."""

    k: int
    n: int
    """Of the joined columns."""
    sites: list[str]
    kernels: list[str]
    launches: int
    """Of all calls, once per planned number of rows."""
    predicted_us: float
    wasted_macs: int
    """Products with padding, of all launches."""
    wasted_bytes: int
    """Bytes moved beyond one A, one B and one C of the product itself."""
    calls: list[Call]
    programs: list[Program]
    """By rows."""


@dataclass(frozen=True)
class Unplanned:
    """A site that is not bound, or runs on the host only, and why."""

    path: str
    reason: Reason


@dataclass(frozen=True)
class PlannedKernel:
    """One distinct kernel, and how much of a pass it does."""

    kernel: str
    build: bool
    """Whether it is to be made; else the library has it."""
    launches: int
    sites: int


@dataclass(frozen=True)
class PlanTotals:
    """Counts over the plan."""

    planned: int
    """Sites that a kernel runs."""
    launches: int
    kernels: int
    bound: int
    """Sites that run on int8 operands, on whatever device."""
    predicted_us: float
    gap_percent: float
    """How far the plan may be above the cheapest choice among the kernels considered; 0: it is the cheapest."""


@dataclass(frozen=True)
class Execution:
    """The part of a plan that a runtime needs; stored in the pack."""

    rows: list[int]
    min_rows: int
    groups: list[PlanGroup]


@dataclass(frozen=True)
class Plan:
    """Everything that build needs to know beside the model itself."""

    schema: str
    model: str
    """sha256 of the graph file that the plan was made for."""
    target: str
    rows: list[int]
    min_rows: int
    """Calls with fewer rows stay on the host."""
    budget: int
    weights: list[PlannedWeight]
    kernels: list[PlannedKernel]
    groups: list[PlanGroup]
    unplanned: list[Unplanned]
    totals: PlanTotals
    costs: Costs

    @property
    def execution(self) -> Execution:
        """What of it goes into the pack."""
        return Execution(self.rows, self.min_rows, self.groups)

    def to_dict(self) -> dict[str, Any]:
        """What `plan --json` prints."""
        made = records.to_dict(self)
        assert isinstance(made, dict)
        return made

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Inverse of to_dict. UsageError names the path of what does not fit."""
        try:
            return _of_this_version(records.from_dict(data, cls))
        except records.RecordError as error:
            raise UsageError(f"not a plan: {error}") from None

    @classmethod
    def loads(cls, text: str | bytes) -> Plan:
        """Parse a plan file. UsageError when it is not one."""
        try:
            return _of_this_version(records.loads(text, cls))
        except records.RecordError as error:
            raise UsageError(f"not a plan: {error}") from None


def _of_this_version(plan: Plan) -> Plan:
    if plan.schema.rpartition(".")[0] != SCHEMA.rpartition(".")[0]:
        raise UsageError(f"schema {plan.schema!r} is not one this version reads ({SCHEMA})", hint="plan again")
    return plan


def blocks(programs: Sequence[Program], rows: int) -> Iterator[tuple[int, int, Program]]:
    """(first row, rows, program) of a call: the smallest program that holds all of them, else the largest one again
    and again.

    >>> small, large = Program(16, "16x8x32", []), Program(128, "128x8x32", [])
    >>> [(start, count, p.rows) for start, count, p in blocks([small, large], 300)]
    [(0, 128, 128), (128, 128, 128), (256, 44, 128)]
    >>> [(start, count, p.rows) for start, count, p in blocks([small, large], 130)]
    [(0, 128, 128), (128, 2, 16)]
    """
    start = 0
    while start < rows:
        left = rows - start
        program = next((p for p in programs if p.rows >= left), programs[-1])
        count = min(left, program.rows)
        yield start, count, program
        start += count
