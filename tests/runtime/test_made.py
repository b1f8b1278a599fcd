"""Operands made at load: right, in a mapped file, kept only on request and never stale."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack.errors import PackError
from onnxpack.pack.read import Pack, open_pack
from onnxpack.quant.int8 import quantize_columns
from onnxpack.runtime import made
from onnxpack.runtime.made import CACHE_VARIABLE, make_operands


def build(folder: Path, seed: int, n: int = 1100) -> Pack:
    """A pack of one q4nx weight [256, n]: several bands, the last one ragged."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((256, n), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
        [numpy_helper.from_array(w, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "m.onnx")
    onnxpack.build(folder / "m.onnx", folder / "m.pack", weights="q4nx", force=True)
    return open_pack(folder / "m.pack")


def expected(pack: Pack) -> tuple[np.ndarray, np.ndarray]:
    """The whole weight decoded at once and quantized at once."""
    record = pack.tensors["w"]
    fields = {name: np.asarray(pack.field(stored)) for name, stored in record.fields.items()}
    encoded = onnxpack.formats.Encoded("q4nx", record.shape, fields)
    w = onnxpack.formats.get("q4nx").decode(encoded)
    codes, scales = np.empty(w.shape, np.int8), np.empty(w.shape[1], np.float32)
    quantize_columns(w, codes, scales)
    return codes, scales


def assert_right(pack: Pack) -> None:
    codes, scales = make_operands(pack, ["w"])["w"]
    wanted_codes, wanted_scales = expected(pack)
    assert np.array_equal(codes, wanted_codes)
    assert np.array_equal(scales, wanted_scales)


def test_bands_give_what_the_whole_weight_gives_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    pack = build(tmp_path, 0)
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    assert_right(pack)
    assert list(spare.iterdir()) == []


def test_a_kept_file_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    pack = build(tmp_path, 0)
    assert_right(pack)
    (kept,) = (tmp_path / "cache").iterdir()
    before = kept.stat().st_mtime_ns
    monkeypatch.setattr(made, "_fill", lambda *_: pytest.fail("made again"))
    assert_right(pack)
    assert kept.stat().st_mtime_ns == before


def test_another_pack_in_the_same_place_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert_right(build(tmp_path, 0))
    assert_right(build(tmp_path, 1))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_weights_changed_under_the_same_manifest_are_not_served_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    pack = build(tmp_path, 0)
    assert_right(pack)
    with (pack.path / "weights.q4nx").open("r+b") as file:
        file.seek(-4000, 2)
        file.write(b"\x55" * 100)
    assert_right(pack)


@pytest.mark.parametrize("damage", ["truncated", "other header", "empty"])
def test_a_damaged_kept_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    pack = build(tmp_path, 0)
    assert_right(pack)
    (kept,) = (tmp_path / "cache").iterdir()
    data = kept.read_bytes()
    kept.write_bytes({"truncated": data[:-1], "other header": b"\0" + data[1:], "empty": b""}[damage])
    assert_right(pack)
    assert kept.read_bytes() == data


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked / "cache"))
    assert_right(build(tmp_path, 0))


def test_host_and_reference_agree_on_such_a_pack(tmp_path: Path) -> None:
    from onnxpack.runtime.session import basic_options

    pack = build(tmp_path, 3)
    x = np.random.default_rng(5).standard_normal((7, 256), np.float32)
    (host,) = onnxpack.load(pack.path, "host", basic_options()).run(None, {"x": x})
    (reference,) = onnxpack.load(pack.path, "reference").run(None, {"x": x})
    assert host.tobytes() == reference.tobytes()


@pytest.mark.parametrize("form", ["q4nx", "q8_0", "nf4", "hqq"])
@pytest.mark.parametrize("damage", ["half", "missing", "extra", "other type"])
def test_fields_that_are_not_the_formats_own_are_refused_by_name(tmp_path: Path, form: str, damage: str) -> None:
    build(tmp_path, 0, n=64)
    out = tmp_path / "m.pack"
    onnxpack.build(tmp_path / "m.onnx", out, weights=form, force=True)
    manifest = json.loads((out / "pack.json").read_text())
    fields = manifest["tensors"][0]["fields"]
    name, field = next(iter(fields.items()))
    if damage == "half":
        rows = field["shape"][0]
        field["shape"][0], field["nbytes"] = rows // 2, field["nbytes"] // rows * (rows // 2)
    elif damage == "missing":
        del fields[name]
    elif damage == "extra":
        fields["more"] = field
    else:
        field["dtype"] = {"int8": "uint8", "uint8": "int8"}[field["dtype"]]
    (out / "pack.json").write_text(json.dumps(manifest))
    with pytest.raises(PackError, match="more" if damage == "extra" else name):
        onnxpack.load(out, "host")
