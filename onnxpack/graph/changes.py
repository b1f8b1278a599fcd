"""What packing did to the graph, node by node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["added", "removed", "rewritten"]


@dataclass(frozen=True)
class Change:
    """One node that packing added, removed or rewrote, and why."""

    action: Action
    node: str
    op: str
    why: str
