"""The host lowering gives the reference device's numbers, bit for bit, whatever the rows look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnxpack.pack.read import open_pack
from onnxpack.quant.bounds import K_LIMIT_SYMMETRIC
from onnxpack.quant.int8 import accumulate, dequantize_columns, quantize_rows
from onnxpack.runtime.host import host_model
from onnxpack.runtime.operands import operand
from onnxpack.runtime.options import session_options
from onnxpack.runtime.reference import multiply
from onnxpack.runtime.session import load

Make = Callable[..., Any]


def info(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def one_site(w: np.ndarray, shape: Any = None, **more: Any) -> dict[str, Any]:
    """x @ w, of unknown rank unless told."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "site")
    return {"nodes": [node], "inputs": [info("x", shape)], "outputs": [info("y", None)], "weights": {"w": w}} | more


@pytest.fixture(scope="module")
def square(pack: Make, both: Make) -> Any:
    w = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    w[:, 5] = 0
    return both(pack(**one_site(w)))


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24])
@pytest.mark.parametrize("declared", [True, False])
def test_every_opset_rank_and_batch(pack: Make, both: Make, rng: Any, opset: int, declared: bool) -> None:
    w = rng.standard_normal((24, 10)).astype(np.float32)
    for shape in ([24], [1, 24], [5, 24], [0, 24], [2, 3, 24], [2, 0, 24], [1, 1, 1, 24], [2, 1, 3, 24]):
        made = both(pack(**one_site(w, shape if declared else None, opset=opset)))
        [y] = made.run({"x": rng.standard_normal(shape).astype(np.float32)})
        assert y.shape == (*shape[:-1], 10)


def test_ir_3_where_initializers_are_inputs(pack: Make, both: Make, rng: Any) -> None:
    w = rng.standard_normal((8, 4)).astype(np.float32)
    made = both(pack(**one_site(w, ["m", 8], opset=9, ir_version=3)))
    assert [value.name for value in made.host.get_inputs()] == ["x"]
    made.run({"x": rng.standard_normal((3, 8)).astype(np.float32)})


def test_products_are_exact_at_every_optimization_level(pack: Make, rng: Any) -> None:
    w = rng.standard_normal((96, 40)).astype(np.float32)
    folder, x = pack(**one_site(w, ["m", 96])), rng.standard_normal((7, 96)).astype(np.float32)
    x[2, 3], x[4] = np.nan, 0
    found = []
    for level in ort.GraphOptimizationLevel.__members__.values():
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        found.append(load(folder, "host", session_options=options).run(None, {"x": x})[0])
    found.append(load(folder, "host").run(None, {"x": x})[0])
    wanted = load(folder, "reference").run(None, {"x": x})[0]
    for y in found:
        np.testing.assert_array_equal(y, wanted)


def test_close_to_the_float_product(square: Any, rng: Any) -> None:
    x = rng.standard_normal((32, 64)).astype(np.float32)
    w = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    w[:, 5] = 0
    [y] = square.run({"x": x})
    error = np.linalg.norm(y - x @ w) / np.linalg.norm(x @ w)
    assert 1e-4 < error < 0.02


def test_zero_rows_give_plus_zero(square: Any, rng: Any) -> None:
    x = rng.standard_normal((4, 64)).astype(np.float32)
    x[1], x[2] = 0, -0.0
    [y] = square.run({"x": x})
    assert not y[1:3].any()
    assert not np.signbit(y[1:3]).any()
    assert y[0].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 15, 16, 63])
def test_a_row_that_is_not_finite_is_nan_and_touches_no_other(square: Any, rng: Any, bad: float, column: int) -> None:
    x = rng.standard_normal((9, 64)).astype(np.float32)
    [clean] = square.run({"x": x})
    x[3, column] = bad
    [y] = square.run({"x": x})
    assert np.isnan(y[3]).all()
    others = np.arange(9) != 3
    np.testing.assert_array_equal(y[others], clean[others])


