"""Packs made by hand: what a builder writes, without one, so that loading is tested on its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from onnxpack import records
from onnxpack.pack.digest import content_digest, files_digest
from onnxpack.pack.manifest import (
    SCHEMA,
    Coverage,
    FieldRecord,
    FileRecord,
    KernelRecord,
    Manifest,
    SiteRecord,
    SourceRecord,
    TensorRecord,
)
from onnxpack.pack.read import file_sha256
from onnxpack.quant.int8 import quantize_columns
from onnxpack.runtime.session import PackSession, basic_options, load

Array = npt.NDArray[Any]


@dataclass
class Draft:
    """A pack to be written. Weights are float32 [K, N]; the graph reads each one under its own name."""

    nodes: list[onnx.NodeProto]
    inputs: list[onnx.ValueInfoProto]
    outputs: list[onnx.ValueInfoProto]
    weights: Mapping[str, Array]
    sites: Sequence[tuple[str, str] | SiteRecord] | None = None
    """(node, weight) of the bound sites; by default every node of the main graph that reads a weight as its B."""
    initializers: Mapping[str, Array] = field(default_factory=dict)
    opset: int = 17
    ir_version: int = 8
    dtype: int = TensorProto.FLOAT
    m: int | str | None = None
    codes: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    """Codes and scales by weight, where a test wants its own instead of quantized ones."""
    kernels: Sequence[KernelRecord] = ()
    functions: Sequence[onnx.FunctionProto] = ()
    value_info: Sequence[onnx.ValueInfoProto] = ()

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        encoded = {name: self.codes.get(name) or quantized(w) for name, w in self.weights.items()}
        arrays = {f"{name}.{part}": a for name, pair in encoded.items() for part, a in zip(_PARTS, pair, strict=True)}
        save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, folder / _STORE)
        places = _places(folder / _STORE)
        (folder / "model.onnx").write_bytes(self._model(encoded, places).SerializeToString())
        (folder / "pack.json").write_text(records.dumps(self._manifest(folder, encoded, places)))
        return folder

    def _model(self, encoded: Mapping[str, tuple[Array, Array]], places: Mapping[str, FieldRecord]) -> onnx.ModelProto:
        decoders = [node for name in encoded for node in decoder(name, self.opset, self.dtype)]
        tensors = [numpy_helper.from_array(np.asarray(a), name) for name, a in self.initializers.items()]
        tensors += [external(name, place) for name, place in places.items()]
        inputs = list(self.inputs)
        if self.ir_version < 4:
            inputs += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in tensors]
        graph = helper.make_graph([*decoders, *self.nodes], "g", inputs, self.outputs, tensors)
        graph.value_info.extend(self.value_info)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        opsets += [helper.make_opsetid(f.domain, 1) for f in self.functions]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=self.ir_version, functions=self.functions, producer_name="tests"
        )

    def site_records(self) -> list[SiteRecord]:
        pairs = self.sites
        if pairs is None:
            bound = (n for n in self.nodes if n.op_type in ("MatMul", "Gemm") and n.input[1] in self.weights)
            pairs = [(n.name, n.input[1]) for n in bound]
        kinds = {n.name: n.op_type for n in self.nodes}
        made = []
        for entry in pairs:
            if isinstance(entry, SiteRecord):
                made.append(entry)
                continue
            node, weight = entry
            k, n = self.weights[weight].shape
            op = kinds.get(node, "MatMul")
            made.append(
                SiteRecord(node, node, op, "weight", self.m, k, n, "float32", weight=weight, reason="no-kernel")
            )
        return made

    def _manifest(self, folder: Path, encoded: Mapping[str, Any], places: Mapping[str, FieldRecord]) -> Manifest:
        tensors = []
        for name, w in self.weights.items():
            fields = {part: places[f"{name}.{part}"] for part in _PARTS}
            tensors.append(TensorRecord(name, w.shape, "int8", {}, fields, name, w.nbytes, {}))
        sites = self.site_records()
        files = [
            FileRecord(name, (folder / name).stat().st_size, file_sha256(folder / name))
            for name in ("model.onnx", _STORE)
        ]
        bound = sum(site.weight is not None for site in sites)
        return Manifest(
            schema=SCHEMA,
            producer="tests",
            source=SourceRecord("source.onnx", "0" * 64, "0" * 64, self.opset),
            target="npu2",
            opset=self.opset,
            domains={},
            tensors=tensors,
            sites=sites,
            kernels=list(self.kernels),
            coverage=Coverage(len(sites), len(sites), bound, 0),
            changes=[],
            files=files,
            content_digest=content_digest(files[0].sha256, "", tensors, sites, list(self.kernels)),
            files_digest=files_digest(files),
        )


_PARTS = ("codes", "scales")
_STORE = "weights.safetensors"


def quantized(w: Array) -> tuple[Array, Array]:
    codes, scales = np.empty(w.shape, np.int8), np.empty(w.shape[1], np.float32)
    quantize_columns(w, codes, scales)
    return codes, scales


def decoder(name: str, opset: int, dtype: int) -> Iterator[onnx.NodeProto]:
    codes, scales = f"{name}.codes", f"{name}.scales"
    out = name if dtype == TensorProto.FLOAT else f"{name}.float32"
    if opset >= 13:
        yield helper.make_node("DequantizeLinear", [codes, scales], [out], f"{name}.decode", axis=1)
    else:
        yield helper.make_node("Cast", [codes], [f"{name}.cast"], f"{name}.decode", to=TensorProto.FLOAT)
        yield helper.make_node("Mul", [f"{name}.cast", scales], [out], f"{name}.scale")
    if out != name:
        yield helper.make_node("Cast", [out], [name], f"{name}.narrow", to=dtype)


def external(name: str, place: FieldRecord) -> TensorProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(place.dtype))
    tensor = TensorProto(name=name, data_type=kind, dims=place.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", place.file), ("offset", place.offset), ("length", place.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _places(file: Path) -> dict[str, FieldRecord]:
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        begin, end = entry["data_offsets"]
        dtype = {"I8": "int8", "F32": "float32"}[entry["dtype"]]
        digest = hashlib.sha256(data[start + begin : start + end]).hexdigest()
        found[name] = FieldRecord(file.name, start + begin, end - begin, dtype, tuple(entry["shape"]), digest)
    return found


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a pack; the arguments are those of Draft."""

    def write(*arguments: Any, **named: Any) -> Path:
        return Draft(*arguments, **named).write(tmp_path_factory.mktemp("packs") / "model.pack")

    return write


@dataclass(frozen=True)
class Pair:
    """One pack on both devices, at ORT_ENABLE_BASIC."""

    host: PackSession
    reference: PackSession

    def run(self, feeds: Mapping[str, Any], names: Sequence[str] | None = None) -> list[Any]:
        """Results of both, which must be the same bytes; NaN equals NaN."""
        with np.errstate(all="raise", under="ignore"):
            wanted = self.reference.run(names, feeds)
        found = self.host.run(names, feeds)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)
        return wanted


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, list):
        assert isinstance(b, list)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif a is None or b is None:
        assert a is b
    else:
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)
        if a.dtype.kind == "f":  # assert_array_equal takes -0.0 for 0.0
            known = ~np.isnan(a)
            np.testing.assert_array_equal(np.signbit(a[known]), np.signbit(b[known]))


@pytest.fixture(scope="session")
def both() -> Callable[[Path], Pair]:
    """Load a pack on both devices."""

    def make(folder: Path) -> Pair:
        return Pair(load(folder, "host", session_options=basic_options()), load(folder, "reference"))

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Only errors of onnxruntime reach the terminal; packs made by hand have unused values here and there."""
    ort.set_default_logger_severity(3)
