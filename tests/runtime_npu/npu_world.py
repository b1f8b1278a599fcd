"""A machine with an NPU that is not there, and packs with kernels for it."""

from __future__ import annotations

import gc
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import elfs
import fake_pyxrt
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from fake_pyxrt import Machine
from onnx import TensorProto, helper, numpy_helper

import onnxpack
from onnxpack import records
from onnxpack.pack.digest import files_digest
from onnxpack.pack.manifest import FileRecord, KernelRecord, Manifest
from onnxpack.pack.read import open_pack
from onnxpack.planning.records import Execution
from onnxpack.runtime.npu import switches
from onnxpack.runtime.session import PackSession, basic_options
from onnxpack.shapes import Gemm

Array = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No switch of the environment reaches a test, and no other process its lock; onnxruntime is quiet."""
    for name in vars(switches).values():
        if isinstance(name, str) and name.startswith("ONNXPACK_"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(switches.LOCK, str(tmp_path / "npu.lock"))
    ort.set_default_logger_severity(3)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """An NPU. Whatever a test does with it: nothing of the driver's is left, and nothing was done in a wrong order."""
    made = Machine()
    monkeypatch.setitem(sys.modules, "pyxrt", fake_pyxrt.module(made))
    yield made
    gc.collect()
    assert not made.violations
    assert not made.left()


@dataclass
class Model:
    """A model to be packed, with kernels of these shapes."""

    nodes: Sequence[onnx.NodeProto]
    inputs: Sequence[onnx.ValueInfoProto]
    outputs: Sequence[onnx.ValueInfoProto]
    constants: Mapping[str, Array]
    kernels: Sequence[Gemm]
    opset: int = 17
    plan: Callable[[Execution], Execution | None] | None = None
    """Changes to the plan that the builder made."""
    functions: Sequence[onnx.FunctionProto] = field(default_factory=list)

    def pack(self, folder: Path) -> Path:
        """Build it."""
        tensors = [numpy_helper.from_array(np.asarray(a), name) for name, a in self.constants.items()]
        graph = helper.make_graph(list(self.nodes), "g", list(self.inputs), list(self.outputs), tensors)
        opsets = [helper.make_opsetid("", self.opset)]
        source = folder / "model.onnx"
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), source)
        return pack_of(source, folder, self.kernels, self.plan)


def pack_of(
    source: Path,
    folder: Path,
    kernels: Iterable[Gemm],
    plan: Callable[[Execution], Execution | None] | None = None,
) -> Path:
    """The pack of a model file, with kernels of these shapes, and its plan as `plan` changes it."""
    goal, library = folder / "model.pack", elfs.library(folder / "library", kernels)
    onnxpack.build(source, goal, weights="int8", kernels=str(library))
    if plan is not None:
        manifest = open_pack(goal).manifest
        assert manifest.plan is not None
        edit(goal, plan=plan(manifest.plan))
    return goal


def edit(pack: Path, **changes: Any) -> None:
    """Another manifest; digests of files are made to fit."""
    manifest = replace(records.loads((pack / "pack.json").read_bytes(), Manifest), **changes)
    files = [
        replace(
            f, nbytes=(pack / f.path).stat().st_size, sha256=hashlib.sha256((pack / f.path).read_bytes()).hexdigest()
        )
        for f in manifest.files
    ]
    manifest = replace(manifest, files=files, files_digest=files_digest(files))
    (pack / "pack.json").write_text(records.dumps(manifest))


def bind_all(pack: Path, shapes: Iterable[Gemm]) -> None:
    """Put kernels of these shapes into a pack, whether its plan has a use for them or not."""
    manifest = open_pack(pack).manifest
    kernels, files = list(manifest.kernels), list(manifest.files)
    for gemm in shapes:
        data, name = elfs.elf(gemm), f"kernels/{gemm}-all.elf"
        (pack / name).parent.mkdir(exist_ok=True)
        (pack / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        kernels.append(KernelRecord(digest, gemm.m, gemm.k, gemm.n, name, digest, "gemm_i8"))
        files.append(FileRecord(name, len(data), digest))
    edit(pack, kernels=kernels, files=files)


def info(name: str, shape: Sequence[Any] | None = None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


BLOCK = {"q": (64, 96), "k": (64, 32), "o": (96, 64)}
"""(K, N) of the sites of `block`."""


def block(kernels: Sequence[Gemm] | None = None, layers: int = 1, **more: Any) -> Model:
    """q and k read the same value, o what comes of q; every layer adds to its input, and needs k's sums."""
    nodes, constants, x = list[onnx.NodeProto](), dict[str, Array](), "x"
    for layer in range(layers):
        n = {name: f"{name}{layer}" for name in ("q", "k", "o", "t", "s", "u", "v", "out")}
        for number, (site, shape) in enumerate(BLOCK.items()):
            constants[f"w{n[site]}"] = normal(*shape, seed=10 * layer + number)
        nodes += [
            helper.make_node("MatMul", [x, f"w{n['q']}"], [n["q"]], f"site_{n['q']}"),
            helper.make_node("MatMul", [x, f"w{n['k']}"], [n["k"]], f"site_{n['k']}"),
            helper.make_node("Sigmoid", [n["q"]], [n["t"]], f"sigmoid_{layer}"),
            helper.make_node("MatMul", [n["t"], f"w{n['o']}"], [n["o"]], f"site_{n['o']}"),
            helper.make_node("ReduceMean", [n["k"]], [n["s"]], f"mean_{layer}", axes=[-1], keepdims=1),
            helper.make_node("Add", [n["o"], n["s"]], [n["u"]], f"add_{layer}"),
            helper.make_node("Add", [n["u"], x], [n["out"]], f"residual_{layer}"),
        ]
        x = n["out"]
    shapes = [Gemm(32, *shape) for shape in BLOCK.values()] if kernels is None else list(kernels)
    return Model(nodes, [info("x", ["b", "t", 64])], [info(x, ["b", "t", 64])], constants, shapes, **more)


@pytest.fixture(scope="session")
def _block_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return block().pack(tmp_path_factory.mktemp("block"))


@pytest.fixture
def block_pack(_block_pack: Path, tmp_path: Path) -> Path:
    """One block: three sites, each with its exact kernel of 32 rows."""
    return shutil.copytree(_block_pack, tmp_path / "block.pack")


def load(pack: Path, device: Any = "npu", **more: Any) -> PackSession:
    return onnxpack.load(pack, device, session_options=basic_options(), **more)


def x_of(rows: int, batch: int = 1, seed: int = 3, k: int = 64) -> dict[str, Array]:
    return {"x": normal(batch, rows, k, seed=seed + rows)}


def same(found: Any, wanted: Any) -> None:
    """The same types, shapes and bits; any NaN is any other."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, list):
            same(a, b)
        elif b is None:
            assert a is None
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(a, b)
            if a.dtype.kind == "f":
                known = ~np.isnan(a)
                np.testing.assert_array_equal(np.signbit(a[known]), np.signbit(b[known]))


def last_run(session: PackSession) -> dict[str, list[tuple[str, int | None, str | None, str | None]]]:
    """Where each site ran in the last run: place, rows, reason and event."""
    trace = session.trace()
    last = max(record.run for record in trace)
    found: dict[str, list[tuple[str, int | None, str | None, str | None]]] = {}
    for record in trace:
        if record.run == last and record.site is not None and last:
            found.setdefault(record.site, []).append((record.where, record.rows, record.reason, record.event))
    return found
