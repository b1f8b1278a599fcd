"""qwen3/: exports that have the census of the design, and greedy decoding in all forms."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from example_runner import EXAMPLES, MODEL, TRAINED, Runner

GENERATE, EXPORT = "qwen3/generate.py", "qwen3/export.py"
needs_export = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "onnxscript")),
    reason="needs the extra `export`",
)


def rows_of(shown: str) -> dict[tuple[str, str], list[str]]:
    """The table of forms: (prompt, form) to its cells."""
    lines = shown.partition("mean KL\n")[2].partition("\n\n")[0].splitlines()
    cells = [re.split(r" {2,}", line.strip()) for line in lines]
    return {(row[2], row[3]): row for row in cells}


def test_float_model_and_pack_say_the_same(example: Runner, tmp_path: Path) -> None:
    text = TRAINED / "heldout_64x257.npy"
    done = example(
        GENERATE, "--model", MODEL, "--packs", tmp_path, "--prompts", text, "--lengths", "16", "48", "--new", "8"
    )
    rows = rows_of(done.stdout)
    assert set(rows) == {(length, form) for length in ("16", "48") for form in ("float", "pack")}
    for (_, form), row in rows.items():
        kl = float(row[-1])
        assert kl == 0 if form == "float" else 0 < kl < 0.05
    for condition in ("load average", "versions: onnxpack", "share of zeros", "runs: 7 pairs"):
        assert condition in done.stdout


def test_too_few_tokens_have_no_spread_and_print_no_figure(example: Runner, tmp_path: Path) -> None:
    done = example(GENERATE, "--model", MODEL, "--packs", tmp_path, "--lengths", "8", "--new", "4", code=2)
    assert "have no spread" in done.stderr
    assert not done.stdout.strip()


def test_prompts_that_are_too_short_are_refused(example: Runner, tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", np.zeros((1, 4), np.int64))
    words = ["--model", MODEL, "--packs", tmp_path, "--prompts", tmp_path / "short.npy", "--lengths", "8"]
    assert "at least 8" in example(GENERATE, *words, code=2).stderr


def test_all_four_forms_of_the_trained_model(example: Runner, shared: Path, tmp_path: Path) -> None:
    cached = shared / "models" / "trained_a" / "trained_a_cached.onnx"
    words = ["--model", MODEL, "--cached", cached, "--packs", tmp_path, "--prompts", TRAINED / "heldout_64x257.npy"]
    rows = rows_of(example(GENERATE, *words, "--lengths", "24", "--new", "8").stdout)
    assert [form for _, form in rows] == ["float", "pack", "float cached", "pack cached"]
    assert rows["24", "float cached"][-2] == "equal"
    assert float(rows["24", "float cached"][-1]) < 1e-6
    assert 0 < float(rows["24", "pack cached"][-1]) < 0.05


def test_export_without_its_extra_is_named_in_its_help() -> None:
    assert 'pip install "onnxpack[export]"' in (EXAMPLES / EXPORT).read_text()


@needs_export
@pytest.mark.slow
def test_exports_agree_with_transformers(example: Runner, tmp_path: Path) -> None:
    for form in ([], ["--cached"]):
        shown = example(EXPORT, tmp_path / "tiny", "--tiny", "--check", *form).stdout
        assert "20 MatMul, 15 with a weight, in 6 shapes" in shown
        assert "operators: ai.onnx 21\n" in shown
    done = example(GENERATE, tmp_path / "tiny", "--transformers", "tiny", "--lengths", "3", "16", "--new", "6")
    beside = done.stdout.partition("transformers' own greedy loop")[2]
    assert len(re.findall(r"float( cached)? +equal", beside)) == 4
    # The check can fail: another seed is another model.
    words = [tmp_path / "tiny", "--transformers", "tiny", "--seed", "1", "--lengths", "3", "--new", "6"]
    assert "float at 3" in example(GENERATE, *words, code=4).stderr


@needs_export
@pytest.mark.slow
def test_the_cached_export_has_one_stacked_cache(example: Runner, tmp_path: Path) -> None:
    example(EXPORT, tmp_path, "--tiny", "--cached")
    path = tmp_path / "model_cached.onnx"
    session = ort.InferenceSession(path)
    assert session.get_inputs()[1].shape == [4, 1, 2, "past", 32]
    assert session.get_outputs()[1].shape == [4, 1, 2, "past + seq", 32]
    ids = np.arange(9)[None]
    empty = np.zeros((4, 1, 2, 0, 32), np.float32)
    whole, cache = session.run(None, {"input_ids": ids, "past": empty})
    _, first = session.run(None, {"input_ids": ids[:, :5], "past": empty})
    rest, second = session.run(None, {"input_ids": ids[:, 5:], "past": first})
    np.testing.assert_allclose(rest, whole[:, 5:], atol=1e-5)
    np.testing.assert_allclose(second, cache, atol=1e-5)
    assert b"site-packages" not in path.read_bytes(), "the exporter's stack traces hold paths of this machine"


@needs_export
@pytest.mark.slow
def test_another_census_is_exit_code_1(tmp_path: Path) -> None:
    """The same export held against another shape: what --check says when a graph is not what it should be."""
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLES / "qwen3")!r})
import export
export.expected_shapes = lambda config: export.Counter({{(64, 64): 3}})
sys.argv = ["export.py", {str(tmp_path)!r}, "--tiny", "--check"]
sys.exit(export.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: 20 products, expected 8" in done.stderr
    assert "(64, 128): 2" in done.stderr


@needs_export
@pytest.mark.slow
def test_weights_from_a_local_folder(example: Runner, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLES / "qwen3")!r})
import export
export.make_model(tiny=True, seed=5).save_pretrained({str(tmp_path / "weights")!r})
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    example(EXPORT, tmp_path / "from_folder", "--weights", tmp_path / "weights", "--check")
    example(EXPORT, tmp_path / "from_seed", "--tiny", "--seed", "5")
    feed = {"input_ids": np.arange(7)[None]}
    logits = [
        ort.InferenceSession(tmp_path / name / "model.onnx").run(None, feed)[0] for name in ("from_folder", "from_seed")
    ]
    np.testing.assert_array_equal(*logits)
    said = example(EXPORT, tmp_path / "x", "--weights", tmp_path / "nothing", code=2).stderr
    assert "no folder with a config.json" in said


@needs_export
@pytest.mark.slow
def test_the_census_expected_of_the_full_shape_is_the_design_notes() -> None:
    """254 products, 197 with a weight, six shapes; making 2.4 GB of weights is left to the example itself."""
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLES / "qwen3")!r})
import export
config = export.Qwen3Config(**export.QWEN3_0_6B)
shapes = export.expected_shapes(config)
print(shapes.total() + 2 * config.num_hidden_layers + 1, shapes.total(), sorted(shapes.values()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "254 197 [1, 28, 28, 28, 56, 56]\n"
