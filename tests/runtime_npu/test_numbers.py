"""The NPU, the host and the reference give the same bits, for every shared model; and it was the NPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from npu_world import Machine, bind_all, edit, load, pack_of, same

import onnxpack
from onnxpack.errors import OnnxpackError
from onnxpack.pack.read import open_pack
from onnxpack.runtime.session import PackSession
from onnxpack.shapes import Gemm
from onnxpack.verify.inputs import input_specs
from onnxpack.verify.synthetic import random_feed, table_lengths

ROWS = 8
"""Of the kernels: calls are cut and padded."""


@pytest.fixture(autouse=True)
def _every_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPACK_NPU_MIN_ROWS", "1")


def exact_pack(source: Path, folder: Path) -> Path | None:
    """The pack of a model, every bound site on an exact kernel; None for what cannot be packed."""
    goal = folder / "model.pack"
    try:
        onnxpack.build(source, goal, weights="int8", force=True)
        manifest = open_pack(goal).manifest
    except OnnxpackError:
        return None
    bound = [site for site in manifest.sites if site.weight is not None]
    if not bound:
        return None
    bind_all(goal, sorted({Gemm(ROWS, int(s.k or 0), int(s.n or 0)) for s in bound}))
    edit(
        goal, plan=None, sites=[s if s.weight is None else replace(s, kernel="k", reason=None) for s in manifest.sites]
    )
    return goal


def feeds_of(session: PackSession, pack: Path) -> Iterator[dict[str, Any]]:
    """Two feeds of one shape, so that both ways to run a shape are met, one of another, and the first again."""
    lengths = table_lengths(onnx.load(pack / "model.onnx", load_external_data=False))
    specs = input_specs(session)
    symbols = sorted({dim for spec in specs for dim in spec.shape if isinstance(dim, str) and dim.isidentifier()})
    for seed, size in ((0, 9), (1, 9), (2, 9), (3, 5)):
        yield random_feed(specs, seed, dict.fromkeys(symbols[-1:], size), lengths)


def check(machine: Machine, pack: Path) -> int:
    """Run a pack on all devices; how many launches there were. -1 for what does not run at all."""
    try:
        host = load(pack, "host")
        feeds = list(feeds_of(host, pack))
        wanted = [host.run(None, feed) for feed in feeds]
    except Exception:
        return -1
    npu, reference = load(pack), load(pack, "reference")
    before = machine.launches
    for feed, result in zip(feeds, wanted, strict=True):
        found = npu.run(None, feed)
        same(found, result)
        same(reference.run(None, feed), result)
    if npu.coverage().device == "host":  # every product is in a body
        return 0
    claimed = sum(placed.where == "npu" for placed in npu._engine.placed)
    counters = npu.coverage().counters
    assert counters.get("npu", 0) + counters.get("host_rows", 0) == len(feeds) * claimed
    ran = [record for record in npu.trace() if record.run and record.where == "npu"]
    assert len(ran) == counters.get("npu", 0)
    assert sum(-(-int(record.rows or 0) // ROWS) for record in ran) == counters.get("launches", 0)
    assert machine.launches - before >= counters.get("launches", 0)
    assert "fallback" not in counters
    return int(counters.get("launches", 0))


FEW = ["families/*.onnx", "quark_small/a8w8_asym*17.onnx", "edge/i0*.onnx"]


def run_all(machine: Machine, shared: Path, folder: Path, patterns: list[str]) -> dict[str, int]:
    launches, wrong = dict[str, int](), list[str]()
    for path in sorted({path for pattern in patterns for path in (shared / "models").glob(pattern)}):
        name = str(path.relative_to(shared / "models"))
        pack = exact_pack(path, folder)
        if pack is not None:
            try:
                launches[name] = check(machine, pack)
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)
    return launches


@pytest.mark.shared
def test_some_shared_models(machine: Machine, shared: Path, tmp_path: Path) -> None:
    launches = run_all(machine, shared, tmp_path, FEW)
    assert sum(count > 0 for count in launches.values()) >= 15, launches


@pytest.mark.shared
@pytest.mark.slow
def test_all_shared_models(machine: Machine, shared: Path, tmp_path: Path) -> None:
    launches = run_all(machine, shared, tmp_path, ["**/*.onnx"])
    print({name: count for name, count in launches.items() if count <= 0})
    assert sum(count > 0 for count in launches.values()) >= 100, launches


@pytest.mark.shared
@pytest.mark.parametrize("name", ["qwen3_tiny/qwen3_tiny.onnx", "families/llama_tiny_fp16.onnx"])
def test_a_plan_of_the_planner(machine: Machine, shared: Path, tmp_path: Path, name: str) -> None:
    """Joins, padding and splits as planned for a library that fits roughly."""
    source = shared / "models" / name
    if not source.is_file():
        pytest.skip(f"{name} is not in the collection")
    shapes = [Gemm(16, 256, 640), Gemm(16, 128, 640), Gemm(32, 384, 256), Gemm(16, 560, 256)]
    pack = pack_of(source, tmp_path, shapes)
    npu, host = load(pack, strict=True), load(pack, "host")
    for feed in feeds_of(host, pack):
        same(npu.run(None, feed), host.run(None, feed))
    counters = npu.coverage().counters
    assert counters["launches"] > 0
    assert counters["npu"] > 0
