"""Where calls run, by trace and by the device's own count of launches: never by numbers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from npu_world import Machine, Model, block, info, last_run, load, normal, same, x_of
from onnx import TensorProto, helper

from onnxpack.errors import UsageError
from onnxpack.planning.records import Execution, Program
from onnxpack.runtime.npu.switches import Switches
from onnxpack.shapes import Gemm

SITES = {"MatMul_0": (64, 96), "MatMul_1": (64, 32), "MatMul_2": (96, 64)}
BELOW = ("host", "below-row-threshold", "npu_float_host_rows")


def test_below_at_and_above_the_threshold(machine: Machine, block_pack: Path) -> None:
    npu, host = load(block_pack), load(block_pack, "host")
    assert npu.coverage().device == "npu"
    assert npu.coverage().where == {"npu": 3, "unbound": 0}
    launches = 0
    for rows, blocks in [(1, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 1), (33, 2), (65, 3)]:
        before = machine.computed.total()
        same(npu.run(None, x_of(rows)), host.run(None, x_of(rows)))
        ran = last_run(npu)
        assert set(ran) == set(SITES)
        for found in ran.values():
            where, count, reason, event = found[0]
            assert (where, count) == ("npu" if blocks else "host", rows)
            assert (reason, event) == ((None, "float matmul") if blocks else BELOW[1:])
        after = npu.coverage().counters.get("launches", 0)
        assert after - launches == 3 * blocks
        assert (machine.computed.total() - before >= 3) is bool(blocks)
        assert blocks or machine.computed.total() == before
        launches = after
    assert "fallback" not in npu.coverage().counters


def test_rows_of_the_whole_batch_count(machine: Machine, block_pack: Path) -> None:
    npu = load(block_pack)
    npu.run(None, x_of(4, batch=3))
    assert machine.launches == 0
    npu.run(None, x_of(4, batch=4))
    assert last_run(npu)["MatMul_0"] == [("npu", 16, None, "float matmul")]


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_any_row_count_when_the_threshold_is_gone(
    machine: Machine, block_pack: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setenv("ONNXPACK_NPU_MIN_ROWS", "0")
    npu, host = load(block_pack), load(block_pack, "host")
    same(npu.run(None, x_of(rows)), host.run(None, x_of(rows)))
    assert (machine.computed.total() > 0) is (rows > 0)


def last_token() -> Model:
    """A head that sees one row of each sequence: its row count is computed inside the graph."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "body"),
        helper.make_node("Gather", ["h", "last"], ["g"], "gather", axis=1),
        helper.make_node("MatMul", ["g", "head"], ["y"], "head"),
    ]
    constants = {"w": normal(64, 64, seed=1), "head": normal(64, 96, seed=2), "last": np.array([-1], np.int64)}
    kernels = [Gemm(32, 64, 64), Gemm(32, 64, 96)]
    return Model(nodes, [info("x", ["b", "t", 64])], [info("y")], constants, kernels)


def test_each_site_goes_by_its_own_rows(machine: Machine, tmp_path: Path) -> None:
    pack = last_token().pack(tmp_path)
    npu, host = load(pack), load(pack, "host")
    for _ in range(4):
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert last_run(npu)["MatMul_0"] == [("npu", 40, None, "float matmul")]
    assert last_run(npu)["MatMul_1"] == [("host", 1, *BELOW[1:])]
    counters = npu.coverage().counters
    assert (counters["npu"], counters["host_rows"]) == (4, 4)
    same(npu.run(None, x_of(2, batch=20)), host.run(None, x_of(2, batch=20)))
    assert last_run(npu)["MatMul_1"] == [("npu", 20, None, "float matmul")]


def with_small_host_program(execution: Execution) -> Execution:
    """Up to 20 rows at a time stay on the host, whatever the threshold."""
    groups = [replace(g, programs=[Program(20, None, []), *g.programs]) for g in execution.groups]
    return replace(execution, min_rows=4, groups=groups)


