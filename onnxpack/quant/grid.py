"""Recognize float weights that are dequantized int8: the source of the codes would lose nothing, they lose again.

>>> codes = np.arange(-100, 100, dtype=np.float32).reshape(-1, 1).repeat(2, axis=1)
>>> on_a_grid(codes * np.float32(0.013)), on_a_grid(np.sin(codes))
(True, False)
"""

from __future__ import annotations

import numpy as np

from onnxpack.types import Array

_COLUMNS = 4
_MIN_ROWS = 64
_LEVELS = 255
_TOLERANCE = 2e-3  # of a step: what float32 rounding of code * scale may move a value


def on_a_grid(w: Array) -> bool:
    """Whether each column of w [K, N] takes at most 255 equally spaced values. Looks at a few columns."""
    k, n = w.shape
    if k < _MIN_ROWS:
        return False
    columns = dict.fromkeys(np.linspace(0, n - 1, _COLUMNS, dtype=int).tolist()) if n else {}
    seen = [_equally_spaced(np.unique(np.asarray(w[:, column], np.float32))) for column in columns]
    return any(found is True for found in seen) and all(found is not False for found in seen)


def _equally_spaced(values: Array) -> bool | None:
    """None for a column that says nothing (constant)."""
    if len(values) < 2:
        return None
    if len(values) > _LEVELS:
        return False
    steps = (values - values[0]).astype(np.float64) / float(np.diff(values).min())
    return bool(steps[-1] <= _LEVELS and np.abs(steps - np.rint(steps)).max() < _TOLERANCE * max(1.0, steps[-1] / 16))
