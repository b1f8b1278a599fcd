"""The saturation probe agrees with what the processor says about itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnxpack.runtime.probe import cpu_level, level_of, needs_precision, products_exact


def test_precise_products_are_exact_on_every_cpu() -> None:
    assert products_exact(precise=True)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="saturation is a matter of x64")
def test_saturation_is_found_where_the_instructions_saturate() -> None:
    if cpu_level() == "none":
        pytest.skip("this system does not say what its processor can do")
    assert needs_precision() == (cpu_level() == "avx2")
    assert products_exact(precise=False) == (not needs_precision())


_EMULATOR = shutil.which("qemu-x86_64")


@pytest.mark.skipif(_EMULATOR is None, reason="qemu-x86_64 is not installed")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator runs this interpreter's own code")
def test_a_cpu_that_saturates_is_found_and_made_exact() -> None:
    """Haswell has AVX2 and no VNNI. Emulated, so the kernel and not the flags decide."""
    code = (
        "from onnxpack.runtime.probe import products_exact as exact, needs_precision as needs;"
        "print(exact(precise=False), exact(precise=True), needs())"
    )
    interpreter = str(Path(sys.executable).resolve())
    paths = f"import sys; sys.path[:] = {sys.path!r}; "
    command = [str(_EMULATOR), "-cpu", "Haswell", interpreter, "-c", paths + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr[-500:]


def test_levels() -> None:
    assert level_of("") == "none"
    assert level_of("processor : 0\nflags : avx2 fma\nflags : amx_int8\n") == "avx2"
    assert level_of("flags\t\t: avx2 avx512_vnni") == "vnni"
