"""The cut graph: shapes that change, values of every type between cuts, memory that is shared and let go, threads."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_world import Machine, Model, block, info, last_run, load, normal, same, x_of
from onnx import TensorProto, helper

from onnxpack.runtime.npu.layout import Lifetime, Pool, place
from onnxpack.runtime.session import PackSession
from onnxpack.shapes import Gemm

KERNEL = [Gemm(16, 64, 64)]


def cut_of(session: PackSession) -> object:
    return session._engine._cut  # type: ignore[union-attr]


def two(between: list, **more: object) -> Model:  # type: ignore[type-arg]
    """A product, some nodes from "h" to "g", and another product."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        *between,
        helper.make_node("MatMul", ["g", "v"], ["y"], "second"),
    ]
    constants = {"w": normal(64, 64, seed=1), "v": normal(64, 64, seed=2), **more.pop("constants", {})}  # type: ignore[arg-type]
    inputs = [info("x", ["b", "t", 64]), *more.pop("inputs", [])]  # type: ignore[misc]
    outputs = [info("y"), *more.pop("outputs", [])]  # type: ignore[misc]
    return Model(nodes, inputs, outputs, constants, KERNEL, **more)  # type: ignore[arg-type]


RELU = [helper.make_node("Relu", ["h"], ["g"], "relu")]


def test_shapes_come_and_go(machine: Machine, tmp_path: Path) -> None:
    pack = block(layers=3).pack(tmp_path)
    npu, host = load(pack, strict=True), load(pack, "host")
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows, batch = int(rng.choice([16, 17, 40, 33])), int(rng.choice([1, 2]))
        feeds = x_of(rows, batch, seed=int(rng.integers(100)))
        same(npu.run(None, feeds), host.run(None, feeds))
        assert {found[0][0] for found in last_run(npu).values()} == {"npu"}
    assert 0 < len(cut_of(npu)._layouts) <= 8  # type: ignore[attr-defined]


def test_results_are_the_callers_for_ever(machine: Machine, block_pack: Path) -> None:
    npu, host = load(block_pack), load(block_pack, "host")
    kept = [(npu.run(None, x_of(20, seed=s)), host.run(None, x_of(20, seed=s))) for s in range(8)]
    for found, _ in kept[:4]:
        found[0][...] += 0  # writable, and nobody else's
    for found, wanted in kept:
        same(found, wanted)
    kept[0][0][0][...] = np.nan
    same(npu.run(None, x_of(20, seed=1)), kept[1][1])
    del npu
    gc.collect()
    same(kept[5][0], kept[5][1])


def test_feeds_are_read_and_never_written(machine: Machine, block_pack: Path) -> None:
    npu = load(block_pack)
    for seed in range(5):
        feeds = x_of(20, seed=seed)
        before = feeds["x"].copy()
        feeds["x"].flags.writeable = False
        npu.run(None, feeds)
        np.testing.assert_array_equal(feeds["x"], before)


def test_all_kinds_of_feeds(machine: Machine, block_pack: Path) -> None:
    npu, host = load(block_pack), load(block_pack, "host")
    x = x_of(20)["x"]
    wanted = host.run(None, {"x": x})
    for fed in (x, np.asfortranarray(x), x.tolist(), ort.OrtValue.ortvalue_from_numpy(x), x.repeat(2, axis=1)[:, ::2]):
        for _ in range(3):
            same(npu.run(None, {"x": fed}), wanted)
    assert machine.computed.total() >= 15 * 3


def test_a_result_of_a_product_is_an_output_and_is_used_again(machine: Machine, tmp_path: Path) -> None:
    pack = two(RELU, outputs=[info("h"), info("g"), info("x2")], inputs=[]).nodes
    nodes = [*pack, helper.make_node("Identity", ["x"], ["x2"], "again")]
    model = two(RELU, outputs=[info("h"), info("g"), info("x2")])
    model.nodes = nodes
    made = model.pack(tmp_path)
    npu, host = load(made, strict=True), load(made, "host")
    for seed in range(4):
        for names in (None, ["h"], ["x2", "y"], ["g", "g"]):
            feeds = x_of(20, seed=seed)
            same(npu.run(names, feeds), host.run(names, feeds))


