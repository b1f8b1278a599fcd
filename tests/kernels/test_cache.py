"""The cache as its owner sees it: list, verify, prune."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from fake_toolchain import FakeToolchain

from onnxpack.kernels import toolchain
from onnxpack.kernels.cache import Cache, default_folder
from onnxpack.kernels.digests import Digests, combine
from onnxpack.kernels.generate import ensure
from onnxpack.kernels.process import Cancelled, Runner
from onnxpack.shapes import Gemm

SHAPES = [Gemm(16, 64, 256), Gemm(16, 64, 512), Gemm(16, 64, 768)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeToolchain, Path]:
    """Tools, and a cache with three kernels made by them: the tests work on copies."""
    folder = tmp_path_factory.mktemp("made")
    tools = FakeToolchain(folder / "tools")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "XRT_FOLDER", folder / "none")
        for name, value in tools.environment().items():
            patch.setenv(name, value)
        assert {r.status for r in ensure(SHAPES, cache=folder / "cache")} == {"built"}
    return tools, folder / "cache"


@pytest.fixture
def filled(made: tuple[FakeToolchain, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A cache with three kernels, the first of them the longest unused."""
    tools, original = made
    monkeypatch.setattr(toolchain, "XRT_FOLDER", tmp_path / "none")
    for name, value in tools.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ONNXPACK_CACHE", str(shutil.copytree(original, tmp_path / "cache")))
    cache = Cache()
    for age, entry in enumerate(sorted(cache.entries(), key=lambda e: shape_of(cache, e.key))):
        stamp = time.time() - 86_400 * (10 - age)
        os.utime(entry.elf, (stamp, stamp))
    return cache


def shape_of(cache: Cache, key: str) -> Gemm:
    record = next(e for e in cache.entries() if e.key == key).record()
    assert record is not None
    return record.gemm


def test_the_folder_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONNXPACK_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("ONNXPACK_CACHE")
    assert default_folder().name == "onnxpack"


def test_an_empty_cache_is_empty_and_untouched(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "none")
    assert cache.entries() == cache.verify() == cache.prune() == []
    assert cache.get("0" * 64) is None
    assert not (tmp_path / "none" / "kernels-1" / "entries").exists()


def test_entries_are_listed_and_whole(filled: Cache) -> None:
    assert sorted(shape_of(filled, e.key) for e in filled.entries()) == SHAPES
    assert all(e.nbytes > e.elf.stat().st_size for e in filled.entries())
    assert all((e.folder / "build.log").read_text().startswith("$ ") for e in filled.entries())
    assert filled.verify() == []


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "record", "other"])
def test_damage_is_found_not_used_and_repaired(filled: Cache, damage: str) -> None:
    entry = next(e for e in filled.entries() if shape_of(filled, e.key) == SHAPES[0])
    data = entry.elf.read_bytes()
    if damage == "flip":
        entry.elf.write_bytes(data[:400] + bytes([data[400] ^ 1]) + data[401:])
    elif damage == "cut":
        entry.elf.write_bytes(data[:-1])
    elif damage == "gone":
        entry.elf.unlink()
    elif damage == "record":
        (entry.folder / "kernel.json").write_text("{")
    else:
        other = next(e for e in filled.entries() if e.key != entry.key)
        (entry.folder / "kernel.json").write_bytes((other.folder / "kernel.json").read_bytes())
    assert [key for key, _ in filled.verify()] == [entry.key]
    assert filled.get(entry.key) is None
    assert [r.status for r in ensure(SHAPES)] == ["built", "cached", "cached"]
    assert filled.verify() == []


def test_prune_removes_the_longest_unused_first(filled: Cache) -> None:
    size = filled.entries()[0].nbytes
    removed = filled.prune(max_bytes=int(2.5 * size))
    assert len(removed) == 1
    assert sorted(shape_of(filled, e.key) for e in filled.entries()) == SHAPES[1:]
    assert filled.prune(max_bytes=0)
    assert filled.entries() == []


def test_prune_by_age_and_by_damage(filled: Cache) -> None:
    assert filled.prune() == []
    assert len(filled.prune(days=9.5)) == 1
    filled.entries()[0].elf.unlink()
    assert len(filled.prune()) == 1
    assert len(filled.entries()) == 1


def test_what_is_being_made_is_left_alone(filled: Cache) -> None:
    key = filled.entries()[0].key
    with filled.lock(key, Runner()), filled.work(key) as folder:
        assert key not in [entry.key for entry in filled.prune(max_bytes=0)]
        assert folder.is_dir()
    assert [entry.key for entry in filled.entries()] == [key]


def test_waiting_for_a_lock_can_be_called_off(filled: Cache) -> None:
    runner = Runner()
    runner.cancel()
    with pytest.raises(Cancelled), filled.lock("ab" * 32, runner):
        pass


def test_left_overs_of_killed_builds_are_swept(filled: Cache) -> None:
    (filled.root / "work" / "0123456789abcdef-xyz").mkdir()
    filled.prune()
    assert list((filled.root / "work").iterdir()) == []


def test_digests_are_remembered_by_what_the_file_system_says(tmp_path: Path) -> None:
    path, store = tmp_path / "f", tmp_path / "memory" / "digests.json"
    path.write_text("one")
    digests = Digests(store)
    first = digests.file(path)
    digests.save()
    assert Digests(store).file(path) == first
    stamp = path.stat()
    path.write_text("two")  # same size; the old modification time is put back
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert Digests(store).file(path) != first
    store.write_text("[not json")
    assert Digests(store).file(path) != first
    (tmp_path / "file").write_text("")
    unwritable = Digests(tmp_path / "file" / "digests.json")
    unwritable.file(path)
    unwritable.save()


def test_a_tree_is_its_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    (tmp_path / "b.txt").write_text("x")
    before = Digests().tree(tmp_path, (".py",))
    (tmp_path / "b.txt").write_text("y")
    assert Digests().tree(tmp_path, (".py",)) == before
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    assert Digests().tree(tmp_path, (".py",)) != before


def test_combining_does_not_depend_on_the_order_of_keys() -> None:
    assert combine({"a": 1, "b": 2}) == combine({"b": 2, "a": 1}) != combine({"a": 2, "b": 1})
