"""Single products: of every kind of site that can be seen, against plain numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from qdq_models import Group, Quantized, codes

import onnxpack
from onnxpack.errors import UsageError
from onnxpack.pack.read import open_pack
from onnxpack.quant.int8 import quantize_columns
from onnxpack.runtime.operands import Operand
from onnxpack.runtime.reference import multiply
from onnxpack.verify.sites import SiteError, failures, relative_rms, site_errors

FLOAT = TensorProto.FLOAT


def normal(*shape: int, seed: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized(w: np.ndarray[Any, Any]) -> tuple[Operand, np.ndarray[Any, Any]]:
    codes, scales = np.empty(w.shape, np.int8), np.empty(w.shape[1], np.float32)
    quantize_columns(w, codes, scales)
    return Operand(codes, scales), codes.astype(np.float32) * scales


def test_figures_against_numpy(packed: Callable[..., Any]) -> None:
    w1, w2 = normal(16, 12), normal(5, 12, seed=4)
    built = packed(
        [
            helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
            helper.make_node("Relu", ["h"], ["r"], "relu"),
            helper.make_node("Gemm", ["r", "w2"], ["y"], "second", transB=1, alpha=3.0),
        ],
        [("x", FLOAT, [7, 16])],
        [("y", FLOAT, [7, 5])],
        {"w1": w1, "w2": w2},
    )
    x = normal(7, 16, seed=9)
    first, second = site_errors(open_pack(built.pack), built.model, [{"x": x}, {"x": -x}])
    for error, a, w in (
        (first, np.concatenate([x, -x]), w1),
        (second, np.maximum(np.concatenate([x @ w1, -x @ w1]), 0), np.ascontiguousarray(w2.T)),
    ):
        weight, decoded = quantized(w)
        exact, found = (a @ decoded).astype(np.float64), multiply(a, weight)
        assert error.rows == 14
        assert error.max_abs == pytest.approx(np.abs(exact - found).max(), rel=1e-3)
        assert error.max_rel == pytest.approx(np.abs(exact - found).max() / np.abs(exact).max(), rel=1e-3)
        assert error.rel_rms == pytest.approx(relative_rms(exact, found), rel=1e-3)
        assert error.weight_rms == pytest.approx(relative_rms(w, decoded), rel=1e-6)
        assert error.failures(0.02) == []
        assert error.failures(1e-4) == [
            f"{error.path}: error {error.max_rel:.4g} of the largest result is above 0.0001"
        ]


def test_transposed_a_shared_inputs_and_shared_weights(packed: Callable[..., Any]) -> None:
    built = packed(
        [
            helper.make_node("Gemm", ["x", "w"], ["a"], "turned", transA=1),
            helper.make_node("Transpose", ["x"], ["t"], "t"),
            helper.make_node("MatMul", ["t", "w"], ["b"], "plain"),
            helper.make_node("Add", ["a", "b"], ["y"], "add"),
        ],
        [("x", FLOAT, [8, 5])],
        [("y", FLOAT, [5, 6])],
        {"w": normal(8, 6)},
    )
    one, two = site_errors(open_pack(built.pack), built.model, [{"x": normal(8, 5)}])
    assert (one.path, one.weight, one.rows) == ("Gemm_0", two.weight, 5)
    assert (one.max_abs, one.max_reference, one.rel_rms) == (two.max_abs, two.max_reference, two.rel_rms)


def test_half_precision_and_functions(packed: Callable[..., Any]) -> None:
    body = helper.make_function(
        "local",
        "Twice",
        ["p", "w"],
        ["q"],
        [helper.make_node("MatMul", ["p", "w"], ["m"], "m"), helper.make_node("Relu", ["m"], ["q"], "r")],
        [helper.make_opsetid("", 17)],
    )
    built = packed(
        [
            helper.make_node("Twice", ["x", "w1"], ["h"], "call", domain="local"),
            helper.make_node("MatMul", ["h", "w2"], ["y"], "last"),
        ],
        [("x", TensorProto.FLOAT16, [9, 10])],
        [("y", TensorProto.FLOAT16, [9, 4])],
        {"w1": normal(10, 8).astype(np.float16), "w2": normal(8, 4).astype(np.float16)},
        functions=[body],
    )
    errors = site_errors(open_pack(built.pack), built.model, [{"x": normal(9, 10).astype(np.float16)}])
    assert [error.path for error in errors] == ["fn:local.Twice/MatMul_0", "MatMul_0"]
    assert all(error.rows == 9 and error.unmeasured is None for error in errors)
    assert failures(errors, 0.02) == []


def test_products_in_bodies_are_listed_and_their_weights_compared(packed: Callable[..., Any]) -> None:
    branches = [
        helper.make_graph(
            [helper.make_node("MatMul", ["x", f"w{i}"], [f"z{i}"], f"m{i}")],
            f"branch{i}",
            [],
            [helper.make_tensor_value_info(f"z{i}", FLOAT, [3, 4])],
        )
        for i in (0, 1)
    ]
    built = packed(
        [helper.make_node("If", ["c"], ["y"], "if", then_branch=branches[0], else_branch=branches[1])],
        [("x", FLOAT, [3, 6]), ("c", TensorProto.BOOL, [])],
        [("y", FLOAT, [3, 4])],
        {"w0": normal(6, 4), "w1": normal(6, 4, seed=8)},
    )
    feed = {"x": normal(3, 6), "c": np.array(True)}
    errors = site_errors(open_pack(built.pack), built.model, [feed])
    assert len(errors) == 2
    assert all(error.unmeasured is not None and error.weight_rms for error in errors)
    assert failures(errors, 0.02) == ["no site could be measured"]
    built.overwrite("w1", "codes", lambda a: -a)
    (failed,) = failures(site_errors(open_pack(built.pack), built.model, [feed]), 0.02)
    assert failed.startswith("If_0/else_branch/MatMul_0: weight w1 is 1.99")


def test_rows_that_are_not_finite_are_left_out(mlp: Any) -> None:
    x = normal(4, 64)
    (whole, _) = site_errors(open_pack(mlp.pack), mlp.model, [{"x": x[1:]}])
    x[0, 3] = np.inf
    first, _ = site_errors(open_pack(mlp.pack), mlp.model, [{"x": x}])
    assert (first.rows, first.max_abs) == (4, whole.max_abs)
    nothing = site_errors(open_pack(mlp.pack), mlp.model, [{"x": np.full((2, 64), np.nan, np.float32)}])
    assert [error.unmeasured for error in nothing] == ["no finite result"] * 2
    assert failures(nothing, 0.02) == ["no site could be measured"]


def test_no_rows(mlp: Any) -> None:
    errors = site_errors(open_pack(mlp.pack), mlp.model, [{"x": np.empty((0, 64), np.float32)}])
    assert [error.unmeasured for error in errors] == ["no row was multiplied"] * 2


def test_nan_of_the_int8_product_fails() -> None:
    error = SiteError("MatMul_0", "w", rows=1)
    error.add(np.ones((1, 2), np.float32), np.array([[1, np.nan]], np.float32))
    assert error.failures(0.02) == ["MatMul_0: error nan of the largest result is above 0.02"]
    error.add(np.ones((1, 2), np.float32), np.ones((1, 2), np.float32))
    assert error.failures(0.02)  # a good run afterwards does not mend it


def test_another_model_is_told(mlp: Any, language_model: Any) -> None:
    with pytest.raises(UsageError, match="has no product"):
        site_errors(open_pack(mlp.pack), language_model.model, [])


@pytest.mark.parametrize("form", ["int8", "q4nx"])
def test_the_loss_of_storing_is_told_apart_from_the_error_of_the_product(form: str, tmp_path: Any, mlp: Any) -> None:
    import onnxpack

    onnxpack.build(mlp.model, tmp_path / "p.pack", weights=form)
    errors = site_errors(open_pack(tmp_path / "p.pack"), mlp.model, [{"x": normal(50, 64)}])
    assert failures(errors, 0.02) == []
    for error in errors:
        assert error.weight_rms is not None
        assert (error.weight_rms > 0.02) == (form == "q4nx")
        assert error.weight_rms == pytest.approx(error.recorded_rms, rel=0.01)


@pytest.mark.parametrize("form", ["plain", "rows", "uint8", "transposed", "weight only"])
def test_groups_are_compared_by_their_own_codes(form: str, tmp_path: Any) -> None:
    """What the devices multiply is exact, so only float32 rounding is left; a weight that is not its own shows."""
    rng = np.random.default_rng(1)
    x = Quantized(codes(rng, (6, 24), np.int8), np.float32(0.02), np.int8(-9))
    w = Quantized(codes(rng, (24, 10), np.int8), np.full(10, 0.01, np.float32), axis=1)
    group = Group(x, w, np.float32(0.1), np.int8(3), bias=np.ones(10, np.float32))
    if form == "rows":
        group = group.but(x=Quantized(x.codes, np.linspace(0.01, 0.02, 6, dtype=np.float32), axis=0))
    if form == "uint8":
        w8 = Quantized(codes(rng, (24, 10), np.uint8), np.full(10, 0.01, np.float32), codes(rng, (10,), np.uint8), 1)
        group = group.but(w=w8)
    if form == "transposed":
        group = group.but(op="Gemm", trans_a=True, x=Quantized(x.codes.T.copy(), x.scale, x.zero))
    proto = group.model()
    if form == "weight only":
        [dequantize] = [n for n in proto.graph.node if n.name == "DequantizeLinear_x"]
        dequantize.op_type, dequantize.input[:] = "Cast", ["x"]
        dequantize.attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    onnxpack.build(tmp_path / "m.onnx", tmp_path / "m.pack")
    [error] = site_errors(open_pack(tmp_path / "m.pack"), tmp_path / "m.onnx", [group.feed()])
    assert (error.rows, error.weight_rms) == (6, 0)
    assert error.max_rel is not None
    assert error.max_rel < (0.02 if form == "weight only" else 1e-6)
    store = tmp_path / "m.pack" / "weights.safetensors"
    data = bytearray(store.read_bytes())
    place = open_pack(tmp_path / "m.pack").manifest.tensors[0].fields["codes"]
    data[place.offset] ^= 0x40
    store.write_bytes(data)
    [error] = site_errors(open_pack(tmp_path / "m.pack"), tmp_path / "m.onnx", [group.feed()])
    assert error.weight_rms is not None
    assert error.failures(0.02) != []
