"""QDQ groups: int8 in, int8 out, and every element what exact integers give, on the host and the reference alike."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_maker import Array, model, node, tensor, value
from onnx import TensorProto, helper
from qdq_models import MICROSOFT, Group, Quantized, codes

import onnxpack
from onnxpack.errors import PackError
from onnxpack.pack.read import open_pack
from onnxpack.quant.qdq import signed_zero_points
from onnxpack.runtime.graphs import uses
from onnxpack.runtime.host import host_model
from onnxpack.runtime.operands import operand
from onnxpack.runtime.reference_groups import multiply_codes
from onnxpack.runtime.session import basic_options

Make = Callable[..., Any]
F32 = np.float32
LEVELS = list(ort.GraphOptimizationLevel.__members__.values())


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a pack of a model."""

    def make(proto: onnx.ModelProto, groups: int | None = 1) -> Path:
        out = tmp_path_factory.mktemp("groups") / "model.pack"
        onnxpack.build(_saved(proto, out.parent), out)
        sites = open_pack(out).manifest.sites
        assert groups is None or sum(s.qdq is not None and s.weight is not None for s in sites) == groups
        return out

    return make


def _saved(proto: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def stock(proto: onnx.ModelProto, feed: dict[str, Array]) -> Array:
    """onnxruntime's CPU provider with the nodes as they are."""
    options = basic_options()
    found: Array = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feed)[0]
    return found


def check(group: Group, packed: Make, levels: Any = LEVELS[1:2]) -> Path:
    """Both devices give exactly what the specification says."""
    folder, wanted, feed = packed(group.model()), group.expected(), group.feed()
    if group.ends == "float" and group.y_scale is not None:
        zero = 0 if group.y_zero is None else int(group.y_zero)
        wanted = (wanted.astype(np.int64) - zero).astype(F32) * F32(group.y_scale)
    sessions = [onnxpack.load(folder, "reference")]
    for level in levels:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        sessions.append(onnxpack.load(folder, "host", options))
    for session in sessions:
        [found] = session.run(None, feed)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    assert sessions[0].coverage().where == {"reference": 1, "unbound": 0}
    assert sessions[1].coverage().where == {"host": 1, "unbound": 0}
    return folder


def lowered(folder: Path) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(host_model(open_pack(folder))[0])


def operators(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in proto.graph.node)


def ordinary(rng: np.random.Generator, m: int = 5, k: int = 24, n: int = 10, **more: Any) -> Group:
    """int8 activations, a scale a column, no zero points."""
    x = Quantized(codes(rng, (m, k), np.int8), F32(0.031))
    w = Quantized(codes(rng, (k, n), np.int8), rng.uniform(0.001, 0.01, n).astype(F32), axis=1)
    return Group(x, w, F32(0.07), np.int8(-7)).but(**more)


