"""Real and made models through the whole build: what stock onnxruntime makes of the pack, and that nothing is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_maker import (
    LEVELS,
    Array,
    chain,
    coded,
    difference,
    external,
    feeds,
    matmul,
    model,
    node,
    normal,
    save,
    session,
    tensor,
    value,
)
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack.errors import ModelError

BUILT_FROM = {
    "families/conv_transformer_lstm.onnx": 0.02,
    "families/gemma3_tiny.onnx": 0.1,
    "families/llama_tiny_fp16.onnx": 0.05,
    "families/mlp_gemm.onnx": 0.02,
    "families/mlp_gemm_opset9.onnx": 0.02,
    "families/moe_dense_3d.onnx": 0.02,
    "families/qwen3moe_tiny_batched_mm.onnx": 0.05,
    "families/vit_tiny.onnx": 0.03,
    "families/whisper_tiny_decoder.onnx": 0.03,
    "families/whisper_tiny_encoder.onnx": 0.02,
    "quantized_a/a_ort_nbits4_b32_qdq.onnx": 0.03,
    "quark_small/a8w8_asym_percol_opset21.onnx": 1e-6,
    "quark_small/a8w8_percol_msft_opset17.onnx": 1e-6,
    "quark_small/float_opset17.onnx": 0.1,
    "quark_small/w8_only_opset21.onnx": 1e-6,
    "qwen3_tiny/qwen3_tiny.onnx": 0.05,
    "qwen3_tiny/qwen3_tiny_cached.onnx": 0.05,
    "qwen3_tiny/qwen3_tiny_op23.onnx": 0.05,
    "real/genai_tiny_lfm2.onnx": 0.02,
    "real/hello_deepa.onnx": 0.05,
    "real/magika_v3_3.onnx": 0.05,
    "real/ppocr_mobile_v2_cls.onnx": 0.01,
    "trained_a/trained_a.onnx": 0.03,
    "trained_a/trained_a_legacy_op17.onnx": 0.03,
}
"""Models with the largest difference that weights of eight bits may make. QDQ models keep their own numbers."""


def build(source: Path | onnx.ModelProto, out: Path) -> dict[str, Any]:
    onnxpack.build(source, out, weights="int8")
    found: dict[str, Any] = json.loads((out / "pack.json").read_text())
    return found


def compare(source: Path, pack: Path, limit: float, levels: tuple[str, ...] = LEVELS) -> int:
    """At every level at which the source loads, the pack loads too and gives close outputs."""
    compared = 0
    for level in levels:
        try:
            reference = session(source, level)
        except Exception:
            continue
        opened = session(pack / "model.onnx", level)
        names = ([i.name for i in s.get_inputs()] for s in (reference, opened))
        assert next(names) == next(names)
        feed = feeds(reference)
        expected, found = reference.run(None, feed), opened.run(None, feed)
        for a, b in zip(expected, found, strict=True):
            assert difference(a, b) <= limit, level
        compared += 1
    return compared


@pytest.mark.parametrize("name", BUILT_FROM)
def test_models_in_stock_onnxruntime(shared: Path, tmp_path: Path, name: str) -> None:
    source, pack = shared / "models" / name, tmp_path / "model.pack"
    manifest = build(source, pack)
    assert manifest["coverage"]["bound"] > 0
    levels = LEVELS if source.stat().st_size < 100_000 else ("ORT_ENABLE_BASIC", "ORT_ENABLE_ALL")
    assert compare(source, pack, BUILT_FROM[name], levels) >= 1
    check_plain(source, pack, manifest)
    check_nothing_is_lost(source, pack, manifest)


def check_plain(source: Path, pack: Path, manifest: dict[str, Any]) -> None:
    """No domain, no opset, no operator that the opset does not have, and the source's own operators stay."""
    before = onnx.load(source, load_external_data=False)
    after = onnx.load(pack / "model.onnx", load_external_data=False)
    versions = {e.domain or "": e.version for e in before.opset_import}
    assert {e.domain or "": e.version for e in after.opset_import} == versions
    assert manifest["opset"] == versions.get("", 0)
    assert [v.name for v in after.graph.output] == [v.name for v in before.graph.output]
    added = {change["op"] for change in manifest["changes"] if change["action"] == "added"}
    for op in added:
        schema = onnx.defs.get_schema(op, versions[""])
        assert not schema.deprecated
    names = [n.name for n in after.graph.node]
    assert len(set(names)) == len(names)
    assert all(names)


