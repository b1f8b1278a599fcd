"""Write docs/pack.schema.json, the JSON Schema of the manifest: `python tests/support/write_schema.py`."""

from __future__ import annotations

import json
from pathlib import Path

from onnxpack import records
from onnxpack.pack.manifest import SCHEMA, Manifest

PATH = Path(__file__).resolve().parents[2] / "docs" / "pack.schema.json"


def text() -> str:
    """The schema as it is published: JSON, sorted keys, two spaces."""
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA, **records.schema(Manifest)}
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
    print(f"wrote {PATH.name}")