CODES = st.sampled_from([np.dtype(np.int8), np.dtype(np.uint8)])


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Every combination of types, zero points, scales, biases, layouts and opsets that is one group."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    m, k, n = draw(st.integers(1, 5)), draw(st.integers(1, 40)), draw(st.integers(1, 20))
    domain = draw(st.sampled_from(["", MICROSOFT]))
    opset = draw(st.integers(13 if domain == "" else 10, 23))
    op = draw(st.sampled_from(["MatMul", "Gemm"]))
    trans_a = op == "Gemm" and draw(st.booleans())
    leading = [] if op == "Gemm" else draw(st.sampled_from([[], [1], [2]]))
    x_type, w_type, y_type = draw(CODES), draw(CODES), draw(CODES)

    def zeros(dtype: Any, shape: Any) -> Any:
        kind = draw(st.sampled_from(["none", "middle", "any"]))
        if kind == "none":
            return None
        limits = np.iinfo(dtype)
        if kind == "middle":
            return np.full(shape, (limits.min + limits.max + 1) // 2, dtype)
        return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)

    def scales(shape: Any) -> Any:
        return np.exp2(rng.uniform(-9, -4, shape)).astype(F32)

    x_shape = [*leading, k, m] if trans_a else [*leading, m, k]
    per_row = m > 1 and draw(st.booleans())
    count: Any = m if per_row else draw(st.sampled_from([(), 1]))
    axis = (1 if trans_a else len(leading)) if per_row else None
    x = Quantized(codes(rng, x_shape, x_type), scales(count), zeros(x_type, count), axis)
    per_column = draw(st.booleans())
    columns: Any = n if per_column else ()
    w = Quantized(codes(rng, (k, n), w_type), scales(columns), zeros(w_type, columns), 1 if per_column else None)
    stored = draw(st.sampled_from(["kn", "transpose"] + (["trans_b"] if op == "Gemm" else [])))
    group = Group(x, w, None, opset=opset, domain=domain, op=op, trans_a=trans_a, stored=stored)
    bias = draw(st.sampled_from(["none", "float"] + ([] if per_row or (op == "MatMul" and leading) else ["int32"])))
    if draw(st.booleans()) or (bias == "float" and op == "MatMul"):
        largest = float(np.abs(group.expected()).max()) or 1.0
        zero = zeros(y_type, ())
        zero = np.dtype(y_type).type(0) if zero is None else zero[()]
        group = group.but(y_scale=F32(largest / draw(st.sampled_from([60, 127, 300]))), y_zero=zero)
    if bias == "int32":
        group = group.but(bias=rng.integers(-20000, 20000, n).astype(np.int32))
    elif bias == "none" and op == "Gemm":
        group = group.but(opset=max(opset, 11))  # the opset since which C may be missing
    elif bias == "float":
        shape = draw(st.sampled_from([(n,), (1, n)]))
        group = group.but(bias=rng.standard_normal(shape).astype(F32))
    return group


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(groups())
def test_every_combination_is_exact_on_both_devices(packed: Make, group: Group) -> None:
    check(group, packed)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(groups())
def test_the_cpu_provider_is_at_most_one_away_and_nowhere_without_a_tie_near(group: Group) -> None:
    if group.y_scale is None:
        return
    found, wanted = stock(group.model(), group.feed()).astype(np.int64), group.expected().astype(np.int64)
    assert np.abs(found - wanted).max(initial=0) <= 1
    values = group.before_rounding().astype(np.float64)
    near = np.abs(values - np.floor(values) - 0.5) < 1e-3
    np.testing.assert_array_equal(found[~near], wanted[~near])


@pytest.mark.parametrize("domain", ["", MICROSOFT])
@pytest.mark.parametrize("opset", range(10, 24))
def test_every_opset(packed: Make, rng: Any, opset: int, domain: str) -> None:
    per_column = opset >= 13 or domain
    for ends, bias in (("codes", None), ("float", None), ("codes", rng.integers(-999, 999, 10).astype(np.int32))):
        group = ordinary(rng, opset=opset, domain=domain, ends=ends, bias=bias)
        if not per_column:
            group = group.but(w=Quantized(group.w.codes, F32(0.004)))
        check(group, packed)


def test_every_optimization_level(packed: Make, rng: Any) -> None:
    per_row = Quantized(
        codes(rng, (5, 24), np.int8), np.linspace(0.01, 0.05, 5, dtype=F32), np.arange(5, dtype=np.int8), 0
    )
    for group in (
        ordinary(rng),
        ordinary(rng, ends="float"),
        ordinary(rng, y_scale=None),
        ordinary(rng, x=per_row),
        ordinary(rng, x=per_row, ends="float", opset=21),
        ordinary(rng, bias=rng.integers(-999, 999, 10).astype(np.int32)),
        ordinary(rng, bias=rng.standard_normal(10).astype(F32)),
    ):
        check(group, packed, LEVELS)


@pytest.mark.parametrize("x_type", [np.int8, np.uint8])
@pytest.mark.parametrize("y", [(F32(0.5), np.int8(3)), (F32(0.5), np.uint8(130)), (None, None)])
def test_any_rank_and_zero_rows(packed: Make, rng: Any, x_type: Any, y: Any) -> None:
    for shape in ([24], [1, 24], [0, 24], [2, 3, 24], [2, 0, 24], [1, 1, 1, 24], [2, 1, 3, 24]):
        x = Quantized(codes(rng, shape, x_type), F32(0.01), np.array(x_type(7)))
        group = ordinary(rng, x=x, y_scale=y[0], y_zero=y[1])
        check(group, packed)
        check(group.but(x_shape=["d"] * (len(shape) - 1) + [24]), packed)


# -- rounding ------------------------------------------------------------------------------------------------------