def tensors_of(path: Path) -> dict[str, TensorProto]:
    """Initializers of the main graph and tensors of Constant nodes, by name, with their bytes."""
    proto = onnx.load(path)
    found = {t.name: t for t in proto.graph.initializer}
    for n in proto.graph.node:
        if n.op_type == "Constant" and n.attribute and n.attribute[0].name == "value":
            found[n.output[0]] = n.attribute[0].t
    return found


def raw(held: TensorProto) -> bytes:
    return numpy_helper.to_array(held).tobytes()


def graphs(path: Path) -> list[onnx.GraphProto]:
    found = [onnx.load(path, load_external_data=False).graph]
    for graph in found:
        found += [a.g for n in graph.node for a in n.attribute if a.HasField("g")]
    return found


def check_nothing_is_lost(source: Path, pack: Path, manifest: dict[str, Any]) -> None:
    """A tensor of the source stands in the pack bit for bit, or is a packed weight, or all that read it is gone."""
    before, after = tensors_of(source), tensors_of(pack / "model.onnx")
    roots = {entry["source"] for entry in manifest["tensors"]}
    left = {name for graph in graphs(pack / "model.onnx") for n in graph.node for name in n.output}
    read = {name for graph in graphs(source) for n in graph.node if left & set(n.output) for name in n.input}
    read |= {v.name for graph in graphs(source) for v in graph.output}
    for name, held in before.items():
        if name in after:
            assert raw(held) == raw(after[name]), name
        else:
            assert name in roots or name not in read, name
    assert roots <= before.keys()
    assert sum(t["source_nbytes"] for t in manifest["tensors"]) >= sum(len(raw(before[root])) for root in roots)


@pytest.mark.parametrize("opset", range(7, 25))
def test_every_opset(tmp_path: Path, opset: int) -> None:
    w = normal(48, 80)
    nodes = [
        node("MatMul", ["x", "W"], ["a"]),
        node("Transpose", ["V"], ["Vt"], perm=[1, 0]),
        node("MatMul", ["a", "Vt"], ["b"]),
        node("Gemm", ["b", "G", "c"], ["y"], transB=1, alpha=0.5, beta=2.0),
    ]
    tensors = [tensor("W", w), tensor("V", normal(64, 80)), tensor("G", normal(10, 64)), tensor("c", normal(10))]
    ir_version = 3 if opset < 9 else 8
    inputs = [value("x", ["M", 48])]
    if ir_version == 3:
        inputs += [value(t.name, list(t.dims)) for t in tensors]
    outputs = [value("y", ["M", 10])]
    source = save(tmp_path / "m.onnx", model(nodes, tensors, inputs, outputs, opset=opset, ir_version=ir_version))
    pack = tmp_path / "model.pack"
    manifest = build(source, pack)
    assert manifest["coverage"]["bound"] == 3
    reference = model(nodes, tensors, [value("x", ["M", 48])], outputs, opset=opset, ir_version=max(4, ir_version))
    assert compare(save(tmp_path / "r.onnx", reference), pack, 0.03) == len(LEVELS)
    check_plain(source, pack, manifest)
    # types as well: strict inference runs each operator's own type rules at this opset
    onnx.checker.check_model(str(pack / "model.onnx"), full_check=True)
    ops = [n.op_type for n in onnx.load(pack / "model.onnx", load_external_data=False).graph.node]
    assert ("DequantizeLinear" in ops) == (opset >= 13)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("opset", [13, 21])
