"""Structure types: sizes are computed, translation loses nothing, lengths and contradictions are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpack.errors import OnnxpackError
from onnxpack.formats import get, names
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.functions import structure
from onnxpack.formats.layout import ProfileError
from onnxpack.formats.profile_json import from_data, from_json, to_data, to_json
from onnxpack.formats.profiles import QuantizationProfile
from onnxpack.formats.structure import ArrayType, Field, StructRef, StructType, to_inline, to_list
from onnxpack.formats.translate import from_structure, to_structure

DATA = Path(__file__).parents[1] / "data" / "formats" / "document_profiles.json"
DOCUMENT: dict[str, Any] = json.loads(DATA.read_text())

OURS = [name for name in names() if get(name).profile is not None]
SHAPE = (64, 512)
VARIANTS = [
    *((name, {}) for name in OURS),
    ("matmulnbits", {"bits": 2, "symmetric": False}),
    ("matmulnbits", {"symmetric": False, "block": 64}),
    ("nf4", {"double_quant": True}),
    ("int4_symmetric", {"group": 0}),
    ("log", {"variant": "packed"}),
    ("int8_per_channel", {"axis": 1}),
    ("int4_gptq", {"bits": 3, "act_order": True, "group": 32}),
    ("int4_awq", {"variant": "gemv"}),
    ("int4_awq", {"variant": "llm-awq", "group": 64}),
    ("hqq", {"axis": 0, "bits": 3}),
    ("exl2", {"bits": 5, "group": 64}),
    ("smoothquant", {"axis": -1}),
    ("paretoq", {"levels": "ternary"}),
]


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [SHAPE, (3, 256)], ids=str)
def test_size_is_that_of_the_stored_tensors(
    name: str, params: dict[str, Any], shape: tuple[int, int], tools: Any
) -> None:
    made, shape = get(name, **params), tools.fitting(name, shape)
    kind = structure(made, shape)
    total = sum(spec.nbytes for spec in made.fields(shape).values())
    assert kind.nbytes() == total
    assert math.isclose(kind.bits_per_weight(), 8 * total / math.prod(shape))
    kind.check_length(total)
    for wrong in (total - 1, total + 1):
        with pytest.raises(ProfileError, match="bytes are stored"):
            kind.check_length(wrong)


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
def test_there_and_back(name: str, params: dict[str, Any]) -> None:
    made = get(name, **params)
    kind = structure(made, SHAPE)
    assert from_structure(kind) == (made.profile_for(SHAPE), SHAPE)
    assert from_json(to_json(kind), StructType) == kind
    assert kind.decoder is not None
    assert kind.decoder.opset == 21


SHAPES = {"gptq groups": (8, 128), "matmulnbits sketch": (64, 256), "tiled floats": (64, 256), "quip": (16, 512)}
SIZES = {
    "int8": 64 * 512,
    "shared exponent": 64 * 512,
    "int4": 64 * 256,
    "three bits": 64 * 192,
    "gptq groups": 512,
    "ternary": 6554,
    "spqr": 64 * 512 * 3 // 8 + 328 * 10,
    "spqr as it is": 64 * 256 + 65 * 4 + 328 * 4,
    "fp6 split": 64 * 512 * 6 // 8,
    "an odd float": 64 * 512 * 5 // 8,
    "log4": 64 * 512 * 5 // 8,
    "aqlm": 64 * 512 // 8 * 2,
    "stq": 128 * 42,
    "plugin": 64 * 256,
    "plugin with blocks": 128 * 42,
    "bfloat16": 64 * 512 * 2,
}


@pytest.mark.parametrize("title", DOCUMENT)
def test_examples_of_the_document_there_and_back(title: str) -> None:
    profile, shape = from_data(DOCUMENT[title], QuantizationProfile), SHAPES.get(title, SHAPE)
    kind = to_structure(profile, shape, "EXAMPLE")
    assert from_structure(kind) == (profile, shape)
    assert from_json(to_json(kind), StructType) == kind
    if title in SIZES:
        assert kind.nbytes() == SIZES[title]


def test_fields_of_a_document_example_by_name() -> None:
    kind = to_structure(from_data(DOCUMENT["int4"], QuantizationProfile), (1, 1024), "INT4_SYMMETRIC_1024")
    values, scale, bits = (kind.find(name) for name in ("values", "scale", "bits"))
    assert values == Field("values", array=ArrayType(DataType.INT4, (1024,)))
    assert scale is not None
    assert scale.constant is not None
    assert (scale.constant.data_type, scale.constant.values) == (DataType.FLOAT, (0.25,))
    assert bits is not None
    assert bits.constant is not None
    assert bits.constant.values == (4,)
    assert kind.nbytes() == 512


def test_operator_names_are_metadata() -> None:
    kind = to_structure(from_data(DOCUMENT["plugin"], QuantizationProfile), (4, 4), "VENDOR")
    assert dict(kind.metadata_props) == {
        "kind": "function",
        "maker": "vendor",
        "quantize_op": "vendor::QuantizeV2",
        "dequantize_op": "vendor::DequantizeV2",
    }
    assert kind.find("quantize_op") is None


def test_by_index_or_inline() -> None:
    kind = structure(get("q6_k"), SHAPE)
    listed, types = to_list(kind)
    assert listed != kind
    assert types
    assert listed.nbytes(types) == kind.nbytes()
    assert to_inline(listed, types) == kind
    with pytest.raises(ProfileError, match="not one of 0 types"):
        listed.nbytes(())


def test_a_type_within_itself_is_refused() -> None:
    loop = StructType("LOOP", (Field("again", struct=StructRef((2,), type_index=0)),))
    for act in (lambda: loop.nbytes([loop]), lambda: to_inline(loop, [loop])):
        with pytest.raises(ProfileError, match="nested deeper"):
            act()


def test_payload_and_constants_that_disagree_are_refused() -> None:
    for path, value in ((("fields", 0, "array", "dims"), [64, 513]), (("output", "dims"), [64, 256])):
        data = to_data(structure(get("int8_per_channel"), SHAPE))
        node = data
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        with pytest.raises(ProfileError, match="does not fit the constants"):
            from_structure(from_data(data, StructType))


def test_shapes_that_do_not_fit_are_refused() -> None:
    for title, shape in (
        ("mxfp4", (1, 33)),
        ("matmulnbits sketch", (33, 128)),
        ("gptq groups", (1, 129)),
        ("int4", (0, 4)),
    ):
        with pytest.raises(OnnxpackError):
            to_structure(from_data(DOCUMENT[title], QuantizationProfile), shape, "X")


@given(st.sampled_from(OURS), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_type_with_one_value_changed_is_a_type_or_refused(name: str, draw: st.DataObject) -> None:
    if name in ("iq1_s", "quip_sharp_e8p"):
        return  # codebooks of thousands of numbers: slow to vary, and no different
    data = to_data(structure(get(name), SHAPE))
    node: Any = data
    while True:
        key = draw.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key]:
            break
        node = node[key]
    node[key] = draw.draw(
        st.none() | st.integers(-5, 1 << 40) | st.sampled_from(["INT4", "kind", "values"]) | st.just(0.5)
    )
    try:
        profile, shape = from_structure(from_data(data, StructType))
    except OnnxpackError:
        return
    assert to_structure(profile, shape, "X").nbytes() >= 0
