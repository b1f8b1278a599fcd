"""Profiles: the document's examples can be said, JSON goes there and back, contradictions are refused by path."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpack.errors import OnnxpackError
from onnxpack.formats import get, names
from onnxpack.formats.layout import ProfileError
from onnxpack.formats.profile_json import from_data, from_json, to_data, to_json
from onnxpack.formats.profiles import KINDS, QuantizationProfile

LINEAR = {"storage_type": "INT4", "bits": 4, "symmetric": True, "scale_float": 0.25, "axis": -1}
E2M1 = {
    "sign_bits": 1,
    "exponent_bits": 2,
    "mantissa_bits": 1,
    "exponent_bias": 1,
    "packed_count": 2,
    "packed_bytes": 1,
}
TERNARY = {"scale_float": 0.5, "codebook_data": [-1.0, 0.0, 1.0], "packed_count": 5, "packed_bytes": 1}
BLOCK = {
    "block_size": 256,
    "bytes_per_block": 42,
    "fields": [
        {"role": "CODE", "bit_offset": 0, "bit_width": 4, "count": 64, "name": "code"},
        {"role": "SIGN", "bit_offset": 256, "bit_width": 1, "count": 64, "name": "sign"},
        {"role": "SCALE", "bit_offset": 320, "bit_width": 16, "count": 1, "data_type": "FLOAT16", "name": "scale"},
    ],
}
STQ = {
    "block_layout": BLOCK,
    "codebook_data": [float(i % 3 - 1) for i in range(128)],
    "codebook_vector_size": 4,
    "index_formula": [{"field": "CODE", "multiplier": 1}, {"field": "SIGN", "multiplier": 16}],
    "scatter": {"group_size": 64, "vector_size": 4, "stride": 16},
}


def tiled(shape: list[int], *elements: dict[str, Any], axes: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    return {"tiling": {"tile_shape": shape, "axes": list(axes), "elem_quant": list(elements), **more}}


DATA = Path(__file__).parents[1] / "data" / "formats" / "document_profiles.json"
DOCUMENT: dict[str, dict[str, Any]] = json.loads(DATA.read_text())
"""Every kind of example of the source document, and of what real formats add to it."""


@pytest.mark.parametrize("title", DOCUMENT)
def test_examples_of_the_document(title: str) -> None:
    profile = from_data(DOCUMENT[title], QuantizationProfile)
    assert from_json(to_json(profile), QuantizationProfile) == profile
    assert to_json(from_json(to_json(profile), QuantizationProfile)) == to_json(profile)
    assert hash(profile) == hash(from_data(DOCUMENT[title], QuantizationProfile))


def test_all_nine_kinds_are_shown() -> None:
    kinds = {kind for d in DOCUMENT.values() for kind in from_data(d, QuantizationProfile).chain}
    assert kinds == set(KINDS)
    assert len(KINDS) == 9


@pytest.mark.parametrize("name", [n for n in names() if get(n).profile is not None])
def test_formats_go_through_json(name: str) -> None:
    profile = get(name).profile
    assert from_json(to_json(profile), QuantizationProfile) == profile


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "kind"),
    ({"linear": LINEAR, "cast": {"storage_type": "FLOAT"}}, "kind"),
    ({"linear": {**LINEAR, "axes": 0}}, "linear.axes"),
    ({"linear": {"bits": 4}}, "linear.storage_type"),
    ({"linear": {**LINEAR, "bits": 5}}, "linear.bits"),
    ({"linear": {**LINEAR, "bits": True}}, "linear.bits"),
    ({"linear": {**LINEAR, "storage_type": "INT5"}}, "linear.storage_type"),
    ({"linear": {**LINEAR, "zero_point": 3}}, "linear.zero_point"),
    ({"linear": {**LINEAR, "scale_int": 3}}, "linear.scale"),
    ({"linear": {**LINEAR, "scale_float": float("inf")}}, "linear.scale_float"),
    ({"linear": {**LINEAR, "quant_min": 9}}, "linear.quant_min"),
    ({"linear": [LINEAR]}, "linear"),
    ({"codebook": {**TERNARY, "codebook_size": 4}}, "codebook.codebook_data"),
    ({"codebook": {**TERNARY, "packed_count": 6}}, "codebook.packed_count"),
    ({"codebook": {**TERNARY, "index_bits": 1}}, "codebook.index_bits"),
    ({"codebook": {"codebook_data": [0.0, "x"]}}, "codebook.codebook_data[1]"),
    ({"floating_point": {**E2M1, "has_inf": True}}, "floating_point.has_nan"),
    ({"floating_point": {**E2M1, "packed_count": 3}}, "floating_point.packed_bytes"),
    ({"sparse": {"base_quant": {"linear": {**LINEAR, "bits": 0}}}}, "sparse.base_quant.linear.bits"),
    ({"sparse": {"base_quant": {"linear": LINEAR}, "outlier_ratio": 2}}, "sparse.outlier_ratio"),
    ({"log": {"bits": 9}}, "log.bits"),
    ({"log": {"bits": 4, "base": 1}}, "log.base"),
    ({"function": {"storage_type": "UINT4", "bits": 4}}, "function.dequantize_op"),
    (tiled([32]), "tiling.elem_quant"),
    (tiled([32], {"linear": {**LINEAR, "bits": 9}}), "tiling.elem_quant[0].linear.bits"),
    (tiled([32, 2], {"linear": LINEAR}), "tiling.tile_shape"),
    (tiled([32], {"linear": LINEAR}, perm=[1]), "tiling.perm"),
    ({"cast": {"storage_type": "INT4"}}, "cast.storage_type"),
    (
        {"structured_block": {**STQ, "index_formula": [{"field": "MASK", "multiplier": 1}]}},
        "structured_block.index_formula[0].field",
    ),
    ({"structured_block": {**STQ, "index_formula": []}}, "structured_block.index_formula"),
    (
        {"structured_block": {**STQ, "scatter": {"group_size": 64, "vector_size": 4, "stride": 4}}},
        "structured_block.scatter.stride",
    ),
    (
        {"structured_block": {**STQ, "block_layout": {**BLOCK, "bytes_per_block": 41}}},
        "structured_block.block_layout.bytes_per_block",
    ),
    ({"linear": LINEAR, "pre_rotation": {"matrix_type": "PLAIN", "dims": [8]}}, "pre_rotation.matrix_index"),
    ({"linear": LINEAR, "pre_rotation": {"matrix_type": "HADAMARD", "dims": [8, 4]}}, "pre_rotation.dims"),
    ({"linear": LINEAR, "data_type": "INT8"}, "data_type"),
    ({"linear": LINEAR, "metadata_props": [["a", "b"], ["a", "c"]]}, "metadata_props"),
]


@pytest.mark.parametrize(("data", "path"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_contradictions_are_refused_by_path(data: dict[str, Any], path: str) -> None:
    with pytest.raises(ProfileError) as caught:
        from_data(data, QuantizationProfile)
    assert caught.value.path == path
    assert caught.value.exit_code == 2


def test_layouts_of_tensors_are_checked() -> None:
    data = to_data(get("int4_gptq").profile)

    def view(i: int, **changes: Any) -> Any:
        return lambda d: d["tensors"]["views"][i].update(changes)

    for change, path in (
        (view(0, field="qw"), "tensors.views[0].field"),
        (view(0, axes="kw w n b | kw n (w b) | kw n i"), "tensors.views[0].axes"),
        (view(0, axes="kw w n b | kw n (w w) | kw n i | n (kw i)"), "tensors.views[0].axes"),
        (view(0, axes="kw w n b | kw n (w b) | n kw i | n (kw i)"), "tensors.views[0].axes"),
        (view(0, axes="kw w n b | kw n (w b) | kw n i | n (kw i"), "tensors.views[0].axes"),
        (view(0, cut="m"), "tensors.views[0].cut"),
        (view(0, per=0), "tensors.views[0].per"),
        (view(0, sizes=[]), "tensors.views[0].sizes"),
        (view(0, sizes=[["n", "M"], ["w", "1"], ["b", "4"]]), "tensors.views[0].dims"),
        (view(1, index="g_idx"), "tensors.views[1].index"),
        (view(2, levels=[1.0]), "tensors.views[2].levels"),
        (view(2, name="zeros"), "tensors.views"),
        (lambda d: d["tensors"]["fields"][0].update(data_type="INT4"), "tensors.fields[0].data_type"),
        (lambda d: d["tensors"]["fields"][0].update(dims=["K-8"]), "tensors.fields[0].dims"),
        (lambda d: d["tensors"].update(order="perm"), "tensors.order"),
        (lambda d: d["tensors"]["views"].pop(2), "tiling.linear.scale.field"),
        (lambda d: d.update(layout=to_data(get("q8_0").profile)["layout"]), "layout.block_size"),
    ):
        broken = json.loads(json.dumps(data))
        change(broken)
        with pytest.raises(ProfileError) as caught:
            from_data(broken, QuantizationProfile)
        assert caught.value.path == path


def test_layouts_are_checked_against_the_profile() -> None:
    data = to_data(get("q4_k").profile)
    for change, path in (
        (lambda d: d["layout"].update(bytes_per_block=100), "layout.bytes_per_block"),
        (lambda d: d["layout"].update(block_size=128), "layout.block_size"),
        (lambda d: d["layout"]["views"][2]["parts"][0].update(bit_offset=8), "layout.views[2].parts[0]"),
        (lambda d: d["layout"]["views"][2]["parts"][0].update(field="qx"), "layout.views[2].parts[0].field"),
        (lambda d: d["layout"]["fields"][1].update(bit_offset=8), "layout.fields[1].bit_offset"),
        (
            lambda d: d["tiling"]["elem_quant"][0]["tiling"]["elem_quant"][0]["linear"]["scale"].update(field="s"),
            "tiling.tiling.linear.scale.field",
        ),
    ):
        broken = json.loads(json.dumps(data))
        change(broken)
        with pytest.raises(ProfileError) as caught:
            from_data(broken, QuantizationProfile)
        assert caught.value.path == path


def test_profiles_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        get("q4_k").profile.doc_string = "x"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KINDS, "bits", "layout"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_json_is_a_profile_or_refused(data: Any) -> None:
    try:
        from_data(data, QuantizationProfile)
    except OnnxpackError:
        pass


@given(st.sampled_from(sorted(DOCUMENT)), st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_profile_with_one_value_changed_is_a_profile_or_refused(title: str, draw: st.DataObject) -> None:
    data = json.loads(json.dumps(DOCUMENT[title]))
    node: Any = data
    while True:
        key = draw.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or draw.draw(st.booleans()):
            break
        node = node[key]
    node[key] = draw.draw(values)
    try:
        from_data(data, QuantizationProfile)
    except OnnxpackError:
        pass


CHECKPOINTS = {n: to_data(get(n).profile) for n in ("int4_gptq", "hqq", "exl2", "spqr", "aqlm", "quarot", "fp6_llm")}
ODD = st.sampled_from(
    [None, 0, -1, 3, 1 << 40, 0.5, True, "", "N", "K/0", "N/K", "a b | c", "(a", "FLOAT16", [], ["N"]]
)


@given(st.sampled_from(sorted(CHECKPOINTS)), st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_checkpoint_profile_with_one_value_changed_is_one_or_refused(name: str, draw: st.DataObject) -> None:
    from onnxpack.formats.translate import from_structure, to_structure

    data = json.loads(json.dumps(CHECKPOINTS[name]))
    node: Any = data
    while True:
        key = draw.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key]:
            break
        node = node[key]
    node[key] = draw.draw(ODD)
    try:
        from_structure(to_structure(from_data(data, QuantizationProfile), (64, 512), "X"))
    except OnnxpackError:
        pass


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"linear": 1}', "null", '"' + "x" * 10])
def test_text_that_is_no_profile(text: str) -> None:
    with pytest.raises(ProfileError):
        from_json(text, QuantizationProfile)
