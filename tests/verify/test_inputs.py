"""Reading feeds: what fits is fed as it is, what does not is one line that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpack.errors import UsageError
from onnxpack.verify.inputs import (
    InputSpec,
    describe,
    first_rows,
    fitted,
    read_arrays,
    read_feed,
    read_feeds,
    rows_apart,
)

IDS = InputSpec("ids", "tensor(int64)", (1, "seq"))
X = InputSpec("x", "tensor(float)", ("batch", 4))


def save(path: Path, array: Any) -> str:
    np.save(path, np.asarray(array))
    return str(path)


def test_npz_by_name_and_npy_for_one_input(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", ids=[[1, 2]], x=np.zeros((1, 4), np.float32))
    assert read_feed([str(tmp_path / "f.npz")], [IDS, X]).keys() == {"ids", "x"}
    assert read_feed([save(tmp_path / "a.npy", [[5]])], [IDS])["ids"].tolist() == [[5]]


def test_npy_by_name_and_several_files(tmp_path: Path) -> None:
    ids, x = save(tmp_path / "a.npy", [[5]]), save(tmp_path / "b=c.npy", np.ones((1, 4), np.float32))
    feed = read_feed([f"ids={ids}", f"x={x}"], [IDS, X])
    assert feed["ids"].tolist() == [[5]]
    assert feed["x"].shape == (1, 4)
    with pytest.raises(UsageError, match="given twice"):
        read_feed([f"ids={ids}", f"ids={ids}"], [IDS, X])


def test_an_npy_file_of_a_model_with_two_inputs_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 2 inputs"):
        read_feed([save(tmp_path / "a.npy", [[5]])], [IDS, X])


def test_directories(tmp_path: Path) -> None:
    for index in (2, 0, 1):
        save(tmp_path / f"{index}.npy", [[index]])
    (tmp_path / "notes.txt").write_text("not an input")
    assert [feed["ids"].tolist() for feed in read_feeds(tmp_path, [IDS])] == [[[0]], [[1]], [[2]]]
    named = tmp_path / "named"
    named.mkdir()
    save(named / "ids.npy", [[7]])
    save(named / "x.npy", np.zeros((1, 4), np.float32))
    (feed,) = read_feeds(named, [IDS, X])
    assert feed["ids"].tolist() == [[7]]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="holds no"):
        read_feeds(empty, [IDS])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"just text",
        b"\x93NUMPY\x01\x00",
        b"PK\x03\x04 and no more",
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,), }".ljust(128)
        + b"abc",
    ],
    ids=["empty", "text", "cut", "zip", "huge"],
)
def test_files_that_hold_no_arrays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.npy").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_arrays(tmp_path / "bad.npy")
    assert "\n" not in caught.value.render()
    assert str(tmp_path / "bad.npy") in caught.value.render()


def test_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_arrays(tmp_path / "none.npy")
    with pytest.raises(UsageError, match="directory"):
        read_arrays(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match="Python objects"):
        read_arrays(tmp_path / "p.npy")


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({}, "input 'ids' is missing"),
        ({"ids": np.ones((1, 2), np.int64), "y": np.ones(1)}, "no input 'y'"),
        ({"ids": np.ones((1, 2))}, "is float64, the model takes int64"),
        ({"ids": np.ones((2, 2), np.int64)}, r"has shape \[2, 2\]"),
        ({"ids": np.ones(2, np.int64)}, r"has shape \[2\]"),
        ({"ids": np.full((1, 1), 2**63, np.uint64)}, "do not fit into int64"),
    ],
)
def test_feeds_that_do_not_fit(feed: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fitted(feed, [IDS])


def test_only_whole_numbers_change_their_width() -> None:
    assert fitted({"ids": np.array([[3]], np.uint8)}, [IDS])["ids"].dtype == np.int64
    narrow = InputSpec("ids", "tensor(int8)", (1,))
    with pytest.raises(UsageError, match="do not fit into int8"):
        fitted({"ids": np.array([200], np.int64)}, [narrow])
    with pytest.raises(UsageError, match="is float64"):
        fitted({"x": np.ones((1, 4))}, [X])


def test_types_numpy_has_none_for() -> None:
    with pytest.raises(UsageError, match="cannot be fed"):
        fitted({"x": np.ones(1, np.float32)}, [InputSpec("x", "tensor(bfloat16)", (1,))])
    assert InputSpec("s", "seq(tensor(float))", ()).dtype is None
    assert InputSpec("s", "tensor(string)", (1,)).dtype == np.dtype(str)


def test_replaceable_initializers_may_be_fed() -> None:
    assert "w" in fitted({"ids": np.ones((1, 2), np.int64), "w": np.ones(2)}, [IDS], ["w"])


def test_rows_apart_keeps_what_is_not_stacked() -> None:
    wide = InputSpec("scale", "tensor(float)", (3,))
    feeds = rows_apart({"ids": np.arange(6).reshape(3, 2), "scale": np.ones(3, np.float32)}, [IDS, wide])
    assert [feed["ids"].tolist() for feed in feeds] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert all(feed["scale"].shape == (3,) for feed in feeds)
    assert len(rows_apart({"x": np.ones((3, 4), np.float32)}, [X])) == 1  # the model takes any number of rows


def test_rows_that_do_not_fit_each_other() -> None:
    other = InputSpec("mask", "tensor(int64)", (1, "seq"))
    with pytest.raises(UsageError, match="2 and 3 rows"):
        rows_apart({"ids": np.ones((3, 2)), "mask": np.ones((2, 2))}, [IDS, other])
    with pytest.raises(UsageError, match="no rows"):
        rows_apart({"ids": np.ones((0, 2))}, [IDS])


def test_first_rows() -> None:
    assert first_rows({"a": np.arange(5), "b": np.arange(5)}, 2)["b"].tolist() == [0, 1]
    with pytest.raises(UsageError, match="differ"):
        first_rows({"a": np.arange(5), "b": np.arange(4)}, 2)


def test_describe() -> None:
    assert list(describe({"n": np.array([], np.float32), "s": np.array(["a"])})) == ["n: float32[0]", "s: str32[1]"]
