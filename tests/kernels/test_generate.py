"""From missing shapes to checked kernels, with a stand-in toolchain: every way it can go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_toolchain import CLASSIC, DECLARATIVE, TRANSITIONAL, FakeToolchain

from onnxpack.errors import EnvironmentFault, UsageError
from onnxpack.kernels import canary
from onnxpack.kernels.cache import Cache
from onnxpack.kernels.digests import Digests
from onnxpack.kernels.elf_report import check
from onnxpack.kernels.generate import Progress, Result, ensure
from onnxpack.kernels.library import parse_kernels, read_record
from onnxpack.kernels.process import Runner
from onnxpack.kernels.recipe import Inputs, draft
from onnxpack.kernels.target import NPU2
from onnxpack.kernels.toolchain import find
from onnxpack.shapes import Gemm

SHAPE = Gemm(16, 64, 256)
OTHER = Gemm(16, 64, 512)


def one(result: list[Result]) -> Result:
    (only,) = result
    return only


# --- the good way -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [DECLARATIVE, TRANSITIONAL, CLASSIC])
def test_a_missing_kernel_is_built_checked_and_recorded(tools: FakeToolchain, tmp_path: Path, generation: str) -> None:
    tools.set(generation=generation)
    result = one(ensure([SHAPE], out_dir=tmp_path / "out"))
    assert result.status == "built"
    kernel = result.kernel
    assert kernel is not None
    assert kernel.path is not None
    assert kernel.path.name.startswith("i8_16x64x256_")
    record = read_record(kernel.path.with_suffix(".json"))
    assert record == kernel.record
    assert record is not None
    assert check(kernel.path, SHAPE, record).bindable
    assert record.kernel_name == "main:sequence"
    assert record.canary == canary.make(SHAPE)
    assert record.parameters["m"] == 16
    assert set(record.provenance["tools"]) == {"aiecc", "aiebu-asm", "peano", "aie", "mlir-aie"}
    assert str(tmp_path) not in kernel.path.with_suffix(".json").read_text()
    assert parse_kernels(str(tmp_path / "out")).shapes == {SHAPE}
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir()) == [".elf", ".json"]


def test_the_second_time_nothing_is_compiled(tools: FakeToolchain, tmp_path: Path) -> None:
    first = ensure([SHAPE, OTHER], out_dir=tmp_path / "out")
    again = ensure([SHAPE, OTHER], out_dir=tmp_path / "out")
    elsewhere = ensure([SHAPE, OTHER], out_dir=tmp_path / "other")
    assert [r.status for r in first + again + elsewhere] == ["built"] * 2 + ["cached"] * 4
    assert len(tools.calls()) == 2
    paths = [r.kernel.path for r in first + elsewhere if r.kernel is not None and r.kernel.path is not None]
    assert paths[0].read_bytes() == paths[2].read_bytes()


def test_what_the_library_has_is_not_built(tools: FakeToolchain, tmp_path: Path) -> None:
    ensure([SHAPE], out_dir=tmp_path / "library")
    library = parse_kernels(str(tmp_path / "library"))
    results = ensure([SHAPE, OTHER], library=library, out_dir=tmp_path / "out")
    assert [r.status for r in results] == ["library", "built"]
    assert parse_kernels(str(tmp_path / "out")).shapes == {OTHER}


def test_a_damaged_library_file_is_built_anew(tools: FakeToolchain, tmp_path: Path) -> None:
    path = one(ensure([SHAPE], out_dir=tmp_path / "library")).kernel
    assert path is not None
    assert path.path is not None
    data = bytearray(path.path.read_bytes())
    data[-1] ^= 1
    path.path.write_bytes(data)
    library = parse_kernels(str(tmp_path / "library"))
    assert one(ensure([SHAPE], library=library)).status == "cached"


def test_progress_names_every_shape(tools: FakeToolchain) -> None:
    seen: list[Progress] = []
    ensure([SHAPE, OTHER, SHAPE], on_progress=seen.append)
    assert sorted(p.gemm for p in seen if p.result is None) == [SHAPE, OTHER]
    assert [p.done for p in seen if p.result is not None] == [1, 2]
    assert {p.total for p in seen} == {2}


def test_nothing_wanted_nothing_done(tools: FakeToolchain) -> None:
    assert ensure([]) == []


# --- what the tools can do to us --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("nothing", "kernel.elf was not written: it may have ignored a flag"),
        ("empty", "kernel.elf is empty"),
        ("garbage", "kernel.elf, but it is nothing that is known"),
        ("core", "kernel.elf, but it is the ELF of one core"),
        ("instructions", "kernel.elf, but it is an instruction ELF"),
        ("cut", "kernel.elf, but the section table"),
        ("count", "transfers, and its record says"),
        ("rewrite", "text changed while it was being compiled"),
    ],
)
def test_success_without_a_whole_result_is_a_failure(tools: FakeToolchain, mode: str, reason: str) -> None:
    tools.set(mode=mode)
    result = one(ensure([SHAPE]))
    assert (result.status, result.kernel) == ("failed", None)
    assert reason in (result.reason or "")
    assert Cache().entries() == []


def test_a_failing_shape_is_reported_and_leaves_the_others(tools: FakeToolchain, tmp_path: Path) -> None:
    tools.set(mode="fail", only="[0, 512, 512, 1]")  # the strides of OTHER's C
    good, bad = ensure([SHAPE, OTHER], out_dir=tmp_path / "out")
    assert (good.status, bad.status) == ("built", "failed")
    assert bad.reason == (
        "aiecc exited with 1: design.mlir:12:3: error: 'aie.tile' op allocated buffers exceeded available memory"
    )
    assert bad.kernel is None
    assert bad.log is not None
    assert "aiecc" in bad.log.read_text()
    assert bad.command == f"onnxpack kernels build --shape 16,64,512 --elfs-out {tmp_path / 'out'}"
    assert "exceeded available memory" in bad.log_tail[-1]
    tools.set(mode="")
    assert one(ensure([OTHER], out_dir=tmp_path / "out")).status == "built"


def test_a_core_kernel_that_does_not_compile_is_reported(tools: FakeToolchain) -> None:
    tools.set(clang="fail")
    result = one(ensure([SHAPE]))
    assert "the core kernel's compiler exited with 1: mm.cc:3:1: error" in (result.reason or "")


def test_a_tool_that_never_ends_runs_into_its_limit(tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPACK_TOOL_TIMEOUT", "2")
    tools.set(mode="children")
    assert "time limit of 2 s" in (one(ensure([SHAPE])).reason or "")
    assert not orphans(tools)
    for wrong in ("soon", "0", "nan", "inf"):
        monkeypatch.setenv("ONNXPACK_TOOL_TIMEOUT", wrong)
        with pytest.raises(UsageError):
            ensure([SHAPE])


def orphans(tools: FakeToolchain) -> list[str]:
    """Command lines of processes that the stand-in started and that still run."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            environ, command = place.read_bytes(), (place.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if str(tools.install).encode() in environ and (b"sleep(600)" in command or b"aiecc" in command):
            found.append(command.decode(errors="replace"))
    return found