def test_half_precision_sites_are_cast_around(tmp_path: Path, dtype: int, opset: int) -> None:
    w = tensor("W", normal(48, 80).astype(helper.tensor_dtype_to_np_dtype(dtype)))
    inputs, outputs = [value("x", ["M", 48], dtype)], [value("y", ["M", 80], dtype)]
    proto = model([node("MatMul", ["x", "W"], ["y"])], [w], inputs, outputs, opset=opset)
    source = save(tmp_path / "m.onnx", proto)
    manifest = build(source, tmp_path / "p")
    assert manifest["sites"][0]["dtype"] == ("float16" if dtype == TensorProto.FLOAT16 else "bfloat16")
    onnx.checker.check_model(str(tmp_path / "p" / "model.onnx"), full_check=True)
    written = onnx.load(tmp_path / "p" / "model.onnx", load_external_data=False)
    assert written.graph.input[0].type.tensor_type.elem_type == dtype
    assert written.graph.output[0].type.tensor_type.elem_type == dtype
    if dtype == TensorProto.FLOAT16:
        assert compare(source, tmp_path / "p", 0.03) == len(LEVELS)


# -- one weight, many ways to reach it -----------------------------------------------------------------------------


def names(manifest: dict[str, Any]) -> list[str]:
    return [entry["name"] for entry in manifest["tensors"]]


def test_a_tied_table_is_kept_for_gather_and_packed_once(tmp_path: Path) -> None:
    table = normal(300, 64)
    nodes = [
        node("Gather", ["T", "ids"], ["e"]),
        node("Transpose", ["T"], ["Tt"], perm=[1, 0]),
        node("MatMul", ["e", "Tt"], ["y"]),
    ]
    source = save(tmp_path / "m.onnx", model(nodes, [tensor("T", table)], [value("ids", ["n"], TensorProto.INT64)]))
    pack = tmp_path / "p"
    manifest = build(source, pack)
    assert names(manifest) == ["T"]
    assert manifest["tensors"][0]["shape"] == [64, 300]
    assert np.array_equal(numpy_helper.to_array(tensors_of(pack / "model.onnx")["T"]), table)
    assert (pack / "model.data").stat().st_size == table.nbytes
    assert (pack / "weights.safetensors").stat().st_size < 4096 * 2 + 64 * 300 + 4 * 300
    assert compare(source, pack, 0.02) == len(LEVELS)


def stored_twice(tmp_path: Path, a: Array, b: Array, first: str = "MatMul", second: str = "MatMul") -> list[str]:
    """Two products whose weights are `a` and `b`; returns the names under which weights are stored."""
    nodes, tensors = [], []
    for name, w, kind, out in (("A", a, first, "h"), ("B", b, second, "y")):
        stored = w if kind == "MatMul" else np.ascontiguousarray(w.T)
        tensors.append(tensor(name, stored))
        if kind == "Gemm":
            nodes.append(node("Gemm", ["x", name], [out], transB=1))
        elif kind == "Transpose":
            nodes += [node("Transpose", [name], [f"{name}t"]), node("MatMul", ["x", f"{name}t"], [out])]
        else:
            nodes.append(node("MatMul", ["x", name], [out]))
    source = save(tmp_path / "m.onnx", model(nodes, tensors, outputs=["y", "h"]))
    shutil.rmtree(tmp_path / "p", ignore_errors=True)
    manifest = build(source, tmp_path / "p")
    compare(source, tmp_path / "p", 0.02, ("ORT_ENABLE_BASIC",))
    return names(manifest)


def test_equal_bytes_are_stored_once_unequal_ones_twice(tmp_path: Path) -> None:
    w = normal(48, 80)
    assert stored_twice(tmp_path, w, w) == ["A"]
    for at in ((0, 0), (47, 79), (24, 3)):
        other = w.copy()
        other.view(np.uint32)[at] ^= 1
        assert stored_twice(tmp_path, w, other) == ["A", "B"]
    assert stored_twice(tmp_path, w, normal(48, 80, seed=1)) == ["A", "B"]


@pytest.mark.parametrize("a", ["MatMul", "Gemm", "Transpose"])
@pytest.mark.parametrize("b", ["MatMul", "Gemm", "Transpose"])
def test_equal_numbers_are_stored_once_in_whatever_layout(tmp_path: Path, a: str, b: str) -> None:
    w = coded(48, 80)
    assert stored_twice(tmp_path, w, w, a, b) == ["A"]


