"""run, verify and bench as commands: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxpack
from onnxpack.cli.main import run

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "trained_a"
MODEL = TRAINED / "trained_a.onnx"
HELDOUT = TRAINED / "heldout_64x257.npy"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("packs") / "a.pack"
    onnxpack.build(MODEL, folder, weights="int8")
    return str(folder)


class Said:
    """Exit code and what was printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Said:
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Said(code, said.out, said.err)

    return call


def fails(said: Said, code: int, *words: str) -> None:
    """One line on stderr, nothing on stdout, the right exit code."""
    assert said.code == code, said.err
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line.startswith("onnxpack: ")]
    assert len(lines) == 1, said.err
    for word in words:
        assert word in lines[0]


# run


def test_run_shows_outputs_and_where_products_ran(pack: str, say: Any) -> None:
    said = say("run", pack, "--random", "--dim", "seq=32", "--seed", 3)
    assert said.code == 0
    assert "1x32x256" in said.out
    assert "host" in said.out
    assert "dynamic-weight" in said.out
    assert said.err.startswith("input_ids: int64[1, 32], ")


def test_run_json(pack: str, say: Any) -> None:
    made = say("run", pack, "--random", "--dim", "seq=5", "--repeat", 2, "--json").json
    (logits,) = made["outputs"]
    assert (logits["name"], logits["type"], logits["shape"], logits["nan"]) == ("logits", "float32", [1, 5, 256], 0)
    assert logits["min"] < logits["mean"] < logits["max"]
    assert {"where": "host", "rows": 5, "reason": "no-kernel", "sites": 29} in made["sites"]
    assert (made["runs"], made["same_every_run"]) == (2, True)


def test_run_on_the_reference_gives_the_same_numbers(pack: str, say: Any) -> None:
    host, reference = (
        say("run", pack, "--random", "--device", device, "--json").json for device in ("host", "reference")
    )
    assert reference["sites"][0]["where"] == "reference"
    assert host["outputs"][0]["first"] == pytest.approx(reference["outputs"][0]["first"], rel=1e-4)


def test_run_reads_inputs_and_keeps_outputs(pack: str, say: Any, tmp_path: Path) -> None:
    ids = np.load(HELDOUT)[:1, :20]
    np.savez(tmp_path / "x.npz", input_ids=ids)
    np.save(tmp_path / "x.npy", ids.astype(np.uint8))
    for source in ("x.npz", "x.npy"):
        said = say("run", pack, "--input", tmp_path / source, "--save", tmp_path / "out.npz")
        assert said.code == 0
        with np.load(tmp_path / "out.npz") as kept:
            np.testing.assert_array_equal(kept["logits"], onnxpack.load(pack).run(None, {"input_ids": ids})[0])


def test_run_with_wrong_inputs(pack: str, say: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "name.npz", ids=np.ones((1, 2), np.int64))
    np.save(tmp_path / "type.npy", np.ones((1, 2)))
    np.save(tmp_path / "shape.npy", np.ones((3, 2), np.int64))
    np.save(tmp_path / "beyond.npy", np.full((1, 2), 999))
    fails(say("run", pack), 2, "no inputs", "input_ids: tensor(int64)[1, seq]")
    fails(say("run", pack, "--input", tmp_path / "name.npz"), 2, "'input_ids' is missing")
    fails(say("run", pack, "--input", tmp_path / "type.npy"), 2, "float64", "int64")
    fails(say("run", pack, "--input", tmp_path / "shape.npy"), 2, "[3, 2]")
    fails(say("run", pack, "--input", tmp_path / "beyond.npy"), 2, "does not run on these inputs")
    fails(say("run", pack, "--input", tmp_path / "none.npy"), 2, "no such file")
    fails(say("run", pack, "--input", MODEL), 2, "not an .npy or .npz file")
    fails(say("run", pack, "--random", "--dim", "length=3"), 2, "'length'", "seq")
    fails(say("run", pack, "--random", "--dim", "seq"), 2, "NAME=SIZE")
    fails(say("run", pack, "--random", "--device", "npu"), 5, "no NPU device")
    fails(say("run", MODEL, "--random"), 3)
    fails(say("run", pack, "--random", "--save", tmp_path / "no" / "o.npz"), 5, "cannot be written")


# verify


def test_verify_held_out_text(pack: str, say: Any) -> None:
    said = say(
        *("verify", pack, "--model", MODEL, "--inputs", HELDOUT, "--next-token", "--windows", 2),
        *("--max-kl", 3e-4, "--min-top1", 0.98, "--json"),
    )
    assert said.code == 0, said.err
    made = said.json
    assert made["passed"] is True
    assert made["runs"] == 2
    assert 0 < made["outputs"]["logits"]["kl"] < 3e-4
    assert made["perplexity"]["tokens"] == 512
    assert made["perplexity"]["pack"] == pytest.approx(made["perplexity"]["reference"], rel=0.005)
    assert made["gates"]["max_kl"] == 3e-4