def test_the_tie_of_the_cpu_provider_is_none_of_ours(packed: Make) -> None:
    """acc = -3090; the float32 product is -3.499998, so it rounds to -3 and not, half to even, to -4."""
    s_x, s_w, s_y = F32(1), F32(0.0011326855), F32(1)
    assert F32(-3090) * F32(F32(s_x * s_w) / s_y) == F32(-3.499998)
    x = Quantized(np.array([[-103]], np.int8), s_x)
    group = Group(x, Quantized(np.array([[30]], np.int8), s_w), s_y, np.int8(0))
    check(group, packed)
    assert group.expected().tolist() == [[-3]]


@pytest.mark.parametrize("zero", [np.int8(-7), np.int8(0), np.uint8(121)])
def test_exact_ties_go_to_even_before_the_zero_point_is_added(packed: Make, zero: Any) -> None:
    """acc * m = -2.5, -1.5, ... 2.5: to even, then the zero point. Adding it first would move every second one."""
    acc = np.arange(-5, 6, 2)
    x = Quantized(acc.reshape(-1, 1).astype(np.int8), F32(1))
    group = Group(x, Quantized(np.array([[1]], np.int8), F32(0.5)), F32(1), zero)
    assert group.expected().astype(int).reshape(-1).tolist() == [int(zero) + v for v in (-2, -2, -0, 0, 2, 2)]
    check(group, packed)


def test_results_saturate(packed: Make, rng: Any) -> None:
    group = ordinary(rng, y_scale=F32(1e-4))
    assert set(np.unique(group.expected())) <= {-128, 127}
    check(group, packed)
    check(group.but(y_zero=np.uint8(200)), packed)
    check(group.but(bias=np.full(10, 1e30, F32)), packed)


# -- extremes ------------------------------------------------------------------------------------------------------


def test_activations_at_the_top_and_weights_at_the_bottom_with_both_zero_points(packed: Make) -> None:
    """microsoft/onnxruntime#7524: uint8 near 255 with zero point 42, int8 near -128 with zero point -26."""
    x = Quantized(np.array([[255, 254, 250], [255, 255, 255], [0, 255, 1]], np.uint8), F32(0.01), np.uint8(42))
    w = Quantized(
        np.array([[-128, -127, -128], [-128, -128, 127], [-128, -120, 127]], np.int8), F32(0.02), np.int8(-26)
    )
    for y in (None, F32(1.3)):
        check(Group(x, w, y, None if y is None else np.int8(5)), packed)


@pytest.mark.parametrize("k", [1024, 33025])
def test_the_largest_accumulators(packed: Make, k: int) -> None:
    """microsoft/onnxruntime#6004, and the longest K that int32 holds with any zero points."""
    signs = np.where(np.arange(k) % 2, 127, -128).astype(np.int8)
    weights = np.stack([signs, np.full(k, 127, np.int8), np.full(k, -128, np.int8)], axis=1)
    for x_type, x_code, zero in ((np.int8, 127, None), (np.uint8, 255, 0), (np.uint8, 0, 255), (np.int8, -128, 127)):
        x = Quantized(np.full((2, k), x_code, x_type), F32(0.01), None if zero is None else x_type(zero))
        for w_zero in (None, np.int8(-128), np.int8(127)):
            check(Group(x, Quantized(weights, F32(0.01), w_zero)), packed)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, 1e-40])
def test_weight_scales_that_are_odd(packed: Make, rng: Any, bad: float) -> None:
    scales = np.full(10, 0.01, F32)
    scales[3] = bad
    group = ordinary(rng, y_scale=None)
    group = group.but(w=Quantized(group.w.codes, scales, axis=1))
    with np.errstate(all="ignore"):
        check(group, packed)
        folder, feed = packed(group.but(y_scale=F32(0.07), y_zero=np.int8(3)).model()), group.feed()
    host, reference = onnxpack.load(folder, "host", basic_options()), onnxpack.load(folder, "reference")
    np.testing.assert_array_equal(host.run(None, feed)[0], reference.run(None, feed)[0])


