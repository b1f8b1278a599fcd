"""Helpers of this room: `example` runs a script; `example_runner` in `support` is a plain module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SUPPORT = str(Path(__file__).parent / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)

from example_runner import Runner  # noqa: E402


@pytest.fixture
def example(tmp_path: Path) -> Runner:
    """Runs an example in an empty folder."""
    return Runner(tmp_path)