def test_all_bad_values_in_one_row(square: Any) -> None:
    x = np.zeros((3, 64), np.float32)
    x[1, :3] = np.nan, np.inf, -np.inf
    [y] = square.run({"x": x})
    assert np.isnan(y[1]).all()
    assert not y[[0, 2]].any()


@pytest.mark.parametrize("exponent", [-149, -140, -130, -127, -126, -125, -120, -119, -100])
def test_tiny_rows(square: Any, rng: Any, exponent: int) -> None:
    x = np.ldexp(rng.standard_normal((6, 64)), exponent).astype(np.float32)
    square.run({"x": x})


def test_huge_row_beside_tiny_rows(square: Any, rng: Any) -> None:
    x = rng.standard_normal((5, 64)).astype(np.float32)
    x[0] *= np.float32(1e30)
    x[1] *= np.float32(1e-30)
    x[2] *= np.float32(1e-44)
    [y] = square.run({"x": x})
    [alone] = square.run({"x": x[1:2]})
    np.testing.assert_array_equal(y[1:2], alone)
    assert np.abs(y[1]).max() > 0


def test_largest_finite_values(pack: Make, both: Make) -> None:
    most = np.finfo(np.float32).max
    x = np.array([[most, most], [most, -most], [-most, 0], [1e-30, most]], np.float32)
    made = both(pack(**one_site(np.array([[0.5, 1e-20], [0.5, 1e-20]], np.float32))))
    found = [device.run(None, {"x": x})[0] for device in (made.host, made.reference)]
    np.testing.assert_array_equal(*found)
    assert not np.isnan(found[0]).any()


def test_ties_round_to_even(pack: Make, both: Make) -> None:
    """amax 127 makes the scale 1: the codes are the values rounded half to even."""
    x = np.zeros((1, 32), np.float32)
    halves = np.arange(-15, 15) + np.float32(0.5)
    x[0, :30], x[0, 30] = halves, 127
    made = both(pack(**one_site(np.eye(32, dtype=np.float32))))
    [y] = made.run({"x": x})
    np.testing.assert_array_equal(np.rint(y[0, :30] / y[0, 30] * 127), np.rint(halves))


@pytest.mark.parametrize("signs", ["same", "alternating"])
@pytest.mark.parametrize("m", [1, 3, 17])
def test_extreme_codes_at_the_int32_bound(pack: Make, both: Make, signs: str, m: int) -> None:
    """127 * 127 * 133144 is the last sum that fits int32; the kernel's uint8 form goes through larger ones."""
    k = K_LIMIT_SYMMETRIC
    w = np.ones((k, 3), np.float32)
    w[:, 1] = -1
    w[::2, 2] = -1
    x = np.ones((m, k), np.float32)
    if signs == "alternating":
        x[:, ::2] = -1
    made = both(pack(**one_site(w)))
    [y] = made.run({"x": x})
    exact = (127 * 127) * (np.sign(x).astype(np.int64) @ np.sign(w).astype(np.int64))
    scale = np.float32(1) / np.float32(127)
    np.testing.assert_array_equal(y, exact.astype(np.float32) * scale * scale)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_random_rows(square: Any, data: st.DataObject) -> None:
    m = data.draw(st.integers(0, 6))
    values = st.floats(width=32, allow_nan=True, allow_infinity=True)
    row = st.lists(values, min_size=64, max_size=64)
    x = np.array([data.draw(row) for _ in range(m)], np.float32).reshape(m, 64)
    with np.errstate(over="ignore"):
        wanted = square.reference.run(None, {"x": x})[0]
    np.testing.assert_array_equal(square.host.run(None, {"x": x})[0], wanted)


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_int32_accumulators_are_equal(pack: Make, rng: Any, opset: int) -> None:
    """The codes that the host session computes, multiplied by onnxruntime's own integer kernel, element for element."""
    k, n = 200, 70
    w = rng.standard_normal((k, n)).astype(np.float32)
    w[:, 0], w[:, 1], w[1:, 2] = 0, 1, 0
    x = rng.standard_normal((40, k)).astype(np.float32)
    x[0], x[1], x[2] = 0, 1, 1e-42
    x[3] *= 1e30
    x[4, ::2], x[4, 1::2] = 5, -5
    opened = open_pack(pack(**one_site(w, opset=opset)))
    weight = operand(opened, "w")
    data, _ = host_model(opened)
    model = onnx.ModelProto.FromString(data)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ("site/a_codes", "site/a_scale"))
    options = session_options(None, str(opened.path))
    host = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    y, a_codes, a_scale = host.run(None, {"x": x})
    codes, scale = quantize_rows(x)
    np.testing.assert_array_equal(a_codes.astype(np.int16) - 128, codes)
    np.testing.assert_array_equal(a_scale[:, 0], scale)
    acc = _integer_product(a_codes, weight.codes)
    np.testing.assert_array_equal(acc, accumulate(codes, weight.codes))
    assert acc.dtype == np.int32
    np.testing.assert_array_equal(y, multiply(x, weight))
    np.testing.assert_array_equal(y, (acc.astype(np.float32) * weight.scales) * scale[:, None])


