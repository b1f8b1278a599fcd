"""A plan file cannot smuggle in a format that a pack may not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import onnxpack
from onnxpack.errors import UsageError

MODEL = Path(__file__).resolve().parents[2] / "examples" / "trained_a" / "trained_a.onnx"


@pytest.mark.parametrize("name", ["tequila", "exl3"])
def test_a_format_that_a_pack_cannot_hold_is_refused_in_a_plan_too(tmp_path: Path, name: str) -> None:
    made = onnxpack.plan(MODEL, weights="int8")
    edited = replace(made, weights=[replace(weight, format=name) for weight in made.weights])
    with pytest.raises(UsageError, match=name):
        onnxpack.build(MODEL, tmp_path / "a.pack", plan=edited)
    assert not (tmp_path / "a.pack").exists()
