"""Golden vectors, and running decoders as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxpack.formats.base import Encoded, FieldSpec, Format

DATA = Path(__file__).parents[1] / "data" / "formats"
Golden = Mapping[str, np.ndarray]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """The arrays of one golden file, by its stem."""
    cache: dict[str, Golden] = {}

    def load(stem: str) -> Golden:
        if stem not in cache:
            with np.load(DATA / f"{stem}.npz", allow_pickle=False) as file:
                cache[stem] = dict(file)
        return cache[stem]

    return load


def decoder_model(made: Format, encoded: Encoded, opset: int) -> onnx.ModelProto:
    """A model without inputs: the stored fields as initializers, the decoder's nodes, the weight as output."""
    decoder = made.decoder(encoded.shape, opset)
    fields = [
        numpy_helper.from_array(seen_as(encoded.fields[view.field], view.spec), name)
        for name, view in made.views(encoded.shape).items()
    ]
    output = helper.make_tensor_value_info(decoder.output, TensorProto.FLOAT, encoded.shape)
    graph = helper.make_graph(list(decoder.nodes), "decoder", [], [output], [*fields, *decoder.constants])
    ir = {13: 7, 14: 7, 18: 8, 21: 10, 23: 11, 26: 13}[opset]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def seen_as(array: np.ndarray, spec: FieldSpec) -> np.ndarray:
    """The bytes of a stored tensor as an initializer of a decoder sees them."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(spec.dtype).reshape(spec.shape)


def fitting(name: str, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape with as many rows more as the format's layout asks for."""
    rows = ROWS.get(name, 1)
    return -(-shape[0] // rows) * rows, shape[1]


ROWS = {
    "bitnet_hf": 4,
    "eetq": 2,
    "exl2": 8,
    "exl3": 128,
    "fp6_llm": 64,
    "hqq": 4,
    "int4_awq": 8,
    "int4_gptq": 32,
    "quip_sharp_e8p": 128,
    "spqr": 16,
}
"""Rows come in multiples of these."""


def stored(made: Format, shape: tuple[int, int]) -> Encoded:
    """A random weight in a format; random codes and factors where nothing encodes."""
    rng = np.random.default_rng(sum(shape))
    if made.encodes:
        return made.encode(rng.normal(0, 0.05, shape).astype(np.float32))
    fields = {}
    for name, spec in made.fields(shape).items():
        raw = rng.integers(0, 256, spec.nbytes, np.uint8).view(spec.dtype).reshape(spec.shape)
        fields[name] = rng.normal(0, 1, spec.shape).astype(spec.dtype) if spec.dtype.kind == "f" else raw
    return Encoded(made.name, shape, fields, made.params)


def run_onnxruntime(model: onnx.ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {})[0]


def run_reference(model: onnx.ModelProto) -> np.ndarray:
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, {})[0]


def same(a: Any, b: Any) -> bool:
    """Bit-exact up to the sign of zero; NaN equals NaN."""
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions above, for test modules (which cannot import a conftest)."""

    class Tools:
        model = staticmethod(decoder_model)
        onnxruntime = staticmethod(run_onnxruntime)
        reference = staticmethod(run_reference)
        same = staticmethod(same)
        bfloat16 = ml_dtypes.bfloat16
        fitting = staticmethod(fitting)
        stored = staticmethod(stored)

    return Tools
