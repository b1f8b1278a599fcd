"""Every fault of device and driver: results stay the host's; it is counted, said once, and raised under strict."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_pyxrt
import pytest
from fake_pyxrt import FAULTS
from npu_world import Machine, block, edit, last_run, load, same, x_of

from onnxpack.errors import EnvironmentFault, KernelError
from onnxpack.pack.read import open_pack
from onnxpack.runtime.npu import device as devices
from onnxpack.runtime.npu.faults import Fault
from onnxpack.runtime.session import PackSession
from onnxpack.shapes import Gemm

KINDS = {
    "timeout": "timeout",
    "error": "state",
    "abort": "state",
    "raise": "raised",
    "untouched": "untouched",
    "half": "untouched",
    "garbage": "canary",
}
"""What the runtime calls each fault of the stand-in when it comes at first use."""


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def device_of(session: PackSession) -> devices.Device:
    return session._engine._device  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_device_that_always_fails(
    machine: Machine, block_pack: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    machine.fault = lambda launch: fault
    npu, host = load(block_pack), load(block_pack, "host")
    runs = 12
    for run in range(runs):
        same(npu.run(None, x_of(40 + run % 3)), host.run(None, x_of(40 + run % 3)))
        for [(where, rows, reason, event)] in last_run(npu).values():
            assert (where, rows, event) == ("host", 40 + run % 3, "npu_float_fallback")
            assert reason in (KINDS[fault], "paused")
    counters = npu.coverage().counters
    assert counters["fallback"] == 3 * runs
    assert counters.get("npu", 0) == counters.get("launches", 0) == 0
    assert counters[f"fault:{KINDS[fault]}"] + counters.get("fault:paused", 0) == 3 * runs
    assert len(said(caplog)) == 2  # two kernels, so two shapes
    assert all(Fault(KINDS[fault]).sentence in line for line in said(caplog))
    assert machine.launches < 20  # a device that does not work is left alone


@pytest.mark.parametrize("fault", FAULTS)
def test_strict_raises(machine: Machine, block_pack: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    npu, host = load(block_pack, strict=True), load(block_pack, "host")
    machine.fault = lambda launch: fault
    kind = KernelError if fault == "garbage" else EnvironmentFault
    with pytest.raises(kind, match=Fault(KINDS[fault]).sentence) as raised:
        npu.run(None, x_of(40))
    assert "MatMul_0" in str(raised.value)
    assert not said(caplog)
    machine.fault = lambda launch: None
    if fault != "garbage":
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
        assert machine.computed.total() > 0
    same(npu.run(None, x_of(3)), host.run(None, x_of(3)))  # few rows go to the host by plan, not by fault


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "garbage"])
@pytest.mark.parametrize("at", range(1, 12))
def test_one_launch_fails_anywhere(machine: Machine, block_pack: Path, fault: str, at: int) -> None:
    npu, host = load(block_pack), load(block_pack, "host")
    machine.fault = lambda launch: fault if launch == at else None
    for rows in (70, 70, 33):
        same(npu.run(None, x_of(rows)), host.run(None, x_of(rows)))
    counters = npu.coverage().counters
    assert counters["fallback"] == 1
    assert counters["npu"] == 8
    assert counters[f"fault:{KINDS[fault]}"] == 1
    same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert {found[0][0] for found in last_run(npu).values()} == {"npu"}
    assert machine.alive["context"] == 2


def test_a_context_that_computes_garbage_is_found_by_its_canary(machine: Machine, block_pack: Path) -> None:
    machine.garbage_from = 2
    npu, host = load(block_pack), load(block_pack, "host")
    for _ in range(3):
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    ran = last_run(npu)
    assert ran["MatMul_0"][0][0] == "npu"
    assert ran["MatMul_1"] == ran["MatMul_2"] == [("host", 40, "canary", "npu_float_fallback")]
    assert npu.coverage().counters["fault:canary"] == 6
    assert machine.made["context"] == 2  # a kernel that is wrong is not tried again


def test_a_new_context_makes_the_others_prove_themselves_again(machine: Machine, block_pack: Path) -> None:
    npu, host = load(block_pack), load(block_pack, "host")
    for _ in range(4):
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    counters = npu.coverage().counters
    assert counters["device:contexts"] == 2
    assert counters["device:canaries"] == 3  # the first one, the second one, and the first one again
    assert machine.launches == counters["device:launches"] == counters["launches"] + 3


def test_a_stale_context_is_replaced_once(machine: Machine, block_pack: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine.stale_after = 5.0
    npu, host = load(block_pack, strict=True), load(block_pack, "host", strict=True)
    device_of(npu).clock = lambda: machine.clock
    same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    for _ in range(3):
        machine.clock += 60
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
        assert {found[0][0] for found in last_run(npu).values()} == {"npu"}
    counters = npu.coverage().counters
    assert counters["device:recreated"] == counters["fault:timeout"] == 6
    assert "fallback" not in counters
    assert len(said(caplog)) == 2


def test_after_timeouts_the_device_is_left_alone_for_a_while(machine: Machine, block_pack: Path) -> None:
    npu, host = load(block_pack), load(block_pack, "host")
    device_of(npu).clock = lambda: machine.clock
    machine.fault = lambda launch: "timeout"
    for _ in range(20):
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert machine.launches == 2
    machine.fault = lambda launch: None
    same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert last_run(npu)["MatMul_0"] == [("host", 40, "paused", "npu_float_fallback")]
    machine.clock += devices.PAUSE_SECONDS + 1
    same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert {found[0][0] for found in last_run(npu).values()} == {"npu"}


# --- contexts and memory ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five kernels in one graph."""
    shapes = [Gemm(16, *shape) for shape in ((64, 96), (64, 32), (96, 64))]
    shapes += [Gemm(64, 64, 96), Gemm(64, 96, 64)]
    return block(shapes, layers=2).pack(tmp_path_factory.mktemp("five"))


