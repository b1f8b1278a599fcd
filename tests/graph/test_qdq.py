"""Which quantized products are one site, and for the others which condition failed at which node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_maker import cli, model, node, tensor, value
from onnx import TensorProto, helper
from qdq_models import MICROSOFT, Group, Quantized, codes

import onnxpack
from onnxpack.errors import ModelError
from onnxpack.graph.load import load
from onnxpack.graph.sites import Site, find_sites

F32 = np.float32
K, N, M = 48, 80, 5

EDGE: dict[str, str] = {
    "i01_a8w8_percol": "sx=1 sw=80 zp_x=1 zp_w=80 zp_y=1",
    "i02_a8w8_pertensor": "sx=1 sw=1 zp_x=1 zp_w=1 zp_y=1",
    "i03_a8w8_msft": "sx=1 sw=80 zp_x=1 zp_w=80 zp_y=1",
    "i04_a8w8_asym": "sx=1 sw=80 zp_x=1 zp_w=80 zp_y=1",
    "i05_a8w8_scale_along_K": "scale-along-k DequantizeLinear_1: axis 0 of the weight is K",
    "i06_u8s8": "sx=1 sw=80 zp_x=1 zp_w=80 zp_y=1",
    "i07_u8u8": "sx=1 sw=1 zp_x=1 zp_w=1 zp_y=1",
    "i08_a16w8": "sixteen-bit-activation DequantizeLinear_0: the activation is int16",
    "i09_a16w8_msft": "sixteen-bit-activation DequantizeLinear_0: the activation is int16",
    "i10_pow2": "sx=1 sw=1 zp_x=1 zp_w=1 zp_y=1",
    "i11_scale_shape1": "sx=1 sw=1 zp_x=1 zp_w=1 zp_y=1",
    "i12_bias_int32": "sx=1 sw=80 zp_x=1 zp_w=80 zp_y=1 bias=int32",
    "i13_per_row_act": "sx=5 sw=80 zp_x=5 zp_w=80 zp_y=1",
    "i14_act_scale_along_K": "scale-along-k DequantizeLinear_0: axis 1 of the activation is K",
    "i15_float_output_used": "sx=1 sw=80 zp_x=1 zp_w=0 float out",
    "i16_dq_shared": "weight only sw=80 zp_w=0 float out",
    "i17_dq_also_output": "weight only sw=80 zp_w=0 float out",
    "i18_scale_dynamic": "scale-not-constant DequantizeLinear_0: scale or zero point is computed at run time",
    "i19_scale_zero_nan": "weight only sw=80 zp_w=0 float out",
    "i22_fp16_scale": "unsupported-dtype DequantizeLinear_0: the scale is float16",
}
"""What a claimed group is, or the reason and the condition of a refused one."""

QUARK: dict[str, str] = {
    "a16w8": "sixteen-bit-activation",
    "a8w8_asym_percol": "claimed",
    "a8w8_percol": "claimed",
    "a8w8_percol_matmulonly": "claimed",
    "a8w8_percol_msft": "claimed",
    "a8w8_pertensor": "claimed",
    "a8w8_smoothquant": "claimed",
    "int4_matmulnbits": "packed-elsewhere",
    "int4_matmulnbits_asym": "packed-elsewhere",
    "u8w8_asym": "claimed",
    "w8_only": "claimed",
    "xint8": "claimed",
}
"""The verdict of all five weight products of each export."""


def say(site: Site) -> str:
    """A line for a site, as in the tables above."""
    if site.group is not None:
        return site.group.traits
    return f"{site.reason.value if site.reason else None} {site.detail}"


def sites(proto: onnx.ModelProto) -> list[Site]:
    return find_sites(load(proto))


def only(proto: onnx.ModelProto) -> Site:
    [site] = sites(proto)
    return site


def refused(proto: onnx.ModelProto) -> tuple[str, str]:
    site = only(proto)
    assert site.group is None
    assert not site.bindable
    assert site.reason is not None
    return site.reason.value, site.detail or ""


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture
def plain(rng: np.random.Generator) -> Group:
    """int8 activations, a scale a column, no zero points."""
    x = Quantized(codes(rng, (M, K), np.int8), F32(0.03))
    return Group(x, Quantized(codes(rng, (K, N), np.int8), np.full(N, 0.01, F32), axis=1), F32(0.1), np.int8(-7))


# -- the shared models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDGE)
def test_edge_cases(shared: Path, name: str) -> None:
    found = find_sites(load(shared / f"models/edge/{name}.onnx"))
    assert {say(site) for site in found} == {EDGE[name]}


@pytest.mark.parametrize("name", ["i20_zp_shape_mismatch", "i21_scale_len_mismatch"])
def test_parameters_that_cannot_be_are_one_line_and_exit_3(shared: Path, name: str) -> None:
    done = cli("census", shared / f"models/edge/{name}.onnx")
    assert (done.returncode, done.stdout) == (3, "")
    [line] = done.stderr.splitlines()
    assert "MatMul_0: DequantizeLinear_0: " in line
    assert ("zero point [] and scale [80] differ in shape" if "zp" in name else "axis 1 needs 80 scales") in line


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("name", QUARK)
def test_quark_exports(shared: Path, name: str, opset: int) -> None:
    found = find_sites(load(shared / f"models/quark_small/{name}_opset{opset}.onnx"))
    weights = [site for site in found if site.kind == "weight"]
    verdicts = ["claimed" if s.group is not None else s.reason.value if s.reason else None for s in weights]
    assert verdicts == [QUARK[name]] * 5


@pytest.mark.parametrize(
    ("name", "claimed", "traits"),
    [
        ("a17_quark_a8w8_pertensor_matmulonly", 29, "zp_y=1"),
        ("a_quark_a8w8_perchannel_msft", 28, "zp_y=1"),
        ("a_ort_nbits4_b32_qdq", 0, ""),
    ],
)
def test_quantized_language_models(shared: Path, name: str, claimed: int, traits: str) -> None:
    found = [s for s in find_sites(load(shared / f"models/quantized_a/{name}.onnx")) if s.kind == "weight"]
    assert len(found) == 29
    groups = [site.group for site in found if site.group is not None]
    assert len(groups) == claimed
    assert all(group.traits.endswith(traits) and group.requantize is not None for group in groups)
    rest = {site.reason.value for site in found if site.group is None and site.reason is not None}
    assert rest <= {"block-scales"}


# -- what a group is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["kn", "transpose", "trans_b"])
def test_weights_as_they_are_stored(plain: Group, stored: str) -> None:
    op = "Gemm" if stored == "trans_b" else "MatMul"
    site = only(plain.but(stored=stored, op=op).model())
    assert site.group is not None
    assert (site.k, site.n) == (K, N)
    assert site.group.weight.transposed == (stored != "kn")
    assert site.group.traits == "sx=1 sw=80 zp_x=0 zp_w=0 zp_y=1"


@pytest.mark.parametrize("domain", ["", MICROSOFT])
def test_zero_points_and_scales_of_every_kind(plain: Group, rng: np.random.Generator, domain: str) -> None:
    x = Quantized(plain.x.codes, np.full(M, 0.02, F32), codes(rng, (M,), np.int8), axis=0)
    w = Quantized(codes(rng, (K, N), np.uint8), np.full(N, 0.01, F32), codes(rng, (N,), np.uint8), axis=1)
    group = plain.but(x=x, w=w, domain=domain, y_zero=np.uint8(100))
    found = only(group.model()).group
    assert found is not None
    assert found.traits == "sx=5 sw=80 zp_x=5 zp_w=80 zp_y=1"
    assert found.activation is not None
    assert found.activation.axis == -2


def test_com_microsoft_without_its_import_is_one_line_and_exit_3(plain: Group, tmp_path: Path) -> None:
    proto = plain.but(domain=MICROSOFT).model()
    kept = [entry for entry in proto.opset_import if entry.domain != MICROSOFT]
    del proto.opset_import[:]
    proto.opset_import.extend(kept)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    done = cli("census", tmp_path / "m.onnx")
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert "com.microsoft" in line


def test_an_int32_bias_is_in_the_accumulator_only_in_its_scale(plain: Group) -> None:
    bias = np.arange(N).astype(np.int32)
    proto = plain.but(bias=bias).model()
    assert only(proto).group.bias.in_accumulator  # type: ignore[union-attr]
    for t in proto.graph.initializer:
        if t.name == "bias_scale":
            t.CopyFrom(tensor("bias_scale", onnx.numpy_helper.to_array(t) * F32(1.0000002)))
    found = only(proto).group
    assert found is not None
    assert found.bias is not None
    assert not found.bias.in_accumulator
    assert found.traits.endswith("bias=float")


def test_a_bias_that_could_overflow_the_accumulator_stays_float(plain: Group) -> None:
    site = only(plain.but(bias=np.full(N, 2**31 - 1, np.int32)).model())
    assert site.group is not None
    assert site.group.bias is not None
    assert not site.group.bias.in_accumulator


def test_gemm_c_is_the_bias_where_alpha_and_beta_are_1(plain: Group) -> None:
    group = plain.but(op="Gemm", bias=np.ones(N, F32))
    assert only(group.model()).group.traits == "sx=1 sw=80 zp_x=0 zp_w=0 zp_y=1 bias=float"  # type: ignore[union-attr]
    for name in ("alpha", "beta"):
        proto = group.model()
        [site] = [n for n in proto.graph.node if n.name == "site"]
        site.attribute.append(helper.make_attribute(name, 0.5))
        found = only(proto).group
        assert found is not None
        assert (found.bias, found.requantize) == (None, None)


def test_a_float_result_that_others_read_keeps_its_quantizer_outside(plain: Group) -> None:
    proto = plain.model()
    proto.graph.node.append(node("Relu", ["product"], ["other"]))
    proto.graph.output.append(value("other", None))
    found = only(proto).group
    assert found is not None
    assert found.requantize is None
    assert found.activation is not None


@pytest.mark.parametrize(("scale", "folded"), [(0.1, True), (0.0, False), (np.nan, False), (np.inf, False)])
def test_an_output_scale_that_is_no_scale_is_not_folded(plain: Group, scale: float, folded: bool) -> None:
    found = only(plain.but(y_scale=F32(scale)).model()).group
    assert found is not None
    assert (found.requantize is not None) == folded


def test_shared_dequantizers(plain: Group) -> None:
    """One for the activations of a product and an Add, one for the weight of two products."""
    proto = plain.but(y_scale=None).model()
    proto.graph.node.append(node("Relu", ["x_dq"], ["r"]))
    proto.graph.node.append(node("MatMul", ["r", "w_dq"], ["y2"]))
    proto.graph.output.append(value("y2", None))
    first, second = sites(proto)
    assert first.group is not None
    assert second.group is not None
    assert first.group.activation is not None
    assert second.group.activation is None
    assert first.group.weight.codes is second.group.weight.codes


# -- what is refused -----------------------------------------------------------------------------------------------


def axis_model(shape: list[int], count: int, axis: int | None, of: str = "w") -> onnx.ModelProto:
    """A weight-only product (or one of quantized activations) whose `of` has `count` scales along `axis`."""
    attributes = {} if axis is None else {"axis": axis}
    nodes = [
        node("DequantizeLinear", ["x", "sx"], ["x_dq"], **(attributes if of == "x" else {})),
        node("DequantizeLinear", ["w", "sw"], ["w_dq"], **(attributes if of == "w" else {})),
        node("MatMul", ["x_dq", "w_dq"], ["y"]),
    ]
    tensors = [
        tensor("w", np.ones(shape, np.int8)),
        tensor("sw", np.ones(count if of == "w" else (), F32)),
        tensor("sx", np.ones(count if of == "x" else (), F32)),
    ]
    return model(nodes, tensors, [value("x", ["m", shape[0]], TensorProto.INT8)], opset=21)


def test_the_axis_comes_from_the_attribute_and_never_from_a_length() -> None:
    """microsoft/onnxruntime#28228: a square weight, 64 scales: along N by default, along K where it says so."""
    assert only(axis_model([64, 64], 64, None)).group.weight.scale.shape == (64,)  # type: ignore[union-attr]
    assert only(axis_model([64, 64], 64, 1)).group is not None
    assert only(axis_model([64, 64], 64, -1)).group is not None
    assert refused(axis_model([64, 64], 64, 0))[0] == "scale-along-k"
    assert refused(axis_model([64, 64], 64, -2))[0] == "scale-along-k"


