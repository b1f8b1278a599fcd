"""Run a pack as onnxruntime runs a model: continue a text, byte by byte, and say where the products ran.

python examples/run.py [PACK [PROMPT]]     # default: build/trained_a.pack, which examples/build.py makes
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

import onnxpack

LENGTH = 48


def main(pack: str = "build/trained_a.pack", prompt: str = "import os\n\ndef main(") -> None:
    session = onnxpack.load(pack)  # in place of onnxruntime.InferenceSession
    tokens = list(prompt.encode())  # the model's vocabulary is the 256 bytes
    for _ in range(LENGTH):
        (logits,) = session.run(["logits"], {"input_ids": np.array([tokens], np.int64)})
        tokens.append(int(logits[0, -1].argmax()))
    print(bytes(tokens).decode(errors="replace"))
    places = Counter(record.where for record in session.trace() if record.site is not None)
    print("\nran on:", ", ".join(f"{where} {count}" for where, count in places.most_common()))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except onnxpack.errors.OnnxpackError as error:
        sys.exit(error.render())
