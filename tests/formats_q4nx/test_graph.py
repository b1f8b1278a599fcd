"""The decoder as a graph: stock onnxruntime gives our decoder's bits, at every opset, from the bytes of the file."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, compose, helper
from onnx.reference import ReferenceEvaluator

import onnxpack
from onnxpack.errors import UsageError
from onnxpack.formats import get
from onnxpack.formats.q4nx import graph
from onnxpack.pack.container import create, layout

Q4NX = get("q4nx")
TYPES = {"uint8": TensorProto.UINT8, "bfloat16": TensorProto.BFLOAT16}


WHOLE, BANDS = 1 << 62, 0
"""folded_bytes: every weight is folded whole, and none is."""


def model_of(folder: Path, w: np.ndarray, opset: int, **sizes: int) -> Path:
    """A graph that decodes w and multiplies by it, and the file of its bytes."""
    k, n = w.shape
    plan = layout({"w": Q4NX.fields(w.shape)["tiles"]})
    with create(folder / "weights.q4nx", plan) as tensors:
        Q4NX.encode_into(w, {"tiles": tensors["w"]})
    decoder = graph.decoder(w.shape, opset, **sizes)
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


LEVELS = [
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
]


def session(path: Path, level=LEVELS[-1], **entries: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    for key, value in entries.items():
        options.add_session_config_entry(f"session.{key}", value)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(path: Path, k: int, level=LEVELS[-1], **entries: str) -> np.ndarray:
    return session(path, level, **entries).run(["weight"], {"x": np.zeros((1, k), np.float32)})[0]


def bits_of(w):
    return Q4NX.decode(Q4NX.encode(w)).tobytes()


@pytest.mark.parametrize("folded_bytes", [WHOLE, BANDS])
@pytest.mark.parametrize("opset", range(13, 27))
def test_every_opset(tmp_path, normal, opset, folded_bytes):
    w = normal(512, 64, seed=opset)
    path = model_of(tmp_path, w, opset, folded_bytes=folded_bytes)
    assert run(path, 512).tobytes() == bits_of(w)
    ops = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    assert ("BitwiseAnd" in ops) == (opset >= 18)
    assert ("Scan" in ops) == (folded_bytes == BANDS)


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("shape", [(256, 32), (300, 70), (1, 1), (33, 500), (768, 97), (896, 48)])
@pytest.mark.parametrize("sizes", [(WHOLE, 0), (BANDS, 1), (BANDS, 100_000), (BANDS, 1 << 20)])
def test_shapes_paddings_and_bands(tmp_path, normal, shape, opset, sizes):
    w = normal(*shape)
    path = model_of(tmp_path, w, opset, folded_bytes=sizes[0], band_bytes=sizes[1])
    assert run(path, shape[0]).tobytes() == bits_of(w)


@pytest.mark.parametrize("folded_bytes", [WHOLE, BANDS])
@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("disable_quant_qdq", ["0", "1"])
def test_every_level_and_setting(tmp_path, normal, level, opset, folded_bytes, disable_quant_qdq):
    w = normal(320, 96)
    path = model_of(tmp_path, w, opset, folded_bytes=folded_bytes)
    assert run(path, 320, level, disable_quant_qdq=disable_quant_qdq).tobytes() == bits_of(w)


@pytest.mark.parametrize("folded_bytes", [WHOLE, BANDS])
@pytest.mark.parametrize("opset", [13, 21])
def test_unusual_values(tmp_path, normal, opset, folded_bytes):
    w = normal(256, 64)
    w[:, 3] = 0
    w[:, 5] = 0.1
    w[:, 7] *= np.float32(1e30)
    w[:, 9] *= np.float32(1e-38)  # scales are subnormal bfloat16
    w[:, 11] = -7
    path = model_of(tmp_path, w, opset, folded_bytes=folded_bytes)
    for level in LEVELS:
        assert run(path, 256, level).tobytes() == bits_of(w)


def test_another_runtime(normal):
    """ONNX's own reference evaluator reads both forms."""
    w = normal(300, 70)
    tiles = Q4NX.encode(w).fields["tiles"].tobytes()
    views = [
        TensorProto(name=name, data_type=TYPES[view.spec.dtype.name], dims=view.spec.shape, raw_data=tiles)
        for name, view in Q4NX.views(w.shape).items()
    ]
    for folded_bytes in (WHOLE, BANDS):
        decoder = graph.decoder(w.shape, 21, folded_bytes)
        outputs = [helper.make_tensor_value_info(decoder.output, TensorProto.FLOAT, w.shape)]
        made = helper.make_graph(decoder.nodes, "g", [], outputs, [*decoder.constants, *views])
        model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        assert ReferenceEvaluator(model).run(None, {})[0].tobytes() == bits_of(w)


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("rows", [1, 5, 128])
def test_products_are_those_of_the_decoded_weight(tmp_path, normal, opset, rows):
    """onnxruntime's default level fuses nothing into the product: it is float32, as with the weight as an input."""
    w, x = normal(512, 640), normal(rows, 512, seed=9)
    assert 4 * w.size > graph.FOLDED_BYTES
    path = model_of(tmp_path, w, opset)
    info = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    plain = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [info("x", shape=x.shape), info("w", shape=w.shape)],
        [info("y", shape=[rows, 640])],
    )
    onnx.save(
        helper.make_model(plain, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), tmp_path / "plain.onnx"
    )
    expected = session(tmp_path / "plain.onnx").run(["y"], {"x": x, "w": Q4NX.decode(Q4NX.encode(w))})[0]
    assert session(path).run(["y"], {"x": x})[0].tobytes() == expected.tobytes()