def test_a_bias_that_is_not_finite(packed: Make, rng: Any) -> None:
    bias = rng.standard_normal(10).astype(F32)
    bias[[2, 5, 7]] = np.nan, np.inf, -np.inf
    group = ordinary(rng, bias=bias)
    folder = packed(group.model())
    found = [onnxpack.load(folder, d, basic_options()).run(None, group.feed())[0] for d in ("host", "reference")]
    np.testing.assert_array_equal(found[0], found[1])
    assert [np.unique(found[0][:, i]).tolist() for i in (2, 5, 7)] == [[-128], [127], [-128]]


# -- what the graph becomes ----------------------------------------------------------------------------------------


def test_one_operator_and_no_float_beside_it(packed: Make, rng: Any) -> None:
    """Neither DequantizeLinear of the group is left; a float graph around it quantizes to uint8 to begin with."""
    folder = check(ordinary(rng, ends="float"), packed)
    assert operators(lowered(folder)) == {"QuantizeLinear": 1, "QLinearMatMul": 1, "DequantizeLinear": 1}
    folder = check(
        ordinary(rng, x=Quantized(codes(rng, (5, 24), np.uint8), 0.02, np.uint8(3)), y_zero=np.uint8(9)), packed
    )
    assert operators(lowered(folder)) == {"QLinearMatMul": 1}
    folder = check(ordinary(rng, opset=18), packed)
    assert operators(lowered(folder)) == {"Cast": 2, "BitwiseXor": 2, "QLinearMatMul": 1}


@pytest.mark.parametrize("form", ["codes", "row", "bias"])
def test_no_product_takes_signed_activations(packed: Make, rng: Any, form: str) -> None:
    group = ordinary(rng)
    if form == "row":
        group = group.but(x=Quantized(group.x.codes, np.full(5, 0.02, F32), axis=0))
    if form == "bias":
        group = group.but(bias=np.zeros(10, np.int32))
    made = lowered(check(group, packed))
    typed = onnx.shape_inference.infer_shapes(made)
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*typed.graph.value_info, *typed.graph.input)}
    [product] = [n for n in made.graph.node if "MatMul" in n.op_type]
    assert kinds[product.input[0]] == TensorProto.UINT8


def test_no_constant_is_left_unused(packed: Make, rng: Any) -> None:
    for group in (ordinary(rng, ends="float"), ordinary(rng, bias=np.ones(10, np.int32), ends="float"), ordinary(rng)):
        made = lowered(packed(group.model()))
        read = uses(made)
        assert [t.name for t in made.graph.initializer if not read[t.name]] == []


def test_weights_that_lie_right_are_mapped_and_others_made_once(packed: Make, rng: Any) -> None:
    big = ordinary(rng, k=64, n=48)
    for group, mapped in (
        (big, True),
        (big.but(stored="transpose"), False),
        (big.but(w=Quantized(codes(rng, (64, 48), np.uint8), big.w.scale, axis=1)), False),
    ):
        folder = packed(group.model())
        blob, made = host_model(open_pack(folder))
        [product] = [n for n in onnx.ModelProto.FromString(blob).graph.node if n.op_type == "QLinearMatMul"]
        assert (product.input[3] not in made.arrays) == mapped
        assert len(blob) < 64 * 48
        name = open_pack(folder).manifest.tensors[0].name
        found = operand(open_pack(folder), name).codes
        assert found.dtype == np.int8
        w = group.w.codes
        np.testing.assert_array_equal(found, w if w.dtype == np.int8 else (w ^ 128).view(np.int8))


def test_the_codes_in_the_pack_are_the_models_own_bytes(packed: Make, rng: Any) -> None:
    group = ordinary(rng)
    pack = open_pack(packed(group.model()))
    assert pack.field(pack.manifest.tensors[0].fields["codes"]).tobytes() == group.w.codes.tobytes()


# -- several readers -----------------------------------------------------------------------------------------------


