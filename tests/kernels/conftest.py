"""Helpers of this room: the ELF writer and the stand-in toolchain live in `support` and are plain modules."""

from __future__ import annotations

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parent / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)