@pytest.mark.parametrize(
    ("count", "axis", "says"), [(47, 1, "48"), (47, -1, "48"), (48, 5, "axis 5"), (48, -3, "axis")]
)
def test_scales_that_do_not_fit_name_node_axis_and_both_lengths(count: int, axis: int, says: str) -> None:
    """microsoft/onnxruntime#17718: accepted at load there, and a failure of the first run."""
    with pytest.raises(ModelError, match=says) as caught:
        onnxpack.census(axis_model([64, 48], count, axis))
    assert "DequantizeLinear_1" in str(caught.value)
    assert str(count) in str(caught.value) or "axis" in str(caught.value)


def test_activation_scales_along_k_and_beyond() -> None:
    assert refused(axis_model([64, 48], 64, None, "x")) == (
        "scale-along-k",
        "DequantizeLinear_0: axis 1 of the activation is K",
    )
    assert only(axis_model([64, 48], 5, 0, "x")).group.activation.axis == -2  # type: ignore[union-attr]
    assert only(axis_model([64, 48], 5, -2, "x")).group.activation.axis == -2  # type: ignore[union-attr]
    assert refused(axis_model([64, 48], 5, 7, "x")) == ("unsupported-op", "DequantizeLinear_0: axis 7 does not exist")


def zero_point_model(zero_points: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], axis: int) -> onnx.ModelProto:
    nodes = [
        node("DequantizeLinear", ["x", "sx", "zx"], ["x_dq"], axis=axis),
        node("DequantizeLinear", ["w", "sw"], ["w_dq"]),
        node("MatMul", ["x_dq", "w_dq"], ["y"]),
    ]
    tensors = [tensor("w", np.ones((K, N), np.int8)), tensor("sw", F32(0.1)), tensor("sx", scale)]
    tensors.append(tensor("zx", zero_points))
    return model(nodes, tensors, [value("x", [M, K], TensorProto.INT8)], opset=21)


