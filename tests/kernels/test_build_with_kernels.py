"""`build` with kernels: what the plan wants is compiled or found, checked, bound and told to the sites."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from fake_toolchain import FakeToolchain
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack.cli.main import run
from onnxpack.pack.read import open_pack

K, N = 64, 256


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two products of one shape, one after the other by way of a third."""
    rng = np.random.default_rng(0)
    weights = {"a": (K, N), "b": (N, K), "c": (K, N)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"]),
            helper.make_node("MatMul", ["h", "b"], ["i"]),
            helper.make_node("MatMul", ["i", "c"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", N])],
        [numpy_helper.from_array(rng.standard_normal(s, np.float32), name) for name, s in weights.items()],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def build(model: Path, out: Path, *more: str) -> int:
    return run(["build", str(model), "-o", str(out), "--quiet", "--rows", "16", *more])


def test_missing_kernels_are_compiled_and_bound(tmp_path: Path, model: Path, tools: FakeToolchain) -> None:
    elfs, out = tmp_path / "elfs", tmp_path / "m.pack"
    assert build(model, out, "--elfs-out", str(elfs)) == 0
    manifest = open_pack(out, "full").manifest
    assert len(manifest.kernels) == len(list(elfs.glob("*.elf"))) == len(tools.calls()) > 0
    assert manifest.coverage.covered == 3
    for site in manifest.sites:
        assert site.reason is None
        assert site.kernel in {kernel.key for kernel in manifest.kernels}
    assert all((out / kernel.file).read_bytes() for kernel in manifest.kernels)
    assert all(kernel.canary is not None for kernel in manifest.kernels)


def test_the_second_build_compiles_nothing_and_has_the_same_bytes(
    tmp_path: Path, model: Path, tools: FakeToolchain
) -> None:
    assert build(model, tmp_path / "1.pack", "--elfs-out", str(tmp_path / "1")) == 0
    compiled = len(tools.calls())
    assert build(model, tmp_path / "2.pack", "--elfs-out", str(tmp_path / "2")) == 0
    assert len(tools.calls()) == compiled
    first, second = (open_pack(tmp_path / f"{i}.pack").manifest for i in (1, 2))
    assert (first.content_digest, first.files_digest) == (second.content_digest, second.files_digest)


def test_a_library_is_bound_without_a_toolchain(
    tmp_path: Path, model: Path, tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    elfs = tmp_path / "elfs"
    assert build(model, tmp_path / "1.pack", "--elfs-out", str(elfs)) == 0
    for name in tools.environment():
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("ONNXPACK_CACHE", str(tmp_path / "another cache"))
    assert build(model, tmp_path / "2.pack", "--kernels", str(elfs)) == 0
    assert open_pack(tmp_path / "2.pack").manifest.coverage.covered == 3
    assert onnxpack.census(model, elfs).totals.covered > 0


def test_without_a_toolchain_the_pack_is_built_and_the_commands_are_named(
    tmp_path: Path, model: Path, no_tools: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(model, tmp_path / "m.pack", "--elfs-out", str(tmp_path / "elfs")) == 0
    manifest = open_pack(tmp_path / "m.pack").manifest
    assert (manifest.coverage.covered, manifest.kernels) == (0, [])
    assert {site.reason for site in manifest.sites} == {"no-kernel"}
    said = capsys.readouterr()
    assert "missing" in said.out
    assert "to make it: " in said.err


def test_one_failing_shape_leaves_the_others_and_exits_4(
    tmp_path: Path, model: Path, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(model, tmp_path / "all.pack", "--elfs-out", str(tmp_path / "all")) == 0
    names = sorted(path.stem for path in (tmp_path / "all").glob("*.elf"))
    assert len(names) > 1
    (tmp_path / "some").mkdir()
    for path in (tmp_path / "all").glob(f"{names[0]}.*"):
        (tmp_path / "some" / path.name).write_bytes(path.read_bytes())
    tools.set(mode="fail")
    code = build(
        model, tmp_path / "m.pack", "--kernels", str(tmp_path / "some"), "--elfs-out", str(tmp_path / "new"),
        "--elf-cache", str(tmp_path / "empty"),
    )  # fmt: skip
    assert code == 4
    manifest = open_pack(tmp_path / "m.pack", "full").manifest
    assert len(manifest.kernels) == 1
    assert 0 < manifest.coverage.covered < 3
    assert "failed to compile" in capsys.readouterr().err


def test_a_damaged_elf_of_a_library_is_refused_and_nothing_is_written(
    tmp_path: Path, model: Path, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    elfs = tmp_path / "elfs"
    assert build(model, tmp_path / "1.pack", "--elfs-out", str(elfs)) == 0
    victim = next(elfs.glob("*.elf"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0xFF
    victim.write_bytes(bytes(data))
    assert build(model, tmp_path / "2.pack", "--kernels", str(elfs)) == 3
    assert victim.name in capsys.readouterr().err
    assert not (tmp_path / "2.pack").exists()


def test_no_elfs_binds_nothing(tmp_path: Path, model: Path, tools: FakeToolchain) -> None:
    assert build(model, tmp_path / "m.pack", "--elfs-out", str(tmp_path / "elfs"), "--no-elfs") == 0
    assert tools.calls() == []
    assert not (tmp_path / "m.pack" / "kernels").exists()


def test_the_report_says_what_became_of_each_kernel(
    tmp_path: Path, model: Path, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(model, tmp_path / "m.pack", "--elfs-out", str(tmp_path / "elfs"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {kernel["status"] for kernel in report["kernels"]} == {"built"}
    assert report["coverage"]["covered"] == 3
