"""What has no single meaning is refused in one line; what others refuse without need is read."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from model_maker import external, matmul, model, node, normal, tensor, value
from onnx import SparseTensorProto, TensorProto, helper

import onnxpack
from onnxpack.errors import ModelError
from onnxpack.graph.functions import MAX_NODES

W = tensor("W", normal(48, 80))


def census(proto: onnx.ModelProto) -> list[tuple[str, int | str | None, int | str | None, str | None]]:
    return [(s.op, s.k, s.n, s.reason) for s in onnxpack.census(proto).sites]


def typed(dtype: int, field: str, count: int) -> TensorProto:
    made = TensorProto(name="W", dims=[48, 80], data_type=dtype)
    getattr(made, field).extend([0] * count)
    return made


@pytest.mark.parametrize(
    ("dtype", "field", "entries_per_element"),
    [
        (TensorProto.FLOAT, "float_data", 1),
        (TensorProto.DOUBLE, "double_data", 1),
        (TensorProto.FLOAT16, "int32_data", 1),
        (TensorProto.BFLOAT16, "int32_data", 1),
        (TensorProto.INT8, "int32_data", 1),
        (TensorProto.INT64, "int64_data", 1),
        (TensorProto.UINT32, "uint64_data", 1),
        (TensorProto.UINT64, "uint64_data", 1),
        (TensorProto.COMPLEX64, "float_data", 2),
        (TensorProto.INT4, "int32_data", 0.5),
    ],
)
def test_data_stands_in_the_field_of_its_type(dtype: int, field: str, entries_per_element: float) -> None:
    count = int(48 * 80 * entries_per_element)
    nodes = [node("Identity", ["W"], ["y"])]
    onnxpack.census(model(nodes, [typed(dtype, field, count)]))
    with pytest.raises(ModelError, match="tensor W: its data has"):
        onnxpack.census(model(nodes, [typed(dtype, field, count - 1)]))
    other = "int64_data" if field != "int64_data" else "float_data"
    with pytest.raises(ModelError, match="its data has 0 bytes"):
        onnxpack.census(model(nodes, [typed(dtype, other, count)]))


BAD_ATTRIBUTES = [
    node("Gemm", ["x", "W"], ["y"], alpha=1),
    node("Gemm", ["x", "W"], ["y"], transB=1.0),
    node("Gemm", ["x", "W"], ["y"], transB="yes"),
    node("Transpose", ["W"], ["y"], perm=1),
    node("Cast", ["W"], ["y"], to="FLOAT"),
    node("FusedMatMul", ["x", "W"], ["y"], domain="com.microsoft", transB=1.0),
]


@pytest.mark.parametrize("bad", BAD_ATTRIBUTES, ids=lambda n: f"{n.op_type}.{n.attribute[0].name}")
def test_attributes_have_the_type_of_their_operator(bad: onnx.NodeProto) -> None:
    with pytest.raises(ModelError, match=r"attribute '\w+' is not of type (FLOAT|INT|INTS)"):
        onnxpack.census(model([bad], [W]))


def test_cast_named_its_type_below_opset_6() -> None:
    nodes = [node("Cast", ["V"], ["W"], to="FLOAT"), node("MatMul", ["x", "W"], ["y"])]
    inputs = [value("x", ["M", 48]), value("V", [48, 80], TensorProto.FLOAT16)]
    half = tensor("V", normal(48, 80).astype("f2"))
    old = model(nodes, [half], inputs, opset=5, ir_version=3)
    assert census(old) == [("MatMul", 48, 80, "unsupported-op")]


def sparse(values: TensorProto, indices: TensorProto, dims: tuple[int, ...] = (48, 80)) -> onnx.ModelProto:
    made = matmul()
    del made.graph.initializer[:]
    made.graph.sparse_initializer.append(SparseTensorProto(values=values, indices=indices, dims=dims))
    return made


VALUES = tensor("W", np.array([1, 2], np.float32))
INDICES = tensor("i", np.array([3, 5], np.int64))


def test_sparse_weights_in_both_index_forms() -> None:
    pairs = tensor("i", np.array([[0, 3], [0, 5]], np.int64))
    for indices in (INDICES, pairs):
        assert census(sparse(VALUES, indices)) == [("MatMul", 48, 80, "no-kernel")]
    constant = node(
        "Constant", [], ["W"], sparse_value=SparseTensorProto(values=VALUES, indices=INDICES, dims=[48, 80])
    )
    assert census(model([constant, node("MatMul", ["x", "W"], ["y"])])) == [("MatMul", 48, 80, "no-kernel")]


BAD_SPARSE = {
    "beyond": sparse(VALUES, tensor("i", np.array([3, 48 * 80], np.int64))),
    "negative": sparse(VALUES, tensor("i", np.array([-1, 5], np.int64))),
    "pair beyond": sparse(VALUES, tensor("i", np.array([[0, 3], [48, 0]], np.int64))),
    "too few values": sparse(tensor("W", np.ones(1, np.float32)), INDICES),
    "too many values": sparse(tensor("W", np.ones(3, np.float32)), INDICES),
    "int32 indices": sparse(VALUES, tensor("i", np.array([3, 5], np.int32))),
    "text values": sparse(tensor("W", np.array(["a", "b"], object)), INDICES),
    "huge": sparse(VALUES, INDICES, (2**31, 2**31)),
    "overflowing": sparse(VALUES, INDICES, (2**32, 2**32)),
    "negative shape": sparse(VALUES, INDICES, (-48, 80)),
    "a GiB": sparse(VALUES, INDICES, (2**14 + 1, 2**14)),
    "external values": sparse(external("W", "secret.bin", [2], 0, 8), INDICES),
    "external indices": sparse(VALUES, external("i", "../secret.bin", [2], 0, 16, TensorProto.INT64)),
}


@pytest.mark.parametrize("case", BAD_SPARSE)
def test_bad_sparse_tensors(case: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    monkeypatch.chdir(tmp_path)  # where onnx's own reader would look for external data of a sparse tensor
    with pytest.raises(ModelError, match="sparse tensor"):
        onnxpack.census(BAD_SPARSE[case])


def test_many_sparse_tensors_share_one_limit() -> None:
    made = sparse(VALUES, INDICES, (2**13, 2**13))
    for i in range(5):
        made.graph.sparse_initializer.add().CopyFrom(made.graph.sparse_initializer[0])
        made.graph.sparse_initializer[-1].values.name = f"V{i}"
    with pytest.raises(ModelError, match="cannot be made dense"):
        onnxpack.census(made)


def function(name: str, nodes: list[onnx.NodeProto], inputs: list[str], outputs: list[str]) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, inputs, outputs, nodes, imports)


def calling(name: str, *functions: onnx.FunctionProto, inputs: tuple[str, ...] = ("x", "W")) -> onnx.ModelProto:
    call = node(name, list(inputs), ["y"], domain="local")
    return model([call], [W], domains={"local": 1}, functions=functions)


def test_functions_are_seen_through() -> None:
    inner = function("Inner", [node("MatMul", ["a", "b"], ["c"])], ["a", "b"], ["c"])
    outer = function("Outer", [node("Inner", ["a", "b"], ["c"], domain="local")], ["a", "b"], ["c"])
    found = onnxpack.census(calling("Outer", outer, inner))
    assert [(s.path, s.k, s.n, s.weight) for s in found.sites] == [("fn:local.Inner/MatMul_0", 48, 80, "W")]


BAD_FUNCTIONS: dict[str, tuple[onnx.ModelProto, str]] = {
    "calls itself": (
        calling("F", function("F", [node("F", ["a", "b"], ["c"], domain="local")], ["a", "b"], ["c"])),
        "function local.F: calls itself",
    ),
    "each other": (
        calling(
            "F",
            function("F", [node("G", ["a", "b"], ["c"], domain="local")], ["a", "b"], ["c"]),
            function("G", [node("F", ["a", "b"], ["c"], domain="local")], ["a", "b"], ["c"]),
        ),
        "calls itself",
    ),
    "twice": (
        calling("F", *[function("F", [node("MatMul", ["a", "b"], ["c"])], ["a", "b"], ["c"])] * 2),
        "function local.F: is defined twice",
    ),
    "too many inputs": (
        calling("F", function("F", [node("Relu", ["a"], ["c"])], ["a"], ["c"])),
        "cannot be inlined",
    ),
}


@pytest.mark.parametrize("case", BAD_FUNCTIONS)
def test_bad_functions(case: str) -> None:
    proto, message = BAD_FUNCTIONS[case]
    with pytest.raises(ModelError, match=message):
        onnxpack.census(proto)


def test_functions_that_explode_are_refused_before_they_do() -> None:
    """A chain of functions that each call the next one twice: a small file, 2**30 nodes."""
    depth = 30
    chain = [
        function(
            f"F{i}",
            [node(f"F{i + 1}", ["a"], ["t"], domain="local"), node(f"F{i + 1}", ["t"], ["c"], domain="local")],
            ["a"],
            ["c"],
        )
        for i in range(depth)
    ]
    chain.append(function(f"F{depth}", [node("Identity", ["a"], ["c"])], ["a"], ["c"]))
    start = time.process_time()
    with pytest.raises(ModelError, match=f"at most {MAX_NODES} are read"):
        onnxpack.census(calling("F0", *chain, inputs=("x",)))
    assert time.process_time() - start < 5


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old, new)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("operator", replaced(b"MatMul", b"Mat\xff\xfel")),
        ("tensor", replaced(b"WWWW", b"W\xff\xfeW")),
        ("input", replaced(b"xxxx", b"x\xff\xfex")),
        ("node", replaced(b"nnnn", b"n\xff\xfen")),
        ("location", replaced(b"llll", b"l\xff\xfel")),
    ],
)
def test_text_that_is_not_utf8(what: str, change: Callable[[bytes], bytes], tmp_path) -> None:
    tensors = [tensor("WWWW", normal(48, 80)), external("Z", "llll", [2], 0, 8)]
    good = model([node("MatMul", ["xxxx", "WWWW"], ["y"], "nnnn")], tensors, [value("xxxx", ["M", 48])])
    (tmp_path / "llll").write_bytes(bytes(8))
    path = tmp_path / "m.onnx"
    path.write_bytes(good.SerializeToString())
    assert len(onnxpack.census(path).sites) == 1
    path.write_bytes(change(good.SerializeToString()))
    with pytest.raises(ModelError) as caught:
        onnxpack.census(path)
    assert caught.value.render().isprintable()


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (model([node("Gemm", ["x", "W"], ["y"])], [tensor("W", normal(1, 48, 80))]), "Gemm takes a matrix"),
        (model([node("Gemm", ["x", "W"], ["y"])], [tensor("W", normal(48))]), "Gemm takes a matrix"),
        (model([node("MatMul", ["x", "W"], ["y"])], [tensor("W", np.float32(1))]), "the weight is a scalar"),
        (model([node("MatMul", ["x"], ["y"])]), "1 inputs are too few"),
        (
            model(
                [node("MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft")],
                [tensor("q", np.zeros((80, 3, 8), "u1")), tensor("s", normal(240))],
            ),
            "does not state its K and N",
        ),
        (
            model(
                [node("Reshape", ["E", "s"], ["V"]), node("MatMul", ["x", "V"], ["y"])],
                [tensor("E", np.zeros(0, "f4")), tensor("s", np.array([48, 2**60]))],
            ),
            "cannot be reshaped",
        ),
        (
            model(
                [node("Add", ["W", "D"], ["V"]), node("MatMul", ["x", "V"], ["y"])],
                [W, tensor("D", normal(48, 80).astype("f8"))],
            ),
            "two tensors of one number type",
        ),
        (model([node("Constant", [], ["W"]), node("MatMul", ["x", "W"], ["y"])]), ""),
    ],
    ids=["gemm3d", "gemm1d", "scalar", "inputs", "nbits", "reshape", "mixed", "no value"],
)
def test_malformed_products(proto: onnx.ModelProto, message: str) -> None:
    if not message:  # a Constant without a value is nobody's weight
        assert census(proto) == [("MatMul", None, None, "dynamic-weight")]
        return
    with pytest.raises(ModelError, match=message):
        onnxpack.census(proto)


def test_transposed_contrib_products_are_listed() -> None:
    turned = [tensor("W", normal(80, 48))]
    for op in ("FusedMatMul", "FusedGemm"):
        proto = model([node(op, ["x", "W"], ["y"], domain="com.microsoft", transB=1)], turned)
        assert census(proto) == [(op, 48, 80, "unsupported-op")]


def test_names_that_are_no_trouble() -> None:
    long, odd = "n" * 5000, "../../tmp/évil\n\x1b[31m*?<>|\"'"
    nodes = [node("MatMul", ["x", long], [odd], odd), node("Relu", [odd], ["y"], odd)]
    found = onnxpack.census(model(nodes, [tensor(long, normal(48, 80))]))
    assert [(s.path, s.name, s.weight) for s in found.sites] == [("MatMul_0", odd, long)]
    nodes[0].input[1] = "nothing"
    with pytest.raises(ModelError) as caught:
        onnxpack.census(model(nodes))
    assert caught.value.render().isprintable()


@pytest.mark.parametrize("kind", ["TENSOR", "GRAPH", "SPARSE_TENSOR"])
def test_attributes_without_their_payload(kind: str) -> None:
    constant = node("Constant", [], ["W"])
    constant.attribute.add(name="value", type=onnx.AttributeProto.AttributeType.Value(kind))
    with pytest.raises(ModelError, match="attribute 'value' is"):
        onnxpack.census(model([constant, node("MatMul", ["x", "W"], ["y"])]))


def test_functions_whose_name_is_no_text(tmp_path) -> None:
    made = calling("FFFF", function("FFFF", [node("MatMul", ["a", "b"], ["c"])], ["a", "b"], ["c"]))
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString().replace(b"FFFF", b"F\xff\xfeF"))
    with pytest.raises(ModelError, match="not UTF-8"):
        onnxpack.census(path)


@pytest.mark.parametrize("field", ["producer_name", "producer_version", "domain", "doc_string", "metadata", "graph"])
def test_texts_about_the_model_that_are_none(tmp_path, field: str) -> None:
    made = matmul()
    if field == "metadata":
        made.metadata_props.add(key="key", value="@@@@")
    elif field == "graph":
        made.graph.name = "@@@@"
    else:
        setattr(made, field, "@@@@")
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString().replace(b"@@@@", b"@\xff\xfe@"))
    with pytest.raises(ModelError, match="not UTF-8"):
        onnxpack.build(path, tmp_path / "out.pack", weights="int8")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_node_that_cannot_be_written_again(tmp_path) -> None:
    """A text that nothing here reads: a census does not mind, a build says it in one line."""
    made = matmul()
    made.graph.node[0].doc_string = "@@@@"
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString().replace(b"@@@@", b"@\xff\xfe@"))
    assert len(onnxpack.census(path).sites) == 1
    with pytest.raises(ModelError, match="the graph cannot be written"):
        onnxpack.build(path, tmp_path / "out.pack", weights="int8")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
