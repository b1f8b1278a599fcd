"""quark/quantize_a8w8.py: with onnxruntime's quantizer always, with AMD Quark where it is installed."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from example_runner import MODEL, TRAINED, Runner

import onnxpack
from onnxpack.pack.read import open_pack
from onnxpack.verify.api import Inputs, verify

SCRIPT = "quark/quantize_a8w8.py"
NAME = "trained_a_a8w8"


def quantize(example: Runner, *more: str) -> str:
    return example(SCRIPT, MODEL, "out", "--windows", "4", *more).stdout


@pytest.mark.parametrize(("granularity", "scales"), [("channel", [128, 256, 384, 704]), ("tensor", [1])])
def test_onnxruntime_quantizes_every_product_with_a_weight(
    example: Runner, tmp_path: Path, granularity: str, scales: list[int]
) -> None:
    shown = quantize(example, "--flow", "onnxruntime", "--granularity", granularity)
    census = onnxpack.census(str(tmp_path / "out" / f"{NAME}.onnx"))
    groups = [site.qdq for site in census.sites if site.qdq is not None]
    assert len(groups) == census.totals.weight == 29
    found = {int(part[3:]) for group in groups for part in group.split() if part.startswith("sw=")}
    assert found - {1} == set(scales) - {1}
    assert "quantized products: 29 taken as one site, 0 refused" in shown
    tensors = open_pack(tmp_path / "out" / f"{NAME}.pack", "full").manifest.tensors
    assert Counter(tensor.format for tensor in tensors) == {"graph-int8": 29}


def test_attention_stays_float(example: Runner, tmp_path: Path) -> None:
    quantize(example, "--flow", "onnxruntime")
    census = onnxpack.census(str(tmp_path / "out" / f"{NAME}.onnx"))
    assert {site.qdq for site in census.sites if site.kind == "dynamic"} == {None}
    assert census.totals.dynamic == 9


def test_the_quantized_model_still_knows_the_language(example: Runner, tmp_path: Path) -> None:
    """A calibration that went wrong (the rotary product, a scale along the wrong axis) costs whole nats."""
    quantize(example, "--flow", "onnxruntime")
    inputs = Inputs(source=str(TRAINED / "heldout_64x257.npy"), windows=4, next_token=True)
    comparison = verify(tmp_path / "out" / f"{NAME}.pack", MODEL, inputs=inputs).comparison
    assert comparison is not None
    assert comparison.perplexity is not None
    assert comparison.perplexity.pack < 1.02 * comparison.perplexity.reference


def test_a_line_says_that_quark_is_not_there(example: Runner, tmp_path: Path) -> None:
    (tmp_path / "quark").mkdir()
    (tmp_path / "quark" / "__init__.py").write_text("raise ImportError('hidden by a test')\n")
    example.environment["PYTHONPATH"] = str(tmp_path)
    done = example(SCRIPT, MODEL, "out", "--windows", "1")
    assert "AMD Quark is not installed: quantizing with onnxruntime's quantize_static instead" in done.stderr
    assert "int8 by onnxruntime" in done.stdout
    refused = example(SCRIPT, MODEL, "out", "--flow", "quark", code=1)
    assert "onnxpack[quark]" in refused.stderr


def test_calibration_that_does_not_fit_is_one_line(example: Runner, tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.ones((2, 8), np.float32))
    said = example(SCRIPT, MODEL, "out", "--calibration", tmp_path / "floats.npy", code=1).stderr
    assert "input input_ids" in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("quark") is None, reason="needs the extra `quark`")
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_quark_quantizes_what_it_sees(example: Runner, tmp_path: Path, granularity: str) -> None:
    """The head's weight stands behind a Transpose, which Quark does not look through: 28 of 29."""
    shown = quantize(example, "--flow", "quark", "--granularity", granularity)
    assert "quantized products: 28 taken as one site, 0 refused" in shown
    graph = onnx.load(tmp_path / "out" / f"{NAME}.onnx", load_external_data=False).graph
    assert Counter(node.op_type for node in graph.node)["QuantizeLinear"] > 28
    tensors = open_pack(tmp_path / "out" / f"{NAME}.pack", "full").manifest.tensors
    assert Counter(tensor.format for tensor in tensors) == {"graph-int8": 28, "q4nx": 1}