def test_one_table_in_two_orientations_is_two_weights(tmp_path: Path) -> None:
    """An autoencoder's tie: [48, 80] and its transpose are two operands."""
    nodes = [
        node("MatMul", ["x", "W"], ["h"]),
        node("Transpose", ["W"], ["Wt"]),
        node("MatMul", ["h", "Wt"], ["y"]),
    ]
    source = save(tmp_path / "m.onnx", model(nodes, [tensor("W", coded(48, 80))]))
    manifest = build(source, tmp_path / "p")
    assert names(manifest) == ["W", "W#2"]
    assert compare(source, tmp_path / "p", 0.02) == len(LEVELS)


def test_weights_of_equal_size_are_not_confused(tmp_path: Path) -> None:
    """Position-coded rectangles: a permutation or an exchange would show at once."""
    weights = [coded(96, 160), coded(160, 96)[:, ::-1].copy(), coded(96, 160)[::-1].copy()]
    source = save(tmp_path / "m.onnx", chain(*weights))
    build(source, tmp_path / "p")
    assert compare(source, tmp_path / "p", 0.02) == len(LEVELS)


VIEWS: dict[str, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
    "identity": ([node("Identity", ["V"], ["W"])], {"V": coded(48, 80)}),
    "constant": ([node("Constant", [], ["W"], value=tensor("v", coded(48, 80)))], {}),
    "constant identity": (
        [node("Constant", [], ["V"], value=tensor("v", coded(48, 80))), node("Identity", ["V"], ["W"])],
        {},
    ),
    "flat constant": (
        [
            node("Constant", [], ["V"], value_floats=coded(48, 80).reshape(-1).tolist()),
            node("Reshape", ["V", "s"], ["W"]),
        ],
        {"s": np.array([48, 80])},
    ),
    "float16": ([node("Cast", ["V"], ["W"], to=TensorProto.FLOAT)], {"V": coded(48, 80).astype("f2")}),
    "double": ([node("Cast", ["V"], ["W"], to=TensorProto.FLOAT)], {"V": coded(48, 80).astype("f8")}),
    "slice": (
        [node("Slice", ["V", "b", "e", "a"], ["W"])],
        {"V": coded(60, 100), "b": np.array([5, 10]), "e": np.array([53, 90]), "a": np.array([0, 1])},
    ),
    "split": ([node("Split", ["V"], ["W", "rest"], axis=1, num_outputs=2)], {"V": coded(48, 160)}),
    "concat": ([node("Concat", ["V", "U"], ["W"], axis=0)], {"V": coded(20, 80), "U": coded(28, 80)}),
    "fill": (
        [node("ConstantOfShape", ["s"], ["W"], value=tensor("v", np.array([0.5], np.float32)))],
        {"s": np.array([48, 80])},
    ),
    "int8 cast mul": (
        [node("Cast", ["V"], ["f"], to=TensorProto.FLOAT), node("Mul", ["f", "s"], ["W"])],
        {"V": coded(48, 80).astype("i1"), "s": np.float32(0.1)},
    ),
    "one matrix of a stack": (
        [node("Squeeze", ["V", "a"], ["W"])],
        {"V": coded(48, 80).reshape(1, 48, 80), "a": np.array([0])},
    ),
}


@pytest.mark.parametrize("case", VIEWS)
def test_weights_behind_views(tmp_path: Path, case: str) -> None:
    nodes, constants = VIEWS[case]
    tensors = [tensor(name, array) for name, array in constants.items()]
    source = save(tmp_path / "m.onnx", model([*nodes, node("MatMul", ["x", "W"], ["y"])], tensors))
    pack = tmp_path / "p"
    manifest = build(source, pack)
    assert manifest["coverage"]["bound"] == 1
    assert compare(source, pack, 0.02) == len(LEVELS)
    assert (pack / "model.onnx").stat().st_size < 4096
    left = {n.op_type for n in onnx.load(pack / "model.onnx", load_external_data=False).graph.node}
    assert left == {"DequantizeLinear", "MatMul"}
    assert not (pack / "model.data").exists()


