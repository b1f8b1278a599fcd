"""PackSession against onnxruntime.InferenceSession: same interface, same errors; and what is our own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxpack.errors import EnvironmentFault, PackError, UsageError
from onnxpack.pack.manifest import KernelRecord, SiteRecord
from onnxpack.runtime.options import copy_options, session_options
from onnxpack.runtime.session import PackSession, load
from onnxpack.runtime.trace import KEPT_RUNS, TraceRecord

Make = Callable[..., Any]

DEVICES = ["host", "reference"]


def info(name: str, shape: Any = None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


@pytest.fixture(scope="module")
def folder(pack: Make) -> Path:
    """Two bound sites and one that is not; two inputs, two outputs."""
    w = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("MatMul", ["h", "w"], ["y"], "second"),
        helper.make_node("MatMul", ["y", "other"], ["z"], "third"),
    ]
    sites = [
        SiteRecord("first", "first", "MatMul", "weight", "b*t", 8, 8, "float32", weight="w", reason="no-kernel"),
        SiteRecord("second", "second", "MatMul", "weight", "unknown", 8, 8, "float32", weight="w", reason="no-kernel"),
        SiteRecord("third", "third", "MatMul", "dynamic", None, 8, None, "float32", reason="dynamic-weight"),
    ]
    inputs = [info("x", ["b", "t", 8]), info("other", [8, 2])]
    return pack(nodes, inputs, [info("y", ["b", "t", 8]), info("z")], {"w": w}, sites)


@pytest.fixture(params=DEVICES)
def session(request: pytest.FixtureRequest, folder: Path) -> PackSession:
    return load(folder, request.param)


@pytest.fixture(scope="module")
def plain(folder: Path) -> ort.InferenceSession:
    return ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def feeds(b: int = 2, t: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(b * 100 + t)
    return {
        "x": rng.standard_normal((b, t, 8)).astype(np.float32),
        "other": rng.standard_normal((8, 2)).astype(np.float32),
    }


def test_the_signature_is_that_of_stock_onnxruntime(session: PackSession, plain: ort.InferenceSession) -> None:
    for method in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        ours, theirs = getattr(session, method)(), getattr(plain, method)()
        assert [(v.name, v.type) for v in ours] == [(v.name, v.type) for v in theirs]
        assert [v.shape for v in ours if v.name != "z"] == [v.shape for v in theirs if v.name != "z"]
    assert session.get_providers() == plain.get_providers()
    assert session.get_provider_options() == plain.get_provider_options()
    ours, theirs = session.get_modelmeta(), plain.get_modelmeta()
    assert (ours.producer_name, ours.graph_name) == (theirs.producer_name, theirs.graph_name) == ("tests", "g")


def test_outputs_by_name(session: PackSession) -> None:
    both = session.run(None, feeds())
    assert [r.shape for r in both] == [(2, 3, 8), (2, 3, 2)]
    assert len(session.run([], feeds())) == 2
    [z] = session.run(["z"], feeds())
    z2, y = session.run(["z", "y"], input_feed=feeds(), run_options=ort.RunOptions())
    np.testing.assert_array_equal(z, both[1])
    np.testing.assert_array_equal(z2, both[1])
    np.testing.assert_array_equal(y, both[0])


def bad_calls() -> dict[str, tuple[Any, Any]]:
    good = feeds()
    return {
        "unknown output": (["nope"], good),
        "unknown and known output": (["y", "nope"], good),
        "missing feed": (None, {"x": good["x"]}),
        "unknown feed": (None, good | {"more": good["x"]}),
        "double": (None, good | {"x": good["x"].astype(np.float64)}),
        "integers": (None, good | {"x": good["x"].astype(np.int64)}),
        "wrong rank": (None, good | {"x": good["x"][0]}),
        "wrong size": (None, good | {"x": good["x"][..., :5]}),
        "unused feed of a wrong size": (["y"], good | {"other": good["other"][:3]}),
        "no array": (None, good | {"x": object()}),
        "no mapping": (None, [good["x"]]),
    }


@pytest.mark.parametrize("case", sorted(bad_calls()))
def test_errors_are_those_of_onnxruntime(session: PackSession, plain: ort.InferenceSession, case: str) -> None:
    names, fed = bad_calls()[case]
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        plain.run(names, fed)
    with pytest.raises(type(theirs.value)) as ours:
        session.run(names, fed)
    assert str(ours.value) == str(theirs.value)


def test_ort_values_and_lists_are_taken(session: PackSession) -> None:
    wanted = session.run(None, feeds())
    fed = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in feeds().items()}
    for found in (session.run(None, fed), session.run(None, {n: a.tolist() for n, a in feeds().items()})):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_arrays_in_any_memory_order(session: PackSession) -> None:
    wanted = session.run(None, feeds())
    turned = {n: np.asfortranarray(a) for n, a in feeds().items()}
    wide = feeds()["x"].repeat(2, axis=0)[::2]
    for found in (session.run(None, turned), session.run(None, feeds() | {"x": wide})):
        np.testing.assert_array_equal(found[0], wanted[0])


def test_terminated_run(session: PackSession) -> None:
    options = ort.RunOptions()
    options.terminate = True
    with pytest.raises(Exception, match="terminate"):
        session.run(None, feeds(), options)


def test_trace_of_the_host(folder: Path) -> None:
    session = load(folder, "host")
    session.run(None, feeds(2, 3))
    session.run(None, feeds(1, 5))
    assert session.trace() == [
        TraceRecord(0, "third", "unbound", None, "dynamic-weight"),
        TraceRecord(1, "first", "host", 6, "no-kernel"),
        TraceRecord(1, "second", "host", None, "no-kernel"),
        TraceRecord(2, "first", "host", 5, "no-kernel"),
        TraceRecord(2, "second", "host", None, "no-kernel"),
    ]


def test_trace_of_the_reference_counts_rows(folder: Path) -> None:
    session = load(folder, "reference")
    session.run(None, feeds(2, 3))
    assert [(r.site, r.where, r.rows) for r in session.trace()] == [
        ("third", "unbound", None),
        ("first", "reference", 6),
        ("second", "reference", 6),
    ]


def test_a_failed_run_leaves_no_trace(session: PackSession) -> None:
    with pytest.raises(ValueError, match="missing"):
        session.run(None, {})
    assert all(record.run == 0 for record in session.trace())


def test_trace_does_not_grow(folder: Path) -> None:
    session = load(folder, "host")
    for _ in range(KEPT_RUNS + 10):
        session.run(None, feeds(1, 1))
    runs = sorted({r.run for r in session.trace() if r.run})
    assert runs == list(range(11, KEPT_RUNS + 11))


def test_coverage(folder: Path) -> None:
    made = load(folder, "host").coverage()
    assert (made.device, made.sites, made.weight, made.bound) == ("host", 3, 2, 2)
    assert made.where == {"host": 2, "unbound": 1}
    assert made.reasons == {"dynamic-weight": 1, "no-kernel": 2}
    assert load(folder, "reference").coverage().where == {"reference": 2, "unbound": 1}


def test_many_threads(folder: Path) -> None:
    sessions = [load(folder, device) for device in DEVICES]
    wanted = {t: sessions[1].run(None, feeds(1, t)) for t in range(1, 9)}
    wrong: list[int] = []

    def work(session: PackSession, t: int) -> None:
        for _ in range(10):
            found = session.run(None, feeds(1, t))
            if not np.array_equal(found[0], wanted[t][0]):
                wrong.append(t)

    threads = [threading.Thread(target=work, args=(session, t)) for t in wanted for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    runs = [r.run for r in sessions[0].trace() if r.site == "first"]
    assert runs == list(range(80 - KEPT_RUNS + 1, 81))


def test_auto_is_the_host_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onnxpack"):
        session = load(folder)
    assert len(caplog.records) == 1
    assert "no NPU device" in caplog.text
    first = session.trace()[0]
    assert (first.site, first.where) == (None, "host")
    assert "no NPU device" in str(first.reason)
    assert session.coverage().device == "host"
    load(folder, strict=True)  # the pack has no kernel, so nothing was given up


def test_strict_does_not_give_up_kernels(pack: Make) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "site")
    kernel = KernelRecord("k", 16, 8, 8, "kernels/k.elf", "0" * 64, "gemm_i8")
    made = pack([node], [info("x", ["m", 8])], [info("y")], {"w": np.eye(8, dtype=np.float32)}, kernels=[kernel])
    with pytest.raises(EnvironmentFault, match="no NPU device"):
        load(made, strict=True)
    for device in DEVICES:
        load(made, device, strict=True)
    load(made)


def test_arguments(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no NPU device"):
        load(folder, "npu")
    with pytest.raises(UsageError, match="no device 'gpu'"):
        load(folder, "gpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="check"):
        load(folder, check="some")  # type: ignore[arg-type]
    with pytest.raises(PackError, match="no such directory"):
        load(tmp_path / "missing")
    load(str(folder), check="full")


def test_relative_path_and_another_directory(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(folder.parent)
    sessions = [load(folder.name, device) for device in DEVICES]
    monkeypatch.chdir(tmp_path)
    for session in sessions:
        session.run(None, feeds())
        session.get_outputs()


def test_the_callers_options_are_copied_and_not_changed(folder: Path) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.add_session_config_entry("session.set_denormal_as_zero", "0")
    before = {name: getattr(options, name) for name in dir(options) if not callable(getattr(options, name))}
    load(folder, "host", session_options=options)
    load(folder, "reference", session_options=options)
    assert before == {name: getattr(options, name) for name in before}
    for key in ("session.model_external_initializers_file_folder_path", "session.qdq_matmulnbits_accuracy_level"):
        with pytest.raises(RuntimeError):
            options.get_session_config_entry(key)
    copied = copy_options(options)
    assert {name: getattr(copied, name) for name in before if not name.startswith("_")} == {
        name: value for name, value in before.items() if not name.startswith("_")
    }
    assert copied.get_session_config_entry("session.set_denormal_as_zero") == "0"


def test_activations_outside_our_sites_stay_float(tmp_path: Path) -> None:
    made = session_options(None, str(tmp_path))
    assert made.get_session_config_entry("session.qdq_matmulnbits_accuracy_level") == "0"
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    made = session_options(options, str(tmp_path))
    assert made.get_session_config_entry("session.qdq_matmulnbits_accuracy_level") == "4"
