"""Kernels on a device that works, and on every kind that does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import npu_elf_writer as writer
import pytest

from onnxpack import records
from onnxpack.errors import GateError, KernelError
from onnxpack.kernels import canary, diagnosis, trial
from onnxpack.kernels.checking import check_library, raise_for_checks, record_proofs, summary
from onnxpack.kernels.diagnosis import Places, diagnose
from onnxpack.kernels.elf_report import inspect_bytes
from onnxpack.kernels.library import SCHEMA, Record, parse_kernels
from onnxpack.shapes import Gemm

SHAPE = Gemm(16, 64, 256)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A stand-in for pyxrt on the path of child processes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "support" / "fake_pyxrt"))
    monkeypatch.setenv("FAKE_PYXRT_SHAPE", "16,64,256")
    monkeypatch.setenv("ONNXPACK_CACHE", str(tmp_path / "cache"))
    return monkeypatch


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """One kernel with its canary."""
    data = writer.full_elf().to_bytes()
    (tmp_path / "k.elf").write_bytes(data)
    record = Record(
        SCHEMA,
        "ab" * 32,
        *(SHAPE.m, SHAPE.k, SHAPE.n),
        inspect_bytes(data).sha256,
        len(data),
        "npu2",
        "gemm_i8",
        "main:sequence",
        canary=canary.make(SHAPE),
    )
    (tmp_path / "k.json").write_text(records.dumps(record))
    return tmp_path


def test_a_device_that_multiplies_passes(device: pytest.MonkeyPatch, library: Path) -> None:
    (checked,) = check_library(str(library), on_device=True)
    assert checked.trial is not None
    assert (checked.trial.route, checked.trial.canary) == ("npu", "equal")
    assert len(checked.trial.launches_us) == trial.LAUNCHES
    raise_for_checks([checked], on_device=True)
    report = summary([checked], on_device=True)
    assert report["machine"]["findings"]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("wrong", "not the known one"),
        ("nothing", "not the known one"),
        ("timeout", "TIMEOUT"),
        ("crash", "ended by signal 6"),
        ("raise", "err=-22"),
        ("hang", "time limit"),
        ("old", "cannot make a context from an ELF"),
        ("none", "No such device"),
        ("broken", "cannot be imported"),
    ],
)
def test_a_device_that_does_not_is_told_apart(
    device: pytest.MonkeyPatch, library: Path, mode: str, reason: str
) -> None:
    device.setenv("FAKE_PYXRT", mode)
    device.setattr(trial, "CHILD_SECONDS", 3.0 if mode == "hang" else 60.0)
    (checked,) = check_library(str(library), on_device=True)
    assert checked.structure == "ok"
    assert checked.trial is not None
    assert not checked.trial.passed
    assert reason in (checked.trial.reason or "")
    assert checked.trial.canary == ("different" if mode in ("wrong", "nothing") else "not run")
    with pytest.raises(GateError):
        raise_for_checks([checked], on_device=True)


def test_what_passed_is_proved_until_it_changes(device: pytest.MonkeyPatch, library: Path) -> None:
    assert parse_kernels(str(library)).kernels[0].proof == "canary"
    checks = check_library(str(library), on_device=True)
    assert record_proofs(parse_kernels(str(library)), checks) == 1
    (kernel,) = parse_kernels(str(library)).kernels
    assert kernel.proof == "proved"
    assert kernel.record is not None
    assert replace(kernel.record, key="cd" * 32).proved is False  # other tools, other proof
    assert replace(kernel.record, sha256="00" * 32).proved is False
    device.setenv("FAKE_PYXRT", "wrong")
    assert record_proofs(parse_kernels(str(library)), check_library(str(library), on_device=True)) == 0


def test_a_foreign_kernel_gets_a_canary_of_its_shape(device: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "foreign.elf"
    path.write_bytes(writer.full_elf().to_bytes())
    (checked,) = check_library(f"{SHAPE}={path}", on_device=True)
    assert checked.proof == "unproved"
    assert checked.trial is not None
    assert checked.trial.passed


def test_what_cannot_be_bound_is_never_sent_to_a_device(device: pytest.MonkeyPatch, library: Path) -> None:
    path = library / "k.elf"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)
    (checked,) = check_library(str(library), on_device=True)
    assert checked.structure == "refused"
    assert checked.trial is None
    with pytest.raises(KernelError):
        raise_for_checks([checked], on_device=True)


def test_a_single_file_can_be_checked(library: Path) -> None:
    (checked,) = check_library(str(library / "k.elf"))
    assert checked.structure == "ok"
    (library / "k.elf").write_bytes(b"")
    (checked,) = check_library(str(library / "k.elf"))
    assert checked.structure == "refused"


# --- the doctor -------------------------------------------------------------------------------------------------------


def places(tmp_path: Path, version: str = "0.7.0") -> Places:
    """A machine with a device, a driver and XRT."""
    for folder in ("accel", "amdxdna", "xrt"):
        (tmp_path / folder).mkdir()
    (tmp_path / "accel" / "accel0").write_text("")
    (tmp_path / "amdxdna" / "version").write_text(version + "\n")
    (tmp_path / "xrt" / "version.json").write_text('{"BUILD_VERSION": "2.25.0"}')
    return Places(tmp_path / "accel", tmp_path / "amdxdna", tmp_path / "xrt")


def states(where: Places, tmp_path: Path) -> dict[str, diagnosis.Finding]:
    return {finding.name: finding for finding in diagnose(tmp_path / "cache", places=where)}


def test_a_good_machine_is_called_good(
    device: pytest.MonkeyPatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XILINX_XRT", raising=False)
    found = states(places(tmp_path), tmp_path)
    for name in ("device", "driver", "xrt", "pyxrt", "devices", "cache"):
        assert found[name].state == "ok", found[name]
    assert "0.7.0" in found["driver"].detail
    assert "2.25.0" in found["xrt"].detail


@pytest.mark.parametrize(
    ("mode", "name", "state"),
    [("none", "devices", "problem"), ("old", "pyxrt", "problem"), ("broken", "pyxrt", "missing")],
)
def test_each_fault_of_pyxrt_has_its_line(
    device: pytest.MonkeyPatch, tmp_path: Path, mode: str, name: str, state: str
) -> None:
    device.setenv("FAKE_PYXRT", mode)
    finding = states(places(tmp_path), tmp_path)[name]
    assert finding.state == state
    assert finding.rule
    assert finding.next_step


def test_a_driver_with_a_bad_name_is_named(tmp_path: Path) -> None:
    finding = states(places(tmp_path, "0.16.0"), tmp_path)["driver"]
    assert finding.state == "problem"
    assert "0.16.0" in finding.detail


def test_an_empty_machine_lacks_everything_and_says_what_to_do(tmp_path: Path) -> None:
    none = tmp_path / "none"
    found = states(Places(none, none, none), tmp_path)
    for name in ("device", "driver"):
        assert found[name].state == "missing"
        assert found[name].next_step