def test_constants_of_gigabytes_would_not_stay_in_the_graph(tmp_path: Path) -> None:
    """Constant nodes, weights and others: the graph file stays small."""
    nodes = [
        node("Constant", [], ["W"], value=tensor("w", normal(48, 4000))),
        node("Constant", [], ["b"], value=tensor("b", normal(3, 4000))),
        node("Constant", [], ["f"], value_floats=normal(4000).tolist()),
        node("MatMul", ["x", "W"], ["h"]),
        node("Add", ["h", "b"], ["g"]),
        node("Add", ["g", "f"], ["y"]),
    ]
    source = save(tmp_path / "m.onnx", model(nodes, inputs=[value("x", [3, 48])]))
    build(source, tmp_path / "p")
    assert (tmp_path / "p" / "model.onnx").stat().st_size < 4096
    assert compare(source, tmp_path / "p", 0.02) == len(LEVELS)


@pytest.mark.parametrize("w", [(1, 48, 80), (1, 1, 48, 80)], ids=str)
@pytest.mark.parametrize("x", [(48,), (3, 48), (2, 3, 48), (5, 2, 3, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("opset", [9, 21])
def test_the_rank_that_a_weight_gave_stays(tmp_path: Path, w: tuple[int, ...], x: tuple[int, ...], opset: int) -> None:
    proto = model(
        [node("MatMul", ["x", "W"], ["y"])],
        [tensor("W", coded(48, 80).reshape(w))],
        [value("x", x)],
        opset=opset,
        ir_version=8,
    )
    source = save(tmp_path / "m.onnx", proto)
    assert build(source, tmp_path / "p")["coverage"]["bound"] == 1
    assert compare(source, tmp_path / "p", 0.02) == len(LEVELS)


def test_a_stack_of_matrices_stays_as_it_is(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "W"], ["h"]), node("MatMul", ["h", "S"], ["y"])]
    tensors = [tensor("W", normal(48, 80)), tensor("S", normal(2, 80, 8))]
    source = save(tmp_path / "m.onnx", model(nodes, tensors, [value("x", [2, 3, 48])]))
    manifest = build(source, tmp_path / "p")
    assert manifest["sites"][1]["reason"] == "batched-weight"
    assert [s["weight"] for s in manifest["sites"]] == ["W", None]
    assert compare(source, tmp_path / "p", 0.02) == len(LEVELS)


# -- names ---------------------------------------------------------------------------------------------------------

NAMES = {
    "long": ["w" * 5000, "v" * 5000],
    "hostile": ["../../tmp/evil", "a/b:c*?<>|\n\x1b[31m"],
    "collide when sanitised": ["a/b", "a_b"],
    "collide by case": ["Proj.W", "proj.w"],
    "collide with ours": ["W", "W.codes"],
    "collide with fields": ["W.weight", "W.scales"],
    "collide with nodes": ["W.DequantizeLinear", "W"],
    "shell and glob": ["$(rm -rf ~)", "*"],
    "numbers": ["0", "#2"],
    "numbered": ["W", "W#2"],
    "unicode": ["权重", "é"],
    "braces": ["{bid}", "{0}"],
    "header": ["__metadata__", "data_offsets"],
}


@pytest.mark.parametrize("case", NAMES)
def test_names_of_weights(tmp_path: Path, case: str) -> None:
    one, two = NAMES[case]
    nodes = [node("MatMul", ["x", one], ["h"], one), node("MatMul", ["h", two], ["y"], one)]
    source = save(tmp_path / "m.onnx", model(nodes, [tensor(one, coded(48, 80)), tensor(two, coded(80, 48))]))
    manifest = build(source, tmp_path / "p")
    assert names(manifest) == [one, two]
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == ["model.onnx", "pack.json", "weights.safetensors"]
    nodes[1].name = "other"  # two nodes of one name: accepted here, refused by onnxruntime
    fixed = save(tmp_path / "f.onnx", model(nodes, [tensor(one, coded(48, 80)), tensor(two, coded(80, 48))]))
    assert compare(fixed, tmp_path / "p", 0.02) == len(LEVELS)
    assert len({s["node"] for s in manifest["sites"]}) == 2
    from safetensors import safe_open

    with safe_open(tmp_path / "p" / "weights.safetensors", "numpy") as file:
        assert len(file.keys()) == 4


def test_nodes_without_names_and_unsorted_ones_get_unique_names(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["h", "V"], ["y"]), node("MatMul", ["x", "W"], ["h"])]
    proto = model(nodes, [tensor("W", coded(48, 80)), tensor("V", coded(80, 32))])
    source = save(tmp_path / "m.onnx", proto)
    manifest = build(source, tmp_path / "p")
    assert {s["path"]: s["node"] for s in manifest["sites"]} == {"MatMul_0": "MatMul_0", "MatMul_1": "MatMul_1"}
    sorted_proto = model(nodes[::-1], [tensor("W", coded(48, 80)), tensor("V", coded(80, 32))])
    assert compare(save(tmp_path / "s.onnx", sorted_proto), tmp_path / "p", 0.02) == len(LEVELS)


