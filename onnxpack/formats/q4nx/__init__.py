"""Q4NX: the 4-bit tile format of the XDNA2 runtimes. Write it, decode it, and look into files that others wrote.

>>> import numpy as np
>>> Q4NX().encode(np.eye(256, 32, dtype=np.float32)).bits_per_weight
5.0

`open_file(path)` reads a foreign file (`.names`, `.judge(name)`, `.decode(name, shape)`), `describe(path)` lists it.
"""

from __future__ import annotations

from onnxpack.formats.q4nx.format import Q4NX
from onnxpack.formats.q4nx.kinds import Judgement, Kind
from onnxpack.formats.q4nx.reader import Q4nxFile, Row, describe, open_file

__all__ = ["Q4NX", "Judgement", "Kind", "Q4nxFile", "Row", "describe", "open_file"]
