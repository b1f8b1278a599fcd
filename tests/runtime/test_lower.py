"""The lowered graph: what it is made of, what it shares, what it leaves alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxpack.errors import PackError
from onnxpack.pack.manifest import SiteRecord
from onnxpack.pack.read import open_pack
from onnxpack.runtime.graphs import walk
from onnxpack.runtime.host import host_model
from onnxpack.runtime.session import load

Make = Callable[..., Any]


def info(name: str, shape: Any = None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def node(op: str, inputs: list[str], output: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name or output, **attributes)


def lowered(folder: Path) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(host_model(open_pack(folder))[0])


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for *_, graph in walk(model.graph) for n in graph.node)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_form_of_one_site(pack: Make) -> None:
    made = lowered(pack([node("MatMul", ["x", "w"], "y")], [info("x")], [info("y")], {"w": normal(16, 8)}))
    assert operators(made) == {
        "ReduceMax": 1,
        "ReduceMin": 1,
        "Neg": 1,
        "Max": 1,
        "MatMul": 1,  # by zeros, for rows that are not finite
        "Add": 1,
        "Div": 2,
        "QuantizeLinear": 1,
        "MatMulIntegerToFloat": 1,
        "Mul": 1,
    }
    assert [value.name for value in made.graph.output] == ["y"]


@pytest.mark.parametrize("opset", [7, 9, 13, 17, 18, 21, 23])
def test_every_added_operator_has_a_schema_at_the_opset(pack: Make, opset: int) -> None:
    nodes = [node("Gemm", ["x", "w", "c"], "y", alpha=0.5, beta=2.0, transA=1)]
    inputs = [info("x", [16, 4]), info("c", [8])]
    made = lowered(pack(nodes, inputs, [info("y")], {"w": normal(16, 8)}, opset=opset))
    for *_, graph in walk(made.graph):
        for n in graph.node:
            if n.domain == "":
                assert onnx.defs.has(n.op_type, n.domain)
                since = onnx.defs.get_schema(n.op_type, opset, n.domain).since_version
                assert since <= opset
    assert {n.domain for n in made.graph.node} <= {"", "com.microsoft"}


def test_no_weight_is_in_the_bytes_and_the_decoder_is_gone(pack: Make) -> None:
    folder = pack([node("MatMul", ["x", "w"], "y")], [info("x")], [info("y")], {"w": normal(256, 512)})
    data, needs = host_model(open_pack(folder))
    made = onnx.ModelProto.FromString(data)
    assert len(data) < 8192
    assert not needs.arrays
    assert "DequantizeLinear" not in operators(made)
    external = [t for t in made.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert sorted(t.name for t in external) == ["w/codes", "w/scales"]


def test_sites_of_one_input_share_its_codes(pack: Make, both: Make) -> None:
    nodes = [node("MatMul", ["x", w], f"y{w}") for w in ("q", "k", "v")]
    nodes.append(node("Gemm", ["x", "q"], "again"))
    nodes.append(node("MatMul", ["z", "q"], "other"))
    ws = {"q": normal(32, 32), "k": normal(32, 16), "v": normal(32, 24)}
    outputs = [info(n.output[0]) for n in nodes]
    folder = pack(nodes, [info("x", ["m", 32]), info("z", ["n", 32])], outputs, ws)
    count = operators(lowered(folder))
    assert count["QuantizeLinear"] == count["ReduceMax"] == 2
    assert count["MatMulIntegerToFloat"] == 5
    both(folder).run({"x": normal(6, 32), "z": normal(3, 32)})


def test_a_decoder_that_others_read_stays(pack: Make, both: Make) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "y"),
        node("Gather", ["w", "i"], "rows", axis=0),
        node("MatMul", ["x", "v"], "u"),
    ]
    folder = pack(
        nodes,
        [info("x", ["m", 8]), info("i", ["n"], TensorProto.INT64)],
        [info("y"), info("rows"), info("u"), info("v")],
        {"w": normal(8, 4), "v": normal(8, 6)},
    )
    assert operators(lowered(folder))["DequantizeLinear"] == 2
    y, rows, _, v = both(folder).run({"x": normal(3, 8), "i": np.array([1, 7])})
    assert rows.shape == (2, 4)
    assert v.shape == (8, 6)
    assert y.shape == (3, 4)


def test_two_sites_on_one_weight_hold_it_once(pack: Make, both: Make) -> None:
    nodes = [node("MatMul", ["x", "w"], "h"), node("MatMul", ["h", "w"], "y")]
    folder = pack(nodes, [info("x", ["m", 8])], [info("y")], {"w": normal(8, 8)})
    names = [t.name for t in lowered(folder).graph.initializer]
    assert names.count("w/codes") == 1
    both(folder).run({"x": normal(4, 8)})


GEMM_C = [None, [], [1], [12], [1, 12], [5, 1], [1, 1], [5, 12]]


@pytest.mark.parametrize("opset", [7, 11, 13, 18])
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("alpha_beta", [(1.0, 1.0), (0.37, -1.3), (2.0, 0.0), (1.0, 3.0), (0.0, 1.0)])
def test_gemm(pack: Make, both: Make, opset: int, trans_a: int, alpha_beta: tuple[float, float]) -> None:
    alpha, beta = alpha_beta
    w, a = normal(20, 12), normal(5, 20)
    nodes, feeds, inputs = [], {"a": a.T.copy() if trans_a else a}, [info("a", [None, None])]
    for index, shape in enumerate(GEMM_C):
        operands = ["a", "w"]
        if shape is not None:
            operands.append(f"c{index}")
            inputs.append(info(f"c{index}", shape))
            feeds[f"c{index}"] = normal(*shape) if shape else np.array(0.7, np.float32)
        elif opset >= 11:
            operands.append("")
        nodes.append(node("Gemm", operands, f"y{index}", alpha=alpha, beta=beta, transA=trans_a))
    if opset < 11:  # C was not optional then
        nodes, inputs = nodes[1:], inputs
    made = both(pack(nodes, inputs, [info(n.output[0]) for n in nodes], {"w": w}, opset=opset))
    results = made.run(feeds)
    exact = a @ w
    for n, y in zip(nodes, results, strict=True):
        c = feeds.get(n.input[2], np.float32(0)) if len(n.input) > 2 else np.float32(0)
        wanted = np.float32(alpha) * exact + np.float32(beta) * c
        assert np.abs(y - wanted).max() <= 0.02 * max(1.0, np.abs(wanted).max())


def test_gemm_equals_its_parts_in_this_order(pack: Make, both: Make) -> None:
    """y = alpha * (a @ w) + beta * c: each step rounded to float32, nothing folded into a scale."""
    w, a, c = normal(20, 12), normal(5, 20), normal(5, 12)
    nodes = [node("Gemm", ["a", "w", "c"], "y", alpha=0.37, beta=-1.3), node("MatMul", ["a", "w"], "p")]
    folder = pack(nodes, [info("a", [5, 20]), info("c", [5, 12])], [info("y"), info("p")], {"w": w})
    y, p = both(folder).run({"a": a, "c": c})
    np.testing.assert_array_equal(y, p * np.float32(0.37) + c * np.float32(-1.3))


def test_beta_zero_does_not_read_c(pack: Make, both: Make) -> None:
    nodes = [node("Gemm", ["a", "w", "c"], "y", beta=0.0)]
    folder = pack(nodes, [info("a", [2, 4]), info("c", [3])], [info("y")], {"w": normal(4, 3)})
    [y] = both(folder).run({"a": normal(2, 4), "c": np.full(3, np.nan, np.float32)})
    assert np.isfinite(y).all()


def test_bodies_of_if_loop_and_scan(pack: Make, both: Make) -> None:
    folder, feeds = bodies_pack(pack)
    for flag in (True, False):
        made = both(folder)
        results = made.run(feeds | {"flag": np.array(flag)})
        assert [r.shape for r in results] == [(3, 8), (3, 8), (4, 3, 8)]
        assert made.host.coverage().where["host"] == 5
        assert made.reference.coverage().where == {"reference": 1, "host": 4, "unbound": 0}
    count = operators(lowered(folder))
    assert count["MatMulIntegerToFloat"] == 5
    assert "DequantizeLinear" not in count


def bodies_pack(pack: Make) -> tuple[Path, dict[str, np.ndarray]]:
    """Sites in both branches of an If (one of them nested), in a Loop and in a Scan, on weights from outside."""
    inner_then = helper.make_graph([node("MatMul", ["h", "v"], "deep", "nested")], "inner_then", [], [info("deep")])
    inner_else = helper.make_graph([node("Identity", ["h"], "flat")], "inner_else", [], [info("flat")])
    then = helper.make_graph(
        [node("If", ["flag"], "t", "inner_if", then_branch=inner_then, else_branch=inner_else)], "then", [], [info("t")]
    )
    other = helper.make_graph([node("MatMul", ["h", "w"], "e", "else_site")], "else", [], [info("e")])
    loop = helper.make_graph(
        [
            node("MatMul", ["state", "w"], "wide", "loop_site"),
            node("Tanh", ["wide"], "next"),
            node("Identity", ["again"], "go_on"),
        ],
        "loop",
        [info("step", [], TensorProto.INT64), info("again", [], TensorProto.BOOL), info("state")],
        [info("go_on", [], TensorProto.BOOL), info("next")],
    )
    scan = helper.make_graph(
        [node("MatMul", ["row", "v"], "out", "scan_site")], "scan", [info("row", ["m", 8])], [info("out", ["m", 8])]
    )
    nodes = [
        node("MatMul", ["x", "w"], "h", "main_site"),
        node("If", ["flag"], "chosen", "if", then_branch=then, else_branch=other),
        node("Loop", ["trips", "", "h"], "looped", "loop", body=loop),
        node("Scan", ["stack"], "scanned", "scan", body=scan, num_scan_inputs=1),
    ]
    names = {"main_site": "w", "nested": "v", "else_site": "w", "loop_site": "w", "scan_site": "v"}
    sites = [
        SiteRecord(f"body/{name}", name, "MatMul", "weight", "m", 8, 8, "float32", weight=w, reason="in-subgraph")
        for name, w in names.items()
    ]
    folder = pack(
        nodes,
        [
            info("x", ["m", 8]),
            info("flag", [], TensorProto.BOOL),
            info("trips", [], TensorProto.INT64),
            info("stack", [4, "m", 8]),
        ],
        [info("chosen"), info("looped"), info("scanned")],
        {"w": normal(8, 8) / 3, "v": normal(8, 8)},
        sites,
        initializers={},
    )
    return folder, {"x": normal(3, 8), "trips": np.array(3), "stack": normal(4, 3, 8)}


def test_unknown_and_vendor_parts_survive(pack: Make) -> None:
    function = helper.make_function(
        "local", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    nodes = [
        helper.make_node("Twice", ["x"], ["h"], "call", domain="local"),
        node("MatMul", ["h", "w"], "y"),
    ]
    draft_pack = pack(nodes, [info("x", ["m", 4])], [info("y")], {"w": normal(4, 4)}, functions=[function])
    made = lowered(draft_pack)
    assert [f.name for f in made.functions] == ["Twice"]
    x = normal(2, 4)
    for device in ("host", "reference"):
        [y] = load(draft_pack, device).run(None, {"x": x})
        assert np.abs(y - 2 * x @ normal(4, 4)).max() < 0.2


def test_names_that_are_taken_already(pack: Make, both: Make) -> None:
    nodes = [
        node("Identity", ["x"], "y/a_scale"),
        node("Abs", ["y/a_scale"], "w/codes"),
        node("MatMul", ["w/codes", "w"], "y"),
        node("Identity", ["y"], "onnxpack/zeros_8"),
    ]
    folder = pack(nodes, [info("x", ["m", 8])], [info("onnxpack/zeros_8"), info("y/a_scale")], {"w": normal(8, 8)})
    both(folder).run({"x": normal(2, 8)})


def test_the_integer_kernel_really_runs(pack: Make, tmp_path: Path) -> None:
    """The session's own profile: one MatMulIntegerToFloat, and no float product but the one by [K, 1] zeros."""
    folder = pack([node("MatMul", ["x", "w"], "y", "site")], [info("x", ["m", 64])], [info("y")], {"w": normal(64, 96)})
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = load(folder, "host", session_options=options)
    session.run(None, {"x": normal(5, 64)})
    events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [e["args"] for e in events if e["name"].endswith("_kernel_time")]
    names = [k["op_name"] for k in kernels]
    assert names.count("MatMulIntegerToFloat") == 1
    for args in kernels:
        if args["op_name"] in ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "DequantizeLinear"):
            shapes = [next(iter(entry.values())) for entry in args["input_type_shape"]]
            assert [64, 96] not in shapes
    [product] = [k for k in kernels if k["op_name"] == "MatMulIntegerToFloat"]
    assert product["input_type_shape"][0] == {"uint8": [5, 64]}


