"""Measured figures for the planner: kernels on the device that is here, and products on this host.

A kernel counts only when its known product comes out right; its figure is the median of its launches. What was not
measured keeps the cost model's default.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnxpack.errors import EnvironmentFault
from onnxpack.kernels.checking import Checked, check_library
from onnxpack.kernels.diagnosis import driver_version
from onnxpack.planning.costs import Costs
from onnxpack.runtime.session import PackSession

_SIDE = 1024
_ROWS = (16, 256)
_REPEATS = 15


def calibrate(kernels: str, *, host: bool = True) -> Costs:
    """Launch every kernel of a directory or list, and time products on the host.

    EnvironmentFault when not one kernel ran and gave its known product: then nothing was learned of the device.
    """
    times, refused = _kernel_times(check_library(kernels, on_device=True))
    if not times:
        why = refused[0] if refused else "it holds no kernels"
        raise EnvironmentFault(f"no kernel ran: {why}", where=kernels, hint="see `onnxpack doctor`")
    source = f"measured by `onnxpack bench --calibrate`: {len(times)} kernels, driver {driver_version() or 'unknown'}"
    costs = Costs(source=source, kernels=times)
    if not host:
        return costs
    call, rate = host_figures()
    return replace(costs, host_call_us=call, host_products_per_us=rate)


def _kernel_times(checks: Sequence[Checked]) -> tuple[dict[str, float], list[str]]:
    times: dict[str, float] = {}
    refused = []
    for checked in checks:
        if checked.trial is not None and checked.trial.passed and checked.shape is not None:
            times[checked.shape] = round(statistics.median(checked.trial.launches_us), 1)
        else:
            refused.append(checked.problem or (checked.trial.reason if checked.trial else None) or "not run")
    return times, refused


def host_figures(side: int = _SIDE) -> tuple[float, float]:
    """Microseconds of a host product beside its arithmetic, and multiply-accumulates a microsecond.

    Two row counts of one side x side product through the host path of a real pack; a line through both medians.
    """
    with tempfile.TemporaryDirectory(prefix="onnxpack-calibrate-") as folder:
        session = _host_session(Path(folder), side)
        few, many = (_median_us(session, rows, side) for rows in _ROWS)
    products = [rows * side * side for rows in _ROWS]
    rate = (products[1] - products[0]) / max(many - few, 1e-3)
    return round(max(0.0, few - products[0] / rate), 1), round(rate, 1)


def _host_session(folder: Path, side: int) -> PackSession:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from onnxpack.api import build, load

    weight = np.random.default_rng(0).standard_normal((side, side), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", side])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", side])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert isinstance(model, onnx.ModelProto)
    build(model, folder / "product.pack", weights="int8")
    return load(folder / "product.pack", "host")


def _median_us(session: PackSession, rows: int, side: int) -> float:
    x = np.random.default_rng(rows).standard_normal((rows, side), np.float32)
    taken = []
    for _ in range(_REPEATS + 2):
        start = time.perf_counter()
        session.run(None, {"x": x})
        taken.append(1e6 * (time.perf_counter() - start))
    return statistics.median(taken[2:])
