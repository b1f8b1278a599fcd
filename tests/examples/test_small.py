"""census.py, build.py and run.py: a screen each, as they stand and with arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_runner import EXAMPLES, MODEL, Runner

import onnxpack
from onnxpack.pack.read import open_pack


def test_census_of_the_trained_model(example: Runner) -> None:
    shown = example("census.py").stdout
    assert "8 x  K=256 N=704" in shown
    assert "38 products: 29 with a weight, 9 without" in shown
    assert "29 not on the NPU: no-kernel" in shown
    assert "covered by a kernel: 0 %" in shown


def test_census_against_kernels(example: Runner) -> None:
    shown = example("census.py", MODEL, "16x256x704,16x256x128").stdout
    assert f"covered by a kernel: {100 * 16 / 29:.0f} %" in shown


def test_build_and_run_as_they_stand(example: Runner, tmp_path: Path) -> None:
    built = example("build.py").stdout
    manifest = open_pack(tmp_path / "build" / "trained_a.pack", "full").manifest
    assert f"content digest: {manifest.content_digest}" in built
    assert "29 of 29 products with a weight are bound to int8" in built
    shown = example("run.py").stdout
    assert shown.startswith("import os\n\ndef main(self")  # the model was trained on Python sources
    assert "ran on: host" in shown


def test_build_in_another_format(example: Runner, tmp_path: Path) -> None:
    example("build.py", MODEL, tmp_path / "a.pack", "int8")
    assert {tensor.format for tensor in open_pack(tmp_path / "a.pack").manifest.tensors} == {"int8"}


@pytest.mark.parametrize("script", ["census.py", "build.py", "run.py"])
def test_a_file_that_is_not_there_is_one_line(example: Runner, script: str) -> None:
    said = example(script, "nothing.onnx", code=1).stderr
    assert "nothing.onnx" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("script", ["census.py", "build.py", "run.py"])
def test_a_small_example_fits_one_screen(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) <= 40


def test_the_examples_use_public_names_only() -> None:
    for script in ("census.py", "build.py", "run.py"):
        for line in (EXAMPLES / script).read_text().splitlines():
            assert not line.startswith("from onnxpack."), f"{script}: {line}"
    assert set(onnxpack.__all__) >= {"census", "build", "load"}
