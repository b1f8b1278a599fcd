"""The census against independent facts: counts, shapes, roots, reasons, totals, coverage."""

from __future__ import annotations

import importlib.util
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from model_maker import chain, external, matmul, model, node, normal, save, tensor, value
from onnx import TensorProto, helper

import onnxpack
from onnxpack import records
from onnxpack.census import SCHEMA, Census
from onnxpack.reasons import Reason

FILLED = {"real/onnx_light_bvlc_alexnet.onnx"}
"""Weights made by ConstantOfShape: constant for us, dynamic in the facts."""


def facts(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared / "models" / "census.json").read_text())
    return found


def products(census: Census) -> Counter[Any]:
    return Counter((s.op, s.k, s.n, s.weight) for s in census.sites if s.kind == "weight")


def check_totals(census: Census) -> None:
    """What must hold for every census, whatever the model is."""
    t = census.totals
    kinds, verdicts = Counter(s.kind for s in census.sites), Counter(s.verdict for s in census.sites)
    assert t.sites == len(census.sites) == t.weight + t.dynamic + t.other == t.covered + t.buildable + t.host
    assert (t.weight, t.dynamic, t.other) == (kinds["weight"], kinds["dynamic"], kinds["other"])
    assert (t.covered, t.buildable, t.host) == (verdicts["covered"], verdicts["buildable"], verdicts["host"])
    assert sum(g.count for g in census.groups) == t.weight
    assert len({s.path for s in census.sites}) == t.sites
    for site in census.sites:
        assert (site.reason is None) == (site.verdict == "covered")
        assert (site.verdict == "buildable") == (site.reason == Reason.NO_KERNEL)
        assert site.reason is None or Reason(site.reason).sentence
        assert (site.weight is None) == (site.kind == "dynamic")
    for group in census.groups:
        members = [s for s in census.sites if s.kind == "weight" and (s.k, s.n) == (group.k, group.n)]
        assert len(members) == group.count
        assert len({s.weight for s in members}) == group.weights
        assert sum(group.verdicts.values()) == group.count
    assert records.from_dict(json.loads(json.dumps(census.to_dict())), Census) == census


def test_every_model_agrees_with_independent_facts(shared: Path) -> None:
    checked = 0
    for name, known in facts(shared).items():
        census = onnxpack.census(shared / "models" / name)
        check_totals(census)
        assert census.schema == SCHEMA
        assert census.model == Path(name).name
        if name in FILLED:
            assert {s.reason for s in census.sites if s.op == "Gemm"} == {"no-kernel"}
            continue
        sites = known["sites"]
        # facts of stacked weights keep the stack: [4, K, N]
        expected = Counter((s["op"], *s["KN"][-2:], s["root"]) for s in sites if s["B"] == "const")
        assert products(census) == expected, name
        dynamic = Counter(s["op"] for s in sites if s["B"] != "const")
        assert Counter(s.op for s in census.sites if s.kind == "dynamic") == dynamic, name
        checked += 1
    assert checked >= 60


def test_rows_are_symbols_and_numbers() -> None:
    def m(*dims: int | str, transposed: bool = False) -> Any:
        x = value("x", dims)
        op = (
            node("Gemm", ["x", "W"], ["y"], transA=int(transposed)) if transposed else node("MatMul", ["x", "W"], ["y"])
        )
        return onnxpack.census(model([op], [tensor("W", normal(48, 80))], [x])).sites[0].m

    assert m(4, 48) == 4
    assert m("seq", 48) == "seq"
    assert m(2, "batch", 3, "seq", 48) == "6*batch*seq"
    assert m(48) == 1
    assert m(0, "seq", 48) == 0
    assert m("²", 48) == "²"
    assert m(48, 5, transposed=True) == 5


def test_unknown_rows_are_null() -> None:
    x = value("x", None)
    census = onnxpack.census(model([node("MatMul", ["x", "W"], ["y"])], [tensor("W", normal(48, 80))], [x]))
    assert census.sites[0].m is None
    assert census.groups[0].m is None
    assert (census.sites[0].k, census.sites[0].n) == (48, 80)


def test_groups_join_what_differs() -> None:
    nodes = [node("MatMul", ["a", "W"], ["y"]), node("MatMul", ["b", "V"], ["z"])]
    tensors = [tensor("W", normal(48, 80)), tensor("V", normal(48, 80, seed=1))]
    census = onnxpack.census(model(nodes, tensors, [value("a", [4, 48]), value("b", ["s", 48])], ["y", "z"]))
    (group,) = census.groups
    assert (group.m, group.count, group.weights, group.bytes) == ("4, s", 2, 2, 2 * 4 * 48 * 80)


