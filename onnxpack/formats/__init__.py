"""Quantization formats: how a weight's bytes are laid out.

>>> [name for name in names() if name.endswith("_k")]
['q2_k', 'q3_k', 'q4_k', 'q5_k', 'q6_k']
>>> import numpy as np
>>> get("int8").encode(np.eye(2, dtype=np.float32)).fields["codes"].tolist()
[[127, 0], [0, 127]]
"""

from __future__ import annotations

from onnxpack.formats.base import Decoder, Encoded, FieldSpec, Format, Orientation
from onnxpack.formats.registry import get, names

__all__ = ["Decoder", "Encoded", "FieldSpec", "Format", "Orientation", "get", "names"]