def shared_graph(rng: Any, y_is_output: bool) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """x quantized once and read by two groups and an Add; the first group's codes go on into a third."""
    k = 16
    tensors = [tensor(f"w{i}", codes(rng, (k, k), np.int8)) for i in range(3)]
    tensors += [
        tensor("s", F32(0.02)),
        tensor("sw", np.full(k, 0.01, F32)),
        tensor("sy", F32(0.09)),
        tensor("z", np.int8(5)),
    ]
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["x_q"]),
        node("DequantizeLinear", ["x_q", "s", "z"], ["x_dq"]),
        *(node("DequantizeLinear", [f"w{i}", "sw"], [f"w{i}_dq"], axis=1) for i in range(3)),
        node("MatMul", ["x_dq", "w0_dq"], ["a"], "site0"),
        node("QuantizeLinear", ["a", "sy", "z"], ["a_q"]),
        node("DequantizeLinear", ["a_q", "sy", "z"], ["a_dq"]),
        node("MatMul", ["x_dq", "w1_dq"], ["b"], "site1"),
        node("MatMul", ["a_dq", "w2_dq"], ["c"], "site2"),
        node("QuantizeLinear", ["c", "sy", "z"], ["c_q"]),
        node("DequantizeLinear", ["c_q", "sy", "z"], ["c_dq"]),
        node("Add", ["x_dq", "c_dq"], ["y"]),
        node("Add", ["b", "a_dq"], ["y2"]),
        node("Relu", ["b"], ["y3"]),
    ]
    outputs = ["y", "y2", "y3", *(["a_q", "x_q"] if y_is_output else [])]
    types = {"a_q": TensorProto.INT8, "x_q": TensorProto.INT8}
    proto = model(nodes, tensors, [value("x", ["m", k])], outputs, opset=17, types=types)
    return proto, {"x": rng.standard_normal((4, k)).astype(F32)}


@pytest.mark.parametrize("y_is_output", [False, True])
def test_shared_codes_and_chains_of_groups(packed: Make, both: Make, rng: Any, y_is_output: bool) -> None:
    proto, feed = shared_graph(rng, y_is_output)
    folder = packed(proto, groups=3)
    pair = both(folder)
    found = pair.run(feed)
    options = basic_options()
    wanted = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feed)
    for a, b, step in zip(found, wanted, (0.09, 0.09, 0, 1, 0), strict=False):
        np.testing.assert_allclose(a, b, atol=1.01 * step + 1e-5)
    assert pair.reference.coverage().where == {"reference": 3, "unbound": 0}
    kept = operators(lowered(folder))
    assert kept["QuantizeLinear"] == (2 if y_is_output else 1)
    assert kept["Cast"] == (2 if y_is_output else 0)  # only a result that is an output is converted, at opset 17
    assert kept["QLinearMatMul"] == 2
    assert kept["MatMulIntegerToFloat"] == 1


def test_a_group_in_a_branch(packed: Make, both: Make, rng: Any) -> None:
    k = 8
    inner = [
        node("DequantizeLinear", ["w", "s"], ["w_dq"]),
        node("DequantizeLinear", ["x", "s", "z"], ["x_dq"]),
        node("MatMul", ["x_dq", "w_dq"], ["p"]),
        node("QuantizeLinear", ["p", "s", "z"], ["r"]),
    ]
    kinds = TensorProto.INT8
    then = helper.make_graph(inner, "then", [], [value("r", None, kinds)])
    other = helper.make_graph([node("Identity", ["x"], ["r2"])], "other", [], [value("r2", None, kinds)])
    proto = model(
        [node("If", ["flag"], ["y"], then_branch=then, else_branch=other)],
        [tensor("w", codes(rng, (k, k), np.int8)), tensor("s", F32(0.02)), tensor("z", np.int8(-3))],
        [value("flag", [], TensorProto.BOOL), value("x", ["m", k], kinds)],
        opset=17,
        types={"y": kinds},
    )
    pair = both(packed(proto))
    x = codes(rng, (3, k), np.int8)
    w = onnx.numpy_helper.to_array(proto.graph.initializer[0])
    group = Group(Quantized(x, F32(0.02), np.int8(-3)), Quantized(w, F32(0.02)), F32(0.02), np.int8(-3))
    np.testing.assert_array_equal(pair.run({"flag": np.array(True), "x": x})[0], group.expected())
    np.testing.assert_array_equal(pair.run({"flag": np.array(False), "x": x})[0], x)
    assert pair.reference.coverage().where == {"host": 1, "unbound": 0}


