"""The saturation probe agrees with what the processor says about itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_maker import model, node, tensor, value
from onnx import TensorProto

import onnxpack
from onnxpack.runtime.probe import cpu_level, level_of, needs_precision, products_exact


def test_products_of_unsigned_weights_are_exact_on_every_cpu() -> None:
    assert products_exact(unsigned_weights=True)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="saturation is a matter of x64")
def test_saturation_is_found_where_the_instructions_saturate() -> None:
    if cpu_level() == "none":
        pytest.skip("this system does not say what its processor can do")
    assert needs_precision() == (cpu_level() == "avx2")
    assert products_exact(unsigned_weights=False) == (not needs_precision())


_EMULATOR = shutil.which("qemu-x86_64")


@pytest.mark.skipif(_EMULATOR is None, reason="qemu-x86_64 is not installed")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator runs this interpreter's own code")
def test_a_cpu_that_saturates_is_found_and_made_exact() -> None:
    """Haswell has AVX2 and no VNNI. Emulated, so the kernel and not the flags decide."""
    code = (
        "from onnxpack.runtime.probe import products_exact as exact, needs_precision as needs;"
        "print(exact(unsigned_weights=False), exact(unsigned_weights=True), needs())"
    )
    assert _on_haswell(code).split() == ["False", "True", "True"]


def _on_haswell(code: str) -> str:
    interpreter = str(Path(sys.executable).resolve())
    paths = f"import sys; sys.path[:] = {sys.path!r}\n"
    command = [str(_EMULATOR), "-cpu", "Haswell", interpreter, "-c", paths + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@pytest.mark.skipif(_EMULATOR is None, reason="qemu-x86_64 is not installed")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator runs this interpreter's own code")
def test_packs_are_exact_on_a_cpu_that_saturates(tmp_path: Path) -> None:
    """Extremes everywhere, one weight for two groups and one for two float products, at two optimization levels."""
    k, n = 64, 48
    w = np.where(np.arange(k * n).reshape(k, n) % 3, 127, -128).astype(np.int8)
    zero = np.arange(n).astype(np.int8)
    constants = {"w": w, "zw": zero, "sw": np.linspace(0.01, 0.02, n, dtype=np.float32), "s": np.float32(0.02)}
    constants |= {"v": (w[:, :8] / np.float32(3)).astype(np.float32), "sy": np.float32(9), "zy": np.int8(3)}
    nodes = [
        node("DequantizeLinear", ["w", "sw", "zw"], ["w_dq"], axis=1),
        node("DequantizeLinear", ["x", "s"], ["x_dq"]),
        node("MatMul", ["x_dq", "w_dq"], ["p"]),
        node("QuantizeLinear", ["p", "sy", "zy"], ["y"]),
        node("MatMul", ["x_dq", "w_dq"], ["y2"]),
        node("MatMul", ["f", "v"], ["y3"]),
        node("Relu", ["f"], ["g"]),
        node("MatMul", ["g", "v"], ["y4"]),
    ]
    inputs = [value("x", ["m", k], TensorProto.UINT8), value("f", ["m", k])]
    tensors = [tensor(name, array) for name, array in constants.items()]
    proto = model(nodes, tensors, inputs, ["y", "y2", "y3", "y4"], opset=17, types={"y": TensorProto.INT8})
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    onnxpack.build(tmp_path / "model.onnx", tmp_path / "model.pack", weights="int8")
    x = np.full((5, k), 255, np.uint8)
    x[1], x[2] = 0, 254
    feed = {"x": x, "f": np.where(np.arange(5 * k).reshape(5, k) % 7, 1, -1).astype(np.float32)}
    wanted = onnxpack.load(tmp_path / "model.pack", "reference").run(None, feed)
    np.savez(tmp_path / "feed.npz", **feed)
    np.savez(tmp_path / "wanted.npz", *wanted)
    code = f"""
import numpy as np, onnxpack
from onnxpack.runtime.session import basic_options
feed, wanted = (dict(np.load({str(tmp_path)!r} + name)) for name in ("/feed.npz", "/wanted.npz"))
for options in (None, basic_options()):
    found = onnxpack.load({str(tmp_path / "model.pack")!r}, "host", options).run(None, feed)
    print(*(np.array_equal(a, b) for a, b in zip(found, wanted.values())))
"""
    assert _on_haswell(code).split() == ["True"] * 8


def test_levels() -> None:
    assert level_of("") == "none"
    assert level_of("processor : 0\nflags : avx2 fma\nflags : amx_int8\n") == "avx2"
    assert level_of("flags\t\t: avx2 avx512_vnni") == "vnni"
