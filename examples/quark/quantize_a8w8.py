"""A float model to A8W8 (int8 activations and weights, as a QDQ graph), then its census and its pack.

    python examples/quark/quantize_a8w8.py                             # the trained model, into build/a8w8
    python examples/quark/quantize_a8w8.py model.onnx out --calibration tokens.npy --granularity tensor

Uses AMD Quark's ONNX flow where it is installed (pip install "onnxpack[quark]"), onnxruntime's quantize_static where
not; --flow chooses. Only MatMul with a constant weight is quantized: attention and the rotary angles stay float, as
quantizing those ruins a language model. Calibrated on rows of tokens from a local file; nothing is downloaded. Weights
get a scale for each output column (or one with --granularity tensor), activations one scale each, no zero points.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import onnxpack
from onnxpack.cli.main import run
from onnxpack.errors import OnnxpackError, UsageError
from onnxpack.verify.accuracy import cases, float_session
from onnxpack.verify.inputs import input_specs, read_feeds

TRAINED = Path(__file__).resolve().parents[1] / "trained_a"
LARGE = 1 << 30
"""Bytes of weights from which on they go to a file of their own: a graph holds 2 GiB at most."""


class Tokens(CalibrationDataReader):
    """Rows of tokens, one at a time, as both quantizers ask for them."""

    def __init__(self, model: Path, source: Path, windows: int) -> None:
        specs = input_specs(float_session(model))
        runs = cases(read_feeds(source, specs), specs, windows=windows, next_token=False)
        self.feeds: list[dict[str, np.ndarray[Any, Any]]] = [run.feed for run in runs]
        self.rest: Iterator[dict[str, np.ndarray[Any, Any]]] = iter(self.feeds)

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        return next(self.rest, None)

    def rewind(self) -> None:
        self.rest = iter(self.feeds)


def with_quark(model: Path, out: Path, tokens: Tokens, per_channel: bool, left_out: list[str], large: bool) -> None:
    """AMD Quark: QConfig and ModelQuantizer."""
    from quark.onnx import ModelQuantizer, QConfig
    from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, QLayerConfig, QuantGranularity

    granularity = QuantGranularity.Channel if per_channel else QuantGranularity.Tensor
    config = QConfig(
        global_config=QLayerConfig(
            activation=Int8Spec(calibration_method=CalibMethod.MinMax),
            weight=Int8Spec(calibration_method=CalibMethod.MinMax, quant_granularity=granularity),
        ),
        exclude=left_out,
        use_external_data_format=large,
        OpTypesToQuantize=["MatMul"],
        MatMulConstBOnly=True,
    )
    ModelQuantizer(config).quantize_model(str(model), str(out), tokens)


def with_onnxruntime(
    model: Path, out: Path, tokens: Tokens, per_channel: bool, left_out: list[str], large: bool
) -> None:
    """onnxruntime's static quantizer, told to do the same."""
    quantize_static(
        str(model),
        str(out),
        tokens,
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["MatMul"],
        nodes_to_exclude=left_out,
        per_channel=per_channel,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        use_external_data_format=large,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "MatMulConstBOnly": True},
    )


def choose(flow: str) -> str:
    """Which quantizer runs; a line says so when it is not the one that the folder is named after."""
    if flow == "onnxruntime":
        return flow
    try:
        importlib.import_module("quark.onnx")
    except ImportError as error:
        if flow == "quark":
            hint = 'pip install "onnxpack[quark]"'
            raise UsageError(f"AMD Quark is not installed ({error})", where="--flow quark", hint=hint) from None
        print("AMD Quark is not installed: quantizing with onnxruntime's quantize_static instead", file=sys.stderr)
        return "onnxruntime"
    return "quark"


def command(*words: str) -> None:
    """Run an onnxpack command as a person would; stop when it fails."""
    print(f"\n$ onnxpack {' '.join(words)}\n", flush=True)
    if code := run(list(words)):
        raise SystemExit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=TRAINED / "trained_a.onnx")
    parser.add_argument("out", type=Path, nargs="?", default=Path("build/a8w8"), help="folder for model and pack")
    parser.add_argument("--calibration", type=Path, default=TRAINED / "calib_64x256.npy", help="rows of tokens (.npy)")
    parser.add_argument("--windows", type=int, default=32, help="rows to calibrate on")
    parser.add_argument("--granularity", choices=("channel", "tensor"), default="channel", help="of weight scales")
    parser.add_argument("--flow", choices=("auto", "quark", "onnxruntime"), default="auto")
    arguments = parser.parse_args()
    flow = choose(arguments.flow)
    census = onnxpack.census(str(arguments.model))
    left_out = [site.name for site in census.sites if site.kind != "weight"]
    large = sum(group.bytes for group in census.groups) > LARGE
    tokens = Tokens(arguments.model, arguments.calibration, arguments.windows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    quantized = arguments.out / f"{arguments.model.stem}_a8w8.onnx"
    quantize = with_quark if flow == "quark" else with_onnxruntime
    with contextlib.redirect_stdout(sys.stderr):  # both talk
        quantize(arguments.model, quantized, tokens, arguments.granularity == "channel", left_out, large)
    rows = f"{len(tokens.feeds)} rows of {arguments.calibration.name}"
    print(f"{quantized}: int8 by {flow}, a scale per {arguments.granularity}, calibrated on {rows}")
    command("census", str(quantized), "--qdq")
    command("build", str(quantized), "-o", str(quantized.with_suffix(".pack")), "--quiet", "--force")


if __name__ == "__main__":
    try:
        main()
    except OnnxpackError as error:
        sys.exit(error.render())
