"""Small real models, packed by the real builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack import records
from onnxpack.pack.manifest import Manifest

SEED = 20


@dataclass(frozen=True)
class Built:
    """A model file and the pack made from it."""

    model: Path
    pack: Path

    def overwrite(
        self, weight: str, field: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    ) -> None:
        """Change stored bytes behind the manifest's back; sizes stay."""
        record = next(t for t in self.manifest.tensors if t.name == weight).fields[field]
        shape = tuple(record.shape)
        stored = np.memmap(self.pack / record.file, np.dtype(record.dtype), "r+", record.offset, shape)
        stored[...] = change(np.array(stored))
        stored.flush()

    @property
    def manifest(self) -> Manifest:
        return records.loads((self.pack / "pack.json").read_bytes(), Manifest)


def save_model(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, list[Any]]],
    outputs: Sequence[tuple[str, int, list[Any]]],
    weights: dict[str, np.ndarray[Any, Any]],
    functions: Sequence[onnx.FunctionProto] = (),
) -> Path:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=list(functions))
    onnx.checker.check_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def weight(k: int, n: int, seed: int = SEED) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed + 1000 * k + n)
    return (rng.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    """Save a model (arguments of save_model after the folder) and build its pack."""

    def make(*arguments: Any, **named: Any) -> Built:
        folder = tmp_path_factory.mktemp("verify")
        model = save_model(folder, *arguments, **named)
        onnxpack.build(model, folder / "model.pack", weights="int8")
        return Built(model, folder / "model.pack")

    return make


@pytest.fixture
def mlp(packed: Callable[..., Built]) -> Built:
    """x [batch, 64] -> y [batch, 24], and the index of its largest element."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("Gemm", ["r", "w2", "b"], ["y"], "second", transB=1),
        helper.make_node("ArgMax", ["y"], ["label"], "argmax", axis=-1, keepdims=0),
    ]
    return packed(
        nodes,
        [("x", TensorProto.FLOAT, ["batch", 64])],
        [("y", TensorProto.FLOAT, ["batch", 24]), ("label", TensorProto.INT64, ["batch"])],
        {"w1": weight(64, 48), "w2": weight(48, 24).T.copy(), "b": np.linspace(-1, 1, 24, dtype=np.float32)},
    )


@pytest.fixture
def language_model(packed: Callable[..., Built]) -> Built:
    """input_ids [1, seq] -> logits [1, seq, 40]; every token is judged by itself."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["e"], "embed"),
        helper.make_node("MatMul", ["e", "w1"], ["h"], "up"),
        helper.make_node("Tanh", ["h"], ["t"], "tanh"),
        helper.make_node("MatMul", ["t", "w2"], ["logits"], "head"),
    ]
    return packed(
        nodes,
        [("input_ids", TensorProto.INT64, [1, "seq"])],
        [("logits", TensorProto.FLOAT, [1, "seq", 40])],
        {"table": weight(40, 32) * 6, "w1": weight(32, 64) * 2, "w2": weight(64, 40) * 3},
    )


@pytest.fixture(autouse=True)
def _quiet() -> None:
    ort.set_default_logger_severity(3)
