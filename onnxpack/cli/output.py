"""How commands print: results to stdout, everything else to stderr, plain where nobody watches.

>>> human_bytes(1536), human_bytes(3 * 2**30), human_bytes(10)
('1.5 KiB', '3.0 GiB', '10 B')
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from onnxpack.errors import one_line, shortened

__all__ = ["human_bytes", "note", "print_json", "print_table", "say", "shortened", "unknown", "watched"]


def human_bytes(count: float) -> str:
    """Bytes in binary units, one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def print_json(data: Any) -> None:
    """One JSON document on stdout, ASCII, indented: the same data, the same bytes."""
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> None:
    """Columns aligned by spaces on stdout; `right` are the columns to right-align. No colour, no boxes: greppable.

    Very long names show their two ends only; JSON has them whole.
    """
    cells = [[shortened(one_line(str(c))) for c in row] for row in [headers, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    for row in cells:
        line = "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        click.echo(line.rstrip())


def say(line: str) -> None:
    """One line on stdout, whatever is in the names that it quotes."""
    click.echo(one_line(line))


def note(line: str) -> None:
    """One line for the person at the terminal, on stderr."""
    click.echo(one_line(line), err=True)


def watched() -> bool:
    """Whether stderr is a terminal that a person watches (a progress bar makes sense)."""
    return sys.stderr.isatty()


def unknown(value: int | str | None) -> str:
    """A dimension for a person: "?" when it is not known."""
    return "?" if value is None else str(value)
