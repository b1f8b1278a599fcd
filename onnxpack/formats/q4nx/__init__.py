"""Q4NX: the 4-bit tile format of the XDNA2 runtimes. Write it, read it, decode it, look into foreign files."""

from __future__ import annotations

from onnxpack.formats.q4nx.format import Q4NX

__all__ = ["Q4NX"]
