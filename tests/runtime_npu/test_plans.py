"""Whatever a plan says - padding, splits, joins, blocks - the sums are the same."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from npu_world import Machine, Model, bind_all, edit, info, last_run, load, normal, same
from onnx import TensorProto, helper

from onnxpack.errors import PackError
from onnxpack.pack.read import open_pack
from onnxpack.planning.records import Call, Execution, Launch, Member, PlanGroup, Program
from onnxpack.shapes import Gemm

K, WIDTHS = 70, (40, 24, 33)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three products of one value, with kernels for anything."""
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"], f"site{i}") for i in range(3)]
    constants = {f"w{i}": normal(K, n, seed=i) for i, n in enumerate(WIDTHS)}
    shapes = ((16, 32, 32), (16, 80, 112), (32, 70, 40), (8, 70, 24), (16, 72, 33), (64, 80, 112))
    outputs = [info(f"y{i}") for i in range(3)]
    pack = Model(nodes, [info("x", ["t", K])], outputs, constants, []).pack(tmp_path_factory.mktemp("three"))
    bind_all(pack, [Gemm(*shape) for shape in shapes])
    return pack


def cut(size: int, most: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, size, most), size]))


def program(rows: int, kernel: Gemm, k: int, n: int) -> Program:
    launches = [Launch(r, i, c) for r in cut(rows, kernel.m) for c in cut(n, kernel.n) for i in cut(k, kernel.k)]
    return Program(rows, str(kernel), launches)


def group(members: list[tuple[str, int]], programs: list[Program]) -> PlanGroup:
    column, made = 0, []
    for site, n in members:
        made.append(Member(site, column, n))
        column += n
    kernels = sorted({p.kernel for p in programs if p.kernel})
    return PlanGroup(K, column, [s for s, _ in members], kernels, 1, 0.0, 0, 0, [Call(made)], programs)


SITES = [(f"MatMul_{i}", n) for i, n in enumerate(WIDTHS)]
PLANS = {
    "joined": [group(SITES, [program(16, Gemm(16, 80, 112), K, sum(WIDTHS))])],
    "joined, two sizes": [
        group(SITES, [program(16, Gemm(16, 80, 112), K, sum(WIDTHS)), program(64, Gemm(64, 80, 112), K, sum(WIDTHS))])
    ],
    "everything split": [group([s], [program(40, Gemm(16, 32, 32), K, s[1])]) for s in SITES],
    "joined and split": [group(SITES, [program(16, Gemm(16, 32, 32), K, sum(WIDTHS))])],
    "exact": [
        group(SITES[:1], [program(32, Gemm(32, 70, 40), K, 40)]),
        group(SITES[1:2], [program(8, Gemm(8, 70, 24), K, 24)]),
        group(SITES[2:], [program(16, Gemm(16, 72, 33), K, 33)]),
    ],
    "some": [group(SITES[1:], [program(16, Gemm(16, 80, 112), K, 57)])],
    "one kernel, two programs": [
        group(SITES, [program(16, Gemm(16, 80, 112), K, sum(WIDTHS)), program(48, Gemm(16, 80, 112), K, sum(WIDTHS))])
    ],
}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_the_sums_are_those_of_the_host(
    machine: Machine, three: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = shutil.copytree(three, tmp_path / "pack")
    edit(pack, plan=Execution([16], 1, PLANS[name]))
    monkeypatch.setenv("ONNXPACK_NPU_MIN_ROWS", "1")
    npu, host = load(pack, strict=True), load(pack, "host")
    claimed = {site for g in PLANS[name] for site in g.sites}
    for rows in (1, 8, 9, 16, 40, 63, 64, 65, 130, 16):
        feeds = {"x": normal(rows, K, seed=rows)}
        before = machine.launches
        same(npu.run(None, feeds), host.run(None, feeds))
        assert machine.launches > before
        ran = last_run(npu)
        assert {site for site, found in ran.items() if found[0][0] == "npu"} == claimed
        assert all(found[0][1] == rows for found in ran.values())


def test_a_join_is_one_launch(machine: Machine, three: Path, tmp_path: Path) -> None:
    pack = shutil.copytree(three, tmp_path / "pack")
    edit(pack, plan=Execution([16], 1, PLANS["joined"]))
    npu = load(pack, strict=True)
    npu.run(None, {"x": normal(16, K)})
    counters = npu.coverage().counters
    assert (counters["launches"], counters["npu"], counters["claimed"]) == (1, 3, 3)


def test_without_a_plan_exact_kernels_are_used(machine: Machine, three: Path, tmp_path: Path) -> None:
    pack = shutil.copytree(three, tmp_path / "pack")
    sites = [replace(s, kernel="k", reason=None) for s in open_pack(pack).manifest.sites]
    edit(pack, plan=None, sites=sites)
    npu, host = load(pack), load(pack, "host")
    for rows in (5, 16, 100):
        feeds = {"x": normal(rows, K, seed=rows)}
        same(npu.run(None, feeds), host.run(None, feeds))
    ran = last_run(npu)
    assert [ran[site][0][0] for site, _ in SITES] == ["npu", "npu", "host"]  # no kernel is 70 x 33
    assert ran["MatMul_2"][0][2] == "no-kernel"


def test_a_plan_for_another_graph_is_refused(machine: Machine, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], "a"),
        helper.make_node("MatMul", ["h", "w1"], ["y"], "b"),
    ]
    constants = {"w0": normal(K, K, seed=1), "w1": normal(K, 40, seed=2)}
    model = Model(nodes, [info("x", ["t", K])], [info("y")], constants, [Gemm(16, 80, 112)])
    pack = model.pack(tmp_path)
    joined = [group([("MatMul_0", K), ("MatMul_1", 40)], [program(16, Gemm(16, 80, 112), K, K + 40)])]
    edit(pack, plan=Execution([16], 1, joined))
    with pytest.raises(PackError, match="read different values"):
        load(pack)
    assert load(pack, "host").run(None, {"x": normal(4, K)})


