"""The public names of the package: light to import, and functions for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

import onnxpack

HEAVY = ("numpy", "onnx", "onnx_ir", "onnxruntime", "ml_dtypes", "safetensors", "click", "rich")


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("code", ["import onnxpack", "import onnxpack; onnxpack.build; onnxpack.errors"])
def test_importing_costs_nothing(code: str) -> None:
    assert not loaded_by(code).intersection(HEAVY)


@pytest.mark.parametrize("name", ["census", "plan", "build", "load"])
def test_functions_stay_functions_when_modules_of_their_name_are_imported(name: str) -> None:
    import onnxpack.census as census_module  # noqa: F401
    import onnxpack.plan as plan_module  # noqa: F401
    from onnxpack.census import take_census
    from onnxpack.plan import make_plan

    function = getattr(onnxpack, name)
    assert callable(function)
    assert function.__module__ == "onnxpack.api"
    assert callable(take_census)
    assert callable(make_plan)


def test_a_test_may_still_replace_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxpack, "census", lambda model: model, raising=False)
    assert onnxpack.census("m") == "m"  # type: ignore[comparison-overlap, arg-type]


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        onnxpack.nothing  # noqa: B018
    assert set(onnxpack.__all__) <= {*dir(onnxpack), *onnxpack.__all__}
    assert onnxpack.__version__.count(".") >= 1
    assert onnxpack.formats.get("int8").name == "int8"
