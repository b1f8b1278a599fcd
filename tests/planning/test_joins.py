"""What runs in one launch: products with one input, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_maker import model, node, normal, tensor, value
from onnx import TensorProto
from plan_tools import of_families

from onnxpack.graph.load import load
from onnxpack.graph.sites import find_sites
from onnxpack.plan import Plan


def together(plan: Plan, source: Any) -> set[frozenset[str]]:
    """Names of the nodes of each call."""
    names = {site.path: site.node.name or "" for site in find_sites(load(source))}
    return {frozenset(names[member.site] for member in call.members) for g in plan.groups for call in g.calls}


def sets(*names: str) -> set[frozenset[str]]:
    return {frozenset(name.split()) for name in names}


def test_one_input_one_launch(plan_of: Any) -> None:
    source = of_families([(64, (96, 32, 32)), (64, (32,))])
    assert together(plan_of(source), source) == sets("p0_0 p0_1 p0_2", "p1_0")


def test_the_widest_stands_first_whatever_the_order_of_the_graph(plan_of: Any) -> None:
    plan = plan_of(of_families([(64, (32, 96, 64))]))
    (call,) = plan.groups[0].calls
    assert [(member.column, member.n) for member in call.members] == [(0, 96), (96, 64), (160, 32)]


def test_a_library_joins_what_its_kernels_are_wide_enough_for(plan_of: Any) -> None:
    source = of_families([(64, (96, 32, 32))])
    assert together(plan_of(source, "128x64x64,128x64x96"), source) == sets("p0_0", "p0_1 p0_2")
    assert together(plan_of(source, "128x64x32"), source) == sets("p0_0", "p0_1", "p0_2")
    assert together(plan_of(source, "128x64x160,128x64x32"), source) == sets("p0_0 p0_1 p0_2")


def test_a_join_may_be_split_along_k_and_padded(plan_of: Any) -> None:
    source = of_families([(100, (40, 40))])
    plan = plan_of(source, "128x64x96")
    assert together(plan, source) == sets("p0_0 p0_1")
    assert [launch.k for launch in plan.groups[0].programs[0].launches] == [(0, 64), (64, 100)]


def test_many_products_of_one_input(plan_of: Any) -> None:
    """A decoder's cross attention: every layer reads the encoder's result."""
    source = of_families([(64, (64,) * 48)])
    plan = plan_of(source, "128x64x512,128x64x64")
    assert plan.totals.planned == 48
    assert plan.totals.launches == 6
    assert max(len(call.members) for call in plan.groups[0].calls) == 8


def test_other_transpositions_of_the_input_are_other_inputs(plan_of: Any) -> None:
    nodes = [
        node("Gemm", ["x", "V"], ["y"], "plain"),
        node("Gemm", ["x", "W"], ["z"], "turned", transA=1),
        node("MatMul", ["x", "V"], ["u"], "product"),
    ]
    source = model(
        nodes, [tensor("V", normal(64, 32)), tensor("W", normal(64, 32))], [value("x", [64, 64])], ["y", "z", "u"]
    )
    assert together(plan_of(source), source) == sets("plain product", "turned")


# --- quantized products ---------------------------------------------------------------------------------------------


def quantized(dequantizers: list[tuple[str, float, int]], of: list[str]) -> Any:
    """Products whose weights are codes; product i reads `of[i]`. Dequantizer i (input, scale, zero point) makes di."""
    inputs = sorted({name for name, _, _ in dequantizers})
    tensors, nodes, outputs = [], [], []
    for i, (name, scale, zero) in enumerate(dequantizers):
        tensors += [tensor(f"s{i}", np.float32(scale)), tensor(f"z{i}", np.int8(zero))]
        nodes.append(node("DequantizeLinear", [name, f"s{i}", f"z{i}"], [f"d{i}"]))
    for i, name in enumerate(of):
        tensors += [tensor(f"W{i}", np.ones((64, 32), np.int8)), tensor(f"t{i}", np.float32(0.1))]
        nodes += [
            node("DequantizeLinear", [f"W{i}", f"t{i}"], [f"w{i}"]),
            node("MatMul", [name, f"w{i}"], [f"y{i}"], f"p{i}"),
        ]
        outputs.append(f"y{i}")
    return model(nodes, tensors, [value(name, ["M", 64], TensorProto.INT8) for name in inputs], outputs)


@pytest.mark.parametrize(
    ("dequantizers", "of", "wanted"),
    [
        ([("x", 0.5, 3)], ["d0", "d0"], ["p0 p1"]),
        ([("x", 0.5, 3), ("x", 0.5, 3)], ["d0", "d1"], ["p0", "p1"]),  # two tensors that happen to be equal
        ([("x", 0.5, 3), ("x", 0.25, 3)], ["d0", "d1", "d1"], ["p0", "p1 p2"]),
        ([("x", 0.5, 3), ("x", 0.5, 4)], ["d0", "d1"], ["p0", "p1"]),
        ([("x", 0.5, 3), ("z", 0.5, 3)], ["d0", "d1"], ["p0", "p1"]),
    ],
)
def test_quantized_products_join_on_the_same_codes_and_parameters(
    plan_of: Any, dequantizers: Any, of: list[str], wanted: list[str]
) -> None:
    source = quantized(dequantizers, of)
    assert all(site.group is not None for site in find_sites(load(source)))
    assert together(plan_of(source), source) == sets(*wanted)


def test_equal_parameters_in_one_tensor_join_across_dequantizers(plan_of: Any) -> None:
    source = quantized([("x", 0.5, 3), ("x", 0.5, 3)], ["d0", "d1"])
    second = next(n for n in source.graph.node if n.output[0] == "d1")
    second.input[1:] = ["s0", "z0"]
    assert together(plan_of(source), source) == sets("p0 p1")


def test_one_scale_with_two_zero_points_is_two_inputs(plan_of: Any) -> None:
    source = quantized([("x", 0.5, 3), ("x", 0.5, 4)], ["d0", "d1"])
    next(n for n in source.graph.node if n.output[0] == "d1").input[1] = "s0"
    assert together(plan_of(source), source) == sets("p0", "p1")


def test_the_plan_keeps_the_graphs_own_codes(plan_of: Any) -> None:
    plan = plan_of(quantized([("x", 0.5, 3)], ["d0", "d0"]))
    assert [weight.format for weight in plan.weights] == ["graph-int8"] * 2
