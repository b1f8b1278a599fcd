"""Sources that are packed already keep their own form: no byte of theirs is lost, and no result changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack.pack.read import open_pack
from onnxpack.runtime.session import basic_options

K, N, BLOCK = 256, 96, 32
Array = npt.NDArray[Any]


def nbits(bits: int, *, zero_points: bool) -> onnx.ModelProto:
    """x @ a com.microsoft MatMulNBits weight of random codes."""
    rng = np.random.default_rng(bits)
    blob = BLOCK * bits // 8
    tensors = {
        "b": rng.integers(0, 256, (N, K // BLOCK, blob), np.uint8),
        "s": rng.uniform(0.01, 0.02, (N * K // BLOCK,)).astype(np.float32),
    }
    if zero_points:
        tensors["z"] = rng.integers(0, 256, (N * (-(-(K // BLOCK) * bits // 8)),), np.uint8)
    node = helper.make_node(
        "MatMulNBits", ["x", *tensors], ["y"], domain="com.microsoft", K=K, N=N, bits=bits, block_size=BLOCK
    )
    return model([node], tensors)


def blocked(dtype: int) -> onnx.ModelProto:
    """x @ a weight that DequantizeLinear decodes in blocks along K."""
    rng = np.random.default_rng(3)
    low, high = (-8, 8) if dtype == TensorProto.INT4 else (0, 16)
    codes = helper.make_tensor("c", dtype, [K, N], rng.integers(low, high, K * N).tolist())
    scales = rng.uniform(0.01, 0.02, (K // BLOCK, N)).astype(np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["c", "s"], ["w"], axis=0, block_size=BLOCK),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    made = model(nodes, {"s": scales})
    made.graph.initializer.append(codes)
    return made


def model(nodes: list[onnx.NodeProto], tensors: dict[str, Array]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", N])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


SOURCES = {
    "nbits 4": (lambda: nbits(4, zero_points=False), "packed-elsewhere"),
    "nbits 4 with zero points": (lambda: nbits(4, zero_points=True), "packed-elsewhere"),
    "nbits 8": (lambda: nbits(8, zero_points=False), "packed-elsewhere"),
    "blocks of int4": (lambda: blocked(TensorProto.INT4), "block-scales"),
    "blocks of uint4": (lambda: blocked(TensorProto.UINT4), "block-scales"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_results_are_those_of_the_source_bit_for_bit(tmp_path: Path, source: str) -> None:
    make, reason = SOURCES[source]
    made = make()
    onnx.save(made, tmp_path / "m.onnx")
    report = onnxpack.build(tmp_path / "m.onnx", tmp_path / "m.pack")
    assert report.hints == ["nothing is bound to int8: the pack runs as the source does (`onnxpack census` says why)"]
    (site,) = open_pack(tmp_path / "m.pack", "full").manifest.sites
    assert (site.reason, site.k, site.n) == (reason, K, N)
    x = np.random.default_rng(9).standard_normal((5, K), np.float32)
    (wanted,) = ort.InferenceSession(tmp_path / "m.onnx", basic_options()).run(None, {"x": x})
    (stock,) = ort.InferenceSession(tmp_path / "m.pack" / "model.onnx", basic_options()).run(None, {"x": x})
    (host,) = onnxpack.load(tmp_path / "m.pack", "host", basic_options()).run(None, {"x": x})
    assert stock.tobytes() == wanted.tobytes()
    assert host.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("source", SOURCES)
def test_every_stored_byte_of_the_source_is_in_the_pack(tmp_path: Path, source: str) -> None:
    made = SOURCES[source][0]()
    onnxpack.build(made, tmp_path / "m.pack")
    packed = {t.name: t for t in onnx.load(tmp_path / "m.pack" / "model.onnx").graph.initializer}
    for tensor in made.graph.initializer:
        assert numpy_helper.to_array(packed[tensor.name]).tobytes() == numpy_helper.to_array(tensor).tobytes()
