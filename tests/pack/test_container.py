"""The streaming safetensors writer, read back by the safetensors library itself."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from onnxpack.errors import EnvironmentFault, UsageError
from onnxpack.formats.base import FieldSpec
from onnxpack.pack.container import ALIGNMENT, DTYPES, create, layout

NUMPY_TYPES = [name for name in DTYPES if not name.startswith("F8")]


def spec(dtype: str, *shape: int) -> FieldSpec:
    return FieldSpec(DTYPES[dtype], shape)


def fill(path: Path, entries: dict[str, FieldSpec], metadata: dict[str, str] | None = None) -> dict[str, np.ndarray]:
    """Write position-coded bytes; returns what was written."""
    written = {}
    with create(path, layout(entries, metadata)) as tensors:
        for seed, (name, array) in enumerate(tensors.items()):
            top = 2 if array.dtype == bool else 64
            array[...] = (np.arange(seed, seed + array.size) % top).reshape(array.shape).astype(array.dtype)
            written[name] = array.copy()
    return written


entries_strategy = st.dictionaries(
    st.text(max_size=20).filter(lambda s: s != "__metadata__"),
    st.builds(
        lambda dtype, shape: FieldSpec(DTYPES[dtype], tuple(shape)),
        st.sampled_from(NUMPY_TYPES),
        st.lists(st.integers(0, 7), max_size=3),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(entries=entries_strategy, metadata=st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_safetensors_reads_what_was_written(tmp_path_factory, entries, metadata):
    path = tmp_path_factory.mktemp("c") / "t.safetensors"
    written = fill(path, entries, metadata)
    found = load_file(path)
    assert set(found) == set(entries)
    for name, array in written.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    with safetensors.safe_open(path, "np") as file:
        assert (file.metadata() or {}) == (metadata or {})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(entries=entries_strategy)
def test_layout_has_no_holes_and_is_aligned(entries):
    plan = layout(entries)
    assert len(plan.header) % ALIGNMENT == 0
    end = len(plan.header)
    for place in plan.places.values():
        assert place.offset == end
        assert place.offset % place.spec.dtype.itemsize == 0
        end += place.nbytes
    assert end == plan.nbytes
    assert layout(entries) == plan


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_type_is_named_as_the_library_names_it(tmp_path, name):
    path = tmp_path / "t"
    fill(path, {"x": spec(name, 3)})
    with safetensors.safe_open(path, "np") as file:
        assert file.get_slice("x").get_dtype() == name


def test_order_is_kept_among_equals_and_follows_it():
    names = ["z", "a", "m"]
    assert list(layout({n: spec("I8", 2) for n in names}).places) == names
    assert list(layout({"a": spec("I8", 1), "b": spec("BF16", 1), "c": spec("F32", 1)}).places) == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"__metadata__": spec("I8", 1)}, "__metadata__"),
        ({"\ud800": spec("I8", 1)}, "Unicode"),
        ({"x": FieldSpec(np.dtype(ml_dtypes.int4), (1,))}, "int4"),
        ({"x": FieldSpec(np.dtype(">f4"), (1,))}, ">f4"),
        ({"x": FieldSpec(np.dtype("S3"), (1,))}, "S3"),
    ],
)
def test_what_cannot_stand_in_a_file_is_refused(entries, match):
    with pytest.raises(UsageError, match=match):
        layout(entries)


def test_failure_leaves_nothing_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "w.safetensors"
    fill(path, {"x": spec("I8", 5)})
    before = path.read_bytes()

    def fail() -> None:
        with create(path, layout({"y": spec("I8", 9)})) as tensors:
            tensors["y"][:3] = 1
            assert path.read_bytes() == before
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
    assert path.read_bytes() == before


def test_no_file_under_the_final_name_before_the_end(tmp_path):
    path = tmp_path / "w"
    with create(path, layout({"y": spec("I8", 9)}), sync=True) as tensors:
        assert not path.exists()
        tensors["y"][...] = 7
    assert load_file(path)["y"].tolist() == [7] * 9


def test_mode_follows_the_umask(tmp_path):
    path = tmp_path / "w"
    fill(path, {"x": spec("I8", 1)})
    umask = os.umask(0o077)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_no_space_is_a_fault_with_figures(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    plan = layout({"x": spec("I8", 16 * free)})
    with (
        pytest.raises(EnvironmentFault, match=rf"{plan.nbytes} bytes are needed, \d+ are free"),
        create(tmp_path / "w", plan),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_directory_and_no_permission_are_faults(tmp_path):
    with pytest.raises(EnvironmentFault, match="No such file"), create(tmp_path / "no" / "w", layout({})):
        pass
    (tmp_path / "dir").mkdir()
    with pytest.raises(EnvironmentFault, match="directory"), create(tmp_path / "dir", layout({})):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["dir"]


def test_threads_fill_different_tensors(tmp_path):
    path = tmp_path / "w"
    entries = {f"t{i}": spec("I32", 5000) for i in range(8)}
    with create(path, layout(entries)) as tensors:

        def work(i: int) -> None:
            tensors[f"t{i}"][...] = i
            tensors.release(f"t{i}")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = load_file(path)
    assert all((found[f"t{i}"] == i).all() for i in range(8))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_release_gives_the_pages_back_and_keeps_the_bytes(tmp_path):
    path = tmp_path / "w"
    size = 64 << 20
    with create(path, layout({"a": spec("U8", size), "b": spec("U8", 3)})) as tensors:
        tensors["a"][...] = 9
        full = _resident()
        tensors.release("a")
        assert full - _resident() > size // 2
        tensors["b"][...] = 1
    found = load_file(path)
    assert (found["a"] == 9).all()
    assert (found["b"] == 1).all()


def test_an_array_that_is_still_held_does_not_break_the_end(tmp_path):
    with create(tmp_path / "w", layout({"x": spec("I8", 4)})) as tensors:
        held = tensors["x"]
        held[...] = 3
    assert load_file(tmp_path / "w")["x"].tolist() == [3, 3, 3, 3]
