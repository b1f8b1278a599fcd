"""16-bit weights behind casts: read as they are stored, never whole in float32, and packed to the same bytes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack.graph.constants import evaluate
from onnxpack.graph.load import load
from onnxpack.graph.sites import find_sites
from onnxpack.graph.tensors import TensorStore
from onnxpack.pack.read import open_pack

K, N = 96, 40


def model(dtype: type, steps: list[onnx.NodeProto], shape: tuple[int, ...]) -> onnx.ModelProto:
    """x @ w, where w is the stored tensor `t` of `shape` through `steps` (t -> w)."""
    values = np.random.default_rng(1).standard_normal(shape, np.float32).astype(dtype)
    graph = helper.make_graph(
        [*steps, helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", N])],
        [numpy_helper.from_array(values, "t"), numpy_helper.from_array(np.array([K, N], np.int64), "shape")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def cast(source: str, to: str) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [to], to=TensorProto.FLOAT)


CHAINS = {
    "cast": ([cast("t", "w")], (K, N)),
    "cast, transpose": ([cast("t", "c"), helper.make_node("Transpose", ["c"], ["w"], perm=[1, 0])], (N, K)),
    "transpose, cast": ([helper.make_node("Transpose", ["t"], ["c"], perm=[1, 0]), cast("c", "w")], (N, K)),
    "cast, reshape": ([cast("t", "c"), helper.make_node("Reshape", ["c", "shape"], ["w"])], (K * N,)),
}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("chain", CHAINS)
def test_the_weight_comes_as_it_is_stored_with_the_same_values(dtype: type, chain: str) -> None:
    loaded = load(model(dtype, *CHAINS[chain]))
    (site,) = find_sites(loaded)
    assert site.weight is not None
    store = TensorStore(loaded.regions)
    narrow, wide = evaluate(site.weight, store, widen=False), evaluate(site.weight, store)
    assert (narrow.dtype, wide.dtype) == (np.dtype(dtype), np.dtype(np.float32))
    assert np.array_equal(narrow.astype(np.float32), wide)


@pytest.mark.parametrize("chain", CHAINS)
def test_the_pack_is_that_of_the_wide_weight(tmp_path: Path, chain: str) -> None:
    narrow = model(np.float16, *CHAINS[chain])
    wide = onnx.ModelProto()
    wide.CopyFrom(narrow)
    values = numpy_helper.to_array(narrow.graph.initializer[0]).astype(np.float32)
    wide.graph.initializer[0].CopyFrom(numpy_helper.from_array(values, "t"))
    packs = []
    for name, source in (("narrow", narrow), ("wide", wide)):
        onnxpack.build(source, tmp_path / name, weights="int8")
        packs.append(open_pack(tmp_path / name).tensors["t"].fields)
    assert {n: f.sha256 for n, f in packs[0].items()} == {n: f.sha256 for n, f in packs[1].items()}


def test_arithmetic_on_the_way_is_done_in_float32() -> None:
    steps = [cast("t", "c"), helper.make_node("Add", ["c", "c"], ["w"])]
    loaded = load(model(np.float16, steps, (K, N)))
    (site,) = find_sites(loaded)
    assert site.weight is not None
    assert evaluate(site.weight, TensorStore(loaded.regions), widen=False).dtype == np.float32