def test_a_model_without_products_has_zero_totals() -> None:
    census = onnxpack.census(model([node("Relu", ["x"], ["y"])]))
    assert census.sites == []
    assert census.groups == []
    assert set(records.to_dict(census.totals).values()) == {0}
    assert census.covered_percent == 100.0


def test_kernels_cover_exact_shapes_only(tmp_path: Path) -> None:
    proto = chain(normal(48, 80), normal(80, 32))
    # the same product of K and N, and K and N exchanged, are other shapes
    census = onnxpack.census(proto, "16x48x80,16x80x48,16x40x64,16x32x80")
    assert [s.verdict for s in census.sites] == ["covered", "buildable"]
    assert census.sites[0].reason is None
    assert census.covered_percent == 50.0
    check_totals(census)


def test_three_kinds_and_two_percentages() -> None:
    """Attention products are counted apart and are no warning."""
    nodes = [
        node("MatMul", ["x", "Wq"], ["q"]),
        node("Transpose", ["q"], ["k"], perm=[1, 0]),
        node("MatMul", ["q", "k"], ["s"]),
        node("MatMul", ["s", "q"], ["y"]),
    ]
    census = onnxpack.census(model(nodes, [tensor("Wq", normal(48, 80))]), "16x48x80")
    assert [s.kind for s in census.sites] == ["weight", "dynamic", "dynamic"]
    assert census.covered_percent == 100.0
    assert (census.totals.covered, census.totals.sites) == (1, 3)


def test_every_rule_has_its_own_reason() -> None:
    body = helper.make_graph([node("MatMul", ["x", "S"], ["b"])], "body", [], [value("b", None)])
    nodes = [
        node("MatMul", ["x", "W"], ["r0"], "plain"),
        node("MatMul", ["x", "B"], ["r1"], "stack"),
        node("MatMul", ["x", "v"], ["r2"], "vector"),
        node("MatMul", ["x", "O"], ["r3"], "input"),
        node("MatMul", ["d", "D"], ["r4"], "double"),
        node("If", ["c"], ["r5"], "if", then_branch=body, else_branch=body),
        node("MatMul", ["x", "t"], ["r6"], "dynamic"),
        node("FusedMatMul", ["x", "F"], ["r7"], "fused", domain="com.microsoft", transB=1),
        node("MatMul", ["e", "E"], ["r8"], "empty"),
    ]
    tensors = [
        tensor("W", normal(48, 80)),
        tensor("B", normal(3, 48, 80)),
        tensor("v", normal(48)),
        tensor("O", normal(48, 80)),
        tensor("D", normal(48, 80).astype("f8")),
        tensor("S", normal(48, 8)),
        tensor("F", normal(80, 48)),
        tensor("E", normal(0, 8)),
    ]
    inputs = [
        value("x", ["M", 48]),
        value("O", [48, 80]),
        value("d", ["M", 48], TensorProto.DOUBLE),
        value("c", [], TensorProto.BOOL),
        value("t", [48, "n"]),
        value("e", ["M", 0]),
    ]
    census = onnxpack.census(model(nodes, tensors, inputs, [f"r{i}" for i in range(9)], types={"r4": 11}))
    check_totals(census)
    assert {s.name: s.reason for s in census.sites if s.name} == {
        "plain": "no-kernel",
        "stack": "batched-weight",
        "vector": "vector-operand",
        "input": "overridable-weight",
        "double": "unsupported-dtype",
        "dynamic": "dynamic-weight",
        "fused": "unsupported-op",
        "empty": "k-zero",
    }
    assert [s.reason for s in census.sites if s.path.startswith("If_0/")] == ["in-subgraph"] * 2
    fused = next(s for s in census.sites if s.name == "fused")
    assert (fused.k, fused.n) == (48, 80)


