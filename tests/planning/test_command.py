"""`onnxpack plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_maker import cli, save
from plan_tools import of_families

from onnxpack.plan import Plan

FAMILIES = [(1000, (1000,)), (64, (48, 80))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plan") / "model.onnx", of_families(FAMILIES))


def test_the_table_says_what_is_padded_split_and_joined(source: Path) -> None:
    run = cli("plan", source, "--kernels", "64x1024x512,64x64x128")
    assert run.returncode == 0, run.stderr
    lines = [" ".join(line.split()) for line in run.stdout.splitlines()]
    assert "1000 1000 1 128 64x1024x512 4 rows in 2 parts, K 1000->1024, N in 2 parts, N 1000->1024" in lines
    assert "64 128 2 128 64x64x128 2 rows in 2 parts, 2 sites joined" in lines or (
        "64 128 2 128 64x64x128 2 2 sites joined, rows in 2 parts" in lines
    )
    wasted = 4 * 64 * 1024 * 512 - 128 * 1000 * 1000
    assert any(f"{wasted} (4.6 %)" in line for line in lines)
    assert any(line.startswith("planned: 3 of 3 bound products, 6 launches, 2 kernels") for line in lines)
    assert "64x64x128 library 2 2" in lines
    assert not run.stderr


def test_kernels_to_be_built_are_said_to_be(source: Path) -> None:
    run = cli("plan", source)
    assert "128x1024x1024  to build" in run.stdout


def test_json_and_file_are_the_same_plan(source: Path, tmp_path: Path) -> None:
    run = cli("plan", source, "--json", "--rows", "16,128", "--rows", "40", "-o", tmp_path / "plan.json")
    assert run.returncode == 0, run.stderr
    printed = Plan.from_dict(json.loads(run.stdout))
    assert Plan.loads((tmp_path / "plan.json").read_bytes()) == printed
    assert printed.rows == [16, 40, 128]
    assert str(source.parent) not in run.stdout


def test_costs_from_a_file(source: Path, tmp_path: Path) -> None:
    figures = {"source": "a machine of ours", "launch_us": 1000}
    (tmp_path / "costs.json").write_text(json.dumps(figures))
    run = cli("plan", source, "--costs", tmp_path / "costs.json")
    assert run.returncode == 0, run.stderr
    assert "(a machine of ours)" in run.stdout


def test_reasons_are_counted(source: Path) -> None:
    run = cli("plan", source, "--budget", "0")
    assert run.returncode == 0
    assert "over-budget" in run.stdout
    assert "planned: 0 of 3" in run.stdout


def test_more_than_eight_kernels_are_worth_a_word(tmp_path: Path) -> None:
    families = [(k, (n,)) for k in (512, 1024, 1536) for n in (512, 1024, 2048, 3072)]
    source = save(tmp_path / "many.onnx", of_families(families))
    assert "hardware contexts" not in cli("plan", source).stderr
    loud = cli("plan", source, "--budget", "16", "--costs", save_costs(tmp_path))
    assert "16 hardware contexts" in loud.stderr


def save_costs(folder: Path) -> Path:
    path = folder / "free.json"
    path.write_text('{"kernel_us": 0}')
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "many"], "--rows"),
        (["--rows", "0"], "--rows"),
        (["--rows", "99999999999999"], "--rows"),
        (["--rows", "-5"], "--rows"),
        (["--budget", "17"], "--budget"),
        (["--min-rows", "0"], "--min-rows"),
        (["--costs", "no-such-file"], "--costs"),
        (["--kernels", "no-such-folder"], "--kernels"),
        (["--weights", "gold"], "gold"),
    ],
)
def test_calls_that_are_wrong(source: Path, arguments: list[str], words: str) -> None:
    run = cli("plan", source, *arguments)
    assert run.returncode == 2
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert not run.stdout


def test_models_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    assert cli("plan", tmp_path / "model.onnx").returncode == 3