# --- without tools, and with broken ones ------------------------------------------------------------------------------


def test_without_a_toolchain_shapes_are_missing_with_the_command_to_make_them(no_tools: None, tmp_path: Path) -> None:
    result = one(ensure([SHAPE], out_dir=tmp_path / "out", cache=tmp_path / "cache"))
    assert result.status == "missing"
    assert "aiecc" in (result.reason or "")
    assert "doctor" in (result.reason or "")
    assert result.command.startswith("onnxpack kernels build --shape 16,64,256")


def test_without_a_toolchain_earlier_results_of_the_same_design_are_used(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure([SHAPE], out_dir=tmp_path / "out")
    tools.aiecc.unlink()
    assert one(ensure([SHAPE], out_dir=tmp_path / "out", cache=tmp_path / "none")).status == "cached"
    assert one(ensure([SHAPE], out_dir=tmp_path / "new")).status == "cached"
    assert parse_kernels(str(tmp_path / "new")).shapes == {SHAPE}
    assert one(ensure([OTHER], out_dir=tmp_path / "out")).status == "missing"


def test_a_broken_compiler_makes_shapes_missing_not_a_crash(tools: FakeToolchain) -> None:
    (tools.install / "include" / "aie_kernels" / "aie2p" / "mm.cc").write_bytes(b'#include "zero.cc"\n\xff\xfe')
    result = one(ensure([SHAPE]))
    assert result.status == "missing"
    assert "clang++" in (result.reason or "")


@pytest.mark.parametrize(
    ("shape", "way_out"),
    [
        (Gemm(16, 1000, 1000), "16x1024x1024 would hold it (4.6 % of its work is padding)"),
        (Gemm(8, 64, 256), "16x64x256 would hold it (50.0 %"),
        (Gemm(128, 1024, 151_936), "split it"),
    ],
)
def test_a_shape_that_fits_no_tiling_is_refused_with_the_limit_and_a_way_out(
    no_tools: None, tmp_path: Path, shape: Gemm, way_out: str
) -> None:
    result = one(ensure([shape], cache=tmp_path))
    assert result.status == "refused"
    assert "allowed" in (result.reason or "")
    assert way_out in (result.reason or "")


def test_a_target_without_elfs_is_refused() -> None:
    with pytest.raises(UsageError, match="no full ELF"):
        ensure([SHAPE], "npu1")
    with pytest.raises(UsageError, match="unknown target"):
        ensure([SHAPE], "npu9")


# --- where results go -------------------------------------------------------------------------------------------------


def test_a_read_only_cache_is_read_and_built_beside(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure([SHAPE])
    monkeypatch.setattr(Cache, "writable", lambda self: False)
    assert one(ensure([SHAPE])).status == "cached"
    assert one(ensure([OTHER], out_dir=tmp_path / "out")).status == "built"
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        ensure([Gemm(16, 64, 768)])


def test_a_cache_that_is_no_folder_is_one_line(tools: FakeToolchain, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault):
        ensure([SHAPE], cache=tmp_path / "file")
    with pytest.raises(EnvironmentFault):
        ensure([SHAPE], out_dir=tmp_path / "file" / "out")


# --- keys -------------------------------------------------------------------------------------------------------------


def key(store: Path | None = None) -> str:
    """The key that a build would have now."""
    drafted = draft(SHAPE, NPU2)
    assert not isinstance(drafted, str)
    return Inputs(find(), Digests(store), Runner()).complete(drafted).key


def test_every_input_changes_the_key_and_nothing_else_does(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "digests.json"
    ensure([SHAPE])
    seen = {key(store)}
    kernels = tools.install / "include" / "aie_kernels" / "aie2p"
    for path in (
        tools.aiecc,
        tools.clang,
        tools.peano / "bin" / "opt",
        tools.install / "bin" / "aie-opt",
        tools.install / "lib" / "libAIE.so.21",
        tools.asm,
        kernels / "mm.cc",
        kernels / "zero.cc",
        tools.install / "include" / "aie_api" / "aie.hpp",
        tools.install / "python" / "aie" / "dialects" / "aie.py",
        tools.peano / "lib" / "libc.a",
    ):
        tools.edit(path)
        changed = key(store)
        assert changed not in seen, path
        seen.add(changed)
    tools.set(generation=CLASSIC)
    changed = key(store)
    assert changed not in seen
    assert one(ensure([SHAPE])).status == "built"
    count = len(tools.calls())

    os.utime(tools.aiecc)
    os.utime(kernels / "mm.cc")
    (kernels / "unrelated.h").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert key(store) == changed
    assert one(ensure([SHAPE])).status == "cached"
    assert len(tools.calls()) == count


def test_the_tool_that_runs_decides_not_the_one_on_path(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeToolchain(tmp_path / "other")
    monkeypatch.setenv("PATH", f"{other.install / 'bin'}:{os.environ['PATH']}")
    first = key()
    other.edit(other.aiecc)
    assert key() == first
    tools.edit(tools.aiecc)
    assert key() != first


def test_the_same_tools_elsewhere_give_the_same_key(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are places, not contents. The stand-in's scripts name their own folder, so they are moved, not copied."""
    first = key()
    (tmp_path / "moved").mkdir()
    tools.install.rename(tmp_path / "moved" / "mlir_aie")
    monkeypatch.setenv("MLIR_AIE_INSTALL_DIR", str(tmp_path / "moved" / "mlir_aie"))
    assert key() == first


# --- several at once, and interrupted ---------------------------------------------------------------------------------


SCRIPT = """
import sys
from pathlib import Path
from onnxpack.kernels.generate import ensure
from onnxpack.shapes import Gemm
shapes = [Gemm(16, 64, 256 * n) for n in range(1, 1 + int(sys.argv[2]))]
results = ensure(shapes, out_dir=Path(sys.argv[1]), jobs=2)
print(*[r.status for r in results], *[r.kernel.record.sha256 for r in results])
"""


def start(out: Path, shapes: int = 3) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    argv = [sys.executable, "-c", SCRIPT, str(out), str(shapes)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: object, seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.02)
    raise AssertionError("it never came to that")


def test_eight_processes_make_one_compile(tools: FakeToolchain, tmp_path: Path) -> None:
    tools.set(sleep=0.5)
    children = [start(tmp_path / str(number), 1) for number in range(8)]
    words = [child.communicate(timeout=60)[0].split() for child in children]
    assert len(tools.calls()) == 1
    assert sorted(status for status, _ in words) == ["built", *["cached"] * 7]
    assert len({digest for _, digest in words}) == 1
    assert all(parse_kernels(str(tmp_path / str(number))).shapes == {SHAPE} for number in range(8))


def test_an_interrupt_leaves_no_process_and_no_file(tools: FakeToolchain, tmp_path: Path) -> None:
    tools.set(mode="children")
    child = start(tmp_path / "out")
    wait_for(lambda: len(tools.calls()) == 2 and len(orphans(tools)) >= 4)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    wait_for(lambda: not orphans(tools))
    assert list((tmp_path / "out").iterdir()) == []
    assert not list((tmp_path / "cache").rglob("kernel.elf"))
    assert not list((tmp_path / "cache").glob("*/work/*"))


def test_a_killed_build_goes_on_where_it_was(tools: FakeToolchain, tmp_path: Path) -> None:
    tools.set(mode="children", only="[0, 768, 768, 1]")  # the strides of the third shape's C
    child = start(tmp_path / "out")
    wait_for(lambda: len(list((tmp_path / "out").glob("*.elf"))) == 2 and len(tools.calls()) == 3)
    child.kill()
    child.communicate(timeout=30)
    for place in Path("/proc").glob("[0-9]*/environ"):  # what kill -9 left behind; nobody else may end it
        end_leftover(place, str(tools.install))
    tools.set(mode="", only="")
    results = ensure([Gemm(16, 64, 256 * n) for n in (1, 2, 3)], out_dir=tmp_path / "out")
    assert [r.status for r in results] == ["cached", "cached", "built"]
    Cache().prune()
    assert not list((tmp_path / "cache").glob("*/work/*"))


def end_leftover(place: Path, mark: str) -> None:
    try:
        if mark.encode() in place.read_bytes() and int(place.parent.name) != os.getpid():
            os.kill(int(place.parent.name), signal.SIGKILL)
    except OSError:
        return


def test_another_users_file_at_a_fixed_path_cannot_reach_a_build(tools: FakeToolchain, tmp_path: Path) -> None:
    """Every build has a folder of its own name: two at once never share a file."""
    tools.set(sleep=0.2)
    folders: set[str] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            folders.update(str(p.parent) for p in (tmp_path / "cache").glob("*/work/*/design.mlir"))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    ensure([SHAPE, OTHER], jobs=2)
    stop.set()
    watcher.join()
    assert len(folders) == 2


# --- cost -------------------------------------------------------------------------------------------------------------


def test_five_unchanged_shapes_take_less_than_a_second(tools: FakeToolchain, tmp_path: Path) -> None:
    shapes = [Gemm(16, 64, 256 * n) for n in range(1, 6)]
    ensure(shapes, out_dir=tmp_path / "out")
    runs = [2.0]
    while len(runs) < 6 and min(runs) >= 1.0:  # other work on the machine must not fail this
        before = time.monotonic()
        assert {r.status for r in ensure(shapes, out_dir=tmp_path / "out")} == {"cached"}
        runs.append(time.monotonic() - before)
    assert min(runs) < 1.0


def test_results_are_plain_data(tools: FakeToolchain) -> None:
    result = one(ensure([SHAPE]))
    assert result.ok
    assert json.dumps(result.command)
