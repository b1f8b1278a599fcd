"""Getting at the device, or not: what `load` says, who holds the lock, what the switches do."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from npu_world import Machine, edit, last_run, load, same, x_of
from plain_pyxrt import Plain

from onnxpack.errors import EnvironmentFault, PackError
from onnxpack.pack.read import open_pack
from onnxpack.runtime.npu import lock
from onnxpack.runtime.npu.lock import DeviceLock


def test_auto_takes_the_device(machine: Machine, block_pack: Path) -> None:
    session = load(block_pack, "auto")
    assert session.coverage().device == "npu"
    session.run(None, x_of(20))
    assert machine.computed.total() > 0
    assert session.get_providers() == ["CPUExecutionProvider"]


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pyxrt at all."""
    monkeypatch.setitem(sys.modules, "pyxrt", None)


def broken(**parts: object) -> ModuleType:
    made = ModuleType("pyxrt")
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def whole() -> dict[str, object]:
    plain = Plain()
    names = ("device", "elf", "hw_context", "run", "ext", "ert_cmd_state", "xclBOSyncDirection")
    return {name: getattr(plain, name) for name in names}


def no_device(index: int) -> None:
    raise RuntimeError("No such device with index '0'\nsecond line")


class OldContext:
    """What a pybind class of an older XRT says about itself."""

    def __init__(self) -> None:
        """__init__(self: pyxrt.hw_context, arg0: pyxrt.device, arg1: pyxrt.uuid) -> None"""


FAULTY = {
    "missing": (None, "no NPU device: XRT's Python module pyxrt is not installed"),
    "no devices": (broken(**whole(), enumerate_devices=lambda: 0), "no NPU device: XRT sees none"),
    "cannot open": (broken(**{**whole(), "device": no_device}), "No such device with index '0'"),
    "too old": (broken(**{**whole(), "ext": SimpleNamespace()}), "has no ext.bo, ext.kernel: XRT is too old"),
    "no ELF": (broken(**{**whole(), "hw_context": OldContext}), "cannot make a context from an ELF"),
}


