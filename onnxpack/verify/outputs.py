"""What a run gave, in a few numbers a person can look at; and the file that keeps it."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxpack.errors import EnvironmentFault, UsageError
from onnxpack.runtime.trace import TraceRecord
from onnxpack.verify.refusal import refused_as

_SHOWN = 6


@dataclass(frozen=True)
class Summary:
    """One output. The figures are of its finite values; null where there are none, or where it has no numbers."""

    name: str
    type: str
    shape: tuple[int, ...] | None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    nan: int = 0
    infinite: int = 0
    first: tuple[Any, ...] = ()
    """The first values; NaN and infinities as text."""


def summarize(name: str, value: Any) -> Summary:
    """Look at one output.

    >>> s = summarize("y", np.array([[1.0, np.nan, 3.0]], np.float32))
    >>> s.type, s.shape, s.min, s.max, s.mean, s.nan, s.first
    ('float32', (1, 3), 1.0, 3.0, 2.0, 1, (1.0, 'nan', 3.0))
    """
    if not isinstance(value, np.ndarray):
        return Summary(name, type(value).__name__, None)
    kind, first = value.dtype.kind, tuple(_plain(v) for v in value.reshape(-1)[:_SHOWN])
    if kind not in "biuf":
        return Summary(name, "string" if kind in "SUO" else value.dtype.name, value.shape, first=first)
    finite = value[np.isfinite(value)]
    nan = int(np.count_nonzero(np.isnan(value)))
    low = high = mean = None
    if finite.size:
        low, high, mean = _plain(finite.min()), _plain(finite.max()), float(finite.mean(dtype=np.float64))
    infinite = value.size - finite.size - nan
    return Summary(name, value.dtype.name, value.shape, low, high, mean, nan, infinite, first)


def _plain(value: Any) -> Any:
    made = value.item() if isinstance(value, np.generic) else value
    if isinstance(made, float) and not np.isfinite(made):
        return str(made)
    return made


@dataclass(frozen=True)
class Placement:
    """Sites that ran in the same way in the last run."""

    where: str
    rows: int | None
    reason: str | None
    sites: int


def placements(records: Iterable[TraceRecord]) -> list[Placement]:
    """Where the sites of the last run ran, and those that are never bound, most first."""
    records = list(records)
    last = max((record.run for record in records), default=0)
    seen = Counter(
        (record.where, record.rows, record.reason)
        for record in records
        if record.site is not None and record.run in (0, last)
    )
    return [Placement(*key, count) for key, count in sorted(seen.items(), key=lambda item: (-item[1], str(item[0])))]


def same_bits(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two runs gave the same bytes (NaN included)."""
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.tolist() == b.tolist() if a.dtype.hasobject else a.tobytes() == b.tobytes()
    if isinstance(a, list) and isinstance(b, list):
        return same_bits(a, b)
    return bool(type(a) is type(b) and a == b)


def save(path: str | Path, outputs: Mapping[str, Any]) -> None:
    """Keep outputs in an .npz file, by name. UsageError for outputs that are no arrays."""
    target = Path(path)
    for name, value in outputs.items():
        if not isinstance(value, np.ndarray):
            raise UsageError(f"is a {type(value).__name__}; only arrays can be saved", where=f"output {name}")
    if target.suffix != ".npz":
        raise UsageError("outputs are saved as .npz", where=str(path), hint=f"name it {target.name}.npz")
    try:
        with zipfile.ZipFile(target, "w") as archive:
            for name, value in outputs.items():
                # As numpy.savez writes it, which cannot take an output that is called "file".
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    plain = value.astype(str) if value.dtype.hasobject else value
                    np.lib.format.write_array(member, plain, allow_pickle=False)
    except OSError as error:
        raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(path)) from None


def repeated(session: Any, feed: Mapping[str, Any], times: int) -> tuple[list[Any], bool]:
    """The outputs of the last of `times` runs, and whether all runs gave the same bytes."""
    with refused_as(lambda why: UsageError(f"does not run on these inputs: {why}")):
        results = list(session.run(None, feed))
        same = True
        for _ in range(times - 1):
            before, results = results, list(session.run(None, feed))
            same &= same_bits(before, results)
    return results, same
