"""What onnxruntime's int8 kernels do on this CPU: measured for correctness, read from the system for reports.

uint8 x int8 products saturate in 16 bits on x64 with AVX2 and no VNNI: 255*127 + 255*127 does not fit. There weights
are given as uint8, which is exact; everywhere else that only costs time (9 times with AMX), so it is never done
blindly. onnxruntime's own `session.x64quantprecision` does the same thing, but not below the extended level, and not
when two products share a weight: it then refuses the graph.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from onnxpack.errors import EnvironmentFault

_CPUINFO = Path("/proc/cpuinfo")
_ROWS = (1, 4, 33)
_K, _N = 256, 48
_SUM = 127 * 127 * _K

CpuLevel = Literal["amx", "vnni", "avx2", "none"]


@cache
def needs_precision() -> bool:
    """Whether weights must be uint8 for products to be exact here. Runs the kernels once.

    EnvironmentFault when they are not exact either way.
    """
    if products_exact(unsigned_weights=False):
        return False
    if products_exact(unsigned_weights=True):
        return True
    raise EnvironmentFault(
        "onnxruntime's int8 product is not exact on this CPU", hint="use device='reference', or another onnxruntime"
    )


def products_exact(*, unsigned_weights: bool) -> bool:
    """Multiply 255 by 127 all over through each operator that the host lowering uses, and look at the sums."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(_model(unsigned_weights), options, providers=["CPUExecutionProvider"])
    wanted = (_SUM, _SUM, 100)
    results = (session.run(None, {"a": np.full((m, _K), 255, np.uint8)}) for m in _ROWS)
    return all((y == sums).all() for found in results for y, sums in zip(found, wanted, strict=True))


def _model(unsigned_weights: bool) -> bytes:
    """Three products of `a` by a weight of 127: as int8, or as uint8 with zero point 128."""
    dtype, middle = (np.uint8, 128) if unsigned_weights else (np.int8, 0)
    inputs = [helper.make_tensor_value_info("a", TensorProto.UINT8, ["m", _K])]
    kinds = {"y": TensorProto.FLOAT, "sums": TensorProto.INT32, "codes": TensorProto.UINT8}
    outputs = [helper.make_tensor_value_info(name, kind, ["m", _N]) for name, kind in kinds.items()]
    constants = {
        "w": np.full((_K, _N), 127 + middle, dtype),
        "one": np.float32(1),
        "w_scale": np.ones(_N, np.float32),
        "zero": np.uint8(128),
        "w_zero": dtype(middle),
        "y_scale": np.float32(_SUM / 100),
        "y_zero": np.uint8(0),
    }
    of_both = ["w", "one", "w_scale", "zero", "w_zero"]
    nodes = [
        helper.make_node("MatMulIntegerToFloat", ["a", *of_both], ["y"], domain="com.microsoft"),
        helper.make_node("MatMulInteger", ["a", "w", "zero", "w_zero"], ["sums"]),
        helper.make_node(
            "QLinearMatMul", ["a", "one", "zero", "w", "w_scale", "w_zero", "y_scale", "y_zero"], ["codes"]
        ),
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "probe", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(model.SerializeToString())


@cache
def cpu_level() -> CpuLevel:
    """The best int8 instructions of this CPU that onnxruntime uses; "none" where the system does not tell."""
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        return "none"
    return level_of(text)


def level_of(cpuinfo: str) -> CpuLevel:
    """The level that the text of /proc/cpuinfo speaks of.

    >>> level_of("flags : fpu avx2 avx512_vnni amx_int8"), level_of("flags : avx2 avx_vnni"), level_of("flags : sse2")
    ('amx', 'vnni', 'none')
    """
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        name, _, values = line.partition(":")
        if name.strip() == "flags":
            flags = set(values.split())
            break
    if "amx_int8" in flags:
        return "amx"
    if flags & {"avx512_vnni", "avx_vnni"}:
        return "vnni"
    return "avx2" if "avx2" in flags else "none"
