"""Gates hold where they should and, above all, fail where they should: on real packs, whole and spoiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxpack.errors import ModelError, PackError, UsageError
from onnxpack.pack.read import open_pack
from onnxpack.runtime.session import basic_options, load
from onnxpack.verify.accuracy import Gates, cases, float_session, logits_outputs, token_input
from onnxpack.verify.api import Inputs, default_gates, verify
from onnxpack.verify.inputs import InputSpec
from onnxpack.verify.metrics import log_softmax

IDS = InputSpec("input_ids", "tensor(int64)", (1, "seq"))
MLP_INPUTS = Inputs(random=2, sizes={"batch": 40})


def tokens(rows: int = 6, length: int = 33) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(0, 40, (rows, length))


@pytest.fixture
def text(tmp_path: Any) -> str:
    np.save(tmp_path / "ids.npy", tokens())
    return str(tmp_path / "ids.npy")


def test_a_sound_pack_passes(mlp: Any) -> None:
    found = verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, sites=True, files=True)
    assert found.passed
    assert found.from_this_model is True
    assert found.files == len(mlp.manifest.files)
    assert found.comparison is not None
    assert found.comparison.gates == default_gates(open_pack(mlp.pack))
    assert found.comparison.gates.max_rel_rms == pytest.approx(0.13, abs=0.01)
    y, label = found.comparison.outputs["y"], found.comparison.outputs["label"]
    assert y.elements == 2 * 40 * 24
    assert y.rel_rms is not None
    assert 0 < y.rel_rms < 0.03
    assert (label.exact, label.elements) == (True, 80)


def test_figures_are_those_of_the_two_sessions(mlp: Any, tmp_path: Any) -> None:
    x = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    found = verify(mlp.pack, mlp.model, inputs=Inputs(str(tmp_path / "x.npy")))
    y = ort.InferenceSession(str(mlp.model), basic_options()).run(["y"], {"x": x})[0].astype(np.float64)
    p = load(mlp.pack, "reference").run(["y"], {"x": x})[0].astype(np.float64)
    assert found.comparison is not None
    figures = found.comparison.outputs["y"]
    assert figures.max_abs == np.abs(y - p).max()
    assert figures.max_rel == pytest.approx(np.abs(y - p).max() / np.abs(y).max())
    assert figures.cosine == pytest.approx((y * p).sum() / np.sqrt((y * y).sum() * (p * p).sum()))


@pytest.mark.parametrize("device", ["host", "reference"])
def test_next_token_is_the_arithmetic_of_held_out_text(language_model: Any, text: str, device: Any) -> None:
    found = verify(
        language_model.pack, language_model.model, inputs=Inputs(text, windows=4, next_token=True), device=device
    )
    ids = tokens()[:4]
    model = ort.InferenceSession(str(language_model.model), basic_options())
    pack = load(language_model.pack, "reference")
    r, p = (
        np.concatenate([log_softmax(s.run(None, {"input_ids": row[None, :-1]})[0]) for row in ids])
        for s in (model, pack)
    )
    assert found.comparison is not None
    figures, perplexity = found.comparison.outputs["logits"], found.comparison.perplexity
    assert perplexity is not None
    assert perplexity.tokens == 4 * 32
    for side, logs in (("reference", r), ("pack", p)):
        nll = -np.take_along_axis(logs, ids[:, 1:, None], -1).mean()
        assert getattr(perplexity, side) == pytest.approx(math.exp(nll))
    assert figures.kl == pytest.approx((np.exp(r) * (r - p)).sum(-1).mean())
    assert figures.top1 == (r.argmax(-1) == p.argmax(-1)).mean()
    assert found.comparison.runs == 4


def test_rows_of_tokens_are_fed_one_by_one_without_a_shift(language_model: Any, text: str) -> None:
    found = verify(language_model.pack, language_model.model, inputs=Inputs(text))
    assert found.comparison is not None
    assert found.comparison.runs == 6
    assert found.comparison.perplexity is None
    assert found.comparison.outputs["logits"].elements == 6 * 33 * 40


def swapped(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return codes.reshape(-1, 2)[:, ::-1].reshape(codes.shape)


SPOILED: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "bytes swapped": ("w2", "codes", swapped),
    "rows swapped": ("w1", "codes", lambda a: a[::-1]),
    "negated": ("w1", "codes", lambda a: -a),
    "zeros": ("w2", "codes", np.zeros_like),
    "0xA5 all over": ("w2", "codes", lambda a: np.full_like(a, 0xA5 - 256)),
    "scales doubled": ("w2", "scales", lambda a: 2 * a),
    "scales of zero": ("w1", "scales", np.zeros_like),
    "scales of NaN": ("w1", "scales", lambda a: np.full_like(a, np.nan)),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_pack_fails(mlp: Any, spoil: tuple[str, str, Callable[..., Any]]) -> None:
    mlp.overwrite(*spoil)
    found = verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, sites=True)
    assert not found.passed
    assert any(failure.startswith("y") for failure in found.failures)
    spoiled = {"w1": "MatMul_0", "w2": "Gemm_0"}
    assert found.sites is not None
    failed = {site.path for site in found.sites if site.failures(0.02)}
    assert failed == {spoiled[spoil[0]]}  # --sites says which weight it is
    with pytest.raises(PackError, match="digest differs"):
        verify(mlp.pack, files=True)


def test_every_gate_fails_by_itself(language_model: Any, text: str) -> None:
    inputs = Inputs(text, next_token=True)
    strict = {"max_kl": 1e-12, "min_top1": 1.0, "max_rel_error": 1e-9, "max_rel_rms": 1e-9, "min_cosine": 1.0}
    loose = {"max_kl": 1.0, "min_top1": 0.5, "max_rel_error": 0.5, "max_rel_rms": 0.5, "min_cosine": 0.9}
    assert verify(language_model.pack, language_model.model, inputs=inputs, gates=Gates(**loose)).passed
    language_model.overwrite("w2", "codes", lambda a: np.where(np.arange(40) % 4, a, -a))  # so that top-1 differs too
    for name, value in strict.items():
        found = verify(language_model.pack, language_model.model, inputs=inputs, gates=Gates(**{name: value}))
        assert len(found.failures) == 1, name
        assert found.failures[0].startswith("logits: ")


def test_gates_given_replace_the_default(mlp: Any) -> None:
    mlp.overwrite("w2", "scales", lambda a: 2 * a)
    assert verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, gates=Gates(min_cosine=0.5)).passed
    assert not verify(mlp.pack, mlp.model, inputs=MLP_INPUTS).passed


def test_labels_are_held_to_equality(mlp: Any) -> None:
    found = verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, gates=Gates(min_equal=0.5))
    assert found.passed
    mlp.overwrite("w2", "codes", lambda a: -a)
    found = verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, gates=Gates(min_equal=0.5))
    assert [failure.partition(":")[0] for failure in found.failures] == ["label"]


def feed(folder: Any, x: np.ndarray[Any, Any]) -> Inputs:
    np.save(folder / "x.npy", x.astype(np.float32))
    return Inputs(str(folder / "x.npy"))


def test_a_comparison_that_proves_nothing_does_not_pass(mlp: Any, tmp_path: Any) -> None:
    for x in (np.full((2, 64), np.nan), np.zeros((0, 64))):
        found = verify(mlp.pack, mlp.model, inputs=feed(tmp_path, x))
        assert not found.passed
        assert "proves nothing" in found.failures[0]


def test_a_model_that_gives_one_number_everywhere_proves_nothing(packed: Callable[..., Any]) -> None:
    built = packed(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "m")],
        [("x", TensorProto.FLOAT, [2, 8])],
        [("y", TensorProto.FLOAT, [2, 4])],
        {"w": np.zeros((8, 4), np.float32)},
    )
    found = verify(built.pack, built.model, sites=True)
    assert found.failures == [
        "this comparison proves nothing (y: the reference is 0 everywhere)",
        "no site could be measured",
    ]
    built.overwrite("w", "codes", lambda a: a + 1)
    found = verify(built.pack, built.model, sites=True)
    assert found.failures == [
        "y: relative RMS error is not finite",
        "MatMul_0: weight w is inf away from the source's, 0 when it was written",
    ]


def test_a_gate_that_no_output_can_meet_or_miss_is_no_pass(mlp: Any) -> None:
    assert verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, gates=Gates(max_rel_error=0.1)).passed
    with pytest.raises(UsageError, match="need logits"):
        verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, gates=Gates(max_kl=1.0))
    judged = verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, gates=Gates(max_kl=1.0), logits=["y"])
    assert judged.passed
    assert judged.comparison is not None
    assert judged.comparison.outputs["y"].kl is not None


def test_an_output_without_a_gate_does_not_pass(packed: Callable[..., Any]) -> None:
    built = packed(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "m"), helper.make_node("ArgMax", ["y"], ["label"], axis=-1)],
        [("x", TensorProto.FLOAT, [30, 8])],
        [("label", TensorProto.INT64, [30, 1])],
        {"w": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)},
    )
    assert verify(built.pack, built.model).passed
    found = verify(built.pack, built.model, gates=Gates(min_cosine=0.9))
    assert found.failures == ["this comparison proves nothing (label: no gate)"]


def test_what_cannot_be_asked(mlp: Any, language_model: Any, text: str) -> None:
    with pytest.raises(UsageError, match="nothing to compare with"):
        verify(mlp.pack)
    with pytest.raises(UsageError, match="nothing to compare with"):
        verify(mlp.pack, files=True, sites=True)
    with pytest.raises(UsageError, match="not from both"):
        verify(mlp.pack, mlp.model, inputs=Inputs(text, random=2))
    with pytest.raises(UsageError, match="own sizes"):
        verify(mlp.pack, mlp.model, inputs=Inputs(text, sizes={"batch": 2}))
    with pytest.raises(UsageError, match="no output is called 'scores'"):
        verify(mlp.pack, mlp.model, logits=["scores"])
    with pytest.raises(UsageError, match="not logits"):
        verify(mlp.pack, mlp.model, logits=["label"])
    with pytest.raises(UsageError, match="which input takes the tokens"):
        verify(mlp.pack, mlp.model, inputs=Inputs(next_token=True))
    with pytest.raises(UsageError, match="has no output"):
        verify(mlp.pack, language_model.model)
    with pytest.raises(ModelError, match="no such file"):
        verify(mlp.pack, "none.onnx")


def test_ids_beyond_the_vocabulary(language_model: Any, tmp_path: Any) -> None:
    np.save(tmp_path / "ids.npy", [[1, 2, 40]])
    with pytest.raises(UsageError, match="do not fit tokens"):
        verify(language_model.pack, language_model.model, inputs=Inputs(str(tmp_path / "ids.npy"), next_token=True))
    with pytest.raises(UsageError, match="the model does not run on these inputs") as caught:
        verify(language_model.pack, language_model.model, inputs=Inputs(str(tmp_path / "ids.npy")))
    assert "\n" not in caught.value.render()


def test_onnxruntime_itself_writes_nothing(
    language_model: Any, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", [[1, 2, 40]])
    for sites in (False, True):
        with pytest.raises(UsageError):
            verify(language_model.pack, language_model.model, inputs=Inputs(str(tmp_path / "ids.npy")), sites=sites)
    assert capfd.readouterr() == ("", "")


def test_text_is_not_a_model(mlp: Any, tmp_path: Any) -> None:
    (tmp_path / "t.onnx").write_text("text")
    with pytest.raises(ModelError, match="onnxruntime refuses it"):
        float_session(tmp_path / "t.onnx")


def test_another_file_than_the_source_is_told(mlp: Any, tmp_path: Any) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(mlp.model.read_bytes() + b"\x12\x01p")  # a producer name: the same graph, another file
    found = verify(mlp.pack, other, inputs=MLP_INPUTS)
    assert found.passed
    assert found.from_this_model is False


def test_cases_shift_what_goes_with_the_tokens() -> None:
    mask = InputSpec("attention_mask", "tensor(int64)", ("batch", "seq"))
    ids = InputSpec("input_ids", "tensor(int64)", ("batch", "seq"))
    fed = {"input_ids": tokens(3, 5), "attention_mask": np.ones((3, 5), np.int64)}
    made = cases([fed], [ids, mask], windows=None, next_token=True)
    assert [case.feed["attention_mask"].shape for case in made] == [(1, 4)] * 3
    for case, row in zip(made, tokens(3, 5), strict=True):
        assert case.targets is not None
        assert case.feed["input_ids"].tolist() == [row[:-1].tolist()]
        assert case.targets.tolist() == [row[1:].tolist()]
    with pytest.raises(UsageError, match="at least 2"):
        cases([{"input_ids": tokens(3, 1)}], [ids], windows=None, next_token=True)


def test_the_token_input() -> None:
    other = InputSpec("position_ids", "tensor(int64)", (1, "seq"))
    assert token_input([other, IDS]) == "input_ids"
    assert token_input([InputSpec("tokens", "tensor(int32)", (1, "seq"))]) == "tokens"
    with pytest.raises(UsageError, match="cannot tell"):
        token_input([other, InputSpec("tokens", "tensor(int64)", (1, "seq"))])


def test_logits_are_found_by_name_and_rank(language_model: Any, mlp: Any) -> None:
    assert logits_outputs(float_session(language_model.model)) == ["logits"]
    assert logits_outputs(float_session(mlp.model)) == []
    assert logits_outputs(float_session(mlp.model), ["y"]) == ["y"]


def test_the_record_has_the_public_keys_and_no_number_that_json_lacks(mlp: Any) -> None:
    import json

    mlp.overwrite("w1", "scales", lambda a: np.full_like(a, np.nan))
    found = verify(mlp.pack, mlp.model, inputs=MLP_INPUTS, sites=True)
    made = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert {"max_abs", "max_rel", "cosine", "kl", "top1"} <= made["outputs"]["y"].keys()
    assert made["passed"] is False


@pytest.mark.shared
def test_trained_language_model(shared: Any, tmp_path: Any) -> None:
    """24 windows of held-out text; the figures of an independent implementation are the limits."""
    import onnxpack

    folder = shared / "models" / "trained_a"
    onnxpack.build(folder / "trained_a.onnx", tmp_path / "a.pack", weights="int8")
    found = verify(
        tmp_path / "a.pack",
        folder / "trained_a.onnx",
        inputs=Inputs(str(folder / "heldout_64x257.npy"), windows=24, next_token=True),
        gates=Gates(max_kl=1.6e-4, min_top1=0.990),
    )
    assert found.failures == []
    assert found.comparison is not None
    perplexity = found.comparison.perplexity
    assert perplexity is not None
    assert perplexity.reference == pytest.approx(2.9745, abs=5e-5)
    assert perplexity.pack == pytest.approx(perplexity.reference, rel=0.002)
