"""Made-up inputs: seeded, of the right types, and always inside the tables they index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxpack.errors import UsageError
from onnxpack.verify.inputs import InputSpec
from onnxpack.verify.synthetic import random_feed, table_lengths


def spec(name: str, kind: str, *shape: int | str | None) -> InputSpec:
    return InputSpec(name, f"tensor({kind})", shape)


def test_the_seed_decides() -> None:
    specs = [spec("x", "float", "batch", 8)]
    first, again, other = (random_feed(specs, seed)["x"] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_sizes() -> None:
    specs = [spec("x", "float", "batch_size", "seq", 3, None), spec("n", "float", None, "a + 2")]
    feed = random_feed(specs, 0, {"seq": 5, "a": 1})
    assert feed["x"].shape == (1, 5, 3, 16)
    assert feed["n"].shape == (1, 3)
    assert random_feed([spec("x", "float", "past + seq")], 0)["x"].shape == (32,)
    with pytest.raises(UsageError, match="no input has a dimension called 'sequence'"):
        random_feed(specs, 0, {"sequence": 5})


@pytest.mark.parametrize("kind", ["float", "float16", "double", "int8", "uint8", "int32", "int64", "bool"])
def test_types(kind: str) -> None:
    made = random_feed([spec("x", kind, 2, 3)], 0)["x"]
    assert made.dtype == spec("x", kind).dtype
    assert made.shape == (2, 3)


def test_masks_positions_and_flags() -> None:
    specs = [spec("attention_mask", "int64", 1, 4), spec("position_ids", "int64", 2, 3), spec("flag", "int64", 50)]
    feed = random_feed(specs, 0)
    assert feed["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert feed["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert set(feed["flag"].tolist()) == {0, 1}


def test_ids_stay_inside_their_table_and_their_type() -> None:
    ids = random_feed([spec("ids", "int64", 1000)], 0, lengths={"ids": 7})["ids"]
    assert set(ids.tolist()) == set(range(7))
    narrow = random_feed([spec("ids", "int8", 1000)], 0, lengths={"ids": 300})["ids"]
    assert narrow.min() >= 0


@pytest.mark.parametrize("kind", ["string", "bfloat16"])
def test_what_cannot_be_made_up(kind: str) -> None:
    with pytest.raises(UsageError, match="input x"):
        random_feed([spec("x", kind, 1)], 0)


def gathers(*nodes: onnx.NodeProto, tables: dict[str, list[int]]) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [],
        [TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT) for name, dims in tables.items()],
    )
    return helper.make_model(graph)


def test_table_lengths_through_views_and_over_axes() -> None:
    model = gathers(
        helper.make_node("Cast", ["ids"], ["c"], to=TensorProto.INT32),
        helper.make_node("Gather", ["long", "ids"], ["a"]),
        helper.make_node("Gather", ["wide", "c"], ["b"], axis=1),
        helper.make_node("Gather", ["odd", "c"], ["d"], axis=5),
        helper.make_node("Gather", ["a", "ids"], ["e"]),
        tables={"long": [100, 8], "wide": [4, 12], "odd": [3, 3]},
    )
    assert table_lengths(model) == {"ids": 12}


def test_made_up_inputs_run(language_model: Any, mlp: Any) -> None:
    from onnxpack.runtime.session import load
    from onnxpack.verify.feeding import session_feed

    feed_of: Callable[..., Any] = session_feed
    for built in (language_model, mlp):
        session = load(built.pack)
        feed = feed_of(built.pack, session, [], random=True)
        assert session.run(None, feed)
    ids = feed_of(language_model.pack, load(language_model.pack), [], random=True, sizes={"seq": 500})["input_ids"]
    assert ids.max() == 39  # the table has 40 rows


def test_a_session_wants_inputs_of_one_kind(mlp: Any, tmp_path: Any) -> None:
    from onnxpack.runtime.session import load
    from onnxpack.verify.feeding import session_feed

    session = load(mlp.pack)
    with pytest.raises(UsageError, match=r"x: tensor\(float\)\[batch, 64\]"):
        session_feed(mlp.pack, session, [], random=False)
    np.save(tmp_path / "x.npy", np.zeros((1, 64), np.float32))
    for extra in ({"random": True}, {"random": False, "sizes": {"batch": 2}}):
        with pytest.raises(UsageError, match="not both"):
            session_feed(mlp.pack, session, [str(tmp_path / "x.npy")], **extra)