def test_the_rest_of_a_gemm_stays_an_operator_of_its_own(packed: Make, both: Make, rng: Any) -> None:
    """alpha, beta and a C that is fed: the group gives float, and what follows is as for a float Gemm."""
    group = ordinary(rng, m=3, op="Gemm", y_scale=None)
    for alpha, beta, fed in ((0.5, 1.0, False), (1.0, -2.0, False), (1.0, 1.0, True), (2.0, 0.0, True)):
        proto = group.but(bias=rng.standard_normal(10).astype(F32)).model()
        [site] = [n for n in proto.graph.node if n.name == "site"]
        site.attribute.extend([helper.make_attribute("alpha", alpha), helper.make_attribute("beta", beta)])
        feed = group.feed()
        c = np.array(onnx.numpy_helper.to_array(next(t for t in proto.graph.initializer if t.name == "bias")))
        if fed:
            kept = [t for t in proto.graph.initializer if t.name != "bias"]
            del proto.graph.initializer[:]
            proto.graph.initializer.extend(kept)
            proto.graph.input.append(value("bias", [10]))
            feed["bias"] = c
        [y] = both(packed(proto)).run(feed)
        wanted = group.expected() * F32(alpha) + (c * F32(beta) if beta else F32(0))
        np.testing.assert_array_equal(y, wanted)


def test_rows_that_do_not_fit_their_scales_are_an_error_and_never_spread(packed: Make, rng: Any) -> None:
    group = ordinary(rng, x_shape=["m", 24], y_scale=None)
    group = group.but(x=Quantized(group.x.codes, np.full(5, 0.02, F32), axis=0))
    folder = packed(group.model())
    for device in ("host", "reference"):
        with pytest.raises(Exception, match=r"scale"):
            onnxpack.load(folder, device, basic_options()).run(None, {"x": group.x.codes[:1]})


# -- weight only ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["kn", "transpose"])
@pytest.mark.parametrize("w_type", [np.int8, np.uint8])
@pytest.mark.parametrize("zeros", ["none", "one", "columns"])
def test_weight_only_sites(packed: Make, both: Make, rng: Any, w_type: Any, zeros: str, stored: str) -> None:
    """Activations as at a float site; codes, scales and zero points are the graph's own."""
    k, n = 40, 12
    w = codes(rng, (k, n), w_type)
    scale = np.linspace(0.001, 0.02, n, dtype=F32) if zeros != "one" else F32(0.004)
    zero = {"none": None, "one": w_type(77), "columns": codes(rng, (n,), w_type)}[zeros]
    q = Quantized(w, scale, zero, axis=1 if np.ndim(scale) else None)
    turned = stored == "transpose"
    names = ["w", "s"] + ([] if zero is None else ["z"])
    axis = {"axis": 0 if turned else 1} if np.ndim(scale) else {}
    nodes = [node("DequantizeLinear", names, ["w_dq"], **axis)]
    nodes += [node("Transpose", ["w_dq"], ["w_t"])] if turned else []
    nodes += [node("MatMul", ["x", "w_t" if turned else "w_dq"], ["y"])]
    tensors = [tensor("w", w.T if turned else w), tensor("s", scale)]
    tensors += [] if zero is None else [tensor("z", np.asarray(zero))]
    pair = both(packed(model(nodes, tensors, [value("x", ["m", k])], opset=17)))
    x = rng.standard_normal((6, k)).astype(F32)
    x[2] = 0
    [y] = pair.run({"x": x})
    s_a = np.where((amax := np.abs(x).max(axis=1)) == 0, F32(2.0**-126), (amax / F32(127)).astype(F32))[:, None]
    acc = np.rint(x / s_a).astype(np.int64) @ q.differences
    np.testing.assert_array_equal(y, (acc.astype(F32) * q.spread(scale, F32)) * s_a)


# -- trace ---------------------------------------------------------------------------------------------------------


def test_the_trace_says_what_a_group_is(packed: Make, rng: Any) -> None:
    plain = ordinary(rng)
    rows = Quantized(plain.x.codes, np.full(5, 0.02, F32), np.arange(5, dtype=np.int8), axis=0)
    for group, facts in (
        (plain, "qdq sx=1 zp_x=0 sw=10 zp_w=0 zp_y=-7"),
        (plain.but(y_scale=None), "qdq sx=1 zp_x=0 sw=10 zp_w=0 float out"),
        (plain.but(x=rows), "qdq sx=5 zp_x=5 sw=10 zp_w=0 zp_y=-7 colsum k=24 n=10"),
        (plain.but(bias=np.ones(10, np.int32)), "qdq sx=1 zp_x=0 sw=10 zp_w=0 zp_y=-7 bias=int32"),
    ):
        for device in ("host", "reference"):
            session = onnxpack.load(packed(group.model()), device)
            session.run(None, group.feed())
            [record] = session.trace()
            assert (record.run, record.where, record.rows, record.facts) == (1, device, 5, facts)


