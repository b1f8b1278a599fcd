"""benchmarks/: tables come with their command and conditions, or not at all."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from example_runner import MODEL, ROOT

from onnxpack.errors import GateError, UsageError
from onnxpack.verify.bench import Spread

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/harness.py; the programs import one another from their folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("harness")


@pytest.fixture
def neighbours(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("neighbours")


def tables(*arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "tables.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rounds_call_all_in_turn_and_the_first_changes(harness: ModuleType) -> None:
    called = []
    calls = {name: (lambda name=name: called.append(name)) for name in "abc"}
    found = harness.rounds(calls, 5, warm_up=1)
    assert "".join(called) == "abcbcacababcbcacab"
    assert {name: len(times) for name, times in found.items()} == {"a": 5, "b": 5, "c": 5}


def test_ratios_are_of_the_same_round(harness: ModuleType) -> None:
    found = {
        "pack": [harness.Times(1.0, 2.0)] * 3 + [harness.Times(10.0, 20.0)] * 2,
        "other": [harness.Times(3.0, 8.0)] * 3 + [harness.Times(30.0, 80.0)] * 2,
    }
    assert harness.ratios(found, "pack") == {"other": Spread(4.0, 4.0, 4.0)}
    assert harness.ratios(found, "pack", clock=True) == {"other": Spread(3.0, 3.0, 3.0)}


def test_too_few_rounds_have_no_ratio(harness: ModuleType) -> None:
    with pytest.raises(UsageError, match="have no spread"):
        harness.ratios(harness.rounds({"pack": list, "other": list}, 4), "pack")


@pytest.mark.parametrize("markdown", [False, True])
def test_a_table_has_command_and_conditions(
    harness: ModuleType, capsys: pytest.CaptureFixture[str], markdown: bool
) -> None:
    report = harness.Report(("K",), 5, neighbours=("float32", "other"), markdown=markdown, command="x.py", title="T")
    report.fed("x", np.array([0.0, 1.0]))
    report.add_row(64, over={"float32": Spread(2.0, 1.5, 2.5)}, goals={"float32": 3.0})
    with pytest.raises(GateError, match=r"64 over float32: 2\.00 is below 3"):
        report.print(check=True)
    shown = capsys.readouterr().out
    for needed in ("2.00 (1.50 to 2.50)", "MISSED: 3", "x.py", "load average", "onnxruntime", "share of zeros: x 0.5"):
        assert needed in shown
    assert "other" in shown
    assert ("| K | float32 |" in shown) == markdown


def test_a_goal_for_a_neighbour_that_took_no_part_is_no_goal(harness: ModuleType) -> None:
    report = harness.Report(("K",), 5, neighbours=("float32", "other"))
    report.add_row(64, over={"float32": Spread(2.0, 1.5, 2.5)}, goals={"other": 3.0})
    assert report.missed == []


def test_neighbours_compute_the_model(neighbours: ModuleType, tmp_path: Path) -> None:
    """Each neighbour is near the float model, is not the float model, and has every product, the head's too."""
    ids = {"input_ids": np.arange(40, 60)[None]}
    wanted = ort.InferenceSession(MODEL).run(["logits"], ids)[0]
    source = neighbours.own_head(MODEL, tmp_path / "own.onnx")
    for name in neighbours.NAMES:
        made = neighbours.make(name, source, tmp_path / "made.onnx")
        found = ort.InferenceSession(made).run(["logits"], ids)[0]
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert 0 < error < 0.1, name
        kinds = [node.op_type for node in onnx.load(made).graph.node]
        assert kinds.count("MatMulNBits") + kinds.count("MatMulInteger") >= 29, name
        bits = 8 * neighbours.stored_bytes(made) / 3_276_800
        assert {"nbits4": 4, "nbits8": 8, "dynamic": 8}[name.split()[0]] <= bits < 9.1, name


def test_a_model_without_a_turned_weight_is_left_alone(neighbours: ModuleType, tmp_path: Path) -> None:
    own = neighbours.own_head(MODEL, tmp_path / "own.onnx")
    assert own != MODEL
    assert neighbours.own_head(own, tmp_path / "again.onnx") == own
    ids = {"input_ids": np.arange(5)[None]}
    runs = [ort.InferenceSession(path).run(["logits"], ids)[0] for path in (MODEL, own)]
    np.testing.assert_allclose(*runs, atol=1e-4)


def test_the_packing_table() -> None:
    shown = tables("--quick", "--only", "packing")
    assert "$ python benchmarks/tables.py --only packing --quick" in shown
    rows = [line for line in shown.splitlines() if re.match(r"(int8|q4nx) +1024x3072 ", line)]
    assert len(rows) == 2
    assert "runs: 5 pairs" in shown
    assert "load average" in shown


@pytest.mark.slow
@pytest.mark.parametrize("section", ["matmul", "models", "resources", "accuracy"])
def test_every_other_table(section: str) -> None:
    shown = tables("--quick", "--markdown", "--only", section)
    assert f"`python benchmarks/tables.py --only {section}" in shown
    assert shown.count("| --- |") >= 1
    for condition in ("load average", "versions: onnxpack", "share of zeros"):
        assert condition in shown
    if section == "accuracy":
        kl = {
            row.split(" | ")[0].strip("| "): row.split(" | ")[4] for row in shown.splitlines() if row.startswith("| ")
        }
        assert float(kl["int8"]) < 2.5e-4 < float(kl["q4nx"]) < 5e-3
        assert kl["float32"] == "0.00e+00"


def test_the_page_has_every_table_with_its_command() -> None:
    page = (ROOT / "docs" / "measured.md").read_text()
    program = (BENCHMARKS / "tables.py").read_text()
    sections = re.findall(r'^    "(\w+)": \w+_table,$', program, re.MULTILINE)
    assert len(sections) == 5
    for section in sections:
        assert re.search(rf"`python benchmarks/tables\.py --only {section}", page), section
    assert page.count("load average: ") == len(sections) + 1
    assert page.count("versions: onnxpack") == len(sections) + 1