def test_verify_for_a_person(pack: str, say: Any) -> None:
    said = say("verify", pack, "--model", MODEL, "--random", 1, "--dim", "seq=24", "--sites", "--files")
    assert said.code == 0, said.err
    assert said.out.splitlines()[0] == "files: 3, every digest agrees"
    assert said.out.rstrip().endswith("passed")
    assert "MatMul_37  m.lm_head.weight" in said.out
    assert "input_ids int64[1, 24]" in said.err


def test_verify_exits_with_4_after_it_has_shown_the_figures(pack: str, say: Any) -> None:
    said = say("verify", pack, "--model", MODEL, "--max-rel-error", 1e-6, "--json")
    assert said.code == 4
    assert said.json["passed"] is False
    assert said.json["outputs"]["logits"]["max_rel"] > 1e-6
    assert "logits: relative error" in said.err.splitlines()[-1]


def spoiled(pack: str, folder: Path) -> Path:
    shutil.copytree(pack, folder / "spoiled.pack")
    weights = folder / "spoiled.pack" / "weights.safetensors"
    data = np.fromfile(weights, np.uint8)
    half = len(data) // 2
    data[-half:] = data[-half:][::-1]
    data.tofile(weights)
    return folder / "spoiled.pack"


def test_verify_of_a_spoiled_pack(pack: str, say: Any, tmp_path: Path) -> None:
    bad = spoiled(pack, tmp_path)
    said = say("verify", bad, "--model", MODEL, "--sites", "--json")
    assert said.code == 4
    assert said.json["passed"] is False
    said = say("verify", bad, "--files")
    assert said.code == 3
    assert "weights.safetensors" in said.err


def test_verify_files_alone(pack: str, say: Any) -> None:
    said = say("verify", pack, "--files", "--json")
    assert said.code == 0
    assert (said.json["passed"], said.json["files"], said.json["outputs"]) == (True, 3, {})


def test_verify_wrongly_called(pack: str, say: Any, tmp_path: Path) -> None:
    fails(say("verify", pack), 2, "--model", "--files")
    fails(say("verify", pack, "--model", tmp_path / "none.onnx"), 3, "no such file")
    fails(say("verify", pack, "--model", HELDOUT), 3, "onnxruntime refuses it")
    fails(say("verify", tmp_path / "none.pack", "--files"), 3, "no such directory")
    fails(say("verify", pack, "--model", MODEL, "--max-site-error", 0.1), 2, "--sites")
    fails(say("verify", pack, "--model", MODEL, "--logits", "scores"), 2, "'scores'")
    fails(say("verify", pack, "--model", MODEL, "--inputs", HELDOUT, "--random", 1), 2, "not from both")
    fails(say("verify", pack, "--model", MODEL, "--min-top1", 2), 2, "--min-top1")


def test_verify_tells_of_another_source(pack: str, say: Any, tmp_path: Path) -> None:
    shutil.copytree(TRAINED, tmp_path / "copy")
    other = tmp_path / "copy" / MODEL.name
    other.write_bytes(other.read_bytes() + b"\x1a\x011")  # producer_version
    said = say("verify", pack, "--model", other, "--random", 1)
    assert said.code == 0
    assert "is not the file that the pack was made from" in said.err


# bench


def test_bench_prints_the_ratio_first_and_the_conditions_with_it(pack: str, say: Any) -> None:
    said = say("bench", pack, "--model", MODEL, "--dim", "seq=8", "--runs", 5, "--threads", 1)
    assert said.code == 0, said.err
    first = said.out.splitlines()[0]
    assert first.endswith(" times as fast as trained_a.onnx, onnxruntime")
    assert first.split()[1].startswith("(")  # the spread, beside the median
    for word in ("load average", "share of zeros", "versions: onnxpack", "5 pairs", "threads: 1", "int8 on this CPU"):
        assert word in said.out


def test_bench_json(pack: str, say: Any) -> None:
    made = say("bench", pack, "--dim", "seq=4", "--runs", 5, "--json").json
    assert made["ratio"]["low"] <= made["ratio"]["median"] <= made["ratio"]["high"]
    assert made["device"] == "host"
    assert made["conditions"]["inputs"] == {"input_ids": "int64[1, 4]"}
    assert {"runs", "threads", "load_average", "versions", "cpu", "zero_share"} <= made["conditions"].keys()


def test_bench_wrongly_called(pack: str, say: Any) -> None:
    fails(say("bench", pack, "--runs", 4), 2, "--runs")
    fails(say("bench", pack, "--model", "none.onnx"), 3, "no such file")
    fails(say("bench", pack, "--dim", "length=3"), 2, "'length'")


@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_help(command: str, say: Any) -> None:
    said = say(command, "--help")
    assert said.code == 0
    assert "Usage: onnxpack" in said.out
    assert command in say("--help").out