def test_column_sums_are_made_only_for_zero_points_and_once(packed: Make, rng: Any) -> None:
    for zero, needed in ((None, False), (np.int8(-40), True)):
        group = ordinary(rng)
        group = group.but(x=Quantized(group.x.codes, F32(0.02), zero))
        pack = open_pack(packed(group.model()))
        weight = operand(pack, pack.manifest.tensors[0].name)
        [record] = [site.qdq for site in pack.manifest.sites if site.qdq is not None]
        assert signed_zero_points(record.x_zero_point, "int8").any() == needed
        multiply_codes(group.x.codes, weight, record, None)
        assert ("column_sums" in vars(weight)) == needed
        if needed:
            first = weight.column_sums
            multiply_codes(group.x.codes, weight, record, None)
            assert weight.column_sums is first


# -- records that do not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x_scale": []}, "0 scales"),
        ({"x_scale": [0.1, 0.2]}, "2 scales"),
        ({"x_zero_point": [1, 2]}, "2 zero points"),
        ({"x_zero_point": [300]}, "zero point"),
        ({"x_axis": -1}, "axis -1"),
        ({"x": "nowhere"}, "nowhere"),
        ({"requantize": {"node": "nobody", "scale": 1.0, "zero_point": 0, "dtype": "int8"}}, "nobody"),
        ({"requantize": {"node": "site", "scale": 1.0, "zero_point": 0, "dtype": "int8"}}, "site"),
        ({"bias": {"value": "w", "dtype": "int32", "node": "q_y"}}, "q_y"),
    ],
)
@pytest.mark.parametrize("device", ["host", "reference"])
def test_a_record_that_does_not_fit_is_one_error(
    packed: Make, rng: Any, change: dict[str, Any], says: str, device: str
) -> None:
    folder = packed(ordinary(rng).model())
    file = folder / "pack.json"
    manifest = json.loads(file.read_text())
    manifest["sites"][0]["qdq"].update(change)
    file.write_text(json.dumps(manifest))
    with pytest.raises(PackError, match=says):
        onnxpack.load(folder, device)


def test_an_old_opset_says_to_build_again(packed: Make, rng: Any) -> None:
    folder = packed(ordinary(rng, domain=MICROSOFT, opset=10).model())
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for entry in proto.opset_import:
        entry.version = 9 if entry.domain == "" else entry.version
    blob = proto.SerializeToString()
    assert len(blob) == (folder / "model.onnx").stat().st_size
    (folder / "model.onnx").write_bytes(blob)
    with pytest.raises(PackError, match="opset 9 has no integer products"):
        onnxpack.load(folder, "host")


def test_com_microsoft_groups_below_opset_10_run_as_their_own_nodes(packed: Make, rng: Any) -> None:
    """Weight-only sites of that age still run on int8."""
    group = ordinary(rng, domain=MICROSOFT, opset=9)
    proto = group.model()
    [site] = onnxpack.census(_saved(proto, packed(ordinary(rng).model()).parent)).sites
    assert (site.reason, site.detail) == ("unsupported-op", "MatMul_0: opset 9 has no integer products")


# -- real exports --------------------------------------------------------------------------------------------------


def _models(shared: Path) -> list[Path]:
    found = sorted((shared / "models/quark_small").glob("[axuw]*8*.onnx"))
    found += sorted((shared / "models/quantized_a").glob("*a8w8*.onnx"))
    found += sorted((shared / "models/edge").glob("i*.onnx"))
    found += [shared / "models/real/winml_resnet_w8a8/model.onnx"]
    return [path for path in found if "a16" not in path.name and not path.name.startswith(("i20", "i21"))]


