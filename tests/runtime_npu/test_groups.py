"""QDQ groups on the NPU: the graph's own codes go in, the same codes come out; words of the trace; the switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from npu_world import Machine, Model, info, last_run, load, normal, same
from onnx import TensorProto, helper

from onnxpack.errors import EnvironmentFault
from onnxpack.shapes import Gemm

K, N = 64, 48


def quantize(name: str, value: str, out: str, scale: str, zero: str) -> list[Any]:
    return [
        helper.make_node("QuantizeLinear", [value, scale, zero], [f"{out}_codes"], f"q_{name}"),
        helper.make_node("DequantizeLinear", [f"{out}_codes", scale, zero], [out], f"dq_{name}"),
    ]


def grouped(x_zero: Any, y_zero: Any, *, w_zero: int = 0, bias: str | None = None) -> Model:
    """x -> codes -> product with int8 codes per column -> codes -> another one that ends in float."""
    rng = np.random.default_rng(5)
    codes = rng.integers(-127, 128, (K, N)).astype(np.int8)
    more = rng.integers(-127, 128, (N, K)).astype(np.int8)
    w_scale = rng.uniform(0.001, 0.01, N).astype(np.float32)
    constants = {
        "x_scale": np.float32(0.03), "x_zero": x_zero, "y_scale": np.float32(0.07), "y_zero": y_zero,
        "w_codes": codes, "w_scale": w_scale, "w_zero": np.full(N, w_zero, np.int8),
        "v_codes": more, "v_scale": np.float32(0.004), "v_zero": np.int8(0),
        "b_codes": rng.integers(-5000, 5000, N).astype(np.int32), "b_scale": np.float32(0.03) * w_scale,
        "b_float": normal(N, seed=9),
    }  # fmt: skip
    nodes = quantize("x", "x", "xd", "x_scale", "x_zero")
    nodes.append(helper.make_node("DequantizeLinear", ["w_codes", "w_scale", "w_zero"], ["w"], "dq_w", axis=1))
    nodes.append(helper.make_node("MatMul", ["xd", "w"], ["p"], "first"))
    last = "p"
    if bias is not None:
        if bias == "int32":
            nodes.append(helper.make_node("DequantizeLinear", ["b_codes", "b_scale"], ["b"], "dq_b", axis=0))
        last = "biased"
        nodes.append(helper.make_node("Add", ["p", "b" if bias == "int32" else "b_float"], [last], "bias"))
    nodes += quantize("y", last, "yd", "y_scale", "y_zero")
    nodes.append(helper.make_node("DequantizeLinear", ["v_codes", "v_scale", "v_zero"], ["v"], "dq_v"))
    nodes.append(helper.make_node("MatMul", ["yd", "v"], ["z"], "second"))
    used = {name for node in nodes for name in node.input}
    outputs = [info("z"), info("yd_codes", None, helper.np_dtype_to_tensor_dtype(np.asarray(y_zero).dtype))]
    kernels = [Gemm(16, K, N), Gemm(16, N, K)]
    return Model(nodes, [info("x", ["b", "t", K])], outputs, {k: v for k, v in constants.items() if k in used}, kernels)


CASES: dict[str, Model] = {
    "symmetric": grouped(np.int8(0), np.int8(0)),
    "int8": grouped(np.int8(-40), np.int8(7)),
    "uint8": grouped(np.uint8(130), np.uint8(3)),
    "zero points in the weight": grouped(np.int8(-40), np.int8(7), w_zero=5),
    "int32 bias": grouped(np.uint8(130), np.uint8(100), bias="int32"),
    "float bias": grouped(np.uint8(120), np.int8(-3), bias="float32"),
}


def feeds(rows: int) -> dict[str, Any]:
    return {"x": normal(1, rows, K, seed=rows) * 2}


@pytest.mark.parametrize("case", sorted(CASES))
def test_groups_give_the_same_codes(machine: Machine, tmp_path: Path, case: str) -> None:
    pack = CASES[case].pack(tmp_path)
    npu, host, reference = load(pack, strict=True), load(pack, "host"), load(pack, "reference")
    assert npu.coverage().counters["qdq_groups"] == 2
    for rows in (16, 40, 40, 40, 16):
        found = npu.run(None, feeds(rows))
        same(found, host.run(None, feeds(rows)))
        same(found, reference.run(None, feeds(rows)))
        assert {f[0] for f in last_run(npu).values()} == {("npu", rows, None, "qdq")}
    assert len(np.unique(found[1])) > 20
    npu.run(None, feeds(15))
    assert {f[0] for f in last_run(npu).values()} == {("host", 15, "below-row-threshold", "npu_qdq_host_rows")}


def test_faults_of_groups(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = CASES["zero points in the weight"].pack(tmp_path)
    npu, host = load(pack), load(pack, "host")
    machine.fault = lambda launch: "half"
    for rows in (16, 40, 40, 40):
        same(npu.run(None, feeds(rows)), host.run(None, feeds(rows)))
    assert {f[0] for f in last_run(npu).values()} == {("host", 40, "untouched", "npu_qdq_fallback")}
    assert npu.coverage().counters["fallback"] == 8
    monkeypatch.setenv("ONNXPACK_STRICT", "1")
    with pytest.raises(EnvironmentFault):
        load(pack).run(None, feeds(16))


def test_words_on_stderr(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONNXPACK_TRACE", "1")
    npu = load(CASES["int8"].pack(tmp_path))
    for rows in (16, 16, 5):
        npu.run(None, feeds(rows))
    machine.fault = lambda launch: "abort"
    npu.run(None, feeds(16))
    lines = [line.removeprefix("onnxpack: ") for line in capfd.readouterr().err.splitlines()]
    assert lines[0] == "claimed=2 qdq_groups=2 min=16"
    first = next(line for line in lines if line.startswith("qdq sx="))
    assert "sx=1 zp_x=-40 sw=48" in first
    assert "zp_y=7" in first
    assert sum(line.startswith("qdq_colsum k=64 n=48") for line in lines) == 1
    assert sum(line.startswith("qdq m=16 k=64 n=48") for line in lines) == 2
    assert "npu_qdq_host_rows m=5 k=64 n=48 min=16 sites=MatMul_0" in lines
    assert "npu_qdq_fallback m=16 k=64 n=48 why=state sites=MatMul_0" in lines


def test_groups_can_be_left_to_the_graph(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = CASES["int8"].pack(tmp_path)
    monkeypatch.setenv("ONNXPACK_QDQ", "0")
    for device in ("npu", "host", "reference"):
        session = load(pack, device)
        session.run(None, feeds(16))
        assert session.coverage().bound == 0
        assert session.coverage().reasons == {"switched-off": 2}
        assert any("ONNXPACK_QDQ=0" in str(record.reason) for record in session.trace())
    assert machine.launches == 0


def test_refused_groups_are_counted(machine: Machine, tmp_path: Path) -> None:
    model = CASES["int8"]
    nodes = [
        *model.nodes,
        helper.make_node("DequantizeLinear", ["u_codes", "u_scale", "u_zero"], ["u"], "dq_u", axis=0),
        helper.make_node("MatMul", ["xd", "u"], ["r"], "refused"),
    ]
    constants = {
        **model.constants,
        "u_codes": np.ones((K, N), np.int8),
        "u_scale": np.linspace(0.1, 1, K).astype(np.float32),
        "u_zero": np.zeros(K, np.int8),
    }
    outputs = [*model.outputs, info("r", None, TensorProto.FLOAT)]
    npu = load(Model(nodes, model.inputs, outputs, constants, model.kernels).pack(tmp_path))
    facts = [record.facts for record in npu.trace() if record.event == "qdq_refused"]
    assert facts == ["qdq_refused why=scale-along-k count=1"]
