"""Cutting: every value a later step needs is handed on, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnxpack.errors import PackError
from onnxpack.runtime.cut import Calls, Segment, cut
from onnxpack.runtime.session import load

Make = Callable[..., Any]


def info(name: str, shape: Any = None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def node(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], output, **attributes)


def model(nodes: list[onnx.NodeProto], inputs: list[str], outputs: list[str], **tensors: Any) -> onnx.ModelProto:
    held = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", [info(n) for n in inputs], [info(n) for n in outputs], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def shape_of(steps: list[Segment | Calls], source: onnx.ModelProto) -> list[Any]:
    names = [n.name for n in source.graph.node]
    return [
        (
            [names[i] for i in step.nodes]
            if isinstance(step, Calls)
            else (" ".join(names[i] for i in step.nodes), step.inputs, step.outputs, step.initializers)
        )
        for step in steps
    ]


def test_rows_of_a_chain() -> None:
    nodes = [
        node("Abs", ["x"], "a"),
        node("Cut", ["a"], "q"),
        node("Cut", ["a"], "k"),
        node("Add", ["q", "k"], "s"),
        node("Cut", ["s"], "o"),
        node("Add", ["o", "a"], "y"),
    ]
    source = model(nodes, ["x"], ["y"])
    assert shape_of(cut(source, ["q", "k", "o"]), source) == [
        ("a", ("x",), ("a",), ()),
        (["q", "k"]),
        ("s", ("k", "q"), ("s",), ()),
        (["o"]),
        ("y", ("a", "o"), ("y",), ()),
    ]


def test_nothing_to_cut_is_one_segment() -> None:
    source = model([node("Abs", ["x"], "y")], ["x"], ["y"])
    assert shape_of(cut(source, []), source) == [("y", ("x",), ("y",), ())]


def test_nothing_between_cuts_is_no_segment() -> None:
    source = model([node("MatMul", ["x", "w"], "h"), node("MatMul", ["h", "w"], "y")], ["x"], ["y"], w=np.eye(2))
    assert shape_of(cut(source, ["h", "y"]), source) == [
        ("", (), ("w",), ("w",)),
        ["h"],
        ["y"],
    ]


def test_constants_stand_in_every_segment_that_needs_them() -> None:
    nodes = [
        node("Constant", [], "c", value=numpy_helper.from_array(np.float32(2))),
        node("Neg", ["c"], "minus"),
        node("Mul", ["x", "minus"], "a"),
        node("Cut", ["a"], "p"),
        node("Mul", ["p", "minus"], "y"),
    ]
    source = model(nodes, ["x"], ["y"])
    assert shape_of(cut(source, ["p"]), source) == [
        ("c minus a", ("x",), ("a",), ()),
        ["p"],
        ("c minus y", ("p",), ("y",), ()),
    ]


def test_random_values_are_drawn_once() -> None:
    nodes = [
        node("RandomNormal", [], "r", shape=[2]),
        node("Add", ["x", "r"], "a"),
        node("Cut", ["a"], "p"),
        node("Sub", ["p", "r"], "y"),
    ]
    source = model(nodes, ["x"], ["y"])
    first, _, last = cut(source, ["p"])
    assert isinstance(first, Segment)
    assert isinstance(last, Segment)
    assert first.outputs == ("a", "r")
    assert last.inputs == ("p", "r")


def test_unsorted_nodes_are_sorted() -> None:
    nodes = [node("Neg", ["p"], "y"), node("Cut", ["a"], "p"), node("Abs", ["x"], "a")]
    source = model(nodes, ["x"], ["y"])
    assert shape_of(cut(source, ["p"]), source) == [("a", ("x",), ("a",), ()), ["p"], ("y", ("p",), ("y",), ())]


def test_ten_thousand_nodes_in_a_row() -> None:
    nodes = [node("Abs", [f"v{i}"], f"v{i + 1}") for i in range(10_000)][::-1]
    source = model(nodes, ["v0"], ["v10000"])
    [segment] = cut(source, [])
    assert isinstance(segment, Segment)
    assert len(segment.nodes) == 10_000


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([("a", "b"), ("b", "a")], "cycle"),
        ([("nowhere", "b")], "nothing makes"),
        ([("x", "b")], "output 'y' is made by nothing"),
    ],
)
def test_graphs_that_cannot_run(nodes: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(PackError, match=message):
        cut(model([node("Abs", [a], b) for a, b in nodes], ["x"], ["y"]), [])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_steps_run_every_node_once_and_know_their_inputs(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 14))
    nodes, names = [], ["x", "w"]
    for index in range(count):
        inputs = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        nodes.append(node(data.draw(st.sampled_from(["Sum", "RandomNormalLike"])), inputs, f"v{index}"))
        names.append(f"v{index}")
    outputs = data.draw(st.lists(st.sampled_from(names[2:]), min_size=1, unique=True))
    cuts = set(data.draw(st.lists(st.sampled_from(names[2:]), unique=True)))
    source = model(nodes, ["x"], outputs, w=1)
    before = source.SerializeToString()
    steps = cut(source, cuts)
    assert source.SerializeToString() == before
    known = {"x"}
    ran: list[int] = []
    for step in steps:
        if isinstance(step, Calls):
            for index in step.nodes:
                assert nodes[index].name in cuts
                assert set(nodes[index].input) <= known
            known |= {nodes[index].output[0] for index in step.nodes}
            ran += step.nodes
            continue
        assert set(step.inputs) <= known
        inside = set(step.inputs) | set(step.initializers)
        for index in step.nodes:
            assert nodes[index].name not in cuts
            assert set(nodes[index].input) <= inside
            inside.add(nodes[index].output[0])
        assert set(step.outputs) <= inside
        known |= set(step.outputs)
        ran += step.nodes
    assert set(outputs) <= known
    random = [i for i, n in enumerate(nodes) if n.op_type == "RandomNormalLike" or n.name in cuts]
    assert all(ran.count(index) <= 1 for index in random)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_values_of_all_kinds_cross_the_cut(pack: Make, both: Make) -> None:
    """Sequences, optional values, strings, booleans and integers made before a site and read behind it."""
    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    body = helper.make_graph([node("Add", ["p", "side"], "t")], "then", [], [info("t")])
    other = helper.make_graph([node("Identity", ["p"], "e")], "else", [], [info("e")])
    nodes = [
        node("SequenceConstruct", ["x", "x"], "seq"),
        node("Optional", ["x"], "some"),
        node("Shape", ["x"], "dims"),
        node("Cast", ["dims"], "text", to=TensorProto.STRING),
        node("Neg", ["x"], "side"),
        node("Greater", ["x", "side"], "mask"),
        node("MatMul", ["x", "w"], "p"),
        node("SequenceAt", ["seq", "one"], "back"),
        node("Add", ["back", "p"], "y1"),
        node("OptionalGetElement", ["some"], "got"),
        node("Where", ["mask", "got", "p"], "y2"),
        node("Reshape", ["p", "dims"], "y3"),
        node("Identity", ["text"], "y4"),
        node("If", ["flag"], "y5", then_branch=body, else_branch=other),
        node("SequenceInsert", ["seq", "p"], "y6"),
        node("Identity", ["x"], "early"),
    ]
    sequence = helper.make_tensor_sequence_value_info("y6", TensorProto.FLOAT, None)
    outputs = [info("y1"), info("y2"), info("y3"), info("y4", None, TensorProto.STRING), info("y5"), sequence]
    folder = pack(
        nodes,
        [info("x", ["m", 8]), info("flag", [], TensorProto.BOOL)],
        [*outputs, info("early"), info("x"), info("kept"), info("p")],
        {"w": normal(8, 8)},
        initializers={"one": np.array(1), "kept": normal(3)},
        value_info=[helper.make_value_info("some", optional)],
    )
    made = both(folder)
    for flag in (True, False):
        results = made.run({"x": normal(4, 8), "flag": np.array(flag)})
        assert [len(r) if isinstance(r, list) else r.shape for r in results] == [
            *[(4, 8)] * 3, (2,), (4, 8), 3, (4, 8), (4, 8), (3,), (4, 8)
        ]  # fmt: skip
    [only] = made.run({"x": normal(4, 8), "flag": np.array(True)}, ["y3"])
    assert only.shape == (4, 8)


def test_optional_input_that_is_not_fed(pack: Make, both: Make) -> None:
    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    nodes = [
        node("MatMul", ["x", "w"], "p"),
        node("OptionalHasElement", ["maybe"], "has"),
        node("Not", ["has"], "y"),
        node("Abs", ["p"], "z"),
    ]
    inputs = [info("x", ["m", 8]), helper.make_value_info("maybe", optional)]
    folder = pack(nodes, inputs, [info("y", [], TensorProto.BOOL), info("z")], {"w": normal(8, 8)}, opset=18)
    made = both(folder)
    x = normal(2, 8)
    assert [bool(made.run(feeds)[0]) for feeds in ({"x": x}, {"x": x, "maybe": None}, {"x": x, "maybe": x})] == [
        True,
        True,
        False,
    ]


def test_overridable_initializer(pack: Make, both: Make) -> None:
    nodes = [node("Mul", ["x", "gain"], "a"), node("MatMul", ["a", "w"], "p"), node("Mul", ["p", "gain"], "y")]
    inputs = [info("x", ["m", 4]), info("gain", [])]
    folder = pack(nodes, inputs, [info("y")], {"w": normal(4, 4)}, initializers={"gain": np.float32(3)})
    made = both(folder)
    assert [v.name for v in made.reference.get_inputs()] == ["x"]
    assert [v.name for v in made.reference.get_overridable_initializers()] == ["gain"]
    x = normal(2, 4)
    [default], [fed] = made.run({"x": x}), made.run({"x": x, "gain": np.array(1, np.float32)})
    assert np.abs(default / fed - 9).max() < 1e-3


def test_constant_activations(pack: Make, both: Make) -> None:
    nodes = [node("MatMul", ["table", "w"], "p"), node("Add", ["p", "x"], "y")]
    folder = pack(nodes, [info("x", [2, 4])], [info("y")], {"w": normal(6, 4)}, initializers={"table": normal(2, 6)})
    both(folder).run({"x": normal(2, 4)})


def test_only_a_site(pack: Make, both: Make) -> None:
    folder = pack([node("MatMul", ["x", "w"], "y")], [info("x", ["m", 6])], [info("y")], {"w": normal(6, 4)})
    [y] = both(folder).run({"x": normal(2, 6)})
    assert y.shape == (2, 4)


def test_attention_like_graph_with_a_free_symbol(pack: Make, both: Make) -> None:
    """q, k, v of one input, a dynamic product between them, an output site, a residual."""
    d, ws = 16, {name: normal(16, 16) / 4 for name in ("wq", "wk", "wv", "wo")}
    nodes = [
        node("MatMul", ["x", "wq"], "q"),
        node("MatMul", ["x", "wk"], "k"),
        node("MatMul", ["x", "wv"], "v"),
        node("Transpose", ["k"], "kt", perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], "scores"),
        node("Softmax", ["scores"], "p", axis=-1),
        node("MatMul", ["p", "v"], "mix"),
        node("MatMul", ["mix", "wo"], "o"),
        node("Add", ["o", "x"], "y"),
    ]
    made = both(pack(nodes, [info("x", ["b", "t", d])], [info("y")], ws, m="b*t"))
    for b, t in ((1, 1), (2, 5), (0, 3), (3, 0)):
        made.run({"x": normal(b, t, d)})
        counted = [r.rows for r in made.reference.trace() if r.run][-4:]
        assert counted == [r.rows for r in made.host.trace() if r.run][-4:] == [b * t] * 4


def test_external_weights_are_not_copied_into_segments(pack: Make) -> None:
    folder = pack([node("MatMul", ["x", "w"], "y")], [info("x", ["m", 6])], [info("y")], {"w": normal(6, 4)})
    (folder / "extra").mkdir()
    moved = folder.rename(folder.with_name("moved é ü.pack"))
    assert load(moved, "reference").run(None, {"x": normal(1, 6)})[0].shape == (1, 4)
    assert load(moved, "host").run(None, {"x": normal(1, 6)})[0].shape == (1, 4)
