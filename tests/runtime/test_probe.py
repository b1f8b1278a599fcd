"""The saturation probe agrees with what the processor says about itself."""

from __future__ import annotations

import platform

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


def test_levels() -> None:
    assert level_of("") == "none"
    assert level_of("processor : 0\nflags : avx2 fma\nflags : amx_int8\n") == "avx2"
    assert level_of("flags\t\t: avx2 avx512_vnni") == "vnni"
