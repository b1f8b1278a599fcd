"""Every format in a pack: stored, decoded by the plain graph, made into operands; or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack.errors import UsageError
from onnxpack.formats import get, names
from onnxpack.formats.base import Decoder, Orientation
from onnxpack.formats.plugins import DataType, FunctionUniform, Plugin, register, unregister
from onnxpack.formats.select import Selection

K, N = 256, 128
IN_PACKS = [name for name in names() if not get(name).refusal]


def weight(name: str = "") -> np.ndarray:
    """[K, N]; powers of two of one sign each for `log`, whose default range is not that of weights."""
    w = np.random.default_rng(1).normal(0, 0.05, (K, N)).astype(np.float32)
    return np.sign(w) * np.float32(0.25) if name == "log" else w


@pytest.fixture
def product(tmp_path: Path) -> Any:
    """Path of a model that is one product."""

    def make(w: np.ndarray, opset: int = 21) -> Path:
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", K])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", N])],
            [numpy_helper.from_array(w, "w")],
        )
        path = tmp_path / "model.onnx"
        ir = 8 if opset < 21 else 10
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir), path)
        return path

    return make


def run_plain(pack: Path, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(str(pack / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("name", IN_PACKS)
def test_a_pack_in_every_format(name: str, product: Any, tmp_path: Path) -> None:
    w, out = weight(name), tmp_path / "model.pack"
    onnxpack.build(product(w), out, weights=name, min_cosine=-1)
    made = get(name)
    natural = w if made.orientation is Orientation.KN else np.ascontiguousarray(w.T)
    decoded = made.decode(made.encode(natural))
    decoded = decoded if made.orientation is Orientation.KN else decoded.T
    x = np.random.default_rng(2).normal(size=(5, K)).astype(np.float32)
    plain = run_plain(out, x)
    assert np.abs(plain - x @ decoded).max() <= 3e-6 * np.abs(x @ decoded).max()
    session = onnxpack.load(out, device="host")
    (hosted,) = session.run(None, {"x": x})
    assert [record.where for record in session.trace()] == ["host"]
    # The operand is int8 of the decoded weight, the activations int8 by row: no third quantization hides here.
    assert np.abs(hosted - x @ decoded).max() < 0.03 * np.abs(x @ decoded).max()
    graph = onnx.load(out / "model.onnx", load_external_data=False)
    assert {node.domain for node in graph.graph.node} == {""}
    stored = sum(spec.nbytes for spec in made.fields(natural.shape).values())
    (file,) = [f for f in out.iterdir() if f.name.startswith("weights.")]
    assert stored <= file.stat().st_size < stored + 8192


def test_formats_without_a_place_in_a_pack_say_why() -> None:
    assert set(names()) - set(IN_PACKS) == {"exl3", "tequila"}
    for name, reason in (("exl3", "no encoder"), ("tequila", "bias")):
        with pytest.raises(UsageError, match=f"cannot hold weights in format {name}: .*{reason}"):
            Selection.parse(f"lm_head=int8,*={name}")


def test_an_older_graph_gets_int8_and_is_told(product: Any, tmp_path: Path) -> None:
    report = onnxpack.build(product(weight(), 15), tmp_path / "model.pack", weights="spqr", min_cosine=0)
    assert report.to_dict()["weights"][0]["format"] == "int8"


# Plugins -------------------------------------------------------------------------------------------------------------

OPERATOR = "vendor::HalfDequantize"


def decode(payload: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    return payload.view(np.int8).reshape(shape).astype(np.float32) * np.float32(1 / 256)


def encode(w: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(w * 256), -128, 127).astype(np.int8).view(np.uint8).reshape(-1)


def nodes(shape: tuple[int, int], opset: int) -> Decoder:
    step = numpy_helper.from_array(np.float32(1 / 256), "step")
    sign = numpy_helper.from_array(np.float32(128), "half")
    full = numpy_helper.from_array(np.float32(256), "full")
    wanted = numpy_helper.from_array(np.array(shape, np.int64), "shape")
    made = [
        helper.make_node("Cast", ["payload"], ["bytes"], to=TensorProto.FLOAT),
        helper.make_node("Less", ["bytes", "half"], ["positive"]),
        helper.make_node("Sub", ["bytes", "full"], ["below"]),
        helper.make_node("Where", ["positive", "bytes", "below"], ["codes"]),
        helper.make_node("Mul", ["codes", "step"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], ["decoded"]),
    ]
    return Decoder(tuple(made), "decoded", (step, sign, full, wanted))


@pytest.fixture
def plugin() -> Any:
    made = []

    def add(**parts: Any) -> Any:
        profile = FunctionUniform(DataType.INT8, 8, "vendor::HalfQuantize", OPERATOR)
        register(Plugin(profile, decode, **parts))
        made.append(OPERATOR)
        return get(OPERATOR)

    yield add
    for name in made:
        unregister(name)


def test_a_plugin_is_a_format_by_its_operator_s_name(plugin: Any, tools: Any) -> None:
    with pytest.raises(UsageError, match=OPERATOR):
        get(OPERATOR)
    made = plugin(encode=encode, nodes=nodes)
    assert (made.name, made.family, made.encodes, made.refusal) == (OPERATOR, "function", True, "")
    w = weight().T
    encoded = made.encode(w)
    assert made.from_bytes(made.to_bytes(encoded), w.shape).nbytes == K * N
    assert np.abs(made.decode(encoded) - w).max() <= 1 / 512 + 1e-7
    assert tools.same(tools.onnxruntime(tools.model(made, encoded, 13)), made.decode(encoded))
    from onnxpack.formats.functions import structure
    from onnxpack.formats.translate import from_structure

    kind = structure(made, (4, 8))
    assert dict(kind.metadata_props)["dequantize_op"] == OPERATOR
    assert from_structure(kind) == (made.profile, (4, 8))


def test_a_plugin_in_a_pack(plugin: Any, product: Any, tmp_path: Path) -> None:
    made = plugin(encode=encode, nodes=nodes)
    out = tmp_path / "model.pack"
    onnxpack.build(product(weight()), out, weights=OPERATOR, min_cosine=0)
    x = np.random.default_rng(2).normal(size=(3, K)).astype(np.float32)
    expected = x @ made.decode(made.encode(weight().T)).T
    assert np.abs(run_plain(out, x) - expected).max() < 1e-5
    (hosted,) = onnxpack.load(out, device="host").run(None, {"x": x})
    assert np.abs(hosted - expected).max() < 0.03 * np.abs(expected).max()


def test_a_plugin_without_standard_nodes_has_no_place_in_a_pack(plugin: Any) -> None:
    made = plugin(encode=encode)
    assert not made.has_decoder
    with pytest.raises(UsageError, match="adds no operator domain"):
        Selection.parse(OPERATOR)
    with pytest.raises(UsageError, match="no decoder of standard operators"):
        made.decoder((4, 8), 21)


def test_plugins_that_break_their_word_are_named(plugin: Any) -> None:
    with pytest.raises(UsageError, match="not domain::Name"):
        register(Plugin(FunctionUniform(DataType.INT8, 8, "", "Dequantize"), decode))
    made = plugin(encode=lambda w: np.zeros(3, np.uint8))
    with pytest.raises(UsageError, match="registered already"):
        register(Plugin(FunctionUniform(DataType.INT8, 8, "", OPERATOR), decode))
    with pytest.raises(UsageError, match=f"{OPERATOR} encoded to"):
        made.encode(weight().T)