# -- bodies, functions ---------------------------------------------------------------------------------------------


def test_products_in_bodies_and_functions(tmp_path: Path) -> None:
    def body(name: str, weight: str, own: bool) -> onnx.GraphProto:
        inner = [tensor(f"{name}.own", coded(80, 8))] if own else []
        last = f"{name}.own" if own else "shared"
        nodes = [node("MatMul", ["x", weight], [f"{name}.h"]), node("MatMul", [f"{name}.h", last], [f"{name}.y"])]
        return helper.make_graph(nodes, name, [], [value(f"{name}.y", None)], inner)

    function = helper.make_function(
        "local",
        "Twice",
        ["a", "w"],
        ["c"],
        [node("MatMul", ["a", "w"], ["b"]), node("Add", ["b", "b"], ["c"])],
        [helper.make_opsetid("", 21)],
    )
    nodes = [
        node("If", ["c"], ["z"], then_branch=body("t", "W", True), else_branch=body("e", "W", False)),
        node("Twice", ["x", "W"], ["u"], domain="local"),
        node("Twice", ["u", "F"], ["y"], domain="local"),
    ]
    tensors = [tensor("W", coded(48, 80)), tensor("shared", coded(80, 8)[::-1].copy()), tensor("F", coded(80, 5))]
    inputs = [value("x", ["M", 48]), value("c", [], TensorProto.BOOL)]
    proto = model(nodes, tensors, inputs, ["y", "z"], domains={"local": 1}, functions=[function])
    source = save(tmp_path / "m.onnx", proto)
    manifest = build(source, tmp_path / "p")
    assert manifest["coverage"]["bound"] == 6
    assert sorted(names(manifest)) == ["F", "W", "shared", "t.own"]
    assert compare(source, tmp_path / "p", 0.02) == len(LEVELS)


def test_a_loop_body_with_a_captured_weight(tmp_path: Path) -> None:
    inputs = [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("s", [3, 48])]
    outputs = [value("go2", [], TensorProto.BOOL), value("s2", [3, 48])]
    nodes = [node("Identity", ["go"], ["go2"]), node("MatMul", ["s", "W"], ["s2"])]
    loop = node("Loop", ["n", "go0", "x"], ["y"], body=helper.make_graph(nodes, "b", inputs, outputs))
    tensors = [tensor("W", normal(48, 48) / 7), tensor("n", np.array(3)), tensor("go0", np.array(True))]
    source = save(tmp_path / "m.onnx", model([loop], tensors, [value("x", [3, 48])]))
    manifest = build(source, tmp_path / "p")
    assert [s["path"] for s in manifest["sites"]] == ["Loop_0/body/MatMul_0"]
    assert compare(source, tmp_path / "p", 0.05) == len(LEVELS)


# -- the pack stands alone -----------------------------------------------------------------------------------------


def test_the_pack_needs_nothing_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    w, table = normal(48, 80), normal(80, 80)
    (home / "w.bin").write_bytes(w.tobytes() + table.tobytes())
    nodes = [node("MatMul", ["x", "W"], ["h"]), node("Add", ["h", "T"], ["y"])]
    tensors = [external("W", "w.bin", [48, 80]), external("T", "w.bin", [80, 80], w.nbytes)]
    source = save(home / "m.onnx", model(nodes, tensors, [value("x", [80, 48])], [value("y", [80, 80])]))
    feed = {"x": normal(80, 48)}
    expected = session(source).run(None, feed)[0]
    build(source, tmp_path / "p")
    shutil.rmtree(home)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "p").rename(tmp_path / "elsewhere" / "moved.pack")
    monkeypatch.chdir("/")
    assert difference(expected, session(moved / "model.onnx").run(None, feed)[0]) < 0.02
    assert difference(expected, onnxpack.load(moved, "host").run(None, feed)[0]) < 0.03
    onnx.checker.check_model(str(moved / "model.onnx"))


