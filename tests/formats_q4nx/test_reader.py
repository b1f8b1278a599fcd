"""Foreign files: what is genuine decodes bit for bit, what is not is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from onnxpack.errors import ModelError, UsageError
from onnxpack.formats import get
from onnxpack.formats.q4nx import Kind, describe, open_file
from onnxpack.pack.container import create, layout


def write(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], extra: dict | None = None) -> Path:
    """A safetensors-like file with any header."""
    header, data = dict(extra or {}), b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def stored(vector, field="packed", dtype="I8"):
    return dtype, list(vector[field].shape), vector[field].tobytes()


LOGICAL = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (320, 256),
    "mlp.down_proj": (256, 320),
}


def test_a_converters_file_row_by_row(data):
    rows = {
        row.name.removeprefix("model.layers.0.").removesuffix(".weight"): row
        for row in describe(data / "tiny_qwen3.q4nx")
    }
    assert rows["self_attn.o_proj"].kind == Kind.SIGNED
    assert rows["self_attn.q_proj"].kind == rows["mlp.down_proj"].kind == Kind.UNSIGNED
    assert rows["mlp.up_proj"].kind == Kind.PLAIN
    assert [row.name for row in rows.values() if not row.readable] == ["lm_head.weight"]
    assert "0.786" in rows["lm_head"].note
    assert "look-alike" in rows["lm_head"].note


def test_a_converters_file_value_by_value(data):
    file, other = open_file(data / "tiny_qwen3.q4nx"), load_file(data / "tiny_qwen3.q4nx")
    hidden = file.decode("model.layers.0.mlp.up_proj.weight")
    assert hidden.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(hidden, other["model.layers.0.mlp.up_proj.weight"])
    for name, shape in LOGICAL.items():
        values = file.decode(f"model.layers.0.{name}.weight", shape)
        assert values.shape == shape
        assert abs(values.mean()) < 0.01  # a wrong sign convention shifts it by several scales
    with pytest.raises(ModelError, match=r"lm_head.*look-alike"):
        file.decode("lm_head.weight", (96, 256))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("q4_1_64x512", Kind.UNSIGNED),
        ("q4_1_cols320", Kind.UNSIGNED),
        ("q4_1_cols32", Kind.UNSIGNED),
        ("q4_1_degenerate", Kind.UNSIGNED),
        ("q4_1_from_q5_0", Kind.UNSIGNED),
        ("q4_0_64x512", Kind.SIGNED),
        ("q4_0_cols288", Kind.SIGNED),
        ("q4_1_gptoss_tile128", Kind.UNSIGNED_128),
        ("q8_0_64x256", Kind.INT8_SLOT),
        ("q8_0_cols160", Kind.INT8_SLOT),
        ("mxfp4_2x40x160", Kind.MXFP4),
        ("alt_q4k_4736_synthetic", Kind.TWO_LEVEL),
    ],
)
def test_genuine_tensors_are_told_apart_and_decoded(golden, tmp_path, name, kind):
    vector = golden(name)
    dtype = str(vector.get("stored_dtype", "I8"))
    file = open_file(write(tmp_path / "f.q4nx", {"w": stored(vector, dtype=dtype)}))
    assert (file.judge("w").kind, file.judge("w").refusal) == (kind, None)
    shape = tuple(int(d) for d in vector["shape"])
    decoded = vector["decoded"][..., : shape[-2], : shape[-1]]
    np.testing.assert_array_equal(file.decode("w", shape), decoded)
    if len(vector["packed"].shape) > 2:  # the grid stands in the header
        np.testing.assert_array_equal(file.decode("w"), vector["decoded"])
    else:
        with pytest.raises(UsageError, match="shape"):
            file.decode("w")


@pytest.mark.parametrize("name", ["alt_1bp_5120", "alt_zaya_5120"])
def test_look_alikes_are_refused(golden, tmp_path, name):
    file = open_file(write(tmp_path / "f.q4nx", {"w": stored(golden(name))}))
    with pytest.raises(ModelError, match=r"tensor 'w': .*look-alike"):
        file.decode("w", (64, 512))
    assert not describe(file.path)[0].readable


def test_one_bad_tile_row_in_ten_is_refused(golden, tmp_path):
    good, bad = golden("q4_1_64x512")["packed"], golden("alt_1bp_5120")["packed"]
    tiles = np.concatenate([good] * 9 + [bad])
    file = open_file(write(tmp_path / "f.q4nx", {"w": ("I8", list(tiles.shape), tiles.tobytes())}))
    with pytest.raises(ModelError, match="look-alike"):
        file.decode("w", (640, 512))


@pytest.mark.parametrize(("field", "order"), [("colmajor", "column"), ("lane16", "block"), ("rowmajor", "row")])
def test_int8_orders_have_to_be_named(golden, tmp_path, field, order):
    vector = golden("alt_q8_8704_three_layouts")
    file = open_file(write(tmp_path / "f.q4nx", {"w": stored(vector, field)}))
    with pytest.raises(ModelError, match="order"):
        file.decode("w", (64, 512))
    np.testing.assert_array_equal(file.decode("w", (64, 512), order=order), vector["decoded"])
    with pytest.raises(UsageError, match="column, block, row"):
        file.decode("w", (64, 512), order="diagonal")


def test_codec_a_is_told_by_its_header_and_converted_only_when_asked(data, golden):
    file = open_file(data / "alt_codecA_container.q4nx")
    (name,) = file.names
    assert file.header.metadata
    assert len(file.notes) == 2
    with pytest.raises(ModelError, match="codec A"):
        file.decode(name)
    np.testing.assert_array_equal(file.decode(name, convert=True), golden("alt_codecA_synthetic")["decoded"])


def test_codec_a_under_another_name_is_refused(golden, tmp_path):
    file = open_file(write(tmp_path / "f.q4nx", {"w": stored(golden("alt_codecA_synthetic"))}))
    with pytest.raises(ModelError, match="zero points"):
        file.decode("w", (64, 512))


def test_packed_bytes_called_float(golden, tmp_path):
    vector = golden("q4_1_64x512")
    file = open_file(write(tmp_path / "f.q4nx", {"w": stored(vector, dtype="F32")}))
    assert "called F32" in file.judge("w").notes[-1]
    np.testing.assert_array_equal(file.decode("w", (64, 512)), vector["decoded"])


@pytest.mark.parametrize("shape", [(64, 256), (512, 64), (96, 512), (64, 512, 1), (-64, 512)])
def test_a_shape_that_does_not_fit(golden, tmp_path, shape):
    file = open_file(write(tmp_path / "f.q4nx", {"w": stored(golden("q4_1_64x512"))}))
    with pytest.raises(UsageError, match="shape"):
        file.decode("w", shape)


@pytest.mark.parametrize("shape", [(33, 512), (64, 300), (63, 511)])
def test_a_shape_whose_padding_is_not_zero(golden, tmp_path, shape):
    file = open_file(write(tmp_path / "f.q4nx", {"w": stored(golden("q4_1_64x512"))}))
    with pytest.raises(ModelError, match="pads"):
        file.decode("w", shape)


def test_a_grid_in_the_header_must_be_the_shapes(golden, tmp_path):
    tiles = np.concatenate([golden("q4_1_64x512")["packed"]] * 2)
    file = open_file(write(tmp_path / "f.q4nx", {"w": ("I8", [2, 4, 5120], tiles.tobytes())}))
    assert file.decode("w").shape == (64, 1024)
    with pytest.raises(UsageError, match="stored"):
        file.decode("w", (128, 512))


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (("I8", [1, 9216], bytes(9216)), "9216"),
        (("F8_X", [4], bytes(4)), "F8_X"),
        (("F32", [3], bytes(13)), "do not hold"),
        (("U8", [1, 2560], bytes(2560)), "experts"),
        (("U8", [1, 1, 1, 2560], bytes([1]) * 2560), "rearranged"),
        (("Q4NX", [64, 512], bytes(5120)), "not the tiles"),
        (("I8", [1, 5120], b"\x80\x7f" * 2560), "not finite"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, entry, match):
    file = open_file(write(tmp_path / "f.q4nx", {"w": entry}))
    with pytest.raises(ModelError, match=match):
        file.decode("w", (32, 256), convert=True)
    assert match in describe(file.path)[0].note


def test_tiles_that_carry_a_negative_scale(golden, tmp_path):
    tiles = golden("q4_1_64x512")["packed"].copy()
    tiles[0, 1] ^= 0x80
    file = open_file(write(tmp_path / "f.q4nx", {"w": ("I8", [4, 5120], tiles.tobytes())}))
    with pytest.raises(ModelError, match="negative scale"):
        file.decode("w", (64, 512))


@pytest.mark.parametrize("case", ["normal", "offset", "large offset", "cut", "cut below 128", "constant", "tiny"])
def test_our_own_files_are_genuine(tmp_path, normal, case):
    w = {
        "normal": lambda: normal(512, 96),
        "offset": lambda: normal(512, 96) + np.float32(0.5),
        "large offset": lambda: normal(512, 96) - 30,
        "cut": lambda: normal(300, 70),
        "cut below 128": lambda: normal(50, 64),
        "constant": lambda: np.full((256, 32), 0.1, np.float32),
        "tiny": lambda: normal(256, 32, scale=1e-30),
    }[case]()
    q4nx = get("q4nx")
    with create(tmp_path / "w.q4nx", layout({"w": q4nx.fields(w.shape)["tiles"]})) as tensors:
        q4nx.encode_into(w, {"tiles": tensors["w"]})
    file = open_file(tmp_path / "w.q4nx")
    assert file.judge("w").refusal is None
    np.testing.assert_array_equal(file.decode("w", w.shape[::-1]), q4nx.decode(q4nx.encode(w)).T)
    assert load_file(file.path)["w"].shape == q4nx.fields(w.shape)["tiles"].shape


def test_plain_tensors_keep_their_type(tmp_path):
    tensors = {
        "a": np.arange(6, dtype=np.float16).reshape(2, 3),
        "b": np.arange(3, dtype=np.int64),
        "c": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "f.safetensors")
    file = open_file(tmp_path / "f.safetensors")
    for name, array in tensors.items():
        found = file.decode(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    with pytest.raises(UsageError, match="'nobody'"):
        file.decode("nobody")


def test_a_file_that_shrinks_after_its_header_was_read(data, tmp_path):
    path = tmp_path / "f.q4nx"
    shutil.copy(data / "tiny_qwen3.q4nx", path)
    file = open_file(path)
    with path.open("r+b") as handle:
        handle.truncate(5000)
    with pytest.raises(ModelError, match="mapped"):
        file.decode(file.names[-1], (128, 256))