def maker() -> Any:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "make_qwen3.py"
    spec = importlib.util.spec_from_file_location("make_qwen3", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_qwen3"] = module
    spec.loader.exec_module(module)
    return module


def sparse_qwen3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The whole graph of the 0.6B shape; its 2.4 GB of weights are a hole in the data file."""
    qwen3 = maker()

    def hole(self: Any, name: str, *shape: int, scale: float = 0.02) -> str:
        count = 1
        for dim in shape:
            count *= dim
        start = self._file.tell()
        self.initializers.append(external(name, self._name, shape, start, 4 * count))
        self._file.truncate(start + 4 * count)
        self._file.seek(0, 2)
        return name

    monkeypatch.setattr(qwen3.Builder, "weight", hole)
    path = folder / "qwen3.onnx"
    qwen3.build(path, qwen3.Config())
    return path


PROJECTIONS = "32x1024x2048,32x1024x1024,32x2048x1024,32x1024x3072,32x3072x1024"


def test_figures_of_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sparse_qwen3(tmp_path, monkeypatch)
    start = time.process_time()
    census = onnxpack.census(path)
    assert time.process_time() - start < 2.0  # the target is 1 s on a quiet machine
    check_totals(census)
    assert census.totals.weight == 197
    assert {(g.k, g.n): g.count for g in census.groups} == {
        (1024, 1024): 56,
        (1024, 3072): 56,
        (1024, 2048): 28,
        (2048, 1024): 28,
        (3072, 1024): 28,
        (1024, 151936): 1,
    }
    assert census.totals.dynamic == 57
    assert onnxpack.census(path, "16x1024x2048,16x1024x1024").totals.covered == 84
    assert onnxpack.census(path, PROJECTIONS).totals.covered == 196
    head = next(s for s in census.sites if s.n == 151936)
    assert head.weight == "model.embed_tokens.weight"


@pytest.mark.slow
def test_a_census_reads_no_weights_and_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    path = sparse_qwen3(tmp_path, monkeypatch)
    script = (
        "import sys, onnxpack\n"
        "onnxpack.census(sys.argv[1])\n"
        "peak = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]\n"
        "print(peak[0].split()[1])"  # not ru_maxrss: that starts with what the test process had
    )
    found = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 250 * 1024  # KiB


@pytest.mark.parametrize("gib", [3, 5])
def test_data_files_larger_than_2_and_4_gib(tmp_path: Path, gib: int) -> None:
    """Three weights of a GiB each in one file with a hole for content; value_info is stripped, a Reshape in between."""
    k, n, end = 8192, 32768, gib << 30
    offsets = [0, 1 << 30, end - 4 * k * n]
    tensors = [external(f"W{i}", "w.bin", [k, n] if i != 1 else [n, k], offsets[i]) for i in range(3)]
    nodes = [
        node("MatMul", ["x", "W0"], ["a"]),
        node("MatMul", ["a", "W1"], ["b"]),
        node("Reshape", ["b", "shape"], ["c"]),
        node("MatMul", ["c", "W2"], ["y"]),
    ]
    proto = model(nodes, [*tensors, tensor("shape", [0, k])], [value("x", ["seq", k])])
    path = save(tmp_path / "m.onnx", proto)
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(end)
    start = time.process_time()
    census = onnxpack.census(path)
    assert time.process_time() - start < 2.0
    assert [(s.m, s.k, s.n) for s in census.sites] == [("seq", k, n), ("seq", n, k), ("seq", k, n)]
    small = model(
        nodes,
        [
            tensor("W0", normal(16, 24)),
            tensor("W1", normal(24, 16)),
            tensor("W2", normal(16, 24)),
            tensor("shape", [0, 16]),
        ],
        [value("x", ["seq", 16])],
    )
    assert [s.m for s in onnxpack.census(small).sites] == [s.m for s in census.sites]


def test_foreign_domains_are_listed_once_and_stop_nothing() -> None:
    nodes = [
        node("Odd", ["x"], ["h"], domain="vendor.x"),
        node("MatMul", ["h", "W"], ["y"]),
        node("Odd", ["y"], ["z"], domain="vendor.x"),
        node("Even", ["z"], ["w"], domain="vendor.x"),
        node("MatMulNBits", ["x", "q", "s"], ["n"], domain="com.microsoft", K=48, N=80, bits=4, block_size=16),
    ]
    tensors = [tensor("W", normal(48, 80)), tensor("q", normal(80, 3, 8).astype("u1")), tensor("s", normal(240))]
    census = onnxpack.census(model(nodes, tensors, outputs=["w", "n"], domains={"vendor.x": 1}))
    assert census.foreign_domains == {"com.microsoft": ["MatMulNBits"], "vendor.x": ["Even", "Odd"]}
    first, second = census.sites
    assert (first.m, first.k, first.n, first.reason) == (None, 48, 80, "no-kernel")
    assert (second.k, second.n, second.reason) == (48, 80, "packed-elsewhere")


def test_names_shared_by_two_bodies_say_no_shape() -> None:
    def body(rows: int) -> Any:
        nodes = [node("Identity", [f"a{rows}"], ["h"]), node("MatMul", ["h", "W"], [f"o{rows}"])]
        return helper.make_graph(nodes, "b", [], [value(f"o{rows}", None)])

    inputs = [value("c", [], TensorProto.BOOL), value("a4", [4, 48]), value("a8", [8, 48])]
    choice = node("If", ["c"], ["y"], then_branch=body(4), else_branch=body(8))
    census = onnxpack.census(model([choice], [tensor("W", normal(48, 80))], inputs))
    assert {s.path for s in census.sites} == {"If_0/then_branch/MatMul_0", "If_0/else_branch/MatMul_0"}
    assert [s.m for s in census.sites] == [None, None]


def test_one_product_alone_is_enough() -> None:
    census = onnxpack.census(matmul(1024, 1024, 16), "16x1024x1024")
    assert census.sites[0].verdict == "covered"