def test_no_map_of_a_file_outlives_a_build(tmp_path: Path) -> None:
    """Where a mapped file cannot be deleted, cleaning up would fail."""

    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]

    (tmp_path / "w.bin").write_bytes(normal(48, 80).tobytes())
    proto = model([node("MatMul", ["x", "W"], ["y"])], [external("W", "w.bin", [48, 80])])
    source = save(tmp_path / "m.onnx", proto)
    onnxpack.build(source, tmp_path / "p", weights="int8")
    assert mapped() == []


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for turned in (False, True):
            w = normal(48, 80)
            w[3, 7] = bad
            nodes = [node("MatMul", ["x", "W"], ["y"])]
            if turned:
                nodes = [node("Transpose", ["W"], ["Wt"]), node("MatMul", ["x", "Wt"], ["y"])]
                w = np.ascontiguousarray(w.T)
            with pytest.raises(ModelError) as caught:
                onnxpack.build(model(nodes, [tensor("W", w)]), tmp_path / "p", weights="int8")
            assert "tensor W" in caught.value.render()
            assert f"{np.float32(bad)} at [3, 7]" in caught.value.render()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "proto",
    [
        model([node("Relu", ["x"], ["y"])]),
        model([node("MatMul", ["x", "t"], ["y"])], inputs=[value("x", ["M", 48]), value("t", [48, 8])]),
    ],
    ids=["no product", "dynamic only"],
)
def test_a_model_without_a_weight_product_is_refused(tmp_path: Path, proto: onnx.ModelProto) -> None:
    with pytest.raises(ModelError, match="no matrix product with a constant weight"):
        onnxpack.build(proto, tmp_path / "p", weights="int8")


def test_vendor_operators_are_refused_by_name(tmp_path: Path) -> None:
    nodes = [node("ExtendedQuantizeLinear", ["x"], ["h"], domain="com.amd.quark"), node("MatMul", ["h", "W"], ["y"])]
    proto = model(nodes, [tensor("W", normal(48, 80))], domains={"com.amd.quark": 1})
    assert onnxpack.census(proto).totals.weight == 1
    with pytest.raises(ModelError) as caught:
        onnxpack.build(proto, tmp_path / "p", weights="int8")
    assert "com.amd.quark.ExtendedQuantizeLinear" in caught.value.render()
    assert "QuantizeLinear/DequantizeLinear" in caught.value.render()


def test_an_unused_vendor_import_is_no_reason_to_refuse(tmp_path: Path) -> None:
    proto = matmul()
    proto.opset_import.append(helper.make_opsetid("com.amd.quark", 1))
    onnxpack.build(proto, tmp_path / "p", weights="int8")


def test_error_figures_of_the_manifest_are_those_of_the_bytes(tmp_path: Path) -> None:
    w = normal(300, 200) * np.linspace(0.01, 3, 200, dtype=np.float32)
    manifest = build(matmul(300, 200, w=w), tmp_path / "p")
    decoded = session(tmp_path / "p" / "model.onnx").run(None, {"x": np.eye(300, dtype=np.float32)})[0]
    exact = np.sqrt(np.square(w.astype("f8") - decoded).sum() / np.square(w.astype("f8")).sum())
    figure = manifest["tensors"][0]["error"]["relative_rms"]
    assert figure == float(f"{exact:.4g}")


@pytest.mark.parametrize("device", ["host", "reference"])
def test_a_pack_loads_where_parents_may_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    import os

    build(matmul(), tmp_path / "p")

    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "not allowed")

    with monkeypatch.context() as walled:
        walled.setattr(os.path, "realpath", forbidden)
        walled.setattr(Path, "resolve", forbidden)
        found = onnxpack.load(tmp_path / "p", device).run(None, {"x": normal(3, 48)})[0]
    assert found.shape == (3, 80)
