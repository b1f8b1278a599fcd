"""Libraries: directories with records, lists, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import npu_elf_writer as writer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpack import records
from onnxpack.errors import KernelError, UsageError
from onnxpack.kernels.library import SCHEMA, Canary, Record, elf_name, parse_kernels
from onnxpack.shapes import Gemm

ELF = writer.full_elf().to_bytes()


def put(folder: Path, name: str, record: Record | None = None, data: bytes = ELF) -> Path:
    path = folder / name
    path.write_bytes(data)
    if record is not None:
        path.with_suffix(".json").write_text(records.dumps(record))
    return path


def make_record(m: int, k: int, n: int, canary: Canary | None = None) -> Record:
    return Record(SCHEMA, "ab" * 32, m, k, n, "00" * 32, len(ELF), "npu2", "gemm_i8", "main:sequence", canary=canary)


def test_a_directory_gives_shapes_from_records_and_from_names(tmp_path: Path) -> None:
    put(tmp_path, "i8_16x64x128_0123456789ab.elf")
    put(tmp_path, "mine.elf", make_record(32, 64, 128))
    put(tmp_path, "unrelated.txt")
    library = parse_kernels(str(tmp_path))
    assert library.shapes == {Gemm(16, 64, 128), Gemm(32, 64, 128)}
    assert library.problems == ()
    assert {kernel.gemm for kernel in library.kernels} == library.shapes


def test_what_is_no_kernel_is_left_out_and_named(tmp_path: Path) -> None:
    put(tmp_path, "i8_16x64x128_0123456789ab.elf", data=b"version https://git-lfs.github.com/spec/v1\n")
    put(tmp_path, "i8_16x64x256_0123456789ab.elf", data=b"")
    put(tmp_path, "full_i8_O_K2048_N1024.elf")
    library = parse_kernels(str(tmp_path))
    assert library.shapes == frozenset()
    assert len(library.problems) == 3
    assert any("which shape" in problem for problem in library.problems)


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("i8_16x64x128_0123456789ab.elf", make_record(16, 64, 256), "two shapes"),
        ("a.elf", make_record(0, 64, 256), "is not a shape"),
        ("a.elf", Record(**{**records.to_dict(make_record(1, 2, 3)), "nbytes": 7}), "its record says 7"),
        ("a.elf", Record(**{**records.to_dict(make_record(1, 2, 3)), "schema": "onnxpack/kernel/2.0"}), "schema"),
    ],
)
def test_a_record_that_contradicts_its_file_disqualifies_it(
    tmp_path: Path, name: str, record: Record, message: str
) -> None:
    put(tmp_path, name, record)
    library = parse_kernels(str(tmp_path))
    assert library.shapes == frozenset()
    assert message in library.problems[0]


@pytest.mark.parametrize("text", ["not json", "[]", '{"m": 1}', "{" * 10_000, '{"m": 1e999}'])
def test_a_record_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    put(tmp_path, "i8_16x64x128.elf").with_suffix(".json").write_text(text)
    (problem,) = parse_kernels(str(tmp_path)).problems
    assert "not a kernel record" in problem
    assert "\n" not in problem


def test_the_best_kernel_of_a_shape_comes_first(tmp_path: Path) -> None:
    put(tmp_path, "a.elf", make_record(16, 64, 128))
    put(tmp_path, "b.elf", make_record(16, 64, 128, Canary(1, "ff")))
    put(tmp_path, "i8_16x64x128_0123456789ab.elf")
    best = parse_kernels(str(tmp_path)).find(Gemm(16, 64, 128))
    assert best is not None
    assert best.path == tmp_path / "b.elf"
    assert best.proof == "canary"


def test_shapes_match_exactly_or_not_at_all() -> None:
    library = parse_kernels("128x1024x2048")
    assert library.find(Gemm(128, 1024, 2048)) is not None
    assert library.find(Gemm(128, 2048, 1024)) is None
    assert library.find(Gemm(64, 1024, 2048)) is None


def test_a_list_names_foreign_files_which_are_unproved(tmp_path: Path) -> None:
    path = put(tmp_path, "q, v=1.elf")
    library = parse_kernels(f"16x1024x2048={path},16x1024x1024={path}")
    assert library.shapes == {Gemm(16, 1024, 2048), Gemm(16, 1024, 1024)}
    kernel = library.find(Gemm(16, 1024, 2048))
    assert kernel is not None
    assert (kernel.path, kernel.proof) == (path, "unproved")


@given(st.lists(st.tuples(*[st.integers(1, 10**6)] * 3), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_list_is_read_as_it_is_written(shapes: list[tuple[int, int, int]]) -> None:
    library = parse_kernels(",".join("x".join(map(str, shape)) for shape in shapes))
    assert parse_kernels(library.to_list()) == parse_kernels(parse_kernels(library.to_list()).to_list())
    assert parse_kernels(library.to_list()).shapes == {Gemm(*shape) for shape in shapes}


@pytest.mark.parametrize(
    "text",
    ["", "\0", "a" * 5000, "1x2", "0x2x3", "1x2x3=", "foo=bar", "1x2x3,foo", "/does/not/exist", "1x2x3=\0", "-1x2x3"],
)
def test_what_is_no_library_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_kernels(text)


def test_listed_files_must_exist_and_be_elfs(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="no such file"):
        parse_kernels(f"1x2x3={tmp_path}/gone.elf")
    with pytest.raises(KernelError, match="not an ELF"):
        parse_kernels(f"1x2x3={put(tmp_path, 'stub.elf', data=b'../other.elf')}")
    with pytest.raises(KernelError, match="two shapes"):
        parse_kernels(f"1x2x3={put(tmp_path, 'i8_1x2x4.elf')}")
    other = put(tmp_path, "other.elf")
    with pytest.raises(UsageError, match="listed twice"):
        parse_kernels(f"1x2x3={other},1x2x3={put(tmp_path, 'third.elf')}")


@given(st.text(max_size=60) | st.from_regex(r"[0-9x=,./ -]{0,40}", fullmatch=True))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_text_is_a_library_or_one_line(text: str) -> None:
    said = ""
    try:
        parse_kernels(text)
    except (UsageError, KernelError) as error:
        said = error.render()
    assert "\n" not in said


def test_pipes_and_folders_that_are_called_like_kernels_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "i8_1x2x3.elf")
    (tmp_path / "i8_1x2x4.elf").mkdir()
    put(tmp_path, "i8_1x2x5.elf")
    os.mkfifo(tmp_path / "i8_1x2x5.json")
    library = parse_kernels(str(tmp_path))
    assert library.shapes == frozenset()
    assert len(library.problems) == 3


def test_names_carry_the_whole_shape() -> None:
    assert elf_name(Gemm(16, 1, 2), "ff" * 32) != elf_name(Gemm(32, 1, 2), "ff" * 32)


def test_reading_a_library_imports_nothing_heavy() -> None:
    code = "import sys, onnxpack.kernels as k; k.parse_kernels('1x2x3'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "onnx", "onnxruntime", "elftools", "filelock", "subprocess"} & set(loaded)
