"""Fixtures shared by all rooms."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

SUPPORT = str(ROOT / "tests" / "support")
"""Plain modules that tests of several rooms import: `model_maker`."""
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)


def shared_folder() -> Path | None:
    """The shared collection of models and vectors, when it lies beside the checkout."""
    for place in (os.environ.get("ONNXPACK_SHARED"), ROOT.parent / "shared"):
        if place and (Path(place) / "models").is_dir():
            return Path(place)
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the shared collection; the test is skipped, by name, without it."""
    folder = shared_folder()
    if folder is None:
        pytest.skip("the shared model collection is not beside the checkout")
    return folder