def test_shapes_that_depend_on_data(machine: Machine, tmp_path: Path) -> None:
    """The same shapes are fed, and what is between has another shape on every run."""
    between = [
        helper.make_node("ReduceSum", ["h", "axis"], ["sums"], "sums", keepdims=0),
        helper.make_node("Greater", ["sums", "zero"], ["positive"], "positive"),
        helper.make_node("NonZero", ["positive"], ["where"], "where"),
        helper.make_node("Transpose", ["where"], ["turned"], "turned", perm=[1, 0]),
        helper.make_node("GatherND", ["h", "turned"], ["g"], "gather"),
    ]
    constants = {"axis": np.array([-1], np.int64), "zero": np.float32(0)}
    pack = two(between, constants=constants).pack(tmp_path)
    npu, host = load(pack), load(pack, "host")
    shapes = set()
    for seed in range(8):
        feeds = x_of(80, seed=seed)
        found = npu.run(None, feeds)
        same(found, host.run(None, feeds))
        shapes.add(found[0].shape)
        assert last_run(npu)["MatMul_0"] == [("npu", 80, None, "float matmul")]
    assert len(shapes) > 3


TYPES = [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.BOOL]


@pytest.mark.parametrize("kind", TYPES)
def test_types_between_cuts(machine: Machine, tmp_path: Path, kind: int) -> None:
    """A value of every type goes around the second product, from one segment to another."""
    between = [*RELU, helper.make_node("Cast", ["x"], ["side"], "side", to=kind)]
    model = two(between, outputs=[info("z")])
    tail = [
        helper.make_node("Cast", ["side"], ["back"], "back", to=TensorProto.FLOAT),
        helper.make_node("Add", ["y", "back"], ["z"], "add"),
    ]
    model.nodes = [*model.nodes, *tail]
    pack = model.pack(tmp_path)
    npu, host = load(pack, strict=True), load(pack, "host")
    for seed in range(4):
        same(npu.run(None, x_of(20, seed=seed)), host.run(None, x_of(20, seed=seed)))


def test_sequences_between_cuts_and_as_outputs(machine: Machine, tmp_path: Path) -> None:
    between = [
        helper.make_node("SequenceConstruct", ["h", "x"], ["list"], "list"),
        helper.make_node("SequenceAt", ["list", "first"], ["g"], "at"),
    ]
    listed = helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None)
    pack = two(between, outputs=[listed], constants={"first": np.array(0, np.int64)}).pack(tmp_path)
    npu, host = load(pack, strict=True), load(pack, "host")
    for seed in range(4):
        same(npu.run(None, x_of(20, seed=seed)), host.run(None, x_of(20, seed=seed)))
    assert last_run(npu)["MatMul_1"][0][0] == "npu"


def test_strings_as_inputs_keep_the_graph_on_the_host(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [helper.make_node("Identity", ["text"], ["copy"], "copy")]
    inputs, outputs = [info("text", ["n"], TensorProto.STRING)], [info("copy", None, TensorProto.STRING)]
    model = two(RELU, inputs=inputs, outputs=outputs)
    model.nodes = [*model.nodes, *nodes]
    pack = model.pack(tmp_path)
    npu = load(pack)
    y, copy = npu.run(None, {**x_of(20), "text": np.array(["a", "b"])})
    assert copy.tolist() == ["a", "b"]
    same([y], load(pack, "host").run(["y"], {**x_of(20), "text": np.array(["a", "b"])}))
    assert npu.coverage().device == "host"
    assert machine.launches == 0
    assert "every site runs on the host" in caplog.text


def test_an_input_with_a_default(machine: Machine, tmp_path: Path) -> None:
    between = [helper.make_node("Mul", ["h", "factor"], ["g"], "mul")]
    model = two(between, inputs=[info("factor", [1])], constants={"factor": np.array([2.0], np.float32)})
    pack = model.pack(tmp_path)
    npu, host = load(pack, strict=True), load(pack, "host")
    for seed in range(4):
        for more in ({}, {"factor": np.array([-3.0], np.float32)}):
            feeds = {**x_of(20, seed=seed), **more}
            same(npu.run(None, feeds), host.run(None, feeds))


def test_a_product_that_needs_nothing_but_the_input_and_one_that_ends_the_graph(
    machine: Machine, tmp_path: Path
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "only")]
    pack = Model(nodes, [info("x", ["t", 64])], [info("y")], {"w": normal(64, 64)}, KERNEL).pack(tmp_path)
    npu, host = load(pack, strict=True), load(pack, "host")
    for rows in (16, 16, 16, 40):
        feeds = {"x": normal(rows, 64, seed=rows)}
        same(npu.run(None, feeds), host.run(None, feeds))


def test_rows_without_a_number(machine: Machine, block_pack: Path) -> None:
    npu, host, reference = load(block_pack, strict=True), load(block_pack, "host"), load(block_pack, "reference")
    x = x_of(40)["x"]
    x[0, 3, 5], x[0, 7, 0], x[0, 9] = np.nan, np.inf, 0
    for _ in range(3):
        found = npu.run(None, {"x": x})
        same(found, host.run(None, {"x": x}))
        same(found, reference.run(None, {"x": x}))
    assert np.isnan(found[0][0, 3]).all()
    assert np.isfinite(found[0][0, 8]).all()