def test_a_k_long_zero_point_beside_one_scale() -> None:
    """It passes the checker and fails onnxruntime's first run; so do other lengths that do not fit."""
    proto = zero_point_model(np.zeros(K, np.int8), np.float32(0.1), 1)
    proto.graph.output[0].CopyFrom(value("y", [M, N]))
    onnx.checker.check_model(proto)
    assert refused(proto) == ("zero-point-along-k", "DequantizeLinear_0: axis 1 of the activation is K")
    found = refused(zero_point_model(np.zeros(M, np.int8), np.float32(0.1), 0))
    assert found == ("unsupported-op", "DequantizeLinear_0: 1 scales and 5 zero points")
    found = refused(zero_point_model(np.int8(3), np.full(M, 0.1, F32), 0))
    assert found == ("unsupported-op", "DequantizeLinear_0: 5 scales and 1 zero points")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_activation_scales_that_are_not_finite(plain: Group, bad: float) -> None:
    found = refused(plain.but(x=Quantized(plain.x.codes, F32(bad))).model())
    assert found == ("unsupported-op", "DequantizeLinear_0: the scale is not finite")


def test_an_activation_of_unknown_rank_with_several_scales(plain: Group) -> None:
    proto = plain.but(x=Quantized(plain.x.codes, np.full(M, 0.02, F32), axis=0)).model()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    reason, detail = refused(proto)
    assert (reason, "rank" in detail) == ("unsupported-op", True)


