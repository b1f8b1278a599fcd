"""What every command has in common: exit codes, one line for each error, quick help, pipes, odd terminals."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from model_maker import cli, matmul, model, node, normal, save, tensor

from onnxpack import errors
from onnxpack.cli import main
from onnxpack.cli.main import COMMANDS, INTERRUPTED, run

HEAVY = ("numpy", "onnx", "onnx_ir", "onnxruntime", "ml_dtypes", "safetensors", "rich", "msgspec")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "m.onnx", matmul())


def line_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that an error is, on stderr; nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("onnxpack: ")
    assert lines[0].isprintable()
    return lines[0]


def test_help_is_quick_and_light() -> None:
    spent = []
    for _ in range(3):
        before = os.times()
        found = cli("--help")
        after = os.times()
        assert found.returncode == 0
        spent.append(after.children_user - before.children_user + after.children_system - before.children_system)
    assert min(spent) < 0.3
    assert all(name in found.stdout for name in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from onnxpack.cli.main import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(found.stderr.split()).intersection(HEAVY)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_and_imports_nothing_heavy(name: str) -> None:
    code = "import sys; from onnxpack.cli.main import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, name, "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"Usage: onnxpack {name}")
    assert not set(found.stderr.split()).intersection(HEAVY)
    assert importlib.import_module(f"onnxpack.cli.{name}").command.help


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("onnxpack ")


def test_no_arguments_print_the_help() -> None:
    found = cli()
    assert found.returncode == 2
    assert found.stdout == ""
    assert "Commands:" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["--nothing"], "--nothing"),
        (["census"], "Missing argument 'MODEL'"),
        (["census", "m.onnx", "--nothing"], "--nothing"),
        (["census", "m.onnx", "more"], "more"),
        (["census", "m.onnx", "--fail-under", "101"], "--fail-under"),
        (["census", "m.onnx", "--fail-under", "x"], "--fail-under"),
        (["census", "m.onnx", "--fail-under"], "--fail-under"),
        (["build", "m.onnx"], "-o"),
        (["inspect"], "PACK"),
        (["\x1b[31m\nevil"], "evil"),
    ],
)
def test_wrong_calls(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run(arguments) == 2
    line = line_of(capsys)
    assert words in line
    assert "--help" in line


BAD_FILES: dict[str, bytes | None] = {
    "missing": None,
    "text": b"hello\n",
    "empty": b"",
    "cut short": matmul().SerializeToString()[:-3],
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\n",
    "no opset": model([node("Relu", ["x"], ["y"])], opset=999).SerializeToString(),
}


@pytest.mark.parametrize("command", ["census", "build", "plan"])
@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_are_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, command: str) -> None:
    path = tmp_path / "m.onnx"
    if (data := BAD_FILES[case]) is not None:
        path.write_bytes(data)
    more = ["-o", str(tmp_path / "p")] if command == "build" else []
    assert run([command, str(path), *more]) == 3
    assert line_of(capsys).startswith(f"onnxpack: {path}: ")


@pytest.mark.parametrize("command", ["inspect", "run", "verify", "bench"])
def test_places_that_are_no_packs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, source: Path
) -> None:
    more = {"run": ["--random"], "verify": ["--files"]}.get(command, [])
    for place in (tmp_path / "missing", source, tmp_path):
        assert run([command, str(place), *more]) == 3
        assert str(place) in line_of(capsys)


def test_debug_stands_anywhere_and_keeps_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "missing.onnx")
    for arguments in (["--debug", "census", missing], ["census", "--debug", missing], ["census", missing, "--debug"]):
        assert run(arguments) == 3
        said = capsys.readouterr().err
        assert "Traceback" in said
        assert said.splitlines()[-1].startswith("onnxpack: ")
    assert run(["census", missing]) == 3
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("ONNXPACK_DEBUG", "1")
    assert run(["census", missing]) == 3
    assert "Traceback" in capsys.readouterr().err


class Broken:
    """Stands for a command whose work fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (errors.UsageError("wrong"), 2, "wrong"),
        (errors.ModelError("bad", where="m", hint="h"), 3, "m: bad (h)"),
        (errors.PackError("bad"), 3, "bad"),
        (errors.KernelError("bad"), 3, "bad"),
        (errors.GateError("low"), 4, "low"),
        (errors.EnvironmentFault("none"), 5, "none"),
        (errors.OnnxpackError("promise"), 1, "promise"),
        (PermissionError(13, "Permission denied", "/file"), 5, "/file: Permission denied"),
        (OSError("odd"), 5, "odd"),
        (MemoryError("Unable to allocate"), 5, "not enough memory: Unable to allocate"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("a\nb\x1b[0m"), 1, "bug: ValueError: a\\nb\\x1b[0m"),
        (RecursionError("deep"), 1, "bug: RecursionError"),
        (AssertionError(), 1, "bug: AssertionError"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else "",
)
def test_each_error_has_its_exit_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    import onnxpack

    monkeypatch.setattr(onnxpack, "census", Broken(error), raising=False)
    assert run(["census", "m.onnx"]) == code
    assert words in line_of(capsys)


