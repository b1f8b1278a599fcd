"""Fixtures of this room; what they are made of is in npu_world."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from npu_world import _block_pack, _calm, block_pack, machine

__all__ = ["_block_pack", "_calm", "block_pack", "machine"]
