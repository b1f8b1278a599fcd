"""census, build and inspect as commands: results on stdout, everything else on stderr, JSON as it was promised."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from model_maker import chain, model, node, normal, save, tensor, tree, value

from onnxpack.cli.main import run

SITE = {"path", "op", "kind", "m", "k", "n", "dtype", "weight", "verdict", "reason"}
GROUP = {"k", "n", "m", "dtype", "bytes", "count", "weights", "verdict"}
TOTALS = {"sites", "weight", "dynamic", "other", "covered", "buildable", "host"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    nodes = [node("MatMul", ["x", "W"], ["h"]), node("MatMul", ["h", "V"], ["g"]), node("MatMul", ["g", "t"], ["y"])]
    inputs = [value("x", ["M", 48]), value("t", [32, "n"])]
    return save(tmp_path / "m.onnx", model(nodes, [tensor("W", normal(48, 80)), tensor("V", normal(80, 32))], inputs))


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str | Path) -> Said:
        capsys.readouterr()
        code = run([str(a) for a in arguments])
        return Said(code, *capsys.readouterr())

    return call


# -- census --------------------------------------------------------------------------------------------------------


def test_census_as_a_table(say: Any, source: Path) -> None:
    said = say("census", source)
    assert said.code == 0
    assert said.err == ""
    lines = said.out.splitlines()
    assert re.match(r"\s*K\s+N\s+M\s+count\s+weights\s+bytes\s+dtype\s+verdict", lines[0])
    assert "3 products: 2 with a weight, 1 dynamic, 0 other" in lines
    assert "no-kernel" in said.out
    assert "MatMul_0" not in said.out
    assert "MatMul_0" in say("census", source, "--sites").out


def test_census_as_json_has_the_promised_keys(say: Any, source: Path) -> None:
    said = say("census", source, "--json", "--kernels", "16x48x80")
    assert said.code == 0
    assert said.out.isascii()
    census = said.json
    assert set(census) >= {"schema", "model", "sites", "groups", "totals"}
    assert census["model"] == "m.onnx"
    assert all(set(site) >= SITE for site in census["sites"])
    assert all(set(group) >= GROUP for group in census["groups"])
    assert set(census["totals"]) >= TOTALS
    assert [(s["verdict"], s["reason"]) for s in census["sites"]] == [
        ("covered", None),
        ("buildable", "no-kernel"),
        ("host", "dynamic-weight"),
    ]
    assert say("census", source, "--json", "--kernels", "16x48x80").out == said.out


def test_census_of_nothing(say: Any, tmp_path: Path) -> None:
    empty = save(tmp_path / "e.onnx", model([node("Relu", ["x"], ["y"])]))
    said = say("census", empty)
    assert said.code == 0
    assert "0 products" in said.out
    assert set(say("census", empty, "--json").json["totals"].values()) == {0}
    assert say("census", empty, "--fail-under", "100").code == 0


@pytest.mark.parametrize(("under", "code"), [("0", 0), ("50", 0), ("50.1", 4), ("100", 4)])
def test_fail_under_is_a_gate_over_weight_products(say: Any, source: Path, under: str, code: int) -> None:
    said = say("census", source, "--kernels", "16x48x80", "--fail-under", under)
    assert said.code == code
    assert said.out  # the result is printed all the same
    if code:
        assert said.err.count("\n") == 1
        assert "50.0 % of the weight products are covered" in said.err
    as_json = say("census", source, "--kernels", "16x48x80", "--fail-under", under, "--json")
    assert as_json.code == code
    assert as_json.json["totals"]["covered"] == 1


@pytest.mark.parametrize("kernels", ["1x2", "axbxc", "16x48", "0x48x80", "-16x48x80", "9" * 50 + "x1x1"])
def test_kernels_that_are_none(say: Any, source: Path, kernels: str) -> None:
    said = say("census", source, "--kernels", kernels)
    assert said.code in (2, 3)
    assert said.out == ""
    assert said.err.count("\n") == 1


# -- build ---------------------------------------------------------------------------------------------------------


def test_build_prints_results_and_progress_apart(say: Any, source: Path, tmp_path: Path) -> None:
    said = say("build", source, "-o", tmp_path / "p", "--weights", "int8")
    assert said.code == 0
    progress = said.err.splitlines()
    assert sorted(line.split()[0] for line in progress if "->" in line) == ["V", "W"]
    assert any(re.match(r"W\s+48x80\s+15\.0 KiB -> 4\.1 KiB", line) for line in progress)
    for name in ("load", "plan", "layout", "graph", "weights", "publish", "total"):
        assert re.search(rf"^{name}\s+\d+\.\d+$", said.out, re.MULTILINE)
    digests = re.findall(r"digest:\s+([0-9a-f]{64})$", said.out, re.MULTILINE)
    manifest = json.loads((tmp_path / "p" / "pack.json").read_text())
    assert digests == [manifest["content_digest"], manifest["files_digest"]]
    quiet = say("build", source, "-o", tmp_path / "q", "--weights", "int8", "--quiet")
    assert "->" not in quiet.err


def test_build_as_json_has_the_promised_keys(say: Any, source: Path, tmp_path: Path) -> None:
    said = say("build", source, "-o", tmp_path / "p", "--weights", "int8", "--json")
    report = said.json
    assert set(report) >= {"pack", "content_digest", "files_digest", "weights", "kernels", "coverage", "seconds"}
    assert report["pack"] == str(tmp_path / "p")
    assert [w["name"] for w in report["weights"]] == ["W", "V"]
    assert report["weights"][0]["bytes_before"] == 4 * 48 * 80
    assert report["weights"][0]["bytes_after"] == 48 * 80 + 4 * 80


def test_build_refuses_and_forces(say: Any, source: Path, tmp_path: Path) -> None:
    pack = tmp_path / "p"
    assert say("build", source, "-o", pack, "--weights", "int8").code == 0
    before = tree(pack)
    said = say("build", source, "-o", pack, "--weights", "int8")
    assert said.code == 2
    assert said.out == ""
    assert said.err == f"onnxpack: {pack}: exists already (--force replaces it)\n"
    assert tree(pack) == before
    other = save(tmp_path / "o.onnx", chain(normal(48, 80)))
    assert say("build", other, "-o", pack, "--weights", "int8", "--force").code == 0
    assert tree(pack) != before


@pytest.mark.parametrize("out", ["no/parent/p", ".", "", "m.onnx", "full"])
def test_build_into_impossible_places(
    say: Any, source: Path, out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("x")
    said = say("build", source, "-o", out, "--weights", "int8")
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "m.onnx"]


def test_build_of_a_model_without_products(say: Any, tmp_path: Path) -> None:
    empty = save(tmp_path / "e.onnx", model([node("Relu", ["x"], ["y"])]))
    said = say("build", empty, "-o", tmp_path / "p")
    assert said.code == 3
    assert said.err.startswith(f"onnxpack: {empty}: it has no matrix product with a constant weight")


def test_build_with_a_loss_that_is_too_large(say: Any, tmp_path: Path) -> None:
    source = save(tmp_path / "m.onnx", chain(normal(48, 80)))
    said = say("build", source, "-o", tmp_path / "p", "--weights", "int8", "--min-cosine", "1")
    assert said.code == 4
    assert "tensor W0" in said.err
    assert not (tmp_path / "p").exists()


# -- inspect -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pack(source: Path, tmp_path: Path, say: Any) -> Path:
    assert say("build", source, "-o", tmp_path / "p", "--weights", "int8").code == 0
    return tmp_path / "p"


def test_inspect_as_a_table_and_as_json(say: Any, pack: Path) -> None:
    said = say("inspect", pack)
    assert said.code == 0
    manifest = json.loads((pack / "pack.json").read_text())
    assert manifest["content_digest"] in said.out
    assert "weights.safetensors" in said.out
    assert say("inspect", pack, "--json").json == manifest


def test_inspect_one_weight(say: Any, pack: Path) -> None:
    said = say("inspect", pack, "--tensor", "W")
    assert said.code == 0
    assert "48x80" in said.out
    assert "MatMul_0" in said.out
    assert say("inspect", pack, "--tensor", "W", "--json").json["name"] == "W"
    missing = say("inspect", pack, "--tensor", "w")
    assert missing.code == 2
    assert missing.err.count("\n") == 1


def test_inspect_says_what_packing_changed(say: Any, pack: Path) -> None:
    said = say("inspect", pack, "--changes")
    assert "DequantizeLinear" in said.out
    changes = say("inspect", pack, "--changes", "--json").json
    assert {c["action"] for c in changes} <= {"added", "removed", "rewritten"}
    assert {c["op"] for c in changes if c["action"] == "added"} == {"DequantizeLinear"}
    assert {c["op"] for c in changes if c["action"] == "rewritten"} == {"MatMul"}
    assert len(say("inspect", pack, "--sites", "--json").json) == 3
