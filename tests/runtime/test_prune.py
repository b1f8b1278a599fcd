"""What only a packed weight's decoder needed is gone from what runs, bodies included; what others read stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack.pack.read import open_pack
from onnxpack.runtime.graphs import walk
from onnxpack.runtime.host import host_model

K, N = 1024, 512
"""2 MiB of float32: large enough for the decoder of Q4NX to be a Scan."""


def model(*, weight_is_output: bool) -> onnx.ModelProto:
    w = np.random.default_rng(0).standard_normal((K, N), np.float32)
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", N])]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if weight_is_output:
        nodes.append(helper.make_node("Neg", ["w"], ["v"]))
        outputs.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, [K, N]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", K])],
        outputs,
        [numpy_helper.from_array(w, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for *_, graph in walk(proto.graph):
        yield from graph.node


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    onnxpack.build(model(weight_is_output=False), tmp_path / "m.pack", weights="q4nx")
    return tmp_path / "m.pack"


def test_the_pack_decodes_with_a_body(pack: Path) -> None:
    proto = onnx.load(pack / "model.onnx", load_external_data=False)
    assert "Scan" in {node.op_type for node in nodes(proto)}


def test_the_host_runs_without_the_decoder_and_reads_none_of_its_bytes(pack: Path) -> None:
    proto = onnx.ModelProto.FromString(host_model(open_pack(pack))[0])
    assert {node.op_type for node in nodes(proto)}.isdisjoint({"Scan", "DequantizeLinear", "BitShift", "BitwiseAnd"})
    files = {entry.value for t in proto.graph.initializer for entry in t.external_data if entry.key == "location"}
    assert "weights.q4nx" not in files
    assert len(proto.graph.initializer) < 12


def test_a_decoder_that_another_node_reads_stays(tmp_path: Path) -> None:
    source = model(weight_is_output=True)
    onnxpack.build(source, tmp_path / "m.pack", weights="q4nx")
    x = np.random.default_rng(1).standard_normal((3, K), np.float32)
    _, v = onnxpack.load(tmp_path / "m.pack", "host").run(None, {"x": x})
    assert np.array_equal(v, -numpy_helper.to_array(source.graph.initializer[0]))
