"""Constants through views: shapes without bytes, numbers as onnxruntime computes them, nothing without bounds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_maker import Array, model, node, normal, tensor, value
from onnx import TensorProto

import onnxpack
from onnxpack.errors import ModelError
from onnxpack.graph.constant import Constant
from onnxpack.graph.constants import ConstantResolver, evaluate, structure
from onnxpack.graph.load import load
from onnxpack.graph.tensors import TensorStore

W = normal(6, 8)
I64 = np.int64


def resolved(proto: onnx.ModelProto, name: str) -> tuple[Constant | None, TensorStore]:
    loaded = load(proto)
    store = TensorStore(loaded.regions)
    values = {v.name: v for n in loaded.ir.graph for v in n.outputs} | dict(loaded.ir.graph.initializers)
    return ConstantResolver(store).resolve(values[name]), store


def onnxruntime(proto: onnx.ModelProto, name: str) -> Array:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    found: Array = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"]).run([name], {})[0]
    return found


CODES = np.arange(-24, 24).reshape(6, 8)
S8, Z8 = np.linspace(0.01, 0.08, 8).astype("f4"), np.arange(8).astype("i1")
S6 = np.linspace(0.01, 0.06, 6).astype("f4")

CASES: dict[str, tuple[int, list[onnx.NodeProto], dict[str, Any]]] = {
    "identity": (21, [node("Identity", ["W"], ["y"])], {}),
    "transpose": (21, [node("Transpose", ["W"], ["y"])], {}),
    "transpose perm": (21, [node("Transpose", ["C"], ["y"], perm=[2, 0, 1])], {"C": normal(2, 3, 4)}),
    "reshape": (21, [node("Reshape", ["W", "s"], ["y"])], {"s": np.array([0, -1, 2], I64)}),
    "reshape allowzero": (
        14,
        [node("Reshape", ["E", "s"], ["y"], allowzero=1)],
        {"E": np.zeros((0, 3), "f4"), "s": np.array([3, 0], I64)},
    ),
    "squeeze": (21, [node("Squeeze", ["C", "a"], ["y"])], {"C": normal(1, 6, 1, 8), "a": np.array([0, -2], I64)}),
    "squeeze all": (21, [node("Squeeze", ["C"], ["y"])], {"C": normal(1, 6, 1, 8)}),
    "squeeze 11": (11, [node("Squeeze", ["C"], ["y"], axes=[0])], {"C": normal(1, 6, 1, 8)}),
    "unsqueeze": (21, [node("Unsqueeze", ["W", "a"], ["y"])], {"a": np.array([-1, 0], I64)}),
    "unsqueeze 11": (11, [node("Unsqueeze", ["W"], ["y"], axes=[1, 3])], {}),
    "flatten": (21, [node("Flatten", ["C"], ["y"], axis=2)], {"C": normal(2, 3, 4)}),
    "flatten 0": (21, [node("Flatten", ["C"], ["y"], axis=0)], {"C": normal(2, 3, 4)}),
    "flatten -1": (21, [node("Flatten", ["C"], ["y"], axis=-1)], {"C": normal(2, 3, 4)}),
    "cast f2": (21, [node("Cast", ["W"], ["y"], to=TensorProto.FLOAT16)], {}),
    "cast f8": (21, [node("Cast", ["W"], ["y"], to=TensorProto.DOUBLE)], {}),
    "cast i8": (21, [node("Cast", ["W"], ["y"], to=TensorProto.INT8)], {}),
    "cast i8 f4": (21, [node("Cast", ["Q"], ["y"], to=TensorProto.FLOAT)], {"Q": CODES.astype("i1")}),
    "cast bf16": (
        21,
        [node("Cast", ["W"], ["b"], to=TensorProto.BFLOAT16), node("Cast", ["b"], ["y"], to=TensorProto.FLOAT)],
        {},
    ),
    "slice": (
        21,
        [node("Slice", ["W", "b", "e", "a", "s"], ["y"])],
        {
            "b": np.array([1, -1], I64),
            "e": np.array([100, -100], I64),
            "a": np.array([0, -1], I64),
            "s": np.array([2, -3], I64),
        },
    ),
    "slice no axes": (21, [node("Slice", ["W", "b", "e"], ["y"])], {"b": np.array([1], I64), "e": np.array([-1], I64)}),
    "slice 9": (9, [node("Slice", ["W"], ["y"], starts=[1, 2], ends=[5, 2**31], axes=[0, 1])], {}),
    "split": (21, [node("Split", ["W", "s"], ["a", "y", "b"], axis=1)], {"s": np.array([1, 5, 2], I64)}),
    "split uneven": (21, [node("Split", ["W"], ["a", "b", "y"], axis=1, num_outputs=3)], {}),
    "split 11": (11, [node("Split", ["W"], ["a", "y"], axis=-1, split=[3, 5])], {}),
    "split even 11": (11, [node("Split", ["W"], ["a", "y"])], {}),
    "concat": (21, [node("Concat", ["W", "C", "W"], ["y"], axis=-2)], {"C": normal(2, 8)}),
    "expand": (21, [node("Expand", ["C", "s"], ["y"])], {"C": normal(3, 1), "s": np.array([2, 1, 4], I64)}),
    "fill": (
        21,
        [node("ConstantOfShape", ["s"], ["y"], value=tensor("v", np.array([0.5], "f4")))],
        {"s": np.array([3, 2], I64)},
    ),
    "fill zero": (21, [node("ConstantOfShape", ["s"], ["y"])], {"s": np.array([3, 2], I64)}),
    "add": (21, [node("Add", ["W", "C"], ["y"])], {"C": normal(8)}),
    "sub": (21, [node("Sub", ["C", "W"], ["y"])], {"C": normal(6, 1)}),
    "mul": (21, [node("Mul", ["W", "C"], ["y"])], {"C": np.float32(0.1)}),
    "div": (21, [node("Div", ["W", "C"], ["y"])], {"C": S8}),
    "div int": (21, [node("Div", ["Q", "D"], ["y"])], {"Q": CODES.astype("i4"), "D": np.full(8, 7, "i4")}),
    "cast and scale": (
        21,
        [node("Cast", ["Q"], ["c"], to=TensorProto.FLOAT), node("Mul", ["c", "S"], ["y"])],
        {"Q": CODES.astype("i1"), "S": S8},
    ),
    "dq": (21, [node("DequantizeLinear", ["Q", "s"], ["y"])], {"Q": CODES.astype("i1"), "s": np.float32(0.1)}),
    "dq [1]": (21, [node("DequantizeLinear", ["Q", "s"], ["y"])], {"Q": CODES.astype("i1"), "s": S8[:1]}),
    "dq columns": (21, [node("DequantizeLinear", ["Q", "s", "z"], ["y"])], {"Q": CODES.astype("i1"), "s": S8, "z": Z8}),
    "dq rows": (21, [node("DequantizeLinear", ["Q", "s"], ["y"], axis=0)], {"Q": CODES.astype("i1"), "s": S6}),
    "dq axis -2": (21, [node("DequantizeLinear", ["Q", "s"], ["y"], axis=-2)], {"Q": CODES.astype("i1"), "s": S6}),
    "dq uint8": (
        13,
        [node("DequantizeLinear", ["Q", "s", "z"], ["y"], axis=1)],
        {"Q": (CODES + 128).astype("u1"), "s": S8, "z": np.full(8, 128, "u1")},
    ),
    "dq int32": (
        21,
        [node("DequantizeLinear", ["Q", "s"], ["y"])],
        {"Q": (CODES * 99991).astype("i4"), "s": np.float32(1e-6)},
    ),
    "dq f2": (21, [node("DequantizeLinear", ["Q", "s"], ["y"])], {"Q": CODES.astype("i1"), "s": S8.astype("f2")}),
    "dq blocks": (
        21,
        [node("DequantizeLinear", ["Q", "s", "z"], ["y"], axis=0, block_size=4)],
        {"Q": CODES.astype("i1"), "s": normal(2, 8) ** 2, "z": np.arange(16).reshape(2, 8).astype("i1")},
    ),
    "dq int4": (
        21,
        [node("DequantizeLinear", ["Q", "s"], ["y"], axis=0, block_size=3)],
        {"Q": (CODES % 16 - 8).astype(ml_dtypes.int4), "s": normal(2, 8) ** 2},
    ),
    "dq uint4 odd": (
        21,
        [node("DequantizeLinear", ["Q", "s"], ["y"])],
        {"Q": (np.arange(35) % 16).reshape(5, 7).astype(ml_dtypes.uint4), "s": np.float32(0.5)},
    ),
    "dq msft": (
        17,
        [node("DequantizeLinear", ["Q", "s", "z"], ["y"], domain="com.microsoft", axis=1)],
        {"Q": CODES.astype("i1"), "s": S8, "z": Z8},
    ),
    "q dq": (
        21,
        [
            node("QuantizeLinear", ["W", "s", "z"], ["q"], axis=1),
            node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1),
        ],
        {"s": S8, "z": Z8},
    ),
    "q default": (21, [node("QuantizeLinear", ["W", "s"], ["y"])], {"s": np.float32(0.01)}),
    "q ties": (
        21,
        [node("QuantizeLinear", ["T", "s", "z"], ["y"])],
        {"T": np.array([0.5, 1.5, 2.5, -0.5, -1.5, 300, -300], "f4"), "s": np.float32(1), "z": np.int8(-7)},
    ),
    "q output type": (
        21,
        [node("QuantizeLinear", ["W", "s"], ["y"], output_dtype=TensorProto.INT8)],
        {"s": np.float32(0.01)},
    ),
    "q uint16": (21, [node("QuantizeLinear", ["W", "s", "z"], ["y"])], {"s": np.float32(1e-4), "z": np.uint16(32768)}),
    "constant": (21, [node("Constant", [], ["y"], value=tensor("v", W))], {}),
    "constant floats": (21, [node("Constant", [], ["y"], value_floats=[1.0, 2.5])], {}),
    "constant ints": (21, [node("Constant", [], ["y"], value_ints=[3, 4])], {}),
    "constant float": (21, [node("Constant", [], ["y"], value_float=1.5)], {}),
    "long chain": (
        21,
        [*(node("Identity", [f"i{i}"], [f"i{i + 1}"]) for i in range(2000)), node("Identity", ["i2000"], ["y"])],
        {"i0": W},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_onnxruntime(case: str) -> None:
    opset, nodes, constants = CASES[case]
    tensors = [tensor(name, array) for name, array in ({"W": W} | constants).items()]
    used = {name for n in nodes for name in n.input}
    proto = model(nodes, [t for t in tensors if t.name in used], [], ["y"], opset=opset)
    proto.graph.output[0].ClearField("type")
    constant, store = resolved(proto, "y")
    assert constant is not None
    numbers = evaluate(constant, store)
    expected = onnxruntime(proto, "y")
    assert constant.shape == numbers.shape == expected.shape
    assert constant.dtype.numpy() == numbers.dtype == expected.dtype
    assert np.array_equal(numbers, expected), case
    assert constant.root.tensor is not None or constant.root.node is not None


@pytest.mark.parametrize(
    "case", ["identity", "transpose", "reshape", "slice", "split", "squeeze", "unsqueeze", "flatten", "expand", "fill"]
)
def test_views_do_not_copy(case: str) -> None:
    opset, nodes, constants = CASES[case]
    tensors = [tensor(name, array) for name, array in ({"W": W} | constants).items()]
    constant, store = resolved(model(nodes, tensors, [], ["y"], opset=opset), "y")
    assert constant is not None
    base = evaluate(constant, store)
    assert base.base is not None or not base.flags.owndata


BAD: dict[str, list[onnx.NodeProto]] = {
    "perm": [node("Transpose", ["W"], ["y"], perm=[0, 0])],
    "perm rank": [node("Transpose", ["W"], ["y"], perm=[0, 1, 2])],
    "squeeze": [node("Squeeze", ["W", "minus"], ["y"])],
    "axis": [node("Unsqueeze", ["W", "far"], ["y"])],
    "concat": [node("Concat", ["W", "V"], ["y"], axis=0)],
    "concat types": [node("Concat", ["W", "H"], ["y"], axis=0)],
    "split": [node("Split", ["W", "far"], ["y"], axis=0)],
    "expand": [node("Expand", ["W", "far"], ["y"])],
    "slice steps": [node("Slice", ["W", "zero", "far", "zero", "zero"], ["y"])],
    "slice pairs": [node("Slice", ["W", "two", "far"], ["y"])],
    "reshape": [node("Reshape", ["W", "far"], ["y"])],
    "reshape by words": [node("Reshape", ["W", "words"], ["y"])],
    "fill": [node("ConstantOfShape", ["minus"], ["y"])],
    "scales": [node("DequantizeLinear", ["Q", "V"], ["y"])],
    "scale length": [node("DequantizeLinear", ["Q", "five"], ["y"], axis=1)],
    "scale axis": [node("DequantizeLinear", ["Q", "five"], ["y"], axis=2)],
    "zero point": [node("DequantizeLinear", ["Q", "eight", "two"], ["y"], axis=1)],
    "blocks": [node("DequantizeLinear", ["Q", "eight"], ["y"], axis=1, block_size=3)],
}


@pytest.mark.parametrize("case", BAD)
def test_views_that_cannot_be_are_refused_at_their_node(case: str) -> None:
    constants: dict[str, Any] = {
        "W": W,
        "V": normal(3, 3),
        "H": W.astype("f2"),
        "Q": CODES.astype("i1"),
        "minus": np.array([-1], I64),
        "zero": np.array([0], I64),
        "two": np.array([1, 2], I64),
        "far": np.array([77], I64),
        "five": np.ones(5, "f4"),
        "eight": np.ones(8, "f4"),
        "words": np.array(["a"], object),
    }
    nodes = [*BAD[case], node("MatMul", ["x", "y"], ["z"])]
    proto = model(nodes, [tensor(name, array) for name, array in constants.items()], [value("x", ["M", 6])], ["z"])
    with pytest.raises(ModelError, match=f"{BAD[case][0].op_type}_0"):
        onnxpack.census(proto)


def test_a_filled_weight_of_any_size_is_counted_but_never_computed(tmp_path) -> None:
    """ConstantOfShape and Expand are views of one number; arithmetic on them would need the memory."""
    nodes = [node("ConstantOfShape", ["s"], ["f"]), node("Add", ["f", "f"], ["W"]), node("MatMul", ["x", "W"], ["y"])]
    proto = model(nodes, [tensor("s", np.array([48, 2**36], I64))])
    assert onnxpack.census(proto).sites[0].n == 2**36
    with pytest.raises(ModelError, match="Add_0: 13194139533312 bytes would have to be computed"):
        onnxpack.build(proto, tmp_path / "out.pack", weights="int8")
    assert list(tmp_path.iterdir()) == []


def test_shapes_are_never_computed_from_large_tensors() -> None:
    """A target shape cut out of a huge computed constant: reading it would cost the memory."""
    nodes = [
        node("ConstantOfShape", ["s"], ["f"], value=tensor("v", np.array([48], I64))),
        node("Add", ["f", "f"], ["g"]),
        node("Slice", ["g", "zero", "two"], ["shape"]),
        node("Reshape", ["W", "shape"], ["V"]),
        node("MatMul", ["x", "V"], ["y"]),
    ]
    tensors = [
        tensor("s", np.array([2**33], I64)),
        tensor("zero", np.array([0], I64)),
        tensor("two", np.array([2], I64)),
        tensor("W", normal(96, 96)),
    ]
    with pytest.raises(ModelError, match="too long for a shape"):
        onnxpack.census(model(nodes, tensors, [value("x", ["M", 96])]))


def test_structure_tells_weights_apart_by_how_they_are_made() -> None:
    nodes = [
        node("Identity", ["W"], ["a"]),
        node("Transpose", ["W"], ["b"]),
        node("Transpose", ["a"], ["c"], perm=[1, 0]),
        node("Split", ["W"], ["d", "e"], axis=0, num_outputs=2),
        node("Cast", ["W"], ["f"], to=TensorProto.FLOAT16),
        node("Identity", ["V"], ["g"]),
    ]
    proto = model(nodes, [tensor("W", W), tensor("V", W)], [], list("abcdefg"))
    loaded = load(proto)
    resolver = ConstantResolver(TensorStore(loaded.regions))
    made = {v.name: resolver.resolve(v) for n in loaded.ir.graph for v in n.outputs}
    marks = {name: structure(constant) for name, constant in made.items() if constant is not None}
    assert len(marks) == 7
    assert marks["a"] == structure(resolver.resolve(loaded.ir.graph.initializers["W"]))
    assert len({marks[name] for name in "abdefg"}) == 6
    found = made["c"]
    assert found is not None
    assert found.chain == ("Transpose", "Identity")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_chains_of_views(data: st.DataObject) -> None:
    """Any chain of shape-changing views gives the numbers that numpy gives."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    expected = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    nodes, tensors, at = [], [tensor("W", expected)], "W"
    for i in range(data.draw(st.integers(1, 6))):
        out, rank = f"v{i}", expected.ndim
        kind = data.draw(st.sampled_from(["Transpose", "Reshape", "Unsqueeze", "Slice", "Flatten"]))
        if kind == "Transpose":
            perm = data.draw(st.permutations(range(rank)))
            nodes.append(node(kind, [at], [out], perm=list(perm)))
            expected = expected.transpose(perm)
        elif kind == "Reshape":
            tensors.append(tensor(f"s{i}", np.array([-1, expected.shape[-1] if rank else 1], I64)))
            nodes.append(node(kind, [at, f"s{i}"], [out]))
            expected = expected.reshape(-1, expected.shape[-1])
        elif kind == "Unsqueeze":
            axis = data.draw(st.integers(-rank - 1, rank))
            tensors.append(tensor(f"s{i}", np.array([axis], I64)))
            nodes.append(node(kind, [at, f"s{i}"], [out]))
            expected = np.expand_dims(expected, axis)
        elif kind == "Slice":
            axis = data.draw(st.integers(0, rank - 1))
            stop = data.draw(st.integers(1, expected.shape[axis]))
            tensors += [tensor(f"{n}{i}", np.array([v], I64)) for n, v in (("b", 0), ("e", stop), ("a", axis))]
            nodes.append(node(kind, [at, f"b{i}", f"e{i}", f"a{i}"], [out]))
            expected = np.take(expected, range(stop), axis)
        else:
            axis = data.draw(st.integers(0, rank))
            nodes.append(node(kind, [at], [out], axis=axis))
            expected = expected.reshape(int(np.prod(expected.shape[:axis])), -1)
        at = out
    constant, store = resolved(model(nodes, tensors, [], [at]), at)
    assert constant is not None
    assert constant.shape == expected.shape
    assert np.array_equal(evaluate(constant, store), expected)
    assert constant.root.name == "W"
    assert len(constant.chain) == len(nodes)
