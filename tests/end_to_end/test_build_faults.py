"""Builds that are killed, interrupted, starved of space, or that meet: the old pack stays, nothing is left."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_maker import chain, cli, model, node, normal, save, tensor, tree, value

import onnxpack
from onnxpack.errors import EnvironmentFault, OnnxpackError, UsageError
from onnxpack.pack import data, space
from onnxpack.pack.read import open_pack


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Weights and float data, so that every file of a pack is written."""
    nodes = [
        node("MatMul", ["x", "W"], ["h"]),
        node("Add", ["h", "bias"], ["g"]),
        node("MatMul", ["g", "V"], ["y"]),
    ]
    tensors = [tensor("W", normal(256, 300)), tensor("bias", normal(64, 300)), tensor("V", normal(300, 40))]
    return save(tmp_path / "in" / "m.onnx", model(nodes, tensors, [value("x", [64, 256])]))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model.pack"


def leftovers(target: Path) -> list[str]:
    return sorted(p.name for p in target.parent.iterdir() if p != target)


def starve(monkeypatch: pytest.MonkeyPatch, at: str, when: int = 0) -> None:
    """No space from the `when`-th call on: of reserving, of a plain write, of the manifest, of the graph."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    calls = iter(range(10**6))

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= when:
                raise full
            return real(*args, **kwargs)

        return call

    if at == "reserve":
        monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate))
    elif at == "manifest":
        monkeypatch.setattr(Path, "write_text", failing(Path.write_text))
    elif at == "graph":
        monkeypatch.setattr(Path, "write_bytes", failing(Path.write_bytes))
    elif at == "mkdir":
        monkeypatch.setattr(Path, "mkdir", failing(Path.mkdir))
    elif at == "map":
        monkeypatch.setattr(mmap, "mmap", failing(mmap.mmap))
    else:
        monkeypatch.setattr(data, "_pieces", failing(data._pieces))


@pytest.mark.parametrize("old", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize(
    ("at", "when"),
    [("reserve", 0), ("reserve", 1), ("manifest", 0), ("graph", 0), ("mkdir", 0), ("data", 0), ("data", 1)],
)
def test_no_space_at_any_moment(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, at: str, when: int, old: bool
) -> None:
    if old:
        onnxpack.build(source, target, weights="int8")
    before = tree(target.parent)
    with monkeypatch.context() as patched:
        starve(patched, at, when)
        try:
            onnxpack.build(source, target, weights="int8", force=old)
        except EnvironmentFault as error:
            line = error.render()
            assert "pace" in line
            assert line.isprintable()
        else:
            assert (at, when) == ("data", 1), "nothing was starved"
            return
    assert tree(target.parent) == before
    assert leftovers(target) == []
    onnxpack.build(source, target, weights="int8", force=old)  # the next one succeeds
    open_pack(target, "full")


def test_space_is_asked_for_before_the_work(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 1000, "total": 0, "used": 0})
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EnvironmentFault, match=r"no space: \d+ bytes are needed, 1000 are free"):
        onnxpack.build(source, target, weights="int8")
    assert leftovers(target) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 256 KiB, where one may be mounted."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, tmp_path: Path) -> None:
    large = save(tmp_path / "large.onnx", chain(normal(512, 700)))
    small = save(tmp_path / "small.onnx", chain(normal(48, 80)))
    ran = cli("build", large, "-o", small_disk / "p", "--weights", "int8")
    assert ran.returncode == 5
    assert "no space" in ran.stderr.splitlines()[-1]
    assert list(small_disk.iterdir()) == []
    onnxpack.build(small, small_disk / "p", weights="int8")
    before = tree(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize - 8192))
    with pytest.raises(EnvironmentFault) as caught:
        onnxpack.build(small, small_disk / "p", weights="int8", force=True)
    assert "space" in caught.value.render()
    filler.unlink()
    assert tree(small_disk) == before


def test_a_parent_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    for where in ("/proc/model.pack", "/sys/model.pack"):
        if not Path(where).parent.is_dir():
            continue
        with pytest.raises(EnvironmentFault) as caught:
            onnxpack.build(source, where, weights="int8")
        assert caught.value.exit_code == 5
        assert caught.value.render().startswith(where)


def test_refusal_comes_before_any_work(source: Path, target: Path) -> None:
    onnxpack.build(source, target, weights="int8")
    before = tree(target)
    for bad in (source, source.parent / "missing.onnx"):  # the model is not even looked at
        with pytest.raises(UsageError, match="--force"):
            onnxpack.build(bad, target, weights="int8")
    assert tree(target) == before


def test_the_old_pack_stays_when_the_new_model_is_bad(source: Path, target: Path, tmp_path: Path) -> None:
    onnxpack.build(source, target, weights="int8")
    before = tree(target)
    w = normal(48, 80)
    w[1, 1] = float("nan")
    for bad in (chain(w), model([node("Relu", ["x"], ["y"])])):
        with pytest.raises(OnnxpackError):
            onnxpack.build(bad, target, weights="int8", force=True)
    assert tree(target) == before
    assert leftovers(target) == []


def start(source: Path, target: Path, *more: str, slow: float = 0.0) -> subprocess.Popen[str]:
    """A build in a process of its own; with `slow`, every weight takes that long."""
    script = (
        "import sys, time, threading\n"
        "from onnxpack.pack import weights\n"
        "real = weights.encode\n"
        "def encode(*a, **k):\n"
        f"    time.sleep({slow})\n"
        "    return real(*a, **k)\n"
        "from onnxpack.pack import write\n"
        "write.encode = encode\n"
        "from onnxpack.cli.main import run\n"
        "print('ready', flush=True)\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, "build", str(source), "-o", str(target), "--weights", "int8", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_draft(target: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(2000):
        if any(name.endswith(".building") for name in leftovers(target)) or process.poll() is not None:
            return
        time.sleep(0.005)
    raise AssertionError("no build began")


def test_an_interrupted_build_leaves_nothing(source: Path, target: Path) -> None:
    onnxpack.build(source, target, weights="int8")
    before = tree(target)
    process = start(source, target, "--force", slow=1.0)
    wait_for_draft(target, process)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "onnxpack: interrupted"
    assert "Traceback" not in said
    assert tree(target) == before
    assert leftovers(target) == []


@pytest.mark.slow
def test_a_killed_build_loses_nothing_and_the_next_cleans_up(source: Path, target: Path) -> None:
    """At random moments, again and again: the old pack is whole, and what the dead left is swept by the next build."""
    onnxpack.build(source, target, weights="int8")
    before = tree(target)
    chance = random.Random(0)
    killed_while_building = 0
    for _ in range(8):
        process = start(source, target, "--force", slow=0.05)
        wait_for_draft(target, process)
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.communicate(timeout=30)
        assert tree(target) == before
        open_pack(target, "full")
        killed_while_building += bool(leftovers(target))
    assert killed_while_building
    onnxpack.build(source, target, weights="int8", force=True)
    assert leftovers(target) == []
    assert tree(target) == before


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_many_builds_into_one_target(source: Path, target: Path, force: bool) -> None:
    more = ["--force"] if force else []
    processes = [start(source, target, *more, slow=0.1) for _ in range(4)]
    ended = [(p.communicate(timeout=60), p.returncode) for p in processes]
    codes = sorted(code for _, code in ended)
    if force:
        assert codes == [0] * 4
    else:
        assert codes.count(0) == 1
        assert set(codes) == {0, 2}
    assert all("Traceback" not in said for (_, said), _ in ended)
    open_pack(target, "full")
    assert leftovers(target) == []


def test_more_weights_than_threads_and_the_first_error_wins(tmp_path: Path, target: Path) -> None:
    weights = [normal(32, 32, seed=i) for i in range(40)]
    for bad in (7, 31):
        weights[bad][2, 3] = float("inf")
    with pytest.raises(OnnxpackError) as caught:
        onnxpack.build(chain(*weights), target, weights="int8")
    assert "tensor W7" in caught.value.render()
    assert leftovers(target) == []


def test_a_callback_that_fails_ends_the_build(source: Path, target: Path) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        onnxpack.build(source, target, weights="int8", on_weight=broken)
    assert leftovers(target) == []


def test_what_was_promised_is_what_was_written(source: Path, target: Path) -> None:
    report = onnxpack.build(source, target, weights="V=int8,*=q4nx", min_cosine=0)
    manifest = json.loads((target / "pack.json").read_text())
    assert {t["name"]: t["format"] for t in manifest["tensors"]} == {"W": "q4nx", "V": "int8"}
    assert report.coverage.bound == manifest["coverage"]["bound"] == 2
    assert {w["name"]: w["format"] for w in report.weights} == {"W": "q4nx", "V": "int8"}
    assert set(report.passes) >= {"load", "plan", "layout", "graph", "weights", "manifest", "publish"}
