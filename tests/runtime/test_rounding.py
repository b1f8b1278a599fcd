"""float16 graphs: values are rounded where the graph says, in one session as in many segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from model_maker import Array, model, node, normal, tensor, value
from onnx import TensorProto

import onnxpack
from onnxpack.quant.int8 import quantize_columns
from onnxpack.runtime.operands import Operand
from onnxpack.runtime.reference import multiply

Make = Callable[..., Any]
F16, F32 = np.float16, np.float32
K = 24


def built(proto: Any, folder: Path) -> Path:
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    onnxpack.build(folder / "model.onnx", folder / "model.pack", weights="int8")
    return folder / "model.pack"


def half_graph(opset: int) -> tuple[Any, Array]:
    """x * c -> MatMul -> * k -> MatMul -> + what went in; onnxruntime emulates every operator but the products."""
    w = normal(K, K).astype(F16)
    tensors = [tensor("w", w), tensor("c", F16(1.1)), tensor("k", F16(0.3))]
    nodes = [
        node("Mul", ["x", "c"], ["a"]),
        node("MatMul", ["a", "w"], ["b"]),
        node("Mul", ["b", "k"], ["d"]),
        node("MatMul", ["d", "w"], ["e"]),
        node("Add", ["e", "a"], ["f"]),
        node("Cast", ["f"], ["y"], to=TensorProto.FLOAT),
    ]
    inputs = [value("x", ["m", K], TensorProto.FLOAT16)]
    return model(nodes, tensors, inputs, opset=opset, ir_version=8), w


def in_halves(x: Array, w: Array) -> Array:
    """The same by hand, each float16 value rounded."""
    codes, scales = np.empty(w.shape, np.int8), np.empty(K, F32)
    quantize_columns(w, codes, scales)
    weight = Operand(codes, scales)
    a = (x * F16(1.1)).astype(F16)
    d = (multiply(a.astype(F32), weight).astype(F16) * F16(0.3)).astype(F16)
    e = multiply(d.astype(F32), weight).astype(F16)
    return e.astype(F32) + a.astype(F32)


@pytest.mark.parametrize("level", ["DISABLE_ALL", "ENABLE_BASIC", "ENABLE_ALL"])
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 21])
def test_every_half_is_rounded_on_both_devices(tmp_path: Path, rng: Any, opset: int, level: str) -> None:
    proto, w = half_graph(opset)
    folder, x = built(proto, tmp_path), rng.standard_normal((7, K)).astype(F16)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    found = [onnxpack.load(folder, device, options).run(None, {"x": x})[0] for device in ("host", "reference")]
    np.testing.assert_array_equal(found[0], found[1])
    # The last sum and the Cast behind it are the graph's own: onnxruntime may leave out the rounding between.
    exact = in_halves(x, w)
    rounded = exact.astype(F16).astype(F32)
    assert np.array_equal(found[0], exact) or np.array_equal(found[0], rounded)
    assert not np.array_equal(exact, rounded)


def test_a_real_float16_model_is_the_same_on_both_devices(shared: Path, tmp_path: Path, both: Make) -> None:
    source = shared / "models/families/llama_tiny_fp16.onnx"
    onnxpack.build(source, tmp_path / "model.pack")
    pair = both(tmp_path / "model.pack")
    assert pair.host.coverage().bound == 15
    for seed, length in ((0, 1), (1, 9), (2, 40)):
        ids = np.random.default_rng(seed).integers(0, 600, (1, length))
        names = [entry.name for entry in pair.host.get_inputs()]
        feed = {name: ids if "id" in name and "position" not in name else np.ones_like(ids) for name in names}
        for result in pair.run(feed):
            assert result.dtype == F16
            assert np.isfinite(result).all()
