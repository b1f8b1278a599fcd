"""Tables that formats are defined by and that no formula gives: IQ1_S's grid, bitsandbytes' dynamic levels.

>>> load("iq1_s_grid").shape, load("nf4_levels").shape
((2048, 8), (256,))
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt


@functools.cache
def load(name: str) -> npt.NDArray[Any]:
    """The table `name`.npy, read-only."""
    with resources.files(__name__).joinpath(f"{name}.npy").open("rb") as file:
        table: npt.NDArray[Any] = np.load(file, allow_pickle=False)
    table.setflags(write=False)
    return table