def replace(folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """Change model.onnx in place and keep the manifest's sizes right."""
    file = folder / "model.onnx"
    model = onnx.ModelProto.FromString(file.read_bytes())
    change(model)
    file.write_bytes(model.SerializeToString())
    manifest = json.loads((folder / "pack.json").read_text())
    for entry in manifest["files"]:
        entry["nbytes"] = (folder / entry["path"]).stat().st_size
    (folder / "pack.json").write_text(json.dumps(manifest))
    return folder


def rename(model: onnx.ModelProto) -> None:
    next(n for n in model.graph.node if n.op_type == "MatMul").name = "other"


def twice(model: onnx.ModelProto) -> None:
    model.graph.node.add().CopyFrom(next(n for n in model.graph.node if n.op_type == "MatMul"))


def other_op(model: onnx.ModelProto) -> None:
    next(n for n in model.graph.node if n.op_type == "MatMul").op_type = "Add"


def own_domain(model: onnx.ModelProto) -> None:
    model.graph.node.add(op_type="Product", domain="onnxpack", name="p")


def not_text(model: onnx.ModelProto) -> None:
    data = model.SerializeToString().replace(b"w.codes", b"w.c\xffdes")
    model.ParseFromString(data)


def no_number(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "MatMul")
    node.op_type = "Gemm"
    node.attribute.append(helper.make_attribute("alpha", "much"))


def outside(model: onnx.ModelProto) -> None:
    """A file beside the pack, through a decoder that stays because its result is an output."""
    model.graph.output.add(name="w")
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../" + entry.value


def no_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 6


@pytest.mark.parametrize("device", ["host", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, "site node 'y' is not in the graph"),
        (twice, "two nodes are called 'y'"),
        (other_op, "operator 'Add' cannot be bound"),
        (own_domain, "domain 'onnxpack'"),
        (not_text, "not UTF-8"),
        (no_number, "attribute alpha is not a number"),
        (outside, "onnxruntime refuses the graph"),
        (no_opset, "imports no ai.onnx opset"),
        (old_opset, "opset 6"),
    ],
)
def test_a_graph_that_does_not_fit_the_manifest(
    pack: Make, device: Any, change: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = pack([node("MatMul", ["x", "w"], "y")], [info("x", ["m", 4])], [info("y")], {"w": normal(4, 4)})
    with pytest.raises(PackError, match=message):
        load(replace(folder, change), device)
    assert not capfd.readouterr().out


@pytest.mark.parametrize("device", ["host", "reference"])
@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x08:\xff"])
def test_a_graph_file_that_is_no_model(pack: Make, device: Any, data: bytes) -> None:
    folder = pack([node("MatMul", ["x", "w"], "y")], [info("x", ["m", 4])], [info("y")], {"w": normal(4, 4)})
    (folder / "model.onnx").write_bytes(data)
    with pytest.raises(PackError):
        load(replace_sizes(folder), device)


def replace_sizes(folder: Path) -> Path:
    manifest = json.loads((folder / "pack.json").read_text())
    for entry in manifest["files"]:
        entry["nbytes"] = (folder / entry["path"]).stat().st_size
    (folder / "pack.json").write_text(json.dumps(manifest))
    return folder
