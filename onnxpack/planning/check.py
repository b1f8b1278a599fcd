"""Whether an execution can be run: each product whole, each site once. Plans and packs are files that people edit.

Nothing here knows how a plan was made; what is checked is what an executor relies on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod

from onnxpack.errors import UsageError
from onnxpack.planning.records import Call, Execution, PlanGroup, Program, Range
from onnxpack.planning.tiling import LAUNCH_LIMIT
from onnxpack.shapes import Gemm


def problems(execution: Execution, shapes: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    """What is wrong with an execution, given (K, N) of every site that a kernel may run: one line each."""
    seen: set[str] = set()
    for number, group in enumerate(execution.groups):
        where = f"group {number} ({group.k}x{group.n})"
        yield from (f"{where}: {problem}" for problem in _group(group, shapes))
        for path in group.sites:
            if path in seen:
                yield f"{where}: site {path!r} is planned twice"
            seen.add(path)


def _group(group: PlanGroup, shapes: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    if group.sites != [member.site for call in group.calls for member in call.members]:
        yield "its sites are not those of its calls"
    for call in group.calls:
        yield from _call(group, call, shapes)
    rows = [program.rows for program in group.programs]
    if not rows or rows[0] < 1 or any(a >= b for a, b in pairwise(rows)):
        yield f"programs for {rows} rows"
    for program in group.programs:
        yield from (f"{program.rows} rows: {problem}" for problem in _program(group, program))


def _call(group: PlanGroup, call: Call, shapes: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    column = 0
    for member in call.members:
        if shapes.get(member.site) != (group.k, member.n):
            yield f"no site {member.site!r} of {group.k}x{member.n} can run on a kernel"
        if member.column != column:
            yield f"site {member.site!r} begins at column {member.column}, not at {column}"
        column += member.n
    if column != group.n:
        yield f"{column} columns are joined"


def _program(group: PlanGroup, program: Program) -> Iterator[str]:
    if program.kernel is None:
        if program.launches:
            yield "launches without a kernel"
        return
    try:
        kernel = Gemm.parse(program.kernel)
    except UsageError as error:
        yield error.what
        return
    if not 0 < len(program.launches) <= LAUNCH_LIMIT:
        yield f"{len(program.launches)} launches"
        return
    axes = (
        ("rows", [launch.rows for launch in program.launches], program.rows, kernel.m),
        ("K", [launch.k for launch in program.launches], group.k, kernel.k),
        ("columns", [launch.columns for launch in program.launches], group.n, kernel.n),
    )
    for name, ranges, size, most in axes:
        if not _covers(ranges, size, most):
            yield f"the launches do not cover {name} 0 to {size} in pieces of at most {most}"
    given = {(launch.rows, launch.k, launch.columns) for launch in program.launches}
    every = prod(len(set(ranges)) for _, ranges, _, _ in axes)
    if not len(program.launches) == len(given) == every:
        yield "some piece is computed twice or not at all"


def _covers(ranges: Iterable[Range], size: int, most: int) -> bool:
    """Whether the distinct ranges are 0 to `size`, end to end, none longer than `most`."""
    at = 0
    for start, stop in sorted(set(ranges)):
        if start != at or not start < stop <= start + most:
            return False
        at = stop
    return at == size
