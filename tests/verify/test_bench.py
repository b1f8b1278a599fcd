"""Timing: what a ratio is made of, and that none comes without its conditions. Times themselves are never asserted."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from onnxpack.errors import ModelError, UsageError
from onnxpack.pack.read import open_pack
from onnxpack.runtime.session import load
from onnxpack.verify import bench as b


def conditions(runs: int = 5) -> b.Conditions:
    return b.conditions(runs, 1, 0.5, {"x": np.array([0.0, 1.0, 0.0, 0.0])}, codes_zero_share=0.25)


def test_median_ratio_and_spread_by_hand() -> None:
    times = [(4.0, 1.0), (6.0, 2.0), (2.0, 1.0), (8.0, 2.0), (5.0, 5.0)]
    pairs = [b.Pair(base, 3 * base, ours, ours) for base, ours in times]
    found = b.result("float", pairs, conditions())
    assert found.ratio == b.Spread(3.0, 1.0, 4.0)
    assert found.cpu_ratio == b.Spread(9.0, 3.0, 12.0)
    assert found.baseline_ms == b.Spread(5000.0, 2000.0, 8000.0)
    assert found.pack_ms == b.Spread(2000.0, 1000.0, 5000.0)
    assert str(found.ratio) == "3.00 (1.00 to 4.00)"


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    times = [(1.0, 1.0), (10.0, 1.0), (10.0, 10.0), (1.0, 1.0), (10.0, 10.0)]
    pairs = [b.Pair(base, base, ours, ours) for base, ours in times]
    assert b.result("float", pairs, conditions()).ratio.median == 1.0


def test_runs_alternate_and_take_turns_at_going_first() -> None:
    calls: list[str] = []
    pairs = b.interleave(lambda: calls.append("f"), lambda: calls.append("p"), runs=4, warm_up=2)
    assert len(pairs) == 4
    assert "".join(calls) == "fppf" + "fppffppf"


def test_too_few_runs_have_no_spread(mlp: Any) -> None:
    for count in range(b.MIN_RUNS):
        with pytest.raises(UsageError, match="no spread"):
            b.Spread.of([1.0] * count)
    with pytest.raises(UsageError, match="4 runs"):
        b.bench(open_pack(mlp.pack), load(mlp.pack), mlp.model, {}, runs=4, threads=1)


def test_a_result_cannot_be_made_without_its_conditions() -> None:
    for kind in (b.Result, b.Conditions):
        for field in dataclasses.fields(kind):
            assert field.default is dataclasses.MISSING
            assert field.default_factory is dataclasses.MISSING


def test_conditions_say_what_lesson_asks_for() -> None:
    made = conditions()
    assert made.zero_share == {"x": 0.75, "packed codes": 0.25}
    assert made.inputs == {"x": "float64[4]"}
    assert made.versions.keys() == {"onnxpack", "onnxruntime", "numpy"}
    assert made.load_average[0] == 0.5
    text = "\n".join(made.lines())
    for word in ("5 pairs", "threads: 1", "share of zeros: x 0.75", "load average", "onnxruntime ", made.cpu):
        assert word in text


def test_a_system_without_load_average(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", none)
    assert b.load() == 0.0


def test_share_of_zero_codes(mlp: Any) -> None:
    pack = open_pack(mlp.pack)
    codes = [np.asarray(pack.field(tensor.fields["codes"])) for tensor in pack.tensors.values()]
    wanted = sum(int((c == 0).sum()) for c in codes) / sum(c.size for c in codes)
    assert b.codes_zero_share(pack) == pytest.approx(wanted)
    mlp.overwrite("w1", "codes", np.zeros_like)
    mlp.overwrite("w2", "codes", np.zeros_like)
    assert b.codes_zero_share(pack) == 1.0


@pytest.mark.parametrize("with_model", [True, False])
def test_both_sides_run_and_the_pack_stays_as_it_was(mlp: Any, with_model: bool) -> None:
    before = {file.name: file.read_bytes() for file in mlp.pack.iterdir()}
    feed = {"x": np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)}
    session = load(mlp.pack, "host", b.bench_options(1))
    found = b.bench(open_pack(mlp.pack), session, mlp.model if with_model else None, feed, runs=5, threads=1)
    assert found.ratio.low <= found.ratio.median <= found.ratio.high
    assert found.conditions.runs == 5
    assert found.baseline.startswith("model.onnx")
    assert len({record.run for record in session.trace()} - {0}) == 5 + b.WARM_UP
    assert {file.name: file.read_bytes() for file in mlp.pack.iterdir()} == before


def test_the_plain_graph_is_float32_in_truth(mlp: Any) -> None:
    """Otherwise onnxruntime would quantize its activations and the baseline would be something else."""
    import onnxruntime as ort

    from onnxpack.runtime.session import basic_options

    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    decoded = ort.InferenceSession(str(mlp.pack / "model.onnx"), basic_options()).run(["y"], {"x": x})[0]
    found = b.plain_session(open_pack(mlp.pack), 1).run(["y"], {"x": x})[0]
    np.testing.assert_allclose(found, decoded, atol=1e-5)


def test_inputs_that_do_not_fit(mlp: Any) -> None:
    feed = {"x": np.zeros((2, 63), np.float32)}
    with pytest.raises(UsageError, match="does not run"):
        b.bench(open_pack(mlp.pack), load(mlp.pack), mlp.model, feed, runs=5, threads=1)
    with pytest.raises(ModelError, match="no such file"):
        b.bench(open_pack(mlp.pack), load(mlp.pack), "none.onnx", feed, runs=5, threads=1)