def bad_calls() -> dict[str, tuple[object, object]]:
    good = x_of(20)
    return {
        "unknown output": (["nope"], good),
        "missing feed": (None, {}),
        "unknown feed": (None, good | {"more": good["x"]}),
        "double": (None, good | {"x": good["x"].astype(np.float64)}),
        "wrong rank": (None, good | {"x": good["x"][0]}),
        "wrong size": (None, good | {"x": good["x"][..., :5]}),
        "no array": (None, good | {"x": object()}),
        "no mapping": (None, [good["x"]]),
    }


@pytest.mark.parametrize("case", sorted(bad_calls()))
def test_errors_are_those_of_onnxruntime(machine: Machine, block_pack: Path, case: str) -> None:
    npu, plain = load(block_pack), ort.InferenceSession(block_pack / "model.onnx", providers=["CPUExecutionProvider"])
    names, fed = bad_calls()[case]
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        plain.run(names, fed)
    with pytest.raises(type(theirs.value)) as ours:
        npu.run(names, fed)  # type: ignore[arg-type]
    assert str(ours.value) == str(theirs.value)
    npu.run(None, x_of(20))
    assert machine.computed.total() >= 3


def test_terminated_run(machine: Machine, block_pack: Path) -> None:
    npu, host = load(block_pack), load(block_pack, "host")
    options = ort.RunOptions()
    options.terminate = True
    for _ in range(4):
        with pytest.raises(Exception, match="terminate"):
            npu.run(None, x_of(20), options)
        same(npu.run(None, x_of(20)), host.run(None, x_of(20)))


def test_threads(machine: Machine, block_pack: Path) -> None:
    sessions = [load(block_pack, strict=True) for _ in range(2)]
    host, wrong = load(block_pack, "host"), list[BaseException]()
    wanted = {rows: host.run(None, x_of(rows)) for rows in (3, 16, 40, 70)}

    def work(session: PackSession, start: int) -> None:
        try:
            for number in range(24):
                rows = list(wanted)[(start + number) % len(wanted)]
                same(session.run(None, x_of(rows)), wanted[rows])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(s, i)) for i, s in enumerate(sessions * 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert machine.made["device"] == 1
    assert sum(s.coverage().counters["npu"] for s in sessions) == 6 * 24 * 3 * 3 // 4
    del sessions, threads


def resident() -> int:
    """Bytes of memory that are really held: what other tests freed and the allocator kept is given back first."""
    import ctypes
    import resource

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("runs", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow(machine: Machine, block_pack: Path, runs: int) -> None:
    machine.log = _Forgetful()
    npu = load(block_pack)
    feeds = [x_of(rows) for rows in (5, 16, 16, 40, 33, 70, 21)] + [x_of(rows) for rows in range(16, 60)]
    faults = {7: "timeout", 11: "raise"}

    def some(count: int) -> None:
        for number in range(count):
            machine.fault = lambda launch, n=number: faults.get(n % 50) if launch % 9 == 0 else None  # type: ignore[misc]
            npu.run(None, feeds[number % len(feeds)])

    some(max(300, runs // 5))
    before, alive = resident(), dict(machine.alive)
    some(runs)
    assert resident() - before < 4 << 20
    assert sum(machine.alive.values()) <= sum(alive.values()) + 4


class _Forgetful(list):  # type: ignore[type-arg]
    def append(self, item: object) -> None:
        pass


# --- places in memory -------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 500)), max_size=30))
def test_values_that_are_needed_at_once_do_not_overlap(values: list[tuple[int, int, int]]) -> None:
    sizes = {i: size for i, (_, _, size) in enumerate(values)}
    lifetimes = {i: Lifetime(made, made + more) for i, (made, more, _) in enumerate(values)}
    offsets, end = place(sizes, lifetimes)
    assert offsets.keys() == sizes.keys()
    for i in sizes:
        assert offsets[i] % 64 == 0
        assert offsets[i] + sizes[i] <= end
        for j in sizes:
            together = lifetimes[i].made <= lifetimes[j].last and lifetimes[j].made <= lifetimes[i].last
            apart = offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
            assert i == j or not together or apart
    assert end <= sum(-(-size // 64) * 64 for size in sizes.values())


def test_the_pool_holds_as_much_as_was_needed_at_once() -> None:
    pool, kind = Pool(), np.dtype(np.float32)
    for length in range(1, 400):
        lent = [pool.take((length, n), kind, 4 * length * n) for n in (8, 64, 8)]
        assert [one.array.shape for one in lent] == [(length, n) for n in (8, 64, 8)]
        for one in lent:
            pool.give(one)
        assert len(pool._free) <= 3
    assert sum(len(one.memory) for one in pool._free) <= 3 * 5 * 4 * 400 * 64 // 4
