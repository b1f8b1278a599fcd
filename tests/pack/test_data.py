"""The float data file: pages, equal bytes once, digests; and digests of a pack over what decides its numbers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_maker import model, node, normal, tensor, value

import onnxpack
from onnxpack.graph.tensors import TensorStore
from onnxpack.pack.data import ALIGNMENT, lay_out, write
from onnxpack.pack.digest import content_digest, files_digest
from onnxpack.pack.manifest import FieldRecord, FileRecord, KernelRecord, SiteRecord, TensorRecord

STORE = TensorStore({})


def tensors(*arrays: Any) -> list[ir.TensorProtocol]:
    return [ir.tensor(np.asarray(array), name=f"t{i}") for i, array in enumerate(arrays)]


def test_each_tensor_on_its_own_page(tmp_path: Path) -> None:
    arrays = [normal(1000), normal(3), np.arange(5000, dtype=np.int64), np.zeros(0, np.float32)]
    plan = lay_out(tensors(*arrays), STORE)
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)
    digest = write(tmp_path / "d", plan, STORE)
    data = (tmp_path / "d").read_bytes()
    assert len(data) == plan.nbytes
    assert digest == hashlib.sha256(data).hexdigest()
    for array, offset in zip(arrays, plan.offsets, strict=True):
        assert data[offset : offset + array.nbytes] == array.tobytes()


def test_equal_bytes_are_written_once_whatever_their_type() -> None:
    a = normal(500)
    twin, near = a.copy(), a.copy()
    near.view(np.uint32)[499] ^= 1
    held = tensors(a, twin, near, a.view(np.int32), a[:-1])
    plan = lay_out(held, STORE)
    assert [plan.place_of[id(t)] for t in held] == [0, 0, 1, 0, 2]
    assert len(plan.tensors) == 3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2)), max_size=8))
def test_any_tensors_are_found_again(tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]]) -> None:
    held = tensors(*(np.full(n, fill, np.uint8) for n, fill in sizes))
    plan = lay_out(held, STORE)
    path = tmp_path_factory.mktemp("d") / "d"
    assert write(path, plan, STORE) == hashlib.sha256(path.read_bytes()).hexdigest()
    data = path.read_bytes()
    for t, (n, fill) in zip(held, sizes, strict=True):
        offset = plan.offsets[plan.place_of[id(t)]]
        assert data[offset : offset + n] == bytes([fill]) * n
    kinds = {(n, fill if n else 0) for n, fill in sizes}
    assert len(plan.tensors) == len(kinds)


def test_large_floats_leave_the_graph_and_small_ones_stay(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "W"], ["a"]), node("Add", ["a", "big"], ["b"]), node("Mul", ["b", "small"], ["y"])]
    held = [tensor("W", normal(48, 80)), tensor("big", normal(30, 80)), tensor("small", normal(80))]
    onnxpack.build(model(nodes, held, [value("x", [30, 48])]), tmp_path / "p", weights="int8")
    written = onnx.load(tmp_path / "p" / "model.onnx", load_external_data=False)
    places = {t.name: {e.key: e.value for e in t.external_data} for t in written.graph.initializer}
    assert places["big"] == {"location": "model.data", "offset": "0", "length": str(30 * 80 * 4)}
    assert places["small"] == {}
    assert (tmp_path / "p" / "model.data").stat().st_size == 30 * 80 * 4


# -- digests -------------------------------------------------------------------------------------------------------

FIELD = FieldRecord("w", 0, 4, "int8", (2, 2), "a" * 64)
TENSOR = TensorRecord("W", (2, 2), "int8", {}, {"codes": FIELD}, "W", 16, {"relative_rms": 0.1})
SITE = SiteRecord("MatMul_0", "mm", "MatMul", "weight", "M", 2, 2, "float32", "W", None, "no-kernel")
KERNEL = KernelRecord("key", 1, 2, 3, "kernels/key.elf", "b" * 64, "gemm_i8")


def digest(**changes: Any) -> str:
    parts = {"graph": "g", "data": "d", "tensors": [TENSOR], "sites": [SITE], "kernels": [KERNEL]} | changes
    return content_digest(*(parts[name] for name in ("graph", "data", "tensors", "sites", "kernels")))


def but(record: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(record, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"graph": "h"},
        {"data": "e"},
        {"tensors": []},
        {"tensors": [but(TENSOR, name="V")]},
        {"tensors": [but(TENSOR, shape=(4, 1))]},
        {"tensors": [but(TENSOR, format="q4nx")]},
        {"tensors": [but(TENSOR, params={"bits": 4})]},
        {"tensors": [but(TENSOR, fields={"codes": but(FIELD, sha256="c" * 64)})]},
        {"tensors": [but(TENSOR, fields={"other": FIELD})]},
        {"sites": [but(SITE, weight=None)]},
        {"sites": [but(SITE, reason="dynamic-weight")]},
        {"kernels": []},
        {"kernels": [but(KERNEL, key="other")]},
        {"kernels": [but(KERNEL, m=2)]},
    ],
)
def test_what_decides_the_numbers_is_in_the_content_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_what_differs_from_build_to_build_is_not() -> None:
    """An ELF has time stamps; where a field lies in its file follows from the rest."""
    assert digest(kernels=[but(KERNEL, sha256="d" * 64, file="kernels/other.elf")]) == digest()
    assert digest(tensors=[but(TENSOR, fields={"codes": but(FIELD, offset=4096)})]) == digest()


def test_the_files_digest_is_over_every_file() -> None:
    one = FileRecord("model.onnx", 3, "a" * 64)
    changed = [but(one, path="m"), but(one, nbytes=4), but(one, sha256="b" * 64)]
    assert len({files_digest([f]) for f in [one, *changed]} | {files_digest([one, one]), files_digest([])}) == 6
