"""Operands: int8 as it lies in the file, any other format through its decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxpack import formats
from onnxpack.errors import PackError
from onnxpack.formats import registry
from onnxpack.formats.base import Decoder, Encoded, ErrorSums, FieldSpec, Format, Orientation
from onnxpack.pack.read import open_pack
from onnxpack.quant.int8 import quantize_columns
from onnxpack.runtime.operands import operand
from onnxpack.runtime.session import basic_options, load

Make = Callable[..., Any]


class Stretched(Format):
    """int8 codes [N, K] (so: transposed) with one scale: a format that the registry does not have."""

    name = "stretched"
    row = "none"
    family = "linear"
    orientation = Orientation.NK
    min_opset: ClassVar[int] = 13

    def fields(self, shape: tuple[int, ...]) -> dict[str, FieldSpec]:
        n, k = shape
        return {"codes": FieldSpec(np.dtype(np.int8), (n, k)), "scales": FieldSpec(np.dtype(np.float32), (n,))}

    def encode_into(self, w: Any, out: Mapping[str, Any]) -> ErrorSums:
        raise NotImplementedError

    def decode(self, encoded: Encoded) -> Any:
        return np.asarray(encoded.fields["codes"].astype(np.float32) * np.float32(0.25))

    def decoder(self, shape: tuple[int, ...], opset: int) -> Decoder:
        raise NotImplementedError


@pytest.fixture
def folder(pack: Make) -> Path:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "site")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", 12])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    w = np.random.default_rng(3).standard_normal((12, 12)).astype(np.float32)
    return pack([node], [x], [y], {"w": w})


def test_int8_is_mapped_not_copied(folder: Path) -> None:
    made = operand(open_pack(folder), "w")
    assert isinstance(made.codes, np.memmap)
    assert made.codes_at is not None
    assert made.codes_at.file == "weights.safetensors"


def test_another_format_is_decoded_and_quantized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, declared as another format: read [N, K], decoded, quantized per column, given to the session."""
    monkeypatch.setitem(registry._TABLE, "stretched", f"{__name__}:Stretched")
    monkeypatch.setattr(registry, "get", lambda name, **p: Stretched())
    monkeypatch.setattr(formats, "get", lambda name, **p: Stretched())
    before = operand(open_pack(folder), "w")
    edit(folder, lambda record: record.update(format="stretched"))
    made = operand(open_pack(folder), "w")
    w = before.codes.T.astype(np.float32) * np.float32(0.25)
    codes, scales = np.empty((12, 12), np.int8), np.empty(12, np.float32)
    quantize_columns(w, codes, scales)
    np.testing.assert_array_equal(made.codes, codes)
    np.testing.assert_array_equal(made.scales, scales)
    assert made.codes_at is None
    x = np.random.default_rng(4).standard_normal((5, 12)).astype(np.float32)
    host = load(folder, "host", session_options=basic_options())
    [y], [wanted] = host.run(None, {"x": x}), load(folder, "reference").run(None, {"x": x})
    np.testing.assert_array_equal(y, wanted)
    assert np.abs(y - x @ w).max() < 0.05 * np.abs(x @ w).max()


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / "pack.json").read_text())
    change(manifest["tensors"][0])
    (folder / "pack.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("device", ["host", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(format="unheard-of"), "no format is called"),
        (lambda t: t["fields"].pop("scales"), "field scales is missing"),
        (lambda t: t["fields"].update(codes=t["fields"]["scales"]), "field codes is float32"),
    ],
)
def test_damaged_tensor_records(folder: Path, device: Any, change: Any, message: str) -> None:
    edit(folder, change)
    with pytest.raises(PackError, match=message):
        load(folder, device)


def test_unknown_weight(folder: Path) -> None:
    with pytest.raises(PackError, match="no weight 'v'"):
        operand(open_pack(folder), "v")


def test_the_pack_bytes_are_the_operand(folder: Path) -> None:
    made = operand(open_pack(folder), "w")
    initializers = {t.name for t in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer}
    assert initializers == {"w.codes", "w.scales"}
    assert not made.codes.flags.writeable
