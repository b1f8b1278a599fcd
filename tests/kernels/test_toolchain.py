"""Finding the tools, and speaking to each generation of them as it wants."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_toolchain import CLASSIC, DECLARATIVE, EARLY, TRANSITIONAL, FakeToolchain

from onnxpack.kernels import toolchain
from onnxpack.kernels.toolchain import choose_flags, find

pytestmark = pytest.mark.usefixtures("nothing_installed")


def test_nothing_is_found_where_nothing_is() -> None:
    found = find({"PATH": "/nonexistent"})
    assert {tool.name for tool in found.missing} == {"python", "aiecc", "clang++", "mm.cc", "aiebu-asm"}
    assert not found.complete
    assert all(tool.remedy for tool in found.missing)


@pytest.mark.parametrize(
    ("generation", "name", "flags"),
    [
        (DECLARATIVE, "declarative", {"--get-full-elf", "--unified"}),
        (TRANSITIONAL, "declarative", {"--get-full-elf", "--no-xchesscc", "--no-xbridge", "--no-compile-host"}),
        (CLASSIC, "classic", {"--generate-full-elf", "--no-xchesscc", "--no-compile-host", "--dynamic-objFifos"}),
    ],
)
def test_each_generation_is_spoken_to_in_its_own_flags(
    tmp_path: Path, generation: str, name: str, flags: set[str]
) -> None:
    found = find(FakeToolchain(tmp_path, generation).environment())
    assert found.complete
    assert found.generation == name
    assert flags <= set(found.flags)
    assert not {"--get-full-elf", "--generate-full-elf"} <= set(found.flags)
    assert ("--no-xchesscc" in found.flags) == (generation != DECLARATIVE)


def test_a_driver_from_before_full_elfs_is_refused_by_name(tmp_path: Path) -> None:
    found = find(FakeToolchain(tmp_path, EARLY).environment())
    (bad,) = found.missing
    assert bad.name == "aiecc"
    assert "too old" in (bad.problem or "")


def test_versions_and_origins_are_reported(tmp_path: Path) -> None:
    found = find(FakeToolchain(tmp_path).environment())
    assert found.tools["aiecc"].version == "aiecc 1.5.0 (fake)"
    assert found.tools["clang++"].origin == "PEANO_INSTALL_DIR"
    assert found.tools["aiebu-asm"].origin == "XILINX_XRT"


def test_the_assembler_is_required_only_where_it_cannot_be_built_in(tmp_path: Path) -> None:
    for generation, complete in ((DECLARATIVE, True), (CLASSIC, False)):
        tools = FakeToolchain(tmp_path / generation, generation)
        tools.asm.unlink()
        assert find(tools.environment()).complete == complete


def test_an_override_wins_and_a_wrong_one_is_a_problem(tmp_path: Path) -> None:
    tools, other = FakeToolchain(tmp_path / "a"), FakeToolchain(tmp_path / "b", CLASSIC)
    env = tools.environment() | {"ONNXPACK_AIECC": str(other.aiecc)}
    assert find(env).generation == "classic"
    (bad,) = find(env | {"ONNXPACK_AIECC": str(tmp_path / "none")}).missing
    assert "ONNXPACK_AIECC" in (bad.problem or "")


def test_tools_on_path_are_found(tmp_path: Path) -> None:
    tools = FakeToolchain(tmp_path)
    env = tools.environment()
    path = f"{tools.install / 'bin'}:{tools.xrt / 'bin'}:{env['PATH']}"
    found = find({"PATH": path, "PEANO_INSTALL_DIR": str(tools.peano)})
    assert found.tools["aiecc"].origin == found.tools["aiebu-asm"].origin == "PATH"
    assert "mm.cc" in {tool.name for tool in found.missing}


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 7\n", "not a program", "#!/bin/sh\nsleep 600\n"])
def test_a_driver_that_cannot_say_what_it_is_is_a_problem(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "PROBE_SECONDS", 0.5)
    tools = FakeToolchain(tmp_path)
    tools.aiecc.write_text(script)
    (bad,) = find(tools.environment() | {"ONNXPACK_PEANO": str(tools.peano)}).missing[:1]
    assert bad.problem


def test_flags_that_help_does_not_list_are_never_used() -> None:
    assert choose_flags("") == (None, ())
    _, flags = choose_flags("--generate-full-elf\n--full-elf-name")
    assert flags == ("--generate-full-elf", "--full-elf-name={elf}", "--peano={peano}")