def test_bands_are_cut_by_size():
    def heights(shape, **sizes):
        (scan,) = (node for node in graph.decoder(shape, 21, **sizes).nodes if node.op_type == "Scan")
        (body,) = (attribute.g for attribute in scan.attribute if attribute.name == "body")
        return [dim.dim_value for dim in body.output[0].type.tensor_type.shape.dim]

    assert heights((1024, 4096)) == [4, 32, 2048, 2]
    assert heights((1024, 4096), band_bytes=1 << 20) == [2, 32, 2048, 2]
    assert heights((1024, 151936)) == [1, 32, 75968, 2]
    assert heights((5 * 32, 4096)) == [1, 32, 2048, 2]  # 5 groups in 4s: not even, so one at a time


def test_small_weights_are_folded_whole():
    def scans(shape):
        return sum(node.op_type == "Scan" for node in graph.decoder(shape, 21).nodes)

    assert [scans((512, 512)), scans((512, 544))] == [0, 1]


@pytest.mark.parametrize(("opset", "count"), [(13, 15), (18, 14), (21, 14)])
def test_nodes(opset, count):
    nodes = graph.decoder((1024, 3072), opset).nodes
    outputs = [name for node in nodes for name in node.output]
    assert len(nodes) == count
    assert len(set(outputs)) == len(outputs)


@pytest.mark.parametrize(
    ("shape", "opset", "most"),
    [((1024, 3072), 13, 1.32), ((1024, 3072), 21, 1.2), ((1000, 3074), 13, 1.7), ((896, 4864), 21, 1.65)],
)
def test_what_folds_is_small(shape, opset, most):
    """The sum of all values that onnxruntime folds and holds, as a multiple of the float32 weight."""
    assert folded(shape, opset) / (4 * shape[0] * shape[1]) < most
    assert folded(shape, opset, folded_bytes=WHOLE) / (4 * shape[0] * shape[1]) > 4


def folded(shape, opset, **sizes):
    """Bytes of the outputs of all nodes that depend on constants alone; onnxruntime folds no node that has a body."""
    decoder = graph.decoder(shape, opset, **sizes)
    views = [
        helper.make_tensor_value_info(name, TYPES[view.spec.dtype.name], view.spec.shape)
        for name, view in Q4NX.views(shape).items()
    ]
    outputs = [helper.make_tensor_value_info(decoder.output, TensorProto.FLOAT, shape)]
    made = helper.make_graph(decoder.nodes, "g", views, outputs, decoder.constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)])
    known = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    types = {value.name: value.type.tensor_type for value in [*known.value_info, *known.output]}
    open_names, total = set(), 0
    for node in decoder.nodes:
        if node.op_type == "Scan" or open_names & set(node.input):
            open_names |= set(node.output)
            continue
        for name in node.output:
            size = math.prod(dim.dim_value for dim in types[name].shape.dim)
            assert size > 0
            total += size * helper.tensor_dtype_to_np_dtype(types[name].elem_type).itemsize
    return total


MEMORY = """
import sys, threading, time
import numpy as np, onnxruntime as ort

def anonymous():
    return 1024 * int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)

options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, sys.argv[2])
options.add_session_config_entry("session.disable_quant_qdq", sys.argv[3])
peak = before = anonymous()
threading.Thread(target=watch, daemon=True).start()
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
time.sleep(0.005)
load = peak - before
for _ in range(3):
    session.run(None, {"x": np.ones((1, 1024), np.float32)})
time.sleep(0.005)
print(load, peak - before)
"""


