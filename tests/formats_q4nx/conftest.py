"""Golden vectors of the Q4NX room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[1] / "data" / "q4nx"


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of the golden files."""
    return DATA


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """Loads one vector by name."""

    def load(name: str) -> dict[str, Any]:
        with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
            return {key: file[key] for key in file.files}

    return load


@pytest.fixture
def normal() -> Callable[..., np.ndarray]:
    """Normal weights, the same for the same arguments."""

    def make(k: int, n: int, seed: int = 0, scale: float = 0.05) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((k, n), dtype=np.float32) * np.float32(scale)

    return make