def _integer_product(a: np.ndarray, w: np.ndarray) -> np.ndarray:
    node = helper.make_node("MatMulInteger", ["a", "w", "zero"], ["y"])
    inputs = [info("a", None, TensorProto.UINT8)]
    tensors = [
        onnx.numpy_helper.from_array(np.ascontiguousarray(w), "w"),
        onnx.numpy_helper.from_array(np.uint8(128), "zero"),
    ]
    graph = helper.make_graph([node], "g", inputs, [info("y", None, TensorProto.INT32)], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"a": a})[0]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_sixteen_bit_sites(pack: Make, both: Make, rng: Any, kind: int) -> None:
    """Two in a row, so that a bfloat16 value crosses a cut; float32 outside, because run() takes no bfloat16."""
    ws = {"v": rng.standard_normal((32, 16)).astype(np.float32), "w": rng.standard_normal((16, 8)).astype(np.float32)}
    nodes = [
        helper.make_node("Cast", ["x"], ["x16"], "narrow", to=kind),
        helper.make_node("MatMul", ["x16", "v"], ["h"], "first"),
        helper.make_node("Gemm", ["h", "w", "c"], ["y16"], "second", alpha=0.3, beta=1.7),
        helper.make_node("Cast", ["y16"], ["y"], "wide", to=TensorProto.FLOAT),
        helper.make_node("Cast", ["c32"], ["c"], "narrow_c", to=kind),
    ]
    bias = rng.standard_normal(8).astype(np.float32)
    folder = pack(nodes, [info("x", ["m", 32])], [info("y", None)], ws, initializers={"c32": bias}, dtype=kind)
    made = both(folder)
    x = rng.standard_normal((5, 32)).astype(np.float32)
    [y] = made.run({"x": x})
    wide = (x @ ws["v"]) @ ws["w"] * np.float32(0.3) + bias * np.float32(1.7)
    assert np.linalg.norm(y - wide) / np.linalg.norm(wide) < 0.03
    kept = y.astype(helper.tensor_dtype_to_np_dtype(kind))
    np.testing.assert_array_equal(kept.astype(np.float32), y)


def test_weight_codes_are_those_of_an_independent_quantizer(tmp_path: Path, pack: Make, rng: Any) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    w = rng.standard_normal((64, 32)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "site")],
        "g",
        [info("x", ["m", 64])],
        [info("y", ["m", 32])],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "f.onnx")
    quantization.quantize_dynamic(
        tmp_path / "f.onnx",
        tmp_path / "q.onnx",
        per_channel=True,
        weight_type=quantization.QuantType.QInt8,
        extra_options={"WeightSymmetric": True},
    )
    theirs = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "q.onnx").graph.initializer}
    ours = operand(open_pack(pack(**one_site(w))), "w")
    np.testing.assert_array_equal(ours.codes, theirs["w_quantized"])
    np.testing.assert_array_equal(ours.scales, theirs["w_scale"])
    assert np.abs(dequantize_columns(ours.codes, ours.scales) - w).max() <= ours.scales.max() / 2 * 1.001
