"""The commands `kernels`, `doctor` and `cache`, as a shell sees them."""

from __future__ import annotations

import json
from pathlib import Path

import npu_elf_writer as writer
import onnx
import pytest
from fake_toolchain import FakeToolchain
from onnx import TensorProto, helper

from onnxpack.cli.main import run

Shell = pytest.CaptureFixture[str]


def model(path: Path) -> str:
    """Two products, one of them of a shape that fits no tiling without padding."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["seq", 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["seq", 100])
    weights = [
        helper.make_tensor(name, TensorProto.FLOAT, shape, [0.5] * (shape[0] * shape[1]))
        for name, shape in (("w", (64, 256)), ("v", (256, 100)))
    ]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "v"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return str(path)


def test_kernels_are_built_listed_checked_and_kept(tools: FakeToolchain, tmp_path: Path, capsys: Shell) -> None:
    out = str(tmp_path / "out")
    argv = ["kernels", "build", "--shape", "16,64,256", "--shape", "16,64,512", "-o", out, "--json"]
    assert run(argv) == 0
    built = capsys.readouterr()
    report = json.loads(built.out)
    assert report["totals"] == {"built": 2}
    assert "[2/2]" in built.err
    assert run(argv) == 0
    assert json.loads(capsys.readouterr().out)["totals"] == {"cached": 2}

    assert run(["kernels", "list", out, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert [row["shape"] for row in rows] == ["16x64x256", "16x64x512"]
    assert {row["proof"] for row in rows} == {"canary"}

    assert run(["kernels", "list", out, "--env"]) == 0
    listed = capsys.readouterr().out.strip()
    assert run(["kernels", "check", listed]) == 0
    assert run(["kernels", "check", out]) == 0
    assert capsys.readouterr().out.count(" ok ") == 4

    assert run(["cache", "list"]) == 0
    assert "2 kernels" in capsys.readouterr().out
    assert run(["cache", "verify"]) == 0
    assert run(["cache", "prune", "--max-mib", "0", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.partition("whole\n")[2])["removed"]) == 2


def test_the_kernels_of_a_models_plan_are_built(tools: FakeToolchain, tmp_path: Path, capsys: Shell) -> None:
    path = model(tmp_path / "m.onnx")
    assert run(["plan", path, "--rows", "16,32", "--json"]) == 0
    planned = {kernel for group in json.loads(capsys.readouterr().out)["groups"] for kernel in group["kernels"]}
    assert planned
    assert run(["kernels", "build", path, "--rows", "16,32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["shape"]: row["status"] for row in report["kernels"]} == dict.fromkeys(planned, "built")


def test_a_failing_shape_is_exit_4_with_the_log(tools: FakeToolchain, capsys: Shell) -> None:
    tools.set(mode="fail", only="[0, 512, 512, 1]")
    assert run(["kernels", "build", "--shape", "16,64,256", "--shape", "16,64,512"]) == 4
    captured = capsys.readouterr()
    assert "16x64x256  built" in captured.out
    assert "16x64x512  failed" in captured.out
    assert "exceeded available memory" in captured.err
    assert "whole log: " in captured.err
    assert "make it with: onnxpack kernels build --shape 16,64,512" in captured.err


def test_without_tools_the_commands_are_printed_and_it_is_exit_5(no_tools: None, capsys: Shell) -> None:
    assert run(["kernels", "build", "--shape", "16,64,256"]) == 5
    captured = capsys.readouterr()
    assert "missing" in captured.out
    assert "make it with: onnxpack kernels build --shape 16,64,256" in captured.err


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["kernels", "build"], 2),
        (["kernels", "build", "m.onnx", "--shape", "1,2,3"], 2),
        (["kernels", "build", "--shape", "1,2"], 2),
        (["kernels", "build", "--shape", "16,64,256", "--target", "npu1"], 2),
        (["kernels", "build", "--shape", "16,64,256", "--jobs", "0"], 2),
        (["kernels", "build", "none.onnx"], 3),
        (["kernels", "build", "--shape", "16,100,100"], 4),
        (["kernels", "list", "nowhere"], 2),
        (["kernels", "inspect", "nowhere"], 3),
        (["kernels", "check", "nowhere"], 2),
    ],
)
def test_wrong_calls_have_their_exit_codes(no_tools: None, capsys: Shell, argv: list[str], code: int) -> None:
    assert run(argv) == code
    assert "Traceback" not in capsys.readouterr().err


def test_inspect_reports_on_any_file_and_check_fails_on_it(no_tools: None, tmp_path: Path, capsys: Shell) -> None:
    path = tmp_path / "k.elf"
    path.write_bytes(writer.instruction_elf().to_bytes())
    assert run(["kernels", "inspect", str(path)]) == 0
    assert "bindable: no" in capsys.readouterr().out
    assert run(["kernels", "inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "instruction-elf"
    assert run(["kernels", "check", str(path)]) == 3


def test_doctor_reports_and_can_be_a_gate(no_tools: None, capsys: Shell) -> None:
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "building kernels: no" in shown
    assert "next: install mlir-aie" in shown
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["able"]["build"] is False
    assert run(["doctor", "--require", "build"]) == 5


def test_doctor_finds_a_whole_toolchain(tools: FakeToolchain, capsys: Shell) -> None:
    assert run(["doctor", "--require", "build"]) == 0
    assert "--get-full-elf" in capsys.readouterr().out


def test_a_damaged_cache_is_exit_3_until_pruned(tools: FakeToolchain, tmp_path: Path, capsys: Shell) -> None:
    assert run(["kernels", "build", "--shape", "16,64,256"]) == 0
    next((tmp_path / "cache").rglob("kernel.elf")).write_bytes(b"")
    assert run(["cache", "verify"]) == 3
    assert run(["cache", "prune"]) == 0
    assert run(["cache", "verify", "--json"]) == 0
    assert run(["cache", "path"]) == 0
    assert str(tmp_path / "cache") in capsys.readouterr().out
