"""A build executes exactly a plan: its own or one from a file; the pack says how everything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_maker import cli, save
from plan_tools import of_families, replay

import onnxpack
from onnxpack.errors import PackError, UsageError
from onnxpack.pack.read import open_pack

FAMILIES = [(96, (64, 64)), (64, (160,))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("build") / "model.onnx", of_families(FAMILIES))


def manifest(pack: Path) -> Any:
    return json.loads((pack / "pack.json").read_text())


def test_the_pack_holds_the_plan(source: Path, tmp_path: Path) -> None:
    onnxpack.build(source, tmp_path / "a.pack", weights="int8")
    plan = onnxpack.plan(source)
    opened = open_pack(tmp_path / "a.pack", check="full")
    assert opened.manifest.plan == plan.execution
    assert manifest(tmp_path / "a.pack")["plan"]["groups"] == json.loads(json.dumps(plan.to_dict()))["groups"]
    covered = {path for group in plan.groups for path in group.sites}
    assert covered == {site["path"] for site in manifest(tmp_path / "a.pack")["sites"]}


def test_a_plan_from_a_file(source: Path, tmp_path: Path) -> None:
    run = cli("plan", source, "--rows", "32", "--budget", "1", "--weights", "int8", "-o", tmp_path / "plan.json")
    assert run.returncode == 0, run.stderr
    run = cli("build", source, "-o", tmp_path / "a.pack", "--plan", tmp_path / "plan.json", "--json")
    assert run.returncode == 0, run.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    stored = manifest(tmp_path / "a.pack")
    assert stored["plan"] == {key: plan[key] for key in ("rows", "min_rows", "groups")}
    assert {tensor["format"] for tensor in stored["tensors"]} == {"int8"}
    again = onnxpack.build(
        source, tmp_path / "b.pack", plan=onnxpack.plan(source, rows=(32,), budget=1, weights="int8")
    )
    assert again.content_digest == json.loads(run.stdout)["content_digest"]
    assert (tmp_path / "a.pack" / "pack.json").read_bytes() == (tmp_path / "b.pack" / "pack.json").read_bytes()


def test_the_content_digest_covers_the_plan(source: Path, tmp_path: Path) -> None:
    digests = [
        onnxpack.build(source, tmp_path / f"{rows}.pack", plan=onnxpack.plan(source, rows=(rows,))).content_digest
        for rows in (32, 128)
    ]
    assert digests[0] != digests[1]
    path = tmp_path / "128.pack" / "pack.json"
    changed = json.loads(path.read_text())
    changed["plan"]["min_rows"] = 1
    path.write_text(json.dumps(changed))
    with pytest.raises(PackError, match="has been changed"):
        open_pack(tmp_path / "128.pack", check="full")


def test_a_pack_whose_plan_cannot_be_executed(source: Path, tmp_path: Path) -> None:
    onnxpack.build(source, tmp_path / "a.pack", weights="int8")
    path = tmp_path / "a.pack" / "pack.json"
    changed = json.loads(path.read_text())
    changed["plan"]["groups"][0]["programs"][0]["launches"].pop()
    path.write_text(json.dumps(changed))
    with pytest.raises(PackError, match="its plan cannot be executed"):
        open_pack(tmp_path / "a.pack")


def test_a_pack_without_a_plan_is_one_of_the_host(source: Path, tmp_path: Path) -> None:
    onnxpack.build(source, tmp_path / "a.pack", weights="int8")
    path = tmp_path / "a.pack" / "pack.json"
    changed = json.loads(path.read_text())
    del changed["plan"]
    path.write_text(json.dumps(changed))
    assert open_pack(tmp_path / "a.pack").manifest.plan is None


def test_reasons_of_the_plan_are_those_of_the_pack(source: Path, tmp_path: Path) -> None:
    onnxpack.build(source, tmp_path / "a.pack", plan=onnxpack.plan(source, rows=(8,)))
    assert {site["reason"] for site in manifest(tmp_path / "a.pack")["sites"]} == {"below-row-threshold"}


def test_a_plan_of_another_model(source: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other.onnx", of_families([(96, (64, 64)), (64, (96,))]))
    with pytest.raises(UsageError, match="made for another model"):
        onnxpack.build(source, tmp_path / "a.pack", plan=onnxpack.plan(other))
    assert not (tmp_path / "a.pack").exists()


def test_a_plan_that_a_hand_has_broken(source: Path, tmp_path: Path) -> None:
    plan = onnxpack.plan(source).to_dict()
    plan["groups"][0]["programs"][0]["launches"] = []
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match="cannot be executed"):
        onnxpack.build(source, tmp_path / "a.pack", plan=tmp_path / "plan.json")
    assert not (tmp_path / "a.pack").exists()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x00" * 100])
def test_files_that_are_no_plan(source: Path, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_bytes(content)
    run = cli("build", source, "-o", tmp_path / "a.pack", "--plan", tmp_path / "plan.json")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "a.pack").exists()


def test_formats_are_the_plans(source: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(onnxpack.plan(source).to_dict()))
    run = cli("build", source, "-o", tmp_path / "a", "--plan", tmp_path / "plan.json", "--weights", "int8")
    assert run.returncode == 2
    assert "--weights" in run.stderr


def test_what_a_pack_holds_is_enough_to_run_it(source: Path, tmp_path: Path) -> None:
    """A stranger's executor, which knows numpy and pack.json, gets every product exactly."""
    import numpy as np

    onnxpack.build(source, tmp_path / "a.pack", weights="int8", kernels="16x64x64")
    opened = open_pack(tmp_path / "a.pack")
    stored = manifest(tmp_path / "a.pack")
    codes = {s["path"]: opened.field(opened.tensors[s["weight"]].fields["codes"]) for s in stored["sites"]}
    rng = np.random.default_rng(0)
    inputs = {k: rng.integers(-127, 128, (40, k), np.int8) for k, _ in FAMILIES}
    a_of = {s["path"]: inputs[s["k"]] for s in stored["sites"]}
    results = replay(stored["plan"], a_of, codes, 40)
    assert len(results) == 3
    for path, result in results.items():
        assert result is not None
        np.testing.assert_array_equal(result, a_of[path].astype(np.int64) @ codes[path])
