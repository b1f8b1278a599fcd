"""Two hundred small graphs with hand-written expectations, by class: right, refused in one line, or never opened."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import onnxpack
from onnxpack.errors import ModelError

ACCEPTED_THOUGH_INVALID = {"g17_empty_graph.onnx"}
"""An empty graph has one meaning: no products. Its census is the zero that the hand-written facts have."""

AMBIGUOUS = {
    "b11_unknown_rank_x.onnx": "ok",
    "ext/f28_unknown_key/model.onnx": "ok",
    "g01_dup_initializer.onnx": "two initializers are called 'W'",
    "g03_dup_node_names.onnx": "ok",
    "g06_unsorted.onnx": "ok",
    "h03_opset_dup.onnx": "imported at two versions",
    "h04_domain_aionnx.onnx": "ok",
}
"""Where checkers disagree: what we do. Documented in onnxpack.graph.check."""


@pytest.fixture(scope="module")
def edge(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the collection, with its one symbolic link."""
    folder = tmp_path_factory.mktemp("edge") / "edge"
    shutil.copytree(shared / "models" / "edge", folder, copy_function=shutil.copyfile)
    for directory in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        directory.chmod(0o755)
    subprocess.run(["sh", str(folder / "setup_edge.sh")], check=True)
    return folder


@pytest.fixture(scope="module")
def expected(edge: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((edge / "expected.json").read_text())
    return found


def of_class(expected: dict[str, Any], *classes: str) -> dict[str, Any]:
    return {name: case for name, case in expected.items() if case["cls"] in classes}


def compare(name: str, case: dict[str, Any], census: Any) -> None:
    found = [site for site in census.sites if site.kind != "other"]
    kinds = Counter((site.op, site.kind) for site in found)
    wanted = case["sites"]
    assert Counter((op, "dynamic" if b == "dynamic" else "weight") for op, _, _, b, *_ in wanted) == kinds, name
    weights = [site for site in found if site.kind == "weight"]
    # The type of 4-bit codes inside MatMulNBits is what its bits attribute says; the tensor itself is uint8.
    shapes = Counter((op, k, n) for op, k, n, b, *_ in wanted if b != "dynamic")
    assert Counter((site.op, site.k, site.n) for site in weights) == shapes, name
    types = Counter(dtype for op, _, _, b, *_, dtype in wanted if b != "dynamic" and op != "MatMulNBits")
    assert Counter(site.dtype for site in weights if site.op != "MatMulNBits") == types, name
    for op, k, n, b, *_ in wanted:
        if b == "const-overridable":
            assert [s.reason for s in weights if (s.op, s.k, s.n) == (op, k, n)] == ["overridable-weight"], name
        if b == "const-codes-dynamic-scale":
            assert [s.reason for s in weights if (s.op, s.k, s.n) == (op, k, n)] == ["scale-not-constant"], name


def test_valid_models_have_the_right_census(edge: Path, expected: dict[str, Any]) -> None:
    cases = of_class(expected, "ok")
    assert len(cases) >= 130
    for name, case in cases.items():
        compare(name, case, onnxpack.census(edge / name))


def test_shared_weights_have_one_root(edge: Path, expected: dict[str, Any]) -> None:
    cases = {name: case for name, case in of_class(expected, "ok").items() if case.get("shared")}
    assert cases
    for name, case in cases.items():
        used = Counter(site.weight for site in onnxpack.census(edge / name).sites)
        for root, count in case["shared"]:
            assert used[root] <= count, name
            assert used[root] >= 1, name


@pytest.mark.parametrize("cls", ["invalid", "io-error", "hostile"])
def test_bad_models_are_refused_in_one_line(edge: Path, expected: dict[str, Any], cls: str) -> None:
    cases = of_class(expected, cls)
    assert cases
    for name in cases.keys() - ACCEPTED_THOUGH_INVALID:
        with pytest.raises(ModelError) as caught:
            onnxpack.census(edge / name)
        line = caught.value.render()
        assert line.startswith(str(edge / name)), line
        assert line.isprintable(), line
        assert len(line) - len(str(edge)) < 400, line


def test_external_data_is_refused_by_tensor_and_location(edge: Path, expected: dict[str, Any]) -> None:
    named = {
        "ext/f10_traversal/model.onnx": "../secret.bin",
        "ext/f12_absolute/model.onnx": "/etc/passwd",
        "ext/f14_missing/model.onnx": "nowhere.bin",
        "ext/f15_truncated/model.onnx": "weights.bin",
        "ext/f24_symlink/model.onnx": "link.bin",
    }
    for name, location in named.items():
        assert name in expected
        with pytest.raises(ModelError) as caught:
            onnxpack.census(edge / name)
        assert "tensor W" in caught.value.render()
        assert location in caught.value.render()


def test_where_checkers_disagree_the_choice_is_documented(edge: Path, expected: dict[str, Any]) -> None:
    cases = of_class(expected, "ambiguous")
    assert set(cases) == set(AMBIGUOUS)
    for name, case in cases.items():
        if AMBIGUOUS[name] == "ok":
            compare(name, case, onnxpack.census(edge / name))
        else:
            with pytest.raises(ModelError, match=AMBIGUOUS[name]):
                onnxpack.census(edge / name)


WATCHER = """
import json, os, sys
import onnxpack
from onnxpack.errors import OnnxpackError

opened = []
def watch(event, args):
    if event in ("open", "os.open", "mmap.__new__") and args and isinstance(args[0], (str, bytes, os.PathLike)):
        opened.append(os.path.realpath(os.fsdecode(args[0])))
import onnx, onnx_ir, onnxruntime, numpy  # noqa
sys.addaudithook(watch)

out = sys.argv[1]
results = {}
for name in sys.argv[2:]:
    for what in (onnxpack.census, lambda m: onnxpack.build(m, out, weights="int8")):
        try:
            what(name)
            results[name] = "accepted"
        except OnnxpackError as error:
            results[name] = error.exit_code
print(json.dumps([results, sorted(set(opened)), os.path.lexists(out)]))
"""


def test_the_decoys_of_hostile_models_are_never_opened(edge: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    names = [str(edge / name) for name in of_class(expected, "hostile")]
    ran = subprocess.run(
        [sys.executable, "-c", WATCHER, str(tmp_path / "out.pack"), *names],
        capture_output=True,
        text=True,
        check=True,
        cwd=edge / "ext" / "f10_traversal",  # where '../secret.bin' would lead to the decoy
    )
    results, opened, exists = json.loads(ran.stdout)
    assert set(results.values()) == {3}
    assert set(results) == set(names)
    assert not exists
    decoys = {str(edge / "ext" / "secret.bin"), "/etc/passwd", "/dev/zero"}
    assert (edge / "ext" / "secret.bin").exists()
    assert not decoys.intersection(opened)
    assert any(path.endswith("f10_traversal/model.onnx") for path in opened), "the hook saw nothing"