@pytest.mark.parametrize("cap", [1, 2, 3, 16])
def test_fewer_contexts_than_kernels_are_slower_and_nothing_else(machine: Machine, five: Path, cap: int) -> None:
    machine.cap = cap
    npu, host = load(five, strict=True), load(five, "host")
    for rows in (16, 64, 80, 16, 144, 64):
        same(npu.run(None, x_of(rows)), host.run(None, x_of(rows)))
        assert {found[0][0] for found in last_run(npu).values()} == {"npu"}
    assert machine.alive["context"] <= cap
    assert "fallback" not in npu.coverage().counters


def test_our_own_cap_is_kept(machine: Machine, five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPACK_NPU_CONTEXTS", "2")
    most = 0
    npu, host = load(five), load(five, "host")
    for rows in (16, 64, 80, 16, 144, 64):
        same(npu.run(None, x_of(rows)), host.run(None, x_of(rows)))
        most = max(most, machine.alive["context"])
    assert most == 2


def test_no_context_at_all(machine: Machine, block_pack: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine.cap = 0
    npu, host = load(block_pack), load(block_pack, "host")
    for _ in range(10):
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    counters = npu.coverage().counters
    assert counters["fallback"] == 30
    assert counters["fault:context"] + counters["fault:paused"] == 30
    assert len(said(caplog)) == 2
    assert "err=-22" in said(caplog)[0]


def test_operands_share_a_budget(machine: Machine, block_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPACK_NPU_OPERANDS", "0")
    npu, host = load(block_pack, strict=True), load(block_pack, "host")
    for rows in (40, 40, 100):
        same(npu.run(None, x_of(rows)), host.run(None, x_of(rows)))
    assert npu.coverage().counters["device:resident_bytes"] <= 96 * 64
    assert machine.alive["bo"] <= 2 * 2 + 1


def test_operands_stay_when_there_is_room(machine: Machine, block_pack: Path) -> None:
    npu = load(block_pack, strict=True)
    for rows in (40, 40, 100, 7, 40):
        npu.run(None, x_of(rows))
    assert npu.coverage().counters["device:uploads"] == 3 + 2  # weights and canaries
    assert machine.made["bo"] == 2 * 2 + 5
    assert machine.made["run"] <= 7  # prepared once; the canary of a context, and again after the other was made


@pytest.mark.parametrize("pages", [0, 4, 8, 9, 11, 13])
def test_a_device_that_runs_out_of_memory(machine: Machine, block_pack: Path, pages: int) -> None:
    machine.memory = pages * fake_pyxrt.PAGE
    npu, host = load(block_pack), load(block_pack, "host")
    for rows in (40, 33):
        same(npu.run(None, x_of(rows)), host.run(None, x_of(rows)))
    counters = npu.coverage().counters
    assert (counters.get("fallback", 0) > 0) is (pages < 9)
    assert counters.get("fault:memory", 0) == counters.get("fallback", 0)


# --- kernels that are not what they claim -----------------------------------------------------------------------------


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def empty(data: bytearray) -> None:
    data.clear()


def text(data: bytearray) -> None:
    data[:] = b"../other.elf"


@pytest.mark.parametrize("damage", [flip, empty, text])
def test_an_elf_that_was_changed_is_never_loaded(
    machine: Machine, block_pack: Path, damage: Callable[[bytearray], None]
) -> None:
    record = open_pack(block_pack).manifest.kernels[0]
    file = block_pack / record.file
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    edit(block_pack)  # sizes and digests of files are right again; the kernel's own digest is not
    npu, host = load(block_pack), load(block_pack, "host")
    for _ in range(3):
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    shape = f"{record.m}x{record.k}x{record.n}"
    assert machine.computed[shape] == 0
    assert machine.computed.total() > 0
    counters = npu.coverage().counters
    assert counters["fault:kernel"] == counters["fallback"] > 0
    with pytest.raises(KernelError):
        load(block_pack, strict=True).run(None, x_of(40))


def test_a_wrong_canary_in_the_record_keeps_the_kernel_out(machine: Machine, block_pack: Path) -> None:
    known = open_pack(block_pack).manifest.kernels
    edit(block_pack, kernels=[replace(kernel, canary={"seed": 3, "sha256": "0" * 64}) for kernel in known])
    npu, host = load(block_pack), load(block_pack, "host")
    same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert npu.coverage().counters["fault:canary"] == 3


def test_a_kernel_without_a_canary_gets_one(machine: Machine, block_pack: Path) -> None:
    edit(block_pack, kernels=[replace(kernel, canary=None) for kernel in open_pack(block_pack).manifest.kernels])
    npu, host = load(block_pack, strict=True), load(block_pack, "host")
    for _ in range(2):
        same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert npu.coverage().counters["device:canaries"] == 3
    del npu
    machine.garbage_from = 0
    again = load(block_pack)
    same(again.run(None, x_of(40)), host.run(None, x_of(40)))


def test_an_xrt_that_makes_no_context_from_an_elf(
    machine: Machine, block_pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.old = True
    for device, strict in (("npu", False), ("npu", True), ("auto", True)):
        with pytest.raises(EnvironmentFault, match="cannot make a context from an ELF"):
            load(block_pack, device, strict=strict)
    with caplog.at_level(logging.INFO, "onnxpack"):
        session = load(block_pack, "auto")
    assert len(caplog.records) == 1
    assert "cannot make a context from an ELF" in caplog.text
    same(session.run(None, x_of(40)), load(block_pack, "host").run(None, x_of(40)))


# --- a device that goes away ------------------------------------------------------------------------------------------


def test_after_it_was_closed_the_host_runs(machine: Machine, block_pack: Path) -> None:
    npu, host = load(block_pack), load(block_pack, "host")
    npu.run(None, x_of(40))
    device_of(npu).close()
    assert not machine.left()
    same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert last_run(npu)["MatMul_0"] == [("host", 40, "closed", "npu_float_fallback")]
    device_of(npu).close()


def test_an_interrupt_in_a_launch_leaves_nothing_half_done(machine: Machine, block_pack: Path) -> None:
    def interrupted(launch: int) -> str | None:
        if launch == 5:
            raise KeyboardInterrupt
        return None

    npu, host = load(block_pack), load(block_pack, "host")
    machine.fault = interrupted
    with pytest.raises(KeyboardInterrupt):
        npu.run(None, x_of(40))
    same(npu.run(None, x_of(40)), host.run(None, x_of(40)))
    assert {found[0][0] for found in last_run(npu).values()} == {"npu"}


def test_everything_is_released_in_order_at_the_end_of_the_process(tmp_path: Path, block_pack: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import fake_pyxrt, npu_world
machine = fake_pyxrt.Machine()
sys.modules["pyxrt"] = fake_pyxrt.module(machine)
import atexit
atexit.register(lambda: print(machine.violations, machine.left(), machine.log[-1]))
session = npu_world.load({str(block_pack)!r})
session.run(None, npu_world.x_of(40))
assert machine.left()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[] {} -device\n", done.stderr
