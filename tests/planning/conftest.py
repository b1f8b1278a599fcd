"""A language model's graph without its weights, and short ways to a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_tools import qwen3_maker

from onnxpack.formats.select import Selection
from onnxpack.graph.load import Model, load
from onnxpack.graph.sites import Site, find_sites
from onnxpack.plan import Plan, make_plan
from onnxpack.shapes import Gemm

PlanOf = Callable[..., Plan]


@pytest.fixture(scope="session")
def plan_of() -> PlanOf:
    """plan_of(model, kernels="MxKxN,...", rows=..., budget=...): a plan of a proto, of a file, or of a loaded model."""

    def make(source: Any, kernels: str | None = None, **how: Any) -> Plan:
        model = source if isinstance(source, Model) else load(source)
        library = None if kernels is None else [Gemm.parse(text) for text in kernels.split(",") if text]
        return make_plan(model, Selection.parse("int8"), library, **how)

    return make


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, list[Site]]:
    """The 0.6B graph: 254 products, and a data file that is one hole of 2.4 GB."""
    maker = qwen3_maker()
    path = tmp_path_factory.mktemp("qwen3") / "qwen3.onnx"
    maker.build(path, maker.Config())
    model = load(path)
    return model, find_sites(model)


@pytest.fixture(scope="session")
def qwen3_path(qwen3: tuple[Model, list[Site]]) -> Path:
    return Path(qwen3[0].where)
