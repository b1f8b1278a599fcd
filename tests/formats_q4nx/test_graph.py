"""The decoder as a graph: stock onnxruntime gives our decoder's bits, at every opset, from the bytes of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxpack.errors import UsageError
from onnxpack.formats import get
from onnxpack.formats.q4nx import graph
from onnxpack.pack.container import create, layout

Q4NX = get("q4nx")
TYPES = {"uint8": TensorProto.UINT8, "bfloat16": TensorProto.BFLOAT16}


def model_of(folder: Path, w: np.ndarray, opset: int, band_bytes: int | None = None) -> Path:
    """A graph that decodes w and multiplies by it, and the file of its bytes."""
    k, n = w.shape
    plan = layout({"w": Q4NX.fields(w.shape)["tiles"]})
    with create(folder / "weights.q4nx", plan) as tensors:
        Q4NX.encode_into(w, {"tiles": tensors["w"]})
    decoder = Q4NX.decoder(w.shape, opset) if band_bytes is None else graph.decoder(w.shape, opset, band_bytes)
    views = [_external(name, view.spec, plan.places["w"].offset) for name, view in Q4NX.views(w.shape).items()]
    nodes = [*decoder.nodes, helper.make_node("MatMul", ["x", decoder.output], ["y"])]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, n]),
        helper.make_tensor_value_info(decoder.output, TensorProto.FLOAT, [k, n]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, k])]
    made = helper.make_graph(nodes, "g", inputs, outputs, [*decoder.constants, *views])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=7 if opset < 20 else 10)
    onnx.save(model, folder / "model.onnx")
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    return folder / "model.onnx"


def _external(name, spec, offset):
    tensor = TensorProto(name=name, data_type=TYPES[spec.dtype.name], dims=spec.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.q4nx"), ("offset", offset), ("length", spec.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def run(path: Path, k: int, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(["weight"], {"x": np.zeros((1, k), np.float32)})[0]


def bits_of(w):
    return Q4NX.decode(Q4NX.encode(w)).tobytes()


@pytest.mark.parametrize("opset", range(13, 27))
def test_every_opset(tmp_path, normal, opset):
    w = normal(512, 64, seed=opset)
    path = model_of(tmp_path, w, opset)
    assert run(path, 512).tobytes() == bits_of(w)
    ops = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    assert ("BitwiseAnd" in ops) == (opset >= 18)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("shape", [(256, 32), (300, 70), (1, 1), (33, 500), (768, 97)])
@pytest.mark.parametrize("band_bytes", [1, 200_000, None])
def test_shapes_paddings_and_bands(tmp_path, normal, shape, opset, band_bytes):
    w = normal(*shape)
    assert run(model_of(tmp_path, w, opset, band_bytes), shape[0]).tobytes() == bits_of(w)


def test_unusual_values(tmp_path, normal):
    w = normal(256, 64)
    w[:, 3] = 0
    w[:, 5] = 0.1
    w[:, 7] *= np.float32(1e30)
    w[:, 9] *= np.float32(1e-38)  # scales are subnormal bfloat16
    w[:, 11] = -7
    for level in ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL:
        assert run(model_of(tmp_path, w, 13), 256, level).tobytes() == bits_of(w)


def test_bands_are_cut_by_size():
    decoder = graph.decoder((1024, 4096), 21, 1 << 20)
    bands = [node for node in decoder.nodes if node.op_type == "Cast" and node.input[0].endswith("by_column")]
    assert len(bands) == 16
    outputs = [name for node in decoder.nodes for name in node.output]
    assert len(set(outputs)) == len(outputs)
    assert [len(graph.decoder((1024, 3072), opset).nodes) for opset in (13, 21)] == [17, 16]


def test_no_opset_before_13():
    with pytest.raises(UsageError, match="opset 12"):
        Q4NX.decoder((256, 32), 12)


def test_no_byte_is_stored_twice(tmp_path, normal):
    w = normal(512, 96)
    path = model_of(tmp_path, w, 21)
    assert path.stat().st_size < 10_000
    assert (tmp_path / "weights.q4nx").stat().st_size == 4096 + Q4NX.encode(w).nbytes


def test_without_onnxpack(tmp_path, normal):
    """A process that cannot import onnxpack loads the model with stock onnxruntime and gets our bits."""
    w = normal(300, 70)
    model_of(tmp_path, w, 17)
    script = """
import sys
sys.modules["onnxpack"] = None
import numpy as np, onnxruntime
try:
    import onnxpack
except ImportError:
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    np.save("weight.npy", session.run(["weight"], {"x": np.zeros((1, 300), np.float32)})[0])
"""
    subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, check=True)
    assert np.load(tmp_path / "weight.npy").tobytes() == bits_of(w)
