"""What reading a file says when it is no model, and how sites are named when it is one."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_maker import chain, matmul, model, node, normal, save, tensor, value
from onnx import TensorProto, helper

import onnxpack
from onnxpack.errors import GateError, ModelError
from onnxpack.graph.load import load
from onnxpack.graph.names import Namer
from onnxpack.graph.paths import all_graphs, all_nodes, path_of

GOOD = matmul().SerializeToString()


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        onnxpack.census(path)
    line = caught.value.render()
    assert line.startswith(str(path).replace("\0", "\\x00"))
    assert line.isprintable()
    return line


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"hello\nworld\n", "text file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (gzip.compress(GOOD, mtime=0), "gzip data"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b'{"a": 1}', "JSON"),
        ((2).to_bytes(8, "little") + b"{}", "safetensors"),
        (GOOD[: len(GOOD) // 2], "cut short"),
        (GOOD[:-1], "cut short"),
        (GOOD + b"\xff" * 64, "not a protobuf"),
        (b"\xff" * 16 + GOOD[16:], "not a protobuf"),
        (bytes(200), "not a"),
        (b"\0", "not a"),
        (onnx.ModelProto(ir_version=8).SerializeToString(), "no graph"),
    ],
    ids=lambda v: v[:12] if isinstance(v, str) else "",
)
def test_files_that_are_no_models(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    assert message in refusal(path)


def test_places_that_are_no_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "missing.onnx")
    assert "is a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    assert "not a regular file" in refusal(tmp_path / "pipe")
    assert "not a regular file" in refusal("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be read" in refusal(tmp_path / "loop")
    assert "cannot be read" in refusal("a\0b")
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))
    (tmp_path / "file").write_bytes(b"")
    assert "cannot be read" in refusal(tmp_path / "file" / "m.onnx")


@pytest.mark.parametrize("field", ["opset 99", "opset 0", "opset -1", "ir 2", "ir 99", "no opset"])
def test_versions_that_do_not_exist(tmp_path: Path, field: str) -> None:
    made = matmul()
    name, _, number = field.partition(" ")
    if field == "no opset":
        del made.opset_import[:]
    elif name == "opset":
        made.opset_import[0].version = int(number)
    else:
        made.ir_version = int(number)
    line = refusal(save(tmp_path / "m.onnx", made))
    assert "opset" in line or "IR version" in line


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_files_are_refused_or_read_never_worse(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any bytes changed, cut out or put in: a census or one ModelError, and the same for a build."""
    raw = bytearray(chain(normal(6, 5), normal(5, 4)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        what = data.draw(st.sampled_from(["flip", "cut", "insert", "zero"]))
        if what == "flip":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del raw[at : at + data.draw(st.integers(1, 9))]
        elif what == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=6))
        else:
            raw[at : at + 4] = bytes(len(raw[at : at + 4]))
        if not raw:
            break
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / "m.onnx"
    path.write_bytes(bytes(raw))
    try:
        onnxpack.census(path)
        onnxpack.build(path, folder / "out.pack", weights="int8")
    except (ModelError, GateError) as error:  # a gate: the bytes are another weight now, and the loss too large
        assert error.render().isprintable()  # noqa: PT017
        assert not (folder / "out.pack").exists()


def test_paths_are_numbers_of_the_file_and_stay(tmp_path: Path) -> None:
    body = helper.make_graph([node("MatMul", ["x", "V"], ["b"])], "body", [], [value("b", None)])
    nodes = [
        node("MatMul", ["h", "V2"], ["y"], "late"),  # not sorted: its input is made further down
        node("If", ["c"], ["z"], then_branch=body, else_branch=body),
        node("MatMul", ["x", "W"], ["h"], "early"),
    ]
    tensors = [tensor("W", normal(48, 80)), tensor("V", normal(48, 8)), tensor("V2", normal(80, 4))]
    proto = model(nodes, tensors, [value("x", ["M", 48]), value("c", [], TensorProto.BOOL)], ["y", "z"])
    assert {n.name: path_of(n) for n in load(proto).ir.graph if n.name} == {"late": "MatMul_0", "early": "MatMul_1"}
    sites = {s.path: s.name for s in onnxpack.census(proto).sites}
    assert sites == {
        "MatMul_0": "late",
        "MatMul_1": "early",
        "If_0/then_branch/MatMul_0": "",
        "If_0/else_branch/MatMul_0": "",
    }


def test_each_call_of_a_function_has_its_own_path() -> None:
    imports = [helper.make_opsetid("", 21)]
    shared = helper.make_function("local", "F", ["a", "b"], ["c"], [node("MatMul", ["a", "b"], ["c"])], imports)
    nodes = [node("F", ["x", "W"], ["h"], domain="local"), node("F", ["h", "V"], ["y"], domain="local")]
    tensors = [tensor("W", normal(48, 48)), tensor("V", normal(48, 8))]
    census = onnxpack.census(model(nodes, tensors, domains={"local": 1}, functions=[shared]))
    assert {s.path: s.weight for s in census.sites} == {"fn:local.F/MatMul_0": "W", "fn:local.F/MatMul_0#2": "V"}


def test_the_caller_keeps_its_model(tmp_path: Path) -> None:
    """A model given as an object is copied: neither a census nor a build changes it."""
    proto = chain(normal(48, 80), normal(80, 48))
    proto.ir_version = 3
    proto.graph.input.extend(value(t.name, list(t.dims)) for t in proto.graph.initializer)
    before = proto.SerializeToString(deterministic=True)
    onnxpack.census(proto)
    onnxpack.build(proto, tmp_path / "out.pack", weights="int8")
    assert proto.SerializeToString(deterministic=True) == before


def test_new_names_are_free_everywhere() -> None:
    inner = helper.make_graph([node("Identity", ["x"], ["taken"])], "b", [], [value("taken", None)])
    nodes = [node("If", ["c"], ["y"], "n", then_branch=inner, else_branch=inner)]
    loaded = load(model(nodes, [], [value("x", ["M", 48]), value("c", [], TensorProto.BOOL)]))
    namer = Namer(loaded.ir)
    assert namer.value("taken") == "taken_1"
    assert namer.value("taken") == "taken_2"
    assert namer.value("x") == "x_1"
    assert namer.value("free") == "free"
    assert len(all_graphs(loaded.ir.graph)) == 3
    assert len(list(all_nodes(loaded.ir.graph))) == 3


def test_initializers_that_are_inputs(tmp_path: Path) -> None:
    """Below IR 4 every initializer is an input and constant all the same; from 4 on the caller may replace it."""
    for ir_version, reason in ((3, "no-kernel"), (4, "overridable-weight"), (10, "overridable-weight")):
        made = matmul(opset=9)
        made.ir_version = ir_version
        made.graph.input.append(value("W", [48, 80]))
        assert onnxpack.census(made).sites[0].reason == reason
        if ir_version == 3:
            onnxpack.build(made, tmp_path / "out.pack", weights="int8")
            written = onnx.load(tmp_path / "out.pack" / "model.onnx", load_external_data=False)
            assert [i.name for i in written.graph.input] == ["x"]


def test_unknown_fields_survive_nothing_and_hurt_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(GOOD + bytes.fromhex("caf80405") + b"extra")  # field 10057, five bytes
    assert len(onnxpack.census(path).sites) == 1
    assert np.array_equal(load(path).ir.graph.initializers["W"].const_value.numpy(), normal(48, 80))  # type: ignore[union-attr]
