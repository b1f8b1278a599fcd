"""The published JSON Schema is the manifest's, and real packs satisfy it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import write_schema
from model_maker import chain, normal

import onnxpack


@pytest.fixture(scope="module")
def schema() -> Any:
    return json.loads(write_schema.PATH.read_text())


def test_the_published_schema_is_up_to_date() -> None:
    assert write_schema.PATH.read_text() == write_schema.text(), "run: python tests/support/write_schema.py"


def test_the_schema_is_a_schema(schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("weights", ["int8", "q4nx"])
def test_a_real_manifest_satisfies_it(tmp_path: Path, schema: Any, weights: str) -> None:
    onnxpack.build(chain(normal(256, 64), normal(64, 32)), tmp_path / "p", weights=weights, min_cosine=0)
    jsonschema.validate(json.loads((tmp_path / "p" / "pack.json").read_text()), schema)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("schema"),
        lambda m: m.update(tensors={}),
        lambda m: m["tensors"][0].update(shape=["48", 80]),
        lambda m: m["sites"][0].update(kind="some"),
        lambda m: m["files"][0].update(nbytes=1.5),
        lambda m: m["coverage"].pop("bound"),
    ],
)
def test_it_refuses_what_is_none(tmp_path: Path, schema: Any, change: Any) -> None:
    onnxpack.build(chain(normal(48, 80)), tmp_path / "p", weights="int8")
    manifest = json.loads((tmp_path / "p" / "pack.json").read_text())
    change(manifest)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, schema)
