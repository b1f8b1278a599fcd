"""What an exporter notes of its machine does not go into a pack."""

from __future__ import annotations

from pathlib import Path

import onnx

import onnxpack

MODEL = Path(__file__).resolve().parents[2] / "examples" / "trained_a" / "trained_a.onnx"


def test_stack_traces_of_nodes_are_left_behind_and_other_notes_are_kept(tmp_path: Path) -> None:
    model = onnx.load(MODEL)
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value='File "/home/somebody/secret.py", line 1')
        node.metadata_props.add(key="layer", value="kept")
    onnx.save(model, tmp_path / "m.onnx")
    onnxpack.build(tmp_path / "m.onnx", tmp_path / "m.pack", weights="int8")
    written = (tmp_path / "m.pack" / "model.onnx").read_bytes()
    assert b"somebody" not in written
    assert b"kept" in written