def test_every_group_of_every_real_export(shared: Path, tmp_path: Path) -> None:
    """Each group by itself, on random codes, beside the nodes that it stands for."""
    groups = exact = total = 0
    for path in _models(shared):
        out = tmp_path / "model.pack"
        onnxpack.build(path, out, force=True)
        pack, proto = open_pack(out), onnx.load(out / "model.onnx")
        makers = {n.name: n for n in proto.graph.node}
        typed = onnx.shape_inference.infer_shapes(proto)
        for site in pack.manifest.sites:
            record = site.qdq
            if site.weight is None or record is None or record.x is None or record.x_dtype is None:
                continue
            last = record.requantize or record.bias
            name = site.node if last is None or last.node is None else last.node
            part = _cut_out(typed, record.x, makers[name].output[0], record.x_dtype, record.requantize, site.k)
            m = len(record.x_scale) if len(record.x_scale) > 1 else 7
            x = codes(np.random.default_rng(groups), (m, int(site.k or 0)), record.x_dtype)
            wanted = stock(part, {record.x: x}).astype(np.float64)
            values = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
            bias = None if record.bias is None else values[record.bias.value]
            found = multiply_codes(x, operand(pack, site.weight), record, bias).astype(np.float64)
            step = 1 if record.requantize else 1e-5 * np.abs(wanted).max()
            assert np.abs(found - wanted).max() <= step, (path.name, site.path)
            groups, total = groups + 1, total + found.size
            exact += int((found == wanted).sum())
    assert groups > 140
    assert exact / total > 0.98


def _cut_out(proto: onnx.ModelProto, x: str, y: str, dtype: str, requantize: Any, k: Any) -> onnx.ModelProto:
    """The part of a graph between two values, as a model."""
    makers = {out: n for n in proto.graph.node for out in n.output}
    nodes: list[onnx.NodeProto] = []
    pending = [y]
    while pending:
        name = pending.pop()
        if name == x or name not in makers or makers[name] in nodes:
            continue
        nodes.insert(0, makers[name])
        pending += makers[name].input
    nodes.sort(key=lambda n: [m.output[0] for m in proto.graph.node].index(n.output[0]))
    read = {name for n in nodes for name in n.input}
    tensors = [t for t in proto.graph.initializer if t.name in read and t.name != x]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(requantize.dtype if requantize else "float32"))
    graph = helper.make_graph(
        nodes,
        "part",
        [value(x, None, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))],
        [value(y, None, kind)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["BASIC", "ALL"])
def test_whole_exports_are_the_same_on_both_devices(shared: Path, tmp_path: Path, level: str) -> None:
    for path in _models(shared):
        if level == "ALL" and "quantized_a" not in str(path):
            continue
        out = tmp_path / "model.pack"
        onnxpack.build(path, out, force=True)
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        sessions = [onnxpack.load(out, device, options) for device in ("host", "reference")]
        rng, feed = np.random.default_rng(3), {}
        for entry in sessions[0].get_inputs():
            shape = [d if isinstance(d, int) else 9 for d in entry.shape]
            numbers = rng.integers(0, 200, shape) if "int" in entry.type else rng.standard_normal(shape)
            dtype = {"float": "float32"}.get(entry.type[7:-1], entry.type[7:-1])
            feed[entry.name] = numbers.astype(dtype)
        host, reference = (session.run(None, feed) for session in sessions)
        for a, b in zip(host, reference, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=path.name)


@pytest.mark.slow
def test_all_197_groups_of_a_qwen3_shaped_export(tmp_path: Path) -> None:
    """28 layers as quantizers write them, in small: every product is one group, the head too, on both devices."""
    script = Path(__file__).resolve().parents[2] / "benchmarks/make_qwen3.py"
    source = tmp_path / "qwen3.onnx"
    command = [sys.executable, str(script), str(source), "--tiny", "--a8w8", "--layers", "28"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    weights = [site for site in onnxpack.census(source).sites if site.kind == "weight"]
    assert len([site for site in weights if site.qdq is not None]) == len(weights) == 197
    onnxpack.build(source, tmp_path / "model.pack")
    made = operators(lowered(tmp_path / "model.pack"))
    assert made["QLinearMatMul"] == 197
    host, reference = (onnxpack.load(tmp_path / "model.pack", d, basic_options()) for d in ("host", "reference"))
    assert host.coverage().where["host"] == reference.coverage().where["reference"] == 197
    feed = {"input_ids": np.random.default_rng(0).integers(0, 300, (1, 11))}
    found, wanted = host.run(None, feed)[0], reference.run(None, feed)[0]
    np.testing.assert_array_equal(found, wanted)
    assert np.unique(found).size > 30