@pytest.fixture(scope="module")
def six_products(tmp_path_factory):
    """Writes a model of six products, each with a weight [1024, 2048] of its own: 50 MB of float32."""

    def make(**sizes):
        folder = tmp_path_factory.mktemp("six")
        w = np.random.default_rng(0).standard_normal((1024, 2048), np.float32)
        nodes, constants, outputs = [], [], []
        names = [f"w{i}" for i in range(6)]
        plan = layout({name: Q4NX.fields(w.shape)["tiles"] for name in names})
        with create(folder / "weights.q4nx", plan) as tensors:
            for name in names:
                Q4NX.encode_into(w, {"tiles": tensors[name]})
        for name in names:
            piece = compose.add_prefix_graph(
                _piece(w.shape, plan.places[name].offset, sizes), name, rename_inputs=False
            )
            nodes += piece.node
            constants += piece.initializer
            outputs += piece.output
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 1024])]
        made = helper.make_graph(nodes, "g", inputs, outputs, constants)
        onnx.save(
            helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "model.onnx"
        )
        return folder / "model.onnx", 6 * w.nbytes

    return make


def _piece(shape, offset, sizes):
    decoder = graph.decoder(shape, 21, **sizes)
    views = [_external(name, view.spec, offset) for name, view in Q4NX.views(shape).items()]
    nodes = [*decoder.nodes, helper.make_node("MatMul", ["x", decoder.output], ["y"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, shape[0]])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, shape[1]])]
    return helper.make_graph(nodes, "g", inputs, outputs, [*decoder.constants, *views])


def used(model, level, disable_quant_qdq):
    command = [sys.executable, "-c", MEMORY, str(model), level, disable_quant_qdq]
    return [int(part) for part in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of anonymous memory")
def test_memory_of_a_stock_session(six_products):
    """Loading and running stay below twice the float32 weights; folded whole, the same weights take twice as much."""
    model, floats = six_products()
    for level, disable_quant_qdq in (("ORT_ENABLE_ALL", "0"), ("ORT_ENABLE_BASIC", "1")):
        load, run_ = used(model, level, disable_quant_qdq)
        assert load < 1.6 * floats
        assert run_ < 2 * floats
    assert used(six_products(folded_bytes=WHOLE)[0], "ORT_ENABLE_ALL", "0")[0] > 4 * floats


def test_in_a_pack(tmp_path, normal):
    """Several weights in one graph, whose own names are those that the decoder uses inside."""
    first, second = normal(320, 1056), normal(1056, 320, seed=1)
    names = ["codes", "planes", "values", "scaled", "q4nx_band"]
    nodes = [
        helper.make_node("MatMul", ["codes", "planes"], ["values"], "a"),
        helper.make_node("MatMul", ["values", "scaled"], ["q4nx_band"], "b"),
    ]
    inputs = [helper.make_tensor_value_info(names[0], TensorProto.FLOAT, ["rows", 320])]
    outputs = [helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, ["rows", 320])]
    initializers = [onnx.numpy_helper.from_array(first, "planes"), onnx.numpy_helper.from_array(second, "scaled")]
    made = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    onnx.save(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "source.onnx"
    )
    onnxpack.build(tmp_path / "source.onnx", tmp_path / "pack", weights="q4nx")
    model = tmp_path / "pack" / "model.onnx"
    onnx.checker.check_model(str(model), full_check=True)
    assert sum(node.op_type == "Scan" for node in onnx.load(model, load_external_data=False).graph.node) == 2
    x = normal(3, 320, seed=2)
    decoded = [Q4NX.decode(Q4NX.encode(w)).astype(np.float64) for w in (first, second)]
    for level in LEVELS:
        found = session(model, level).run(None, {"codes": x})[0]
        np.testing.assert_allclose(found, x @ decoded[0] @ decoded[1], rtol=1e-4, atol=1e-5)


def test_no_opset_before_13():
    with pytest.raises(UsageError, match="opset 12"):
        Q4NX.decoder((256, 32), 12)


def test_no_byte_is_stored_twice(tmp_path, normal):
    w = normal(512, 96)
    path = model_of(tmp_path, w, 21, folded_bytes=BANDS)
    assert path.stat().st_size < 10_000
    assert (tmp_path / "weights.q4nx").stat().st_size == 4096 + Q4NX.encode(w).nbytes


def test_without_onnxpack(tmp_path, normal):
    """A process that cannot import onnxpack loads the model with stock onnxruntime and gets our bits."""
    w = normal(300, 70)
    model_of(tmp_path, w, 17, folded_bytes=BANDS)
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