@pytest.mark.parametrize("case", sorted(FAULTY))
def test_without_a_device(
    block_pack: Path, monkeypatch: pytest.MonkeyPatch, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, message = FAULTY[case]
    monkeypatch.setitem(sys.modules, "pyxrt", module)
    with pytest.raises(EnvironmentFault) as raised:
        load(block_pack)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(EnvironmentFault):
        load(block_pack, "auto", strict=True)
    caplog.clear()
    with caplog.at_level(logging.INFO, "onnxpack"):
        session = load(block_pack, "auto")
    assert len(caplog.records) == 1
    assert message in caplog.text
    same(session.run(None, x_of(20)), load(block_pack, "host").run(None, x_of(20)))
    assert session.coverage().device == "host"
    assert {found[0][0] for found in last_run(session).values()} == {"host"}


def test_a_module_that_does_not_load(block_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyxrt.py").write_text("raise ImportError('libxrt_coreutil.so.2: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pyxrt", raising=False)
    with pytest.raises(EnvironmentFault, match="libxrt_coreutil"):
        load(block_pack)


def test_a_pack_without_kernels(machine: Machine, block_pack: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(block_pack, kernels=[])
    for session in (load(block_pack), load(block_pack, "auto")):
        assert session.coverage().device == "host"
        session.run(None, x_of(20))
        assert {found[0][0] for found in last_run(session).values()} == {"host"}
    with pytest.raises(PackError, match="no kernel that runs any"):
        load(block_pack, strict=True)
    assert machine.launches == 0


def test_a_kernel_file_outside_of_the_list_is_refused(machine: Machine, block_pack: Path) -> None:
    manifest = open_pack(block_pack).manifest
    edit(block_pack, files=[file for file in manifest.files if file.path != manifest.kernels[0].file])
    with pytest.raises(PackError, match="not one of the pack's"):
        load(block_pack)


# --- switches ---------------------------------------------------------------------------------------------------------


def test_the_host_can_be_forced(machine: Machine, block_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPACK_NPU", "0")
    for device in ("npu", "auto"):
        session = load(block_pack, device)
        session.run(None, x_of(20))
        assert session.coverage().device == "host"
        assert "ONNXPACK_NPU=0" in str(session.trace()[0].reason)
        with pytest.raises(EnvironmentFault, match="ONNXPACK_NPU"):
            load(block_pack, device, strict=True)
    assert machine.made["device"] == 0


def test_fallback_can_be_refused(machine: Machine, block_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPACK_STRICT", "1")
    machine.fault = lambda launch: "error"
    with pytest.raises(EnvironmentFault, match="another state"):
        load(block_pack).run(None, x_of(20))


# --- one process, one device ------------------------------------------------------------------------------------------


def test_sessions_share_one_device_and_its_kernels(machine: Machine, block_pack: Path) -> None:
    first, second = load(block_pack), load(block_pack)
    for session in (first, second, first):
        session.run(None, x_of(20))
    assert machine.made["device"] == 1
    assert machine.made["context"] == 2
    before = machine.alive["bo"]
    del first, session
    gc.collect()
    assert machine.alive["bo"] == before - 3  # its weights
    second.run(None, x_of(20))
    assert machine.alive["context"] == 2
    del second
    assert not machine.left()


def test_one_process_at_a_time(machine: Machine, block_pack: Path, tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from onnxpack.runtime.npu.lock import DeviceLock
held = DeviceLock.acquire(Path({str(tmp_path / "npu.lock")!r}))
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(EnvironmentFault, match="another process uses the NPU"):
            load(block_pack)
        session = load(block_pack, "auto")
        assert session.coverage().device == "host"
        other.communicate()
    again = load(block_pack)
    again.run(None, x_of(20))
    assert machine.computed.total() > 0


def test_the_lock_is_freed_with_the_last_session(machine: Machine, block_pack: Path, tmp_path: Path) -> None:
    sessions = [load(block_pack), load(block_pack)]
    assert len(lock._held) == 1
    sessions.pop()
    gc.collect()
    assert len(lock._held) == 1
    sessions.pop()
    gc.collect()
    assert not lock._held
    machine.devices = 0
    with pytest.raises(EnvironmentFault, match="XRT sees none"):
        load(block_pack)
    assert not lock._held


@pytest.mark.parametrize("make", ["folder", "link", "nowhere"])
def test_a_lock_file_that_cannot_be(tmp_path: Path, make: str) -> None:
    path = tmp_path / "lock"
    if make == "link":
        path.symlink_to(tmp_path / "target")
    elif make == "nowhere":
        path = tmp_path / "no" / "lock"
    else:
        path.mkdir()
        DeviceLock.acquire(path).release()  # a folder can be locked as well
        return
    with pytest.raises(EnvironmentFault, match="ONNXPACK_NPU_LOCK"):
        DeviceLock.acquire(path)


# --- another stand-in -------------------------------------------------------------------------------------------------


def test_nothing_but_the_interface_is_relied_on(block_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Plain()
    monkeypatch.setitem(sys.modules, "pyxrt", broken(**whole_of(plain)))
    npu, host = load(block_pack), load(block_pack, "host")
    for rows in (3, 16, 40, 40, 40, 70):
        same(npu.run(None, x_of(rows)), host.run(None, x_of(rows)))
    assert {found[0][0] for found in last_run(npu).values()} == {"npu"}
    assert plain.started == npu.coverage().counters["device:launches"] > 0
    for state, fault in ((5, "state"), (None, "state"), (8, "timeout")):
        plain.state = state  # type: ignore[assignment]
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
        assert npu.coverage().counters[f"fault:{fault}"] > 0
    del npu
    gc.collect()


def whole_of(plain: Plain) -> dict[str, object]:
    names = ("device", "elf", "hw_context", "run", "ext", "ert_cmd_state", "xclBOSyncDirection")
    return {name: getattr(plain, name) for name in names}
