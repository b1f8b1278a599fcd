"""Plans of real graphs: every site is planned or has a reason, and whatever is planned can be executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxpack.errors import OnnxpackError
from onnxpack.graph.load import load
from onnxpack.graph.sites import find_sites
from onnxpack.planning.fits import check_plan

FOLDERS = ("edge", "families", "quark_small", "qwen3_tiny", "real", "quantized_a", "trained_a")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_model_that_loads(shared: Path, plan_of: Any, folder: str) -> None:
    planned = bound = 0
    for path in sorted((shared / "models" / folder).rglob("*.onnx")):
        try:
            model = load(path)
            sites = find_sites(model)
        except OnnxpackError:
            continue
        plan = plan_of(model, sites=sites, min_rows=1, rows=(128, 3))
        check_plan(plan, sites)
        done = [p for group in plan.groups for p in group.sites] + [entry.path for entry in plan.unplanned]
        assert sorted(done) == sorted(site.path for site in sites), path
        assert {e.path: e.reason for e in plan.unplanned if e.reason == "not-tileable"} == {
            site.path: site.reason for site in sites if site.reason == "not-tileable"
        }
        planned += plan.totals.planned
        bound += plan.totals.bound
    assert bound >= planned > 0
