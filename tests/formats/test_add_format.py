"""Adding a format is one declaration, one vector, one table row.

Q4_0 is added here, outside the package; Q8_0 was added as CONTRIBUTING shows.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpack.formats import ggml, registry
from onnxpack.formats.base import F32, Array, Encoded
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import Codes, Declared
from onnxpack.formats.functions import structure
from onnxpack.formats.layout import BitPart, BitView, BlockField, Role, interleaved
from onnxpack.formats.profiles import LinearUniform, Parameter, QuantizationProfile, TilingQuantization
from onnxpack.formats.translate import from_structure


class Q40(Declared):
    """Blocks of 32: float16 scale (the extreme value over -8), nibbles 8 above zero, low ones first."""

    name = "q4_0"
    row = "Q4_0"
    profile = QuantizationProfile(
        tiling=TilingQuantization(
            (32,),
            (1,),
            (
                QuantizationProfile(
                    linear=LinearUniform(DataType.UINT8, bits=4, zero_point=8, scale=Parameter("d"), codes="codes")
                ),
            ),
        ),
        layout=interleaved(
            32,
            18,
            BlockField(Role.SCALE, 0, 16, 1, DataType.FLOAT16, "d"),
            BlockField(Role.CODE, 0, 8, 16, DataType.UINT8, "qs"),
            views=[BitView("codes", (BitPart("qs", 0, 4, (2, 16), (4, 8)),))],
        ),
    )

    def quantize(self, x: F32, spans: Mapping[str, Array]) -> Codes:
        extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)
        d = extreme / np.float32(-8)
        inverse = np.where(d == 0, np.float32(0), np.float32(1) / np.where(d == 0, np.float32(1), d))
        codes = np.minimum(15, np.trunc(x * inverse + np.float32(8.5)))
        return {"d": d.astype(np.float16), "codes": codes.astype(np.uint8)}


@pytest.mark.parametrize(("stored", "expected"), [("packed", "y"), ("rand_packed", "rand_y"), ("packed_ggufpy", "y")])
def test_the_declaration_is_enough(stored: str, expected: str, golden: Any, tools: Any) -> None:
    arrays, made = golden("q4_0"), Q40()
    encoded = Encoded("q4_0", arrays[expected].shape, {"blocks": arrays[stored]})
    assert tools.same(made.decode(encoded), arrays[expected])
    assert tools.same(tools.onnxruntime(tools.model(made, encoded, 21)), arrays[expected])


def test_its_encoder_is_byte_exact(golden: Any) -> None:
    arrays, made = golden("q4_0"), Q40()
    assert made.encode(arrays["x"]).fields["blocks"].tobytes() == arrays["packed"].tobytes()


def test_what_follows_from_it() -> None:
    made = Q40()
    assert made.family == "tiling+linear"
    assert structure(made, (4096, 4096)).bits_per_weight() == 4.5
    assert from_structure(structure(made, (4, 64))) == (made.profile, (4, 64))


def test_contributing_shows_the_whole_of_q8_0() -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    ]
    assert inspect.getsource(ggml.Q80) in blocks
    line = '"q8_0": "onnxpack.formats.ggml:Q80",\n'
    assert line in blocks
    assert line in inspect.getsource(registry)
    here = Path(__file__).parent
    assert (here.parent / "data" / "formats" / "q8_0.npz").exists()
    for file, table in (
        ("test_golden.py", "CASES"),
        ("test_encoding.py", "TRUE_BITS"),
        ("test_encoding.py", "LOSS"),
        ("test_onnx_decoders.py", "RUNS"),
    ):
        text = (here / file).read_text(encoding="utf-8")
        assert f"`{table}`" in page
        assert '"q8_0"' in text[text.index(f"\n{table}") :]