def test_k_beyond_int32_with_zero_points() -> None:
    for k, zero, reason in ((33025, 1, None), (33026, 1, "k-too-long-for-int32"), (33026, 0, None)):
        x = Quantized(np.zeros((1, k), np.int8), F32(0.1), np.int8(zero))
        site = only(Group(x, Quantized(np.ones((k, 1), np.int8), F32(0.1))).model())
        assert (site.group is None, site.reason and site.reason.value) == (reason is not None, reason or site.reason)


def test_groups_of_opsets_without_integer_products(plain: Group) -> None:
    proto = plain.but(domain=MICROSOFT, opset=9).model()
    assert refused(proto) == ("unsupported-op", "MatMul_0: opset 9 has no integer products")
    assert only(plain.but(domain=MICROSOFT, opset=10).model()).group is not None


@pytest.mark.parametrize("which", ["sx", "sw", "sy"])
def test_scales_that_are_fed(plain: Group, which: str) -> None:
    """Activation or weight: refused, with the node. Result: its QuantizeLinear stays outside."""
    proto = plain.model()
    name = {"sx": "x_scale", "sw": "w_scale", "sy": "y_scale"}[which]
    kept = [t for t in proto.graph.initializer if t.name != name]
    shape = [N] if which == "sw" else []
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    proto.graph.input.append(value(name, shape))
    if which == "sy":
        found = only(proto).group
        assert found is not None
        assert found.requantize is None
    else:
        at = {"sx": 0, "sw": 1}[which]
        says = f"DequantizeLinear_{at}: scale or zero point is computed at run time"
        assert refused(proto) == ("scale-not-constant", says)


def test_the_census_names_the_failing_condition(shared: Path) -> None:
    done = cli("census", "--qdq", shared / "models/edge/i05_a8w8_scale_along_K.onnx")
    assert done.returncode == 0
    assert "0 taken as one site, 1 refused" in done.stdout
    assert "DequantizeLinear_1: axis 0 of the weight is K" in done.stdout
