"""docs/pack.md is enough to write a reader: this one knows json, hashlib and numpy, and what the page says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxpack

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "trained_a" / "trained_a.onnx"


def read_field(pack: Path, field: dict[str, Any]) -> np.ndarray:
    data = (pack / field["file"]).read_bytes()[field["offset"] : field["offset"] + field["nbytes"]]
    assert hashlib.sha256(data).hexdigest() == field["sha256"]
    return np.frombuffer(data, field["dtype"]).reshape(field["shape"])


def digest(data: Any, **how: Any) -> str:
    return hashlib.sha256(json.dumps(data, separators=(",", ":"), **how).encode()).hexdigest()


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "a.pack"
    onnxpack.build(MODEL, folder, weights="int8")
    return folder


def test_weights_are_read_as_the_page_says(pack: Path) -> None:
    manifest = json.loads((pack / "pack.json").read_text())
    source = {tensor["name"]: tensor for tensor in manifest["tensors"]}
    raw = {t.name: t for t in onnx.load(MODEL).graph.initializer}
    checked = 0
    for name, tensor in source.items():
        codes, scales = (read_field(pack, tensor["fields"][field]) for field in ("codes", "scales"))
        weight = codes * scales
        assert list(weight.shape) == tensor["shape"]
        original = np.frombuffer(raw[name].raw_data, np.float32).reshape(raw[name].dims)
        original = original if original.shape == weight.shape and name != "m.lm_head.weight" else original.T
        error = np.linalg.norm(weight - original) / np.linalg.norm(original)
        assert error == pytest.approx(tensor["error"]["relative_rms"], rel=1e-3)
        checked += 1
    assert checked == 29


def test_both_digests_are_what_the_page_says(pack: Path) -> None:
    manifest = json.loads((pack / "pack.json").read_text())
    files = {f["path"]: f for f in manifest["files"]}
    for path, record in files.items():
        data = (pack / path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (record["nbytes"], record["sha256"])
    assert manifest["files_digest"] == digest([[f["path"], f["nbytes"], f["sha256"]] for f in manifest["files"]])
    content = {
        "graph": files["model.onnx"]["sha256"],
        "data": files["model.data"]["sha256"],
        "sites": manifest["sites"],
        "tensors": [
            [t["name"], t["shape"], t["format"], t["params"],
             sorted([name, f["dtype"], f["sha256"]] for name, f in t["fields"].items())]
            for t in manifest["tensors"]
        ],
        "kernels": [[k["key"], k["m"], k["k"], k["n"]] for k in manifest["kernels"]],
        "plan": manifest["plan"],
    }  # fmt: skip
    assert manifest["content_digest"] == digest(content, sort_keys=True)


def test_the_folder_holds_what_the_manifest_lists_and_nothing_else(pack: Path) -> None:
    manifest = json.loads((pack / "pack.json").read_text())
    assert sorted(p.name for p in pack.iterdir()) == sorted(["pack.json", *(f["path"] for f in manifest["files"])])
