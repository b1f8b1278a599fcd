"""What tests do with plans: models of families, replay in numpy, brute force. All without the planner's own code."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from model_maker import model, node, tensor, value
from onnx import TensorProto

ROOT = Path(__file__).resolve().parents[2]

Families = Sequence[tuple[int, Sequence[int]]]
"""(K, N of each product) of each input."""


def of_families(families: Families, rows: Sequence[int | str] | None = None) -> onnx.ModelProto:
    """One input tensor x0, x1, ... for each family, and its products; product j of family i is called `p<i>_<j>`."""
    nodes, tensors, inputs, outputs = [], [], [], []
    for i, (k, widths) in enumerate(families):
        inputs.append(value(f"x{i}", ["M" if rows is None else rows[i], k]))
        for j, n in enumerate(widths):
            tensors.append(tensor(f"W{i}_{j}", np.full((k, n), 0.5, np.float32)))
            nodes.append(node("MatMul", [f"x{i}", f"W{i}_{j}"], [f"y{i}_{j}"], f"p{i}_{j}"))
            outputs.append(f"y{i}_{j}")
    return model(nodes, tensors, inputs, outputs)


def qwen3_maker() -> ModuleType:
    """benchmarks/make_qwen3.py, with weights that are holes in a file: the graph is what counts."""
    spec = importlib.util.spec_from_file_location("make_qwen3_for_plans", ROOT / "benchmarks" / "make_qwen3.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = made
    spec.loader.exec_module(made)

    def hole(builder: Any, name: str, *shape: int, scale: float = 0.0) -> str:
        entry = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        start, length = builder._file.tell(), 4 * math.prod(shape)
        for key, number in (("location", builder._name), ("offset", start), ("length", length)):
            entry.external_data.add(key=key, value=str(number))
        builder._file.truncate(start + length)
        builder._file.seek(0, 2)
        builder.initializers.append(entry)
        return name

    made.Builder.weight = hole
    return made


# --- replay -----------------------------------------------------------------------------------------------------------


def run_kernel(m: int, k: int, n: int, a: Any, b: Any) -> Any:
    """What a kernel of M x K x N makes of operands no larger than its own: full buffers, zeros where nothing is."""
    full_a, full_b = np.zeros((m, k), np.int8), np.zeros((k, n), np.int8)
    full_a[: a.shape[0], : a.shape[1]] = a
    full_b[: b.shape[0], : b.shape[1]] = b
    product = full_a.astype(np.int64) @ full_b.astype(np.int64)
    assert np.abs(product).max(initial=0) <= 2**31 - 1
    return product.astype(np.int32)


def replay(plan: Mapping[str, Any], a_of: Mapping[str, Any], b_of: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """int32 results of every planned site, from a plan's JSON and operands by site. None: some rows are the host's."""
    results: dict[str, Any] = {}
    for group in plan["groups"]:
        for call in group["calls"]:
            members = call["members"]
            a = a_of[members[0]["site"]][:rows]
            b = np.concatenate([b_of[member["site"]] for member in members], axis=1)
            assert b.shape == (group["k"], group["n"])
            c, on_host = np.zeros((rows, group["n"]), np.int32), False
            start = 0
            while start < rows:
                fitting = [p for p in group["programs"] if p["rows"] >= rows - start]
                program = fitting[0] if fitting else group["programs"][-1]
                count = min(rows - start, program["rows"])
                on_host |= program["kernel"] is None
                for launch in program["launches"]:
                    (r0, r1), (k0, k1), (c0, c1) = launch["rows"], launch["k"], launch["columns"]
                    r1 = min(r1, count)
                    if r0 >= count:
                        continue
                    m, k, n = map(int, program["kernel"].split("x"))
                    made = run_kernel(m, k, n, a[start + r0 : start + r1, k0:k1], b[k0:k1, c0:c1])
                    c[start + r0 : start + r1, c0:c1] += made[: r1 - r0, : c1 - c0]
                start += count
            for member in members:
                at = member["column"]
                results[member["site"]] = None if on_host else c[:, at : at + member["n"]]
    return results


# --- brute force ------------------------------------------------------------------------------------------------------

UNPLANNED = 10**10


def cheapest(
    families: Families, rows: Sequence[int], kernels: Sequence[str], launch_us: Any, budget: int, price: float
) -> float:
    """The least that any choice of at most `budget` kernels can cost, in microseconds; UNPLANNED for each site and
    number of rows that stays on the host."""
    best = math.inf
    for count in range(min(budget, len(kernels)) + 1):
        for chosen in combinations(kernels, count):
            shapes = [(*map(int, kernel.split("x")), launch_us(kernel)) for kernel in chosen]
            best = min(best, count * price + sum(_family(k, widths, rows, shapes) for k, widths in families))
    return best


def _family(k: int, widths: Sequence[int], rows: Sequence[int], shapes: Sequence[Any]) -> float:
    return min(
        sum(_product(r, k, [widths[i] for i in part], shapes) for part in partition for r in rows)
        for partition in set_partitions(list(range(len(widths))))
    )


def _product(rows: int, k: int, widths: Sequence[int], shapes: Sequence[Any]) -> float:
    n, best = sum(widths), float(UNPLANNED * len(widths))
    for km, kk, kn, time in shapes:
        if len(widths) > 1 and kn < n:
            continue
        down, slices, across = math.ceil(rows / km), math.ceil(k / kk), math.ceil(n / kn)
        best = min(best, down * slices * across * time + (slices - 1) * 12 * rows * n / 10_000)
    return best


def set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *others = items
    for smaller in set_partitions(others):
        for i in range(len(smaller)):
            yield [*smaller[:i], [first, *smaller[i]], *smaller[i + 1 :]]
        yield [[first], *smaller]
