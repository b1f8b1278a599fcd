"""The same input gives the same bytes, whatever surrounds the build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_maker import chain, coded, model, node, normal, save, tensor, tree, value
from onnx import TensorProto, helper

import onnxpack
from onnxpack.plan import Plan

SCRIPT = """
import os, sys
os.umask(int(sys.argv[4], 8))
if sys.argv[3] != "0":
    os.cpu_count = lambda: int(sys.argv[3])
import onnxpack
report = onnxpack.build(sys.argv[1], sys.argv[2], weights=sys.argv[5], min_cosine=0)
print(report.content_digest, report.files_digest)
"""

SURROUNDINGS: dict[str, dict[str, str]] = {
    "plain": {},
    "hash seed 0": {"PYTHONHASHSEED": "0"},
    "hash seed 1": {"PYTHONHASHSEED": "1"},
    "one thread": {"OMP_NUM_THREADS": "1", "cpus": "1"},
    "many threads": {"OMP_NUM_THREADS": "8", "cpus": "8"},
    "another zone": {"TZ": "Pacific/Kiritimati", "SOURCE_DATE_EPOCH": "1"},
    "another epoch": {"SOURCE_DATE_EPOCH": "1700000000", "TZ": "UTC"},
    "another umask": {"umask": "077"},
    "another locale": {"LC_ALL": "C", "LANG": "C"},
    "another home": {"HOME": "/nonexistent", "USER": "somebody"},
    "no byte code": {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "0"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many weights, shared ones, two containers' worth of names, floats, a body."""
    body = helper.make_graph(
        [node("MatMul", ["x", "B"], ["b"])], "body", [], [value("b", None)], [tensor("B", normal(48, 7))]
    )
    nodes = [node("If", ["c"], ["z"], then_branch=body, else_branch=body)]
    tensors, at = [], "x"
    for i in range(24):
        nodes.append(node("MatMul", [at, f"w{i % 20}"], [f"h{i}"]))
        at = f"h{i}"
    tensors += [tensor(f"w{i}", normal(48, 48, seed=i // 2)) for i in range(20)]
    tensors.append(tensor("bias", normal(48, 48, seed=99)))
    nodes.append(node("Add", [at, "bias"], ["y"]))
    inputs = [value("x", ["M", 48]), value("c", [], TensorProto.BOOL)]
    return save(tmp_path_factory.mktemp("identity") / "m.onnx", model(nodes, tensors, inputs, ["y", "z"]))


def run(source: Path, out: Path, around: dict[str, str], weights: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONHASHSEED", "SOURCE_DATE_EPOCH", "TZ")}
    env |= {k: v for k, v in around.items() if k not in ("cpus", "umask")}
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(source),
        str(out),
        around.get("cpus", "0"),
        around.get("umask", "022"),
        weights,
    ]
    cwd = "/" if around.get("cpus") else out.parent
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=cwd).stdout


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "w1*=int8,*=q4nx"])
def test_the_same_bytes_whatever_surrounds_the_build(source: Path, tmp_path: Path, weights: str) -> None:
    reference: dict[str, bytes] | None = None
    for i, around in enumerate(SURROUNDINGS.values()):
        out = tmp_path / f"out{i}" / "model.pack"
        out.parent.mkdir()
        digests = run(source, out, around, weights).split()
        found = tree(out)
        manifest = json.loads(found["pack.json"])
        assert [manifest["content_digest"], manifest["files_digest"]] == digests
        if reference is None:
            reference = found
        assert found == reference, around


def test_twice_in_one_process(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        onnxpack.build(source, tmp_path / name, weights="int8")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_an_object_and_a_file_give_the_same_pack(source: Path, tmp_path: Path) -> None:
    import onnx

    path = save(tmp_path / "model.onnx", onnx.load(source))
    onnxpack.build(path, tmp_path / "a", weights="int8")
    onnxpack.build(onnx.load(path), tmp_path / "b", weights="int8")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_neither_time_nor_place_stand_in_a_pack(source: Path, tmp_path: Path) -> None:
    import socket

    onnxpack.build(source, tmp_path / "secret-place", weights="int8")
    everything = b"".join(tree(tmp_path / "secret-place").values())
    for trace in (str(tmp_path), "secret-place", str(Path.cwd()), socket.gethostname(), str(Path.home())):
        assert trace.encode() not in everything, trace


def test_the_content_digest_follows_the_content(tmp_path: Path) -> None:
    def digest(name: str, *weights: np.ndarray, **options: str) -> str:
        path = save(tmp_path / "m.onnx", chain(*weights))
        return onnxpack.build(
            path, tmp_path / name, weights=options.get("weights", "int8"), min_cosine=0
        ).content_digest

    w = normal(48, 80)
    other = w.copy()
    other[0, 0] = 3 * other[0, 0] + 1
    first = digest("a", w)
    assert digest("b", w) == first
    assert digest("c", other) != first
    assert digest("d", w, weights="q4nx") != first
    assert digest("e", w, coded(80, 4)) != first


def test_a_plan_survives_json_and_is_executed_exactly(source: Path, tmp_path: Path) -> None:
    plan = onnxpack.plan(source, weights="w1*=int8,*=q4nx")
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    onnxpack.build(source, tmp_path / "a", plan=again, min_cosine=0)
    onnxpack.build(source, tmp_path / "b", weights="w1*=int8,*=q4nx", min_cosine=0)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    formats = {t["name"]: t["format"] for t in json.loads((tmp_path / "a" / "pack.json").read_text())["tensors"]}
    assert {name for name, form in formats.items() if form == "int8"} == {n for n in formats if n.startswith("w1")}