def test_interrupted_is_what_shells_expect() -> None:
    assert INTERRUPTED == 128 + signal.SIGINT


def test_messages_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["census", "x" * 100_000]) == 3
    assert len(line_of(capsys)) < 1500


# -- pipes and terminals -------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A census of some hundred kilobytes: more than a pipe holds."""
    tensors = [tensor("W", normal(48, 48))]
    nodes = [node("MatMul", ["x" if i == 0 else f"h{i}", "W"], [f"h{i + 1}"], f"node_{i:05}" * 4) for i in range(3000)]
    return save(tmp_path / "large.onnx", model(nodes, tensors, outputs=["h3000"]))


def shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    run_it = f'onnxpack() {{ "{sys.executable}" -m onnxpack "$@"; }}\n{script}'
    return subprocess.run(
        ["bash", "-c", run_it], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


@pytest.mark.parametrize("more", ["", "--sites", "--json"])
def test_a_reader_that_goes_away_is_no_error(large: Path, more: str) -> None:
    found = shell(f"onnxpack census {large} --sites {more} | head -1; echo ${{PIPESTATUS[0]}} >&2")
    assert found.stderr.splitlines() == ["0"]
    assert len(found.stdout.splitlines()) == 1


def test_help_into_nothing() -> None:
    assert shell("onnxpack --help | true; echo ${PIPESTATUS[0]}").stdout == "0\n"


def test_a_full_disk_behind_stdout(source: Path) -> None:
    found = shell(f"onnxpack census {source} > /dev/full")
    assert found.returncode == 5
    assert found.stderr == "onnxpack: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_closed_streams(source: Path, closed: str) -> None:
    found = shell(f"onnxpack census {source} {closed}")
    assert found.returncode == 0
    assert found.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_terminals_that_lack_characters(tmp_path: Path, encoding: str) -> None:
    path = save(tmp_path / "m.onnx", model([node("MatMul", ["x", "权重"], ["y"])], [tensor("权重", normal(48, 80))]))
    found = cli("build", path, "-o", tmp_path / "p", env={"PYTHONIOENCODING": encoding})
    assert found.returncode == 0, found.stderr
    assert "48x80" in found.stdout
    if encoding != "ascii":  # there, click writes UTF-8 instead
        assert "\\u6743\\u91cd" in found.stdout


WIDTHS = [
    {"COLUMNS": "20"},
    {"COLUMNS": "1"},
    {"NO_COLOR": "1"},
    {"CI": "true"},
    {"TERM": "dumb"},
    {"FORCE_COLOR": "1"},
]


def test_no_colour_and_any_width(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["census", str(source), "--sites"])
    plain = capsys.readouterr().out
    for env in WIDTHS:
        with monkeypatch.context() as around:
            for name, setting in env.items():
                around.setenv(name, setting)
            assert run(["census", str(source), "--sites"]) == 0
            assert capsys.readouterr().out == plain
            assert run(["--help"]) == 0
            assert "\x1b" not in capsys.readouterr().out


def test_names_that_a_terminal_would_act_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nW"
    nodes = [node("MatMul", ["x", evil], ["h"], evil), node("Odd", ["h"], ["y"], domain="\x1b[31m.domain")]
    path = save(tmp_path / "m.onnx", model(nodes, [tensor(evil, normal(48, 80))], domains={"\x1b[31m.domain": 1}))
    pack = tmp_path / "p"
    calls: list[list[Any]] = [
        ["census", path, "--sites"],
        ["build", path, "-o", pack],
        ["inspect", pack],
        ["inspect", pack, "--sites"],
        ["inspect", pack, "--changes"],
        ["inspect", pack, "--tensor", evil],
        ["inspect", pack, "--tensor", evil + "x"],
        ["census", tmp_path / evil],
    ]
    for arguments in calls:
        run([str(argument) for argument in arguments])
        for text in capsys.readouterr():
            assert all(c.isprintable() or c == "\n" for c in text), (arguments, text)


def test_long_names_do_not_drown_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "n" * 5000
    path = save(tmp_path / "m.onnx", model([node("MatMul", ["x", long], ["y"])], [tensor(long, normal(48, 80))]))
    assert run(["build", str(path), "-o", str(tmp_path / "p")]) == 0
    assert max(len(line) for text in capsys.readouterr() for line in text.splitlines()) < 300


def test_shell_completion_is_offered() -> None:
    found = shell("onnxpack", _ONNXPACK_COMPLETE="bash_source")
    assert found.returncode == 0
    assert "complete" in found.stdout


def test_ctrl_c_while_reading(tmp_path: Path) -> None:
    """An interrupt before there is anything to clean up."""
    code = (
        "import os, signal, sys, onnxpack\n"
        "from onnxpack.cli.main import run\n"
        "def census(*a): os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(5)\n"
        "onnxpack.census = census\n"
        "sys.exit(run(['census', 'm']))"
    )
    start = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == INTERRUPTED
    assert found.stderr == "onnxpack: interrupted\n"
    assert time.monotonic() - start < 5


def test_the_script_is_the_module() -> None:
    assert main.cli.name == "cli"
    found = subprocess.run([sys.executable, "-m", "onnxpack", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("onnxpack ")
