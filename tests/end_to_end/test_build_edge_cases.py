"""Every valid edge case is built or refused for a reason, and what is built runs like its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_maker import difference, feeds, session

import onnxpack
from onnxpack.errors import ModelError

NOT_FINITE = {"e04_nan.onnx", "e05_inf.onnx"}
VENDOR = {"h07_amd_domain.onnx"}
"""Refused by name."""


@pytest.mark.parametrize("group", [*list("abcdeghij"), "ext"])
def test_edge_cases(shared: Path, tmp_path: Path, group: str) -> None:
    edge = shared / "models" / "edge"
    cases = json.loads((edge / "expected.json").read_text())
    names = [
        n
        for n, c in cases.items()
        if c["cls"] == "ok"
        and n.startswith("ext/" if group == "ext" else (f"{group}0", f"{group}1", f"{group}2", f"{group}3"))
    ]
    ran = 0
    for name in names:
        source, pack = edge / name, tmp_path / name.replace("/", "_")
        bindable = any(site.verdict == "buildable" for site in onnxpack.census(source).sites)
        try:
            report = onnxpack.build(source, pack, weights="int8", min_cosine=0)
        except ModelError as error:
            assert not bindable or name in NOT_FINITE | VENDOR | {"i19_scale_zero_nan.onnx"}, error.render()  # noqa: PT017
            assert not pack.exists()
            continue
        assert report.coverage.bound > 0 or not bindable
        ran += runs_like(source, pack)
    assert ran


def runs_like(source: Path, pack: Path) -> bool:
    try:
        reference = session(source, "ORT_ENABLE_BASIC")
        feed = feeds(reference)
        expected = reference.run(None, feed)
    except Exception:  # the source itself does not run here
        return False
    found = session(pack / "model.onnx", "ORT_ENABLE_BASIC").run(None, feed)
    for a, b in zip(expected, found, strict=True):
        if a.dtype.kind in "iub":
            assert (a == b).all(), source.name
        else:
            assert difference(a, b) < 0.06, source.name
    return True
