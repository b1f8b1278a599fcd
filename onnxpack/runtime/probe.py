"""What onnxruntime's int8 kernels do on this CPU: measured for correctness, read from the system for reports.

uint8 x int8 products saturate in 16 bits on x64 with AVX2 and no VNNI: 255*127 + 255*127 does not fit. There
`session.x64quantprecision=1` is exact; everywhere else it only costs time (9 times with AMX), so it is never set
blindly.
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

CpuLevel = Literal["amx", "vnni", "avx2", "none"]


@cache
def needs_precision() -> bool:
    """Whether sessions of this process must set `session.x64quantprecision`. Runs the kernel once.

    EnvironmentFault when the kernel is not exact either way.
    """
    if products_exact(precise=False):
        return False
    if products_exact(precise=True):
        return True
    raise EnvironmentFault(
        "onnxruntime's int8 product is not exact on this CPU", hint="use device='reference', or another onnxruntime"
    )


def products_exact(*, precise: bool) -> bool:
    """Multiply 255 by 127 all over through MatMulIntegerToFloat, as the host lowering does, and look at the sums."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if precise:
        options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(_model(), options, providers=["CPUExecutionProvider"])
    wanted = np.float32(127 * 127 * _K)
    return all((session.run(None, {"a": np.full((m, _K), 255, np.uint8)})[0] == wanted).all() for m in _ROWS)


def _model() -> bytes:
    inputs = [helper.make_tensor_value_info("a", TensorProto.UINT8, ["m", _K])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", _N])]
    constants = {
        "w": np.full((_K, _N), 127, np.int8),
        "one": np.float32(1),
        "w_scale": np.ones(_N, np.float32),
        "zero": np.uint8(128),
    }
    node = helper.make_node("MatMulIntegerToFloat", ["a", *constants], ["y"], domain="com.microsoft")
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph([node], "probe", inputs, outputs, tensors)
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