def test_weights_that_are_one_are_uploaded_once(machine: Machine, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "a"),
        helper.make_node("MatMul", ["h", "w"], ["y"], "b"),
    ]
    model = Model(nodes, [info("x", ["t", 64])], [info("y")], {"w": normal(64, 64)}, [Gemm(16, 64, 64)])
    npu = load(model.pack(tmp_path), strict=True)
    npu.run(None, {"x": normal(16, 64)})
    assert npu.coverage().counters["device:uploads"] == 2  # the weight, and the canary's operand
    assert npu.coverage().counters["launches"] == 2


# --- rows of an earlier call, and other old bytes ---------------------------------------------------------------------


def test_rows_of_an_earlier_call_do_not_come_back(machine: Machine, three: Path, tmp_path: Path) -> None:
    """A kernel of 64 rows sees 100 rows, then 5: what is left of the 100 must be zero on the device."""
    pack = shutil.copytree(three, tmp_path / "pack")
    edit(pack, plan=Execution([64], 1, PLANS["joined, two sizes"]))
    npu, host = load(pack, strict=True), load(pack, "host")
    for rows in (100, 60, 5, 17, 1):
        feeds = {"x": normal(rows, K, seed=rows) * 100}
        same(npu.run(None, feeds), host.run(None, feeds))
        device = npu._engine._device  # type: ignore[union-attr]
        used = [slot for slot in device._slots.values() if slot.token and slot.token[2] - slot.token[1]]
        for slot in used:
            real = slot.token[2] - slot.token[1]
            held = slot.a.memory[: slot.a_view.size].view(np.int8).reshape(slot.a_view.shape)
            assert not held[real:].any()
            assert not held[:, K:].any()
    assert npu.coverage().counters.get("fallback") is None


def test_gemm_and_sixteen_bit_sites(machine: Machine, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "c"], ["h"], "gemm", alpha=0.5, beta=2.0, transB=1),
        helper.make_node("Cast", ["h"], ["half"], "cast", to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["half", "v"], ["y"], "half_product"),
    ]
    constants = {"w": normal(96, 64, seed=1), "c": normal(96, seed=2), "v": normal(96, 32, seed=3).astype(np.float16)}
    kernels = [Gemm(16, 64, 96), Gemm(16, 96, 32)]
    outputs = [info("y", None, TensorProto.FLOAT16)]
    pack = Model(nodes, [info("x", ["t", 64])], outputs, constants, kernels).pack(tmp_path)
    npu, host, reference = load(pack, strict=True), load(pack, "host"), load(pack, "reference")
    for rows in (16, 40):
        feeds = {"x": normal(rows, 64, seed=rows)}
        found = npu.run(None, feeds)
        same(found, host.run(None, feeds))
        same(found, reference.run(None, feeds))
    assert {f[0][0] for f in last_run(npu).values()} == {"npu"}
