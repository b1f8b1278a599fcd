"""Small files that ask for too much: time and memory stay bounded, and the answer is a result or one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_maker import external, model, node, normal, save, tensor, value
from onnx import SparseTensorProto, TensorProto, helper

I64 = np.int64
LAST = node("MatMul", ["x", "W"], ["y"])


def shape(name: str, *dims: int) -> TensorProto:
    return tensor(name, np.array(dims, I64))


def fill(*dims: int, then: list[onnx.NodeProto]) -> onnx.ModelProto:
    """A weight that begins as one number blown up to `dims`."""
    first = node("ConstantOfShape", ["s"], ["a"])
    return model([first, *then, LAST], [shape("s", *dims)], [value("x", ["M", dims[0]])])


def doubling(depth: int) -> onnx.ModelProto:
    """Each Concat joins the one before with itself: 2**depth times the weight."""
    nodes = [node("Concat", [f"c{i}", f"c{i}"], [f"c{i + 1}"], axis=1) for i in range(depth)]
    nodes.append(node("MatMul", ["x", f"c{depth}"], ["y"]))
    return model(nodes, [tensor("c0", normal(8, 8))], [value("x", ["M", 8])])


def nested(depth: int) -> onnx.ModelProto:
    at = helper.make_graph([node("MatMul", ["x", "W"], ["o"])], "g", [], [value("o", None)])
    for i in range(depth):
        at = helper.make_graph(
            [node("If", ["c"], [f"o{i}"], then_branch=at, else_branch=at)], "g", [], [value(f"o{i}", None)]
        )
    inputs = [value("x", ["M", 8]), value("c", [], TensorProto.BOOL)]
    nodes = [node("If", ["c"], ["y"], then_branch=at, else_branch=at)]
    return model(nodes, [tensor("W", normal(8, 8))], inputs)


def functions(depth: int) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("l", 1)]
    made = [
        helper.make_function(
            "l",
            f"F{i}",
            ["a"],
            ["b"],
            [node(f"F{i + 1}", ["a"], ["t"], domain="l"), node(f"F{i + 1}", ["t"], ["b"], domain="l")],
            imports,
        )
        for i in range(depth)
    ]
    made.append(helper.make_function("l", f"F{depth}", ["a"], ["b"], [node("Relu", ["a"], ["b"])], imports))
    nodes = [node("F0", ["x"], ["h"], domain="l"), node("MatMul", ["h", "W"], ["y"])]
    return model(nodes, [tensor("W", normal(48, 8))], domains={"l": 1}, functions=made)


def sparse(dims: tuple[int, ...]) -> onnx.ModelProto:
    made = model([LAST], inputs=[value("x", ["M", dims[0]])])
    values, indices = tensor("W", np.ones(1, np.float32)), tensor("i", np.array([0], I64))
    made.graph.sparse_initializer.append(SparseTensorProto(values=values, indices=indices, dims=dims))
    return made


def chain_of(count: int, op: str) -> onnx.ModelProto:
    nodes = [node(op, [f"v{i}"], [f"v{i + 1}"]) for i in range(count)]
    nodes.append(node("MatMul", ["x", f"v{count}"], ["y"]))
    return model(nodes, [tensor("v0", normal(8, 8))], [value("x", ["M", 8])])


def fan(count: int) -> onnx.ModelProto:
    """One weight, very many products."""
    nodes = [node("MatMul", ["x", "W"], [f"o{i}"]) for i in range(count)]
    return model(nodes, [tensor("W", normal(8, 8))], [value("x", ["M", 8])], [f"o{i}" for i in range(count)])


def reversed_chain(count: int) -> onnx.ModelProto:
    """The worst order for a sort."""
    made = chain_of(count, "Identity")
    nodes = list(made.graph.node)[::-1]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


BOMBS: dict[str, tuple[Callable[[], onnx.ModelProto], set[int]]] = {
    "fill": (lambda: fill(48, 2**40, then=[node("Identity", ["a"], ["W"])]), {5}),
    "fill with a K beyond int32": (lambda: fill(2**31, 2**31, then=[node("Identity", ["a"], ["W"])]), {0}),
    "fill and add": (lambda: fill(48, 2**33, then=[node("Add", ["a", "a"], ["W"])]), {3}),
    "fill and cast": (
        lambda: fill(48, 2**33, then=[node("Cast", ["a"], ["b"], to=10), node("Cast", ["b"], ["W"], to=1)]),
        {3},
    ),
    "fill and concat": (lambda: fill(48, 2**33, then=[node("Concat", ["a", "a"], ["W"], axis=1)]), {3}),
    "fill and quantize": (
        lambda: fill(
            48, 2**33, then=[node("QuantizeLinear", ["a", "one"], ["q"]), node("DequantizeLinear", ["q", "one"], ["W"])]
        ),
        {3},
    ),
    "fill and turn": (
        lambda: fill(48, 2**33, then=[node("Transpose", ["a"], ["t"]), node("Transpose", ["t"], ["W"])]),
        {5},
    ),
    "expand": (
        lambda: model(
            [node("Expand", ["w", "s"], ["W"]), LAST],
            [tensor("w", normal(8, 1)), shape("s", 8, 2**40)],
            [value("x", ["M", 8])],
        ),
        {5},
    ),
    "reshape overflow": (
        lambda: model(
            [node("Reshape", ["w", "s"], ["W"]), LAST],
            [tensor("w", np.zeros(0, np.float32)), shape("s", 16, 2**60)],
            [value("x", ["M", 16])],
        ),
        {3},
    ),
    "doubling": (lambda: doubling(40), {3}),
    "doubling beyond int64": (lambda: doubling(70), {3}),
    "rows beyond int64": (
        lambda: model([LAST], [tensor("W", normal(8, 8))], [value("x", [2**40, 2**40, 8])]),
        {0},
    ),
    "doubling a little": (lambda: doubling(10), {0}),
    "nested bodies": (lambda: nested(7), {0}),
    "functions": (lambda: functions(40), {3}),
    "sparse": (lambda: sparse((2**20, 2**20)), {3}),
    "sparse of a GiB": (lambda: sparse((2**14, 2**14)), {3}),
    "sparse of some MiB": (lambda: sparse((2**11, 2**12)), {0}),
    "long chain": (lambda: chain_of(6_000, "Identity"), {0}),
    "long chain of transposes": (lambda: chain_of(6_000, "Transpose"), {0}),
    "reversed chain": (lambda: reversed_chain(3_000), {0}),
    "fan": (lambda: fan(3_000), {0}),
    "huge external": (
        lambda: model([LAST], [external("W", "w.bin", [2**31, 2**31])], [value("x", ["M", 2**31])]),
        {3},
    ),
    "huge dims without data": (
        lambda: model([LAST], [TensorProto(name="W", dims=[2**40, 2**40], data_type=1)], [value("x", ["M", 8])]),
        {3},
    ),
    "a tensor of zero bytes with huge dims": (
        lambda: model([LAST], [TensorProto(name="W", dims=[2**62, 0], data_type=1)], [value("x", ["M", 2**62])]),
        {0, 3},
    ),
    "shapes from huge tensors": (
        lambda: model(
            [
                node("ConstantOfShape", ["s"], ["f"], value=tensor("v", np.array([8], I64))),
                node("Add", ["f", "f"], ["g"]),
                node("Slice", ["g", "zero", "two"], ["t"]),
                node("Reshape", ["w", "t"], ["W"]),
                LAST,
            ],
            [shape("s", 2**34), shape("zero", 0), shape("two", 2), tensor("w", normal(16, 16))],
            [value("x", ["M", 16])],
        ),
        {3},
    ),
    "slices of slices": (
        lambda: model(
            [
                *(node("Slice", [f"v{i}", "zero", "last"], [f"v{i + 1}"]) for i in range(3000)),
                node("MatMul", ["x", "v3000"], ["y"]),
            ],
            [tensor("v0", normal(8, 8)), shape("zero", 0), shape("last", 2**60)],
            [value("x", ["M", 8])],
        ),
        {0},
    ),
}

RUNNER = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
import onnxpack
from onnxpack.errors import OnnxpackError
import onnxruntime  # its own start is no part of the measurement

found = {}
for path in sys.argv[2:]:
    spent = time.process_time()
    codes = []
    for what in (onnxpack.census, lambda p: onnxpack.build(p, sys.argv[1], weights="int8", force=True)):
        try:
            what(path)
            codes.append(0)
        except OnnxpackError as error:
            codes.append(error.exit_code)
            assert error.render().isprintable() and len(error.render()) < 1500
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0]) // 1024
    found[path] = [codes, time.process_time() - spent, peak]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_bombs(tmp_path: Path) -> None:
    """All in one process with little memory; each has some seconds."""
    (tmp_path / "w.bin").write_bytes(bytes(64))
    paths = {}
    for name, (make, _) in BOMBS.items():
        proto = make()
        if "quantize" in name:
            proto.graph.initializer.append(tensor("one", np.float32(1)))
        paths[str(save(tmp_path / f"{name}.onnx", proto))] = name
    command = [sys.executable, "-c", RUNNER, str(tmp_path / "p"), *paths]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for path, ([census, build], seconds, peak) in json.loads(ran.stdout).items():
        name = paths[path]
        assert census in (0, 3), name
        assert build in BOMBS[name][1], (name, build)
        assert seconds < 12, (name, seconds)
        assert peak < 1500, (name, peak)