def test_a_plan_may_leave_rows_of_a_call_to_the_host(machine: Machine, tmp_path: Path) -> None:
    pack = block(plan=with_small_host_program).pack(tmp_path)
    npu, host = load(pack), load(pack, "host")
    same(npu.run(None, x_of(18)), host.run(None, x_of(18)))
    assert machine.computed.total() == 0
    same(npu.run(None, x_of(140)), host.run(None, x_of(140)))
    assert last_run(npu)["MatMul_2"] == [
        ("npu", 128, None, "float matmul"),
        ("host", 12, "host-is-faster", "npu_float_host_rows"),
    ]
    same(npu.run(None, x_of(160)), host.run(None, x_of(160)))
    assert last_run(npu)["MatMul_2"] == [("npu", 160, None, "float matmul")]


def test_sites_in_bodies_run_on_the_host(machine: Machine, tmp_path: Path) -> None:
    def branch(name: str, weight: str) -> object:
        return helper.make_graph(
            [helper.make_node("MatMul", ["h", weight], [name], f"inner_{name}")], name, [], [info(name)]
        )

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "outer"),
        helper.make_node("If", ["c"], ["y"], "if", then_branch=branch("p", "w"), else_branch=branch("r", "v")),
    ]
    inputs = [info("x", ["b", "t", 64]), info("c", [], TensorProto.BOOL)]
    constants = {"w": normal(64, 64), "v": normal(64, 64, seed=1)}
    pack = Model(nodes, inputs, [info("y")], constants, [Gemm(16, 64, 64)]).pack(tmp_path)
    npu, host = load(pack), load(pack, "host")
    for choice in (True, False):
        feeds = {**x_of(20), "c": np.array(choice)}
        same(npu.run(None, feeds), host.run(None, feeds))
    ran = last_run(npu)
    assert ran.pop("MatMul_0") == [("npu", 20, None, "float matmul")]
    assert len(ran) == 2
    assert all(found == [("host", None, "in-subgraph", None)] for found in ran.values())
    assert npu.coverage().where == {"npu": 1, "host": 2, "unbound": 0}


def test_the_trace_on_stderr(
    machine: Machine, block_pack: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONNXPACK_TRACE", "1")
    npu = load(block_pack)
    npu.run(None, x_of(5))
    machine.fault = lambda launch: "error"
    npu.run(None, x_of(16))
    lines = [line.removeprefix("onnxpack: ") for line in capfd.readouterr().err.splitlines()]
    assert lines[0] == "claimed=3 qdq_groups=0 min=16"
    assert lines[1] == "npu_float_host_rows m=5 k=64 n=96 min=16 sites=MatMul_0"
    assert lines[4] == "npu_float_fallback m=16 k=64 n=96 why=state sites=MatMul_0"
    assert npu.trace()[0].event == "claimed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ONNXPACK_NPU", "2"),
        ("ONNXPACK_STRICT", "yess"),
        ("ONNXPACK_NPU_MIN_ROWS", "-1"),
        ("ONNXPACK_NPU_CONTEXTS", "0"),
        ("ONNXPACK_NPU_CONTEXTS", "17"),
        ("ONNXPACK_NPU_TIMEOUT_MS", "0"),
        ("ONNXPACK_NPU_OPERANDS", "lots"),
        ("ONNXPACK_NPU_MIN_ROWS", "9" * 400),
        ("ONNXPACK_NPU_MIN_ROWS", "٣"),
    ],
)
def test_a_switch_that_is_none_is_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        Switches.read({name: value})


def test_switches_take_what_they_say() -> None:
    assert Switches.read({}) == Switches()
    read = Switches.read({"ONNXPACK_NPU": "off", "ONNXPACK_TRACE": "1", "ONNXPACK_NPU_OPERANDS": "3"})
    assert (read.npu, read.trace, read.operand_bytes) == (False, True, 3 << 20)
