"""Measured figures: kernels that give their known product, the host through a real pack, and a plan that uses both."""

from __future__ import annotations

import json
from pathlib import Path

import npu_elf_writer as writer
import pytest

from onnxpack import records
from onnxpack.calibrate import calibrate, host_figures
from onnxpack.cli.main import run
from onnxpack.errors import EnvironmentFault
from onnxpack.kernels import canary
from onnxpack.kernels.elf_report import inspect_bytes
from onnxpack.kernels.library import SCHEMA, Record
from onnxpack.planning.costs import Costs
from onnxpack.shapes import Gemm

SHAPE = Gemm(16, 64, 256)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One kernel with its canary, and a stand-in for pyxrt on the path of child processes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "support" / "fake_pyxrt"))
    monkeypatch.setenv("FAKE_PYXRT_SHAPE", "16,64,256")
    monkeypatch.setenv("ONNXPACK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "kernels"
    folder.mkdir()
    data = writer.full_elf().to_bytes()
    (folder / "k.elf").write_bytes(data)
    digest = inspect_bytes(data).sha256
    numbers = (SHAPE.m, SHAPE.k, SHAPE.n)
    record = Record(
        SCHEMA, "ab" * 32, *numbers, digest, len(data), "npu2", "gemm_i8", "main:sequence", canary=canary.make(SHAPE)
    )
    (folder / "k.json").write_text(records.dumps(record))
    return folder


def test_a_kernel_that_gives_its_known_product_is_measured(library: Path) -> None:
    costs = calibrate(str(library), host=False)
    assert list(costs.kernels) == [str(SHAPE)]
    assert costs.launch(SHAPE) == round(1000 * costs.kernels[str(SHAPE)])
    assert costs.host_call_us is None


@pytest.mark.parametrize("fault", ["wrong", "nothing"])
def test_a_kernel_that_gives_another_product_is_not(library: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("FAKE_PYXRT", fault)
    with pytest.raises(EnvironmentFault, match="no kernel ran"):
        calibrate(str(library), host=False)


def test_the_host_figures_are_those_of_a_line() -> None:
    call, rate = host_figures(256)
    assert call >= 0
    assert rate > 0


def test_the_command_writes_a_file_that_plan_reads(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costs.json"
    assert run(["bench", str(library), "--calibrate", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"].keys() == {str(SHAPE)}
    assert Costs.loads(out.read_text()).host_products_per_us


def test_without_a_device_nothing_is_written(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    out = tmp_path / "costs.json"
    assert run(["bench", str(library), "--calibrate", str(out)]) == 5
    assert not out.exists()
    assert "no kernel ran" in capsys.readouterr().err
