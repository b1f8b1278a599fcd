"""What is bound and what is refused: whole files, every truncation, named damage, 10,000 random mutations."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import npu_elf_writer as writer
import pytest
from elftools.elf.elffile import ELFFile
from npu_elf_writer import Elf, Section

from onnxpack.errors import KernelError
from onnxpack.kernels import control_code
from onnxpack.kernels.elf_report import WHAT, check, inspect, inspect_bytes
from onnxpack.kernels.library import Record
from onnxpack.shapes import Gemm

WHOLE = writer.full_elf().to_bytes()
SHAPE = Gemm(16, 64, 64)


def test_a_whole_file_is_bindable() -> None:
    report = inspect_bytes(WHOLE)
    assert report.bindable
    assert (report.kind, report.kernels, report.warnings) == ("full-elf", ("main:sequence",), ())
    assert report.facts["columns"] == 8
    assert report.facts["patches"] == {"0": 1, "1": 1, "2": 1}


def test_the_writer_writes_what_an_independent_reader_reads(tmp_path: Path) -> None:
    path = tmp_path / "k.elf"
    path.write_bytes(WHOLE)
    with path.open("rb") as file:
        elf = ELFFile(file)
        assert [s.name for s in elf.iter_sections()][4:6] == [".pdi.1", ".ctrltext.0"]
        assert [s.name for s in elf.get_section_by_name(".symtab").iter_symbols()][1:] == ["_Z4mainPcPcPc", "sequence"]
        assert elf.get_section_by_name(".rela.dyn").num_relocations() == 4


def test_every_truncation_is_refused() -> None:
    for size in range(len(WHOLE)):
        assert not inspect_bytes(WHOLE[:size]).bindable, size


def put(offset: int, layout: str, *values: int) -> Callable[[bytes], bytes]:
    """Overwrite a place of the file."""

    def change(data: bytes) -> bytes:
        damaged = bytearray(data)
        struct.pack_into(layout, damaged, offset, *values)
        return bytes(damaged)

    return change


HEADER_DAMAGE = [
    (put(0, "4s", b"\x7fFLE"), "nothing that is known"),
    (put(4, "B", 2), "64-bit"),
    (put(5, "B", 2), "big-endian"),
    (put(7, "B", 0), "OS/ABI 0"),
    (put(7, "B", 64), "built for aie2ps, not"),
    (put(7, "B", 70), "aie2ps (legacy)"),
    (put(8, "B", 2), "instruction ELF"),
    (put(16, "<H", 1), "its type is 1"),
    (put(18, "<H", 264), "ELF of one core"),
    (put(18, "<H", 62), "its machine is 62"),
    (put(32, "<I", 1 << 20), "section table"),
    (put(32, "<I", 0xFFFFFFF0), "section table"),
    (put(46, "<H", 64), "section headers"),
    (put(48, "<H", 0), "section table"),
    (put(48, "<H", 0xFFFF), "section table"),
    (put(50, "<H", 99), "should hold the names"),
]


@pytest.mark.parametrize(("change", "message"), HEADER_DAMAGE, ids=[m for _, m in HEADER_DAMAGE])
def test_damage_to_the_header_is_named(change: Callable[[bytes], bytes], message: str) -> None:
    report = inspect_bytes(change(WHOLE))
    assert not report.bindable
    assert any(message in problem for problem in report.problems), report.problems


def code_word(offset: int, change: Callable[[int], int]) -> Callable[[Elf], object]:
    """Change one word of the control code."""

    def apply(elf: Elf) -> None:
        section = elf.section(".ctrltext.0")
        data = bytearray(section.data)
        struct.pack_into("<I", data, offset, change(struct.unpack_from("<I", data, offset)[0]))
        section.data = bytes(data)

    return apply


def words(name: str, offset: int, *values: int) -> Callable[[Elf], object]:
    """Overwrite words of a section."""

    def apply(elf: Elf) -> None:
        section = elf.section(name)
        section.data = put(offset, f"<{len(values)}I", *values)(section.data)

    return apply


def rename(name: str, new: str) -> Callable[[Elf], object]:
    def apply(elf: Elf) -> None:
        elf.section(name).name = new

    return apply


def text(name: str, old: bytes, new: bytes) -> Callable[[Elf], object]:
    def apply(elf: Elf) -> None:
        section = elf.section(name)
        section.data = section.data.replace(old, new)

    return apply


def add(*sections: Section) -> Callable[[Elf], object]:
    return lambda elf: elf.sections.extend(sections)


def set_code(*operations: bytes) -> Callable[[Elf], object]:
    def apply(elf: Elf) -> None:
        elf.section(".ctrltext.0").data = writer.control_code(list(operations))

    return apply


CONTENT_DAMAGE: list[tuple[Callable[[Elf], object], str]] = [
    *((lambda elf, n=name: elf.drop(n), name) for name in (".symtab", ".strtab", ".dynsym", ".dynstr", ".rela.dyn")),
    (lambda elf: elf.drop(".note.xrt.configuration"), ".note.xrt.configuration"),
    (lambda elf: elf.drop(".note.xrt.UID"), ".note.xrt.UID"),
    (lambda elf: elf.drop(".group.0"), "no .group"),
    (lambda elf: elf.drop(".pdi.1"), "no .pdi"),
    (rename(".ctrltext.0", ".text"), "no .ctrltext"),
    (add(Section("my.ctrltext", 1, b"\0" * 16)), "would be taken for"),
    (add(Section(".symtab", 2)), ".symtab is there 2 times"),
    (add(Section(".preempt_save.0", 1, b"\0" * 4)), "do not come in pairs"),
    (words(".note.xrt.configuration", 16, 0), "0 columns"),
    (words(".note.xrt.configuration", 16, 9), "9 columns"),
    (words(".note.xrt.configuration", 16, 4), "configuration for 4"),
    (words(".note.xrt.configuration", 8, 5), "is not XRT's"),
    (words(".note.xrt.configuration", 4, 1 << 30), "is cut"),
    (lambda elf: setattr(elf.section(".note.xrt.UID"), "data", writer.note(4, b"0" * 32)), "32 bytes"),
    (code_word(0, lambda w: 0x06030100), "is for XDNA"),
    (code_word(0, lambda w: 0), "its first word"),
    (code_word(4, lambda w: 0x104), "for 4 columns"),
    (code_word(12, lambda w: w + 4), "declares"),
    (code_word(12, lambda w: w - 4), "past the end"),
    (code_word(16, lambda w: 0x77), "unknown operation"),
    (code_word(16 + 16 + 12, lambda w: 2), "declares 2 bytes"),
    (set_code(writer.transfer(0), writer.transfer(1), writer.transfer(2)), "never loads"),
    (lambda elf: setattr(elf.section(".ctrltext.0"), "data", b""), "no control code"),
    (lambda elf: setattr(elf.section(".ctrltext.0"), "data", b"\0" * 18), "no control code"),
    (words(".group.0", 0, 0), "flag 0"),
    (words(".group.0", 4, 99), "does not exist"),
    (words(".group.0", 4, 4, 4), "no control code"),
    (lambda elf: setattr(elf.section(".group.0"), "info", 9), "names symbol 9"),
    (lambda elf: setattr(elf.section(".group.0"), "info", 1), "not an object symbol"),
    (words(".symtab", 44, 0x00090021), "names no kernel function"),
    (text(".strtab", b"_Z4main", b"XZ4main"), "not a function of buffers"),
    (text(".strtab", b"PcPcPc", b"PcPcii"), "not a function of buffers"),
    (text(".strtab", b"_Z4main", b"_Z9main"), "not a function of buffers"),
    (lambda elf: setattr(elf.section(".symtab"), "data", b"\0" * 17), "not a table of symbols"),
    (lambda elf: setattr(elf.section(".rela.dyn"), "data", b"\0" * 13), "not a table of relocations"),
    (words(".rela.dyn", 12, 0x31), "does not lie on a word"),
    (words(".rela.dyn", 12, 0x7FFFFFF0), "does not lie on a word"),
    (words(".rela.dyn", 12, 0), "does not lie on a word"),
    (words(".rela.dyn", 12, 0x34), "where no shim descriptor begins"),
    (words(".rela.dyn", 16, 0x6305), "names symbol 99"),
    (words(".rela.dyn", 16, 0x0207), "scheme 7"),
    (words(".rela.dyn", 16, 0x0203), "a scalar"),
    (words(".rela.dyn", 20, 1 << 31), "folded address bit"),
    (words(".rela.dyn", 0, 0x1C), "where no load_pdi is"),
    (words(".rela.dyn", 4, 0x0208), "which is no configuration"),
    (text(".dynstr", b"\x000\0", b"\0x\0"), "'x' is no argument"),
    (text(".dynstr", b"\x000\0", b"\x007\0"), "argument 7 is patched"),
    (lambda elf: setattr(elf.section(".pdi.1"), "data", b""), "is empty"),
    (add(Section(".pdi.2", 1, writer.PDI_MAGIC)), ".pdi.2 is never loaded"),
    (lambda elf: setattr(elf.section(".rela.dyn"), "data", elf.section(".rela.dyn").data[:-12]), "argument 2 is never"),
]


@pytest.mark.parametrize(("damage", "message"), CONTENT_DAMAGE, ids=[m for _, m in CONTENT_DAMAGE])
def test_damage_to_the_content_is_named(damage: Callable[[Elf], object], message: str) -> None:
    elf = writer.full_elf()
    damage(elf)
    report = inspect_bytes(elf.to_bytes())
    assert not report.bindable
    assert any(message in problem for problem in report.problems), report.problems


def test_doubts_are_warnings() -> None:
    elf = writer.full_elf()
    elf.section(".note.xrt.UID").data = writer.note(3, bytes(16))
    elf.section(".pdi.1").data = bytes(16)
    elf.section(".dynamic").data = struct.pack("<4I", 7, 3, 8, 48)
    elf.section(".ctrltext.0").data += bytes(8)
    report = inspect_bytes(elf.to_bytes())
    assert report.bindable
    for word in ("UID", "does not begin like", ".dynamic", "8 bytes after"):
        assert any(word in warning for warning in report.warnings), report.warnings


def test_overlapping_sections_are_refused() -> None:
    table = struct.unpack_from("<I", WHOLE, 32)[0]
    code = struct.unpack_from("<I", WHOLE, table + 40 * 5 + 16)[0]
    report = inspect_bytes(put(table + 40 * 4 + 16, "<I", code)(WHOLE))
    assert any("overlaps" in problem for problem in report.problems)


def test_names_out_of_a_file_are_printed_safely() -> None:
    elf = writer.full_elf()
    elf.sections.append(Section("evil\x1b[2J.ctrltext", 1))
    assert not any("\x1b" in problem for problem in inspect_bytes(elf.to_bytes()).problems)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs-pointer"),
        (b"../designs/full_i8_O.elf", "link-text"),
        (b"this is a text file, not a kernel\n", "text"),
        (b"\x7fELF", "elf"),
        (bytes(range(256)), "unknown"),
        (writer.instruction_elf().to_bytes(), "instruction-elf"),
        (writer.control_code([writer.load_pdi()]), "instructions"),
        (b"xclbin2\0" + bytes(600), "xclbin"),
    ],
)
def test_other_files_are_named_and_refused(data: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "k.elf"
    path.write_bytes(data)
    report = inspect(path)
    assert (report.kind, report.bindable) == (kind, False)
    assert report.what == WHAT[kind]
    with pytest.raises(KernelError):
        check(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert inspect(tmp_path / "pipe").kind == "unreadable"
    assert inspect(tmp_path).kind == "unreadable"
    assert inspect(tmp_path / "missing").kind == "unreadable"
    assert inspect("a\0b").kind == "unreadable"


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "k.elf"
    with path.open("wb") as file:
        file.truncate(1 << 33)
    assert "more than any kernel" in inspect(path).problems[0]


# --- against a shape and a record -------------------------------------------------------------------------------------


def record(data: bytes, **changes: object) -> Record:
    facts: dict[str, object] = {
        "schema": "onnxpack/kernel/1.0",
        "key": "0" * 64,
        "m": SHAPE.m,
        "k": SHAPE.k,
        "n": SHAPE.n,
        "sha256": inspect_bytes(data).sha256,
        "nbytes": len(data),
        "target": "npu2",
        "design": "gemm_i8",
        "kernel_name": "main:sequence",
        "parameters": {"descriptors": {"A": 1, "B": 1, "C": 1}},
    }
    return Record(**(facts | changes))  # type: ignore[arg-type]


def test_the_record_must_fit_the_file(tmp_path: Path) -> None:
    path = tmp_path / "k.elf"
    path.write_bytes(WHOLE)
    assert check(path, SHAPE, record(WHOLE)).bindable
    for changes, message in (
        ({"sha256": "0" * 64}, "sha256"),
        ({"k": 128}, "16x128x64"),
        ({"kernel_name": "main:seq"}, "main:seq"),
        ({"parameters": {"descriptors": {"A": 2, "B": 1, "C": 1}}}, "transfers"),
    ):
        with pytest.raises(KernelError, match=message):
            check(path, SHAPE, record(WHOLE, **changes))


def test_a_kernel_that_is_no_product_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "k.elf"
    path.write_bytes(writer.full_elf(arguments=4).to_bytes())
    with pytest.raises(KernelError, match="argument 3"):
        check(path)
    elf = writer.full_elf(arguments=2, transfers=(1, 1, 0))
    path.write_bytes(elf.to_bytes())
    assert inspect(path).bindable
    with pytest.raises(KernelError, match="takes 2 buffers"):
        check(path)


def test_a_transfer_beyond_the_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "k.elf"
    moves = [(0, 0, 1024), (1, 2048, 2048), (1, 4096, 64), (2, 0, 4096)]
    path.write_bytes(writer.full_elf(moves=moves).to_bytes())
    assert check(path, Gemm(16, 64, 128)).facts["reach"] == {"0": 1024, "1": 4160, "2": 4096}
    with pytest.raises(KernelError, match="argument 1 is used up to byte 4160"):
        check(path, SHAPE)


def test_symbols_of_one_argument_may_have_several_sizes() -> None:
    """Real assemblers make one for each length of transfer: its size is no bound for where a transfer may begin."""
    report = inspect_bytes(
        writer.full_elf(moves=[(0, 0, 64), (0, 64, 64), (0, 128, 32), (1, 0, 8), (2, 4, 4)]).to_bytes()
    )
    assert report.bindable
    assert report.facts["patches"] == {"0": 3, "1": 1, "2": 1}


def test_a_uid_over_code_and_configurations_is_no_doubt() -> None:
    elf = writer.full_elf()
    parts = elf.section(".pdi.1").data + elf.section(".ctrltext.0").data
    elf.section(".note.xrt.UID").data = writer.note(3, hashlib.md5(parts, usedforsecurity=False).digest())
    assert inspect_bytes(elf.to_bytes()).warnings == ()


# --- cost and robustness ----------------------------------------------------------------------------------------------


def test_a_large_file_is_checked_quickly() -> None:
    data = writer.full_elf((540, 540, 540)).to_bytes()
    assert len(data) > 200_000
    runs = []
    for _ in range(5):
        start = time.process_time()
        assert inspect_bytes(data).bindable
        runs.append(time.process_time() - start)
    assert min(runs) < 0.020


def test_the_longest_code_is_not_walked() -> None:
    with pytest.raises(control_code.BadCode, match="more than any"):
        control_code.walk(bytes(control_code.LIMIT + 4))


def test_ten_thousand_mutations_raise_nothing_and_stay_cheap() -> None:
    chance = random.Random(5)
    sources = [WHOLE, writer.full_elf((3, 2, 4)).to_bytes(), writer.instruction_elf().to_bytes()]
    sources += [writer.control_code([writer.load_pdi(), writer.transfer(0)]), b"xclbin2\0" + bytes(700)]
    start = time.process_time()
    for _ in range(10_000):
        data = bytearray(chance.choice(sources))
        for _ in range(chance.choice((1, 1, 2, 8))):
            kind = chance.randrange(4)
            at = chance.randrange(len(data))
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                struct.pack_into("<I", data, at // 4 * 4 % (len(data) - 4), chance.choice((0, 1, 0xFFFFFFFF, 1 << 31)))
            elif kind == 2:
                del data[at : at + chance.randrange(1, 64)]
            else:
                data[at:at] = chance.randbytes(chance.randrange(1, 16))
            if len(data) < 8:
                data += bytes(8)
        report = inspect_bytes(bytes(data))
        assert report.kind in WHAT
        assert report.bindable == (not report.problems)
    assert time.process_time() - start < 30


# --- the samples ------------------------------------------------------------------------------------------------------


def test_the_collected_samples(shared: Path) -> None:
    folder = shared / "npu_samples"
    kinds = {
        "full_layer_qwen3_0_6b_token0.elf": "elf",
        "swiglu_qwen3_0_6b.xclbin": "xclbin",
        "insts_bf16_8col_D_qwen3_0_6b.bin": "instructions",
        "core_0_2.elf": "core-elf",
        "synthetic_full.elf": "full-elf",
        "synthetic_instr.elf": "instruction-elf",
    }
    for name, kind in kinds.items():
        report = inspect(folder / name)
        assert report.kind == kind
        assert report.bindable == (kind == "full-elf"), report.problems
    assert check(folder / "synthetic_full.elf").kernels == ("main:sequence",)
    assert inspect(folder / "insts_bf16_8col_D_qwen3_0_6b.bin").facts["operations"] == 67
    assert inspect(folder / "swiglu_qwen3_0_6b.xclbin").facts["columns"] == 8


def test_every_cut_of_the_samples_is_refused(shared: Path) -> None:
    for path in (shared / "npu_samples").iterdir():
        data = path.read_bytes()
        assert not any(inspect_bytes(data[:size]).bindable for size in range(0, len(data), 1 + len(data) // 1716))
