"""Small ONNX models for tests, and what tests do with them: save, run, call the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")

node = helper.make_node


def value(name: str, shape: Sequence[int | str] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def tensor(name: str, array: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(array) if np.ndim(array) else np.asarray(array), name)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def coded(k: int, n: int) -> Array:
    """A weight whose elements encode their own position, so that any permutation shows."""
    rows, columns = np.indices((k, n))
    return ((rows * 131 + columns * 17) % 251 - 125).astype(np.float32)


def model(
    nodes: Iterable[onnx.NodeProto],
    tensors: Iterable[onnx.TensorProto] = (),
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    outputs: Sequence[str | onnx.ValueInfoProto] = ("y",),
    *,
    opset: int = 21,
    ir_version: int = 10,
    domains: Mapping[str, int] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    types: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """By default one input x [M, 48]; outputs are float without a stated shape unless `types` says otherwise."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [value("x", ["M", 48])] if inputs is None else list(inputs),
        [value(v, None, (types or {}).get(v, TensorProto.FLOAT)) if isinstance(v, str) else v for v in outputs],
        list(tensors),
    )
    imports = {"": opset, "com.microsoft": 1, **(domains or {})}
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(*entry) for entry in imports.items()],
        ir_version=ir_version,
        functions=list(functions),
        producer_name="tests",
    )


def matmul(k: int = 48, n: int = 80, m: int | str = "M", opset: int = 21, w: Array | None = None) -> onnx.ModelProto:
    """One MatMul of x [m, k] with an initializer W [k, n]."""
    w = normal(k, n) if w is None else w
    return model([node("MatMul", ["x", "W"], ["y"], "mm")], [tensor("W", w)], [value("x", [m, k])], opset=opset)


def chain(*weights: Array, opset: int = 21) -> onnx.ModelProto:
    """x through one MatMul after the other; weights are called W0, W1, ..."""
    nodes, at = [], "x"
    for i in range(len(weights)):
        out = "y" if i == len(weights) - 1 else f"h{i}"
        nodes.append(node("MatMul", [at, f"W{i}"], [out], f"mm{i}"))
        at = out
    tensors = [tensor(f"W{i}", w) for i, w in enumerate(weights)]
    return model(nodes, tensors, [value("x", ["M", weights[0].shape[0]])], opset=opset)


def external(
    name: str,
    location: str | bytes,
    shape: Sequence[int],
    offset: int | str | None = 0,
    length: int | str | None = None,
    dtype: int = TensorProto.FLOAT,
) -> onnx.TensorProto:
    made = TensorProto(name=name, dims=shape, data_type=dtype, data_location=TensorProto.EXTERNAL)
    for key, entry in (("location", location), ("offset", offset), ("length", length)):
        if entry is not None:
            made.external_data.add(key=key, value=entry if isinstance(entry, bytes) else str(entry))
    return made


def save(path: Path, proto: onnx.ModelProto) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return path


def session(path: Path, level: str = "ORT_ENABLE_ALL") -> Any:
    """Stock onnxruntime, kept from quantizing activations by itself."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int16)": np.int16,
    "tensor(bool)": np.bool_,
}


def feeds(opened: Any, seed: int = 0, symbols: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Random inputs; symbolic dimensions are 3 unless `symbols` says otherwise."""
    rng = np.random.default_rng(seed)
    made = {}
    for entry in opened.get_inputs():
        shape = [d if isinstance(d, int) else (symbols or {}).get(d, 3) for d in entry.shape]
        dtype = np.dtype(_TYPES[entry.type])
        numbers = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 4, shape)
        made[entry.name] = (np.ones(shape) if dtype.kind == "b" else numbers).astype(dtype)
    return made


def difference(expected: Array, found: Array) -> float:
    """Largest absolute difference over the largest expected value; equal infinities and NaNs count as equal."""
    assert expected.shape == found.shape
    assert expected.dtype == found.dtype
    a, b = expected.astype(np.float64), found.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b))
    largest = np.abs(a[np.isfinite(a)]).max(initial=0.0)
    return float(gap.max(initial=0.0) / (largest or 1.0))


def cli(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """`onnxpack ...` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "onnxpack", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        timeout=timeout,
        check=False,
    )


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a directory, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def empty_branches(condition: str, output: str, then: onnx.TensorProto, otherwise: onnx.TensorProto) -> onnx.NodeProto:
    """An If whose branches have no nodes, only an initializer each."""
    branches = [
        helper.make_graph([], name, [], [value(t.name, list(t.dims), t.data_type)], [t])
        for name, t in (("then", then), ("else", otherwise))
    ]
    return node("If", [condition], [output], then_branch=branches[0], else_branch=branches[1])
