"""What `run` shows and keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpack.errors import EnvironmentFault, UsageError
from onnxpack.runtime.session import load
from onnxpack.runtime.trace import TraceRecord
from onnxpack.verify.outputs import Placement, placements, repeated, same_bits, save, summarize


def test_summaries() -> None:
    made = summarize("y", np.array([np.inf, -1, np.nan, np.nan, 4], np.float32))
    assert (made.min, made.max, made.mean, made.nan, made.infinite) == (-1, 4, 1.5, 2, 1)
    assert made.first == ("inf", -1.0, "nan", "nan", 4.0)
    nothing = summarize("y", np.full(3, np.nan, np.float32))
    assert (nothing.min, nothing.mean, nothing.nan) == (None, None, 3)
    assert summarize("y", np.empty((0, 4), np.float32)).shape == (0, 4)
    assert summarize("y", np.array(True)).first == (True,)
    assert summarize("y", np.array([2**62, 1])).max == 2**62
    text = summarize("y", np.array(["a", "b"], dtype=object))
    assert (text.type, text.first) == ("string", ("a", "b"))
    assert summarize("y", [np.zeros(1)]).type == "list"
    assert len(summarize("y", np.arange(100)).first) == 6


def test_float16_means_do_not_overflow() -> None:
    assert summarize("y", np.full(10_000, 60_000, np.float16)).mean == pytest.approx(60_000, rel=1e-3)


def test_placements_are_of_the_last_run() -> None:
    def ran(run: int, site: str | None, where: Any, rows: int | None) -> TraceRecord:
        return TraceRecord(run, site, where, rows, "no-kernel")

    records = [
        ran(0, None, "host", None),
        ran(0, "M_9", "unbound", None),
        ran(1, "M_1", "host", 4),
        ran(2, "M_1", "host", 8),
        ran(2, "M_2", "host", 8),
    ]
    assert placements(records) == [Placement("host", 8, "no-kernel", 2), Placement("unbound", None, "no-kernel", 1)]
    assert placements([]) == []


def test_same_bits() -> None:
    nan = np.array([np.nan], np.float32)
    assert same_bits([nan, "a"], [nan.copy(), "a"])
    assert not same_bits([np.array([0.0])], [np.array([-0.0])])
    assert not same_bits([np.zeros(2)], [np.zeros((2, 1))])
    assert not same_bits([np.zeros(2)], [])
    texts = [np.array(["a"], dtype=object)]
    assert same_bits(texts, [np.array(["a"], dtype=object)])
    assert not same_bits(texts, [np.array(["b"], dtype=object)])
    assert same_bits([[nan]], [[nan]])


class Flaky:
    """A session whose second run differs."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, names: Any, feed: Any) -> list[Any]:
        self.runs += 1
        return [np.array([float(self.runs == 2)])]


def test_repeated_runs(mlp: Any) -> None:
    x = np.ones((2, 64), np.float32)
    results, same = repeated(load(mlp.pack), {"x": x}, 3)
    assert same
    assert results[0].shape == (2, 24)
    assert not repeated(Flaky(), {}, 2)[1]
    assert not repeated(Flaky(), {}, 4)[1]
    with pytest.raises(UsageError, match="does not run"):
        repeated(load(mlp.pack), {"x": x[:, 1:]}, 1)


def test_save(tmp_path: Path) -> None:
    outputs = {"file": np.arange(3), "a/b": np.ones((2, 2), np.float16), "t": np.array(["x"], dtype=object)}
    save(tmp_path / "o.npz", outputs)
    save(tmp_path / "again.npz", outputs)
    assert (tmp_path / "o.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()
    with np.load(tmp_path / "o.npz") as kept:
        assert set(kept.files) == {"file", "a/b", "t"}
        assert kept["a/b"].dtype == np.float16
        assert kept["t"].tolist() == ["x"]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only arrays"):
        save(tmp_path / "o.npz", {"y": [np.zeros(1)]})
    with pytest.raises(UsageError, match=r"saved as \.npz"):
        save(tmp_path / "o.bin", {"y": np.zeros(1)})
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        save(tmp_path / "missing" / "o.npz", {"y": np.zeros(1)})
