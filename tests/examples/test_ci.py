"""ci/: the steps of the recipe, run as the recipe writes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from example_runner import EXAMPLES, ROOT, Runner
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(ROOT / "tests" / "kernels" / "support"))
from fake_toolchain import FakeToolchain

SCRIPT = "ci/regenerate.py"
RECIPE = EXAMPLES / "ci" / "pack.yml"


def write_model(path: Path, seed: int = 0, n: int = 256) -> Path:
    """Two products, 64 x n and n x 64."""
    rng = np.random.default_rng(seed)
    weights = {"a": rng.standard_normal((64, n), np.float32), "b": rng.standard_normal((n, 64), np.float32)}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("MatMul", ["h", "b"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", 64])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture
def tools(tmp_path: Path, example: Runner) -> FakeToolchain:
    """A stand-in toolchain that the example's process finds."""
    made = FakeToolchain(tmp_path / "tools")
    example.environment |= made.environment()
    return made


class Recipe:
    """regenerate.py with the recipe's own arguments."""

    def __init__(self, example: Runner, folder: Path) -> None:
        self.example, self.folder, self.record = example, folder, folder / "pack.lock.json"

    def __call__(self, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        words = ["model.onnx", "model.pack", "--record", "pack.lock.json", "--elfs-out", "kernels/"]
        return self.example(SCRIPT, *words, "--elf-cache", ".elf-cache", *more, code=code)

    def recorded(self) -> dict[str, Any]:
        return json.loads(self.record.read_text())


@pytest.fixture
def recipe(tmp_path: Path, example: Runner, tools: FakeToolchain) -> Recipe:
    write_model(tmp_path / "model.onnx")
    return Recipe(example, tmp_path)


def test_a_recorded_pack_passes_again(recipe: Recipe, tools: FakeToolchain) -> None:
    assert "compiled now" not in recipe("--update").stdout
    first = recipe.recorded()
    compiled = len(tools.calls())
    assert len(first["kernels"]) == compiled > 0
    shown = recipe().stdout
    assert shown.count("as recorded") == compiled + 1
    assert "2 of 2 products with a weight (100.0 %)" in shown
    assert recipe.recorded() == first
    assert len(tools.calls()) == compiled, "the second run takes its kernels from the cache"


def test_a_changed_model_fails_and_the_record_stays(recipe: Recipe) -> None:
    recipe("--update")
    before = recipe.record.read_bytes()
    write_model(recipe.folder / "model.onnx", seed=1)
    said = recipe(code=4).stderr
    assert "the content digest differs" in said
    assert recipe.record.read_bytes() == before
    recipe("--update")
    recipe()


def test_kernels_compiled_anew_are_not_compared(recipe: Recipe, tools: FakeToolchain) -> None:
    """Real toolchains write times into their ELFs: the bytes differ, the pack is the same."""
    recipe("--update")
    first = recipe.recorded()
    shutil.rmtree(recipe.folder / ".elf-cache")
    shutil.rmtree(recipe.folder / "kernels")
    for kernel in first["kernels"].values():
        kernel["sha256"] = "0" * 64
    recipe.record.write_text(json.dumps(first))
    assert recipe().stdout.count("compiled now, hash recorded") == len(first["kernels"])
    assert all(kernel["sha256"] != "0" * 64 for kernel in recipe.recorded()["kernels"].values())


def test_a_cached_kernel_with_other_bytes_fails(recipe: Recipe) -> None:
    recipe("--update")
    record = recipe.recorded()
    shape, kernel = next(iter(record["kernels"].items()))
    kernel["sha256"] = "0" * 64
    recipe.record.write_text(json.dumps(record))
    said = recipe(code=4).stderr
    assert f"kernel {shape}: other bytes than recorded, and it was not compiled now" in said


def test_a_product_without_a_kernel_fails(recipe: Recipe, tools: FakeToolchain) -> None:
    recipe("--update")
    words = ["model.onnx", "model.pack", "--record", "pack.lock.json"]
    said = recipe.example(SCRIPT, *words, code=4).stderr
    assert "1 products K=64 N=256 have no kernel: no-kernel" in said
    assert "--fail-under" in said


def test_without_a_record_nothing_is_compared(recipe: Recipe) -> None:
    assert "--update" in recipe(code=2).stderr
    recipe.record.write_text("[]")
    assert "is no record" in recipe(code=2).stderr


def test_the_recipe_runs_as_it_is_written(recipe: Recipe) -> None:
    """Every `run:` line of the workflow, in order, in a checkout laid out as the recipe says."""
    recipe("--update")
    (recipe.folder / "ci").mkdir()
    shutil.copy(EXAMPLES / "ci" / "regenerate.py", recipe.folder / "ci")
    lines = re.findall(r"^ +- run: (.+)$", RECIPE.read_text(), re.MULTILINE)
    assert len(lines) >= 5
    folder = str(Path(sys.executable).parent)
    environment = recipe.example.environment | {"MODEL": "model.onnx"}
    environment["PATH"] = folder + ":" + environment["PATH"]
    for line in lines:
        if "pip install" in line:
            continue  # the package under test is installed
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line], cwd=recipe.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_the_recipe_keeps_the_cache_that_it_builds_with() -> None:
    text = RECIPE.read_text()
    assert re.search(r"path: (\S+)", text)[1] == re.search(r"--elf-cache (\S+)", text)[1]  # type: ignore[index]
