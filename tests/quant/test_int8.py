"""The numbers section of the design, by hand, by property and against an independent oracle."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from onnxpack.errors import ModelError
from onnxpack.formats.base import ErrorSums, significant
from onnxpack.formats.int8 import Int8
from onnxpack.quant import int8
from onnxpack.quant.int8 import accumulate, dequantize_columns, epilogue, quantize_columns, quantize_rows, scale_of

Array = npt.NDArray[Any]
FLOATS = [np.dtype(t) for t in ("f4", "f2", ml_dtypes.bfloat16, "f8")]
SMALLEST = np.float32(2.0**-126)


def quantize(w: Array) -> tuple[Array, Array, int8.ColumnError]:
    codes, scales = np.full(w.shape, 77, np.int8), np.full(w.shape[1], np.nan, np.float32)
    error = quantize_columns(w, codes, scales)
    return codes, scales, error


def naive(w: Array) -> tuple[Array, Array]:
    """The formula of the design, one column at a time, in float32."""
    w = w.astype(np.float32)
    codes, scales = np.zeros(w.shape, np.int8), np.ones(w.shape[1], np.float32)
    for n in range(w.shape[1]):
        amax = np.abs(w[:, n]).max()
        if amax > 0:
            scales[n] = np.maximum(amax, np.float32(127) * SMALLEST) / np.float32(127)
        for k in range(w.shape[0]):
            codes[k, n] = np.clip(np.rint(w[k, n] / scales[n]), -127, 127)
    return codes, scales


# -- by hand -------------------------------------------------------------------------------------------------------


def test_columns_by_hand() -> None:
    w = np.array([[127, 1, 0, -0.0, 254], [-126.5, 0.5, 0, -0.0, 3], [125.5, -1, 0, -0.0, -1]], np.float32)
    codes, scales, _ = quantize(w)
    # half to even: -126.5 -> -126, 125.5 -> 126; 0.5 / (1/127) = 63.5 -> 64; 3 / 2 = 1.5 -> 2; -1 / 2 = -0.5 -> 0
    assert codes.tolist() == [[127, 127, 0, 0, 127], [-126, 64, 0, 0, 2], [126, -127, 0, 0, 0]]
    assert scales.tolist() == [1, float(np.float32(1) / np.float32(127)), 1, 1, 2]


def test_each_column_has_its_own_scale() -> None:
    """Four decades between columns: the small one keeps its accuracy."""
    w = np.tile(np.array([[1, 100], [2, 200]], np.float32), (32, 1)) * np.array([1e-4, 1], np.float32)
    codes, scales, error = quantize(w)
    back = dequantize_columns(codes, scales)
    assert np.abs(back - w).max(axis=0).tolist() <= (scales / 2 * 1.001).tolist()
    assert np.sqrt(error.residual / error.energy).max() < 0.01


def test_rows_by_hand() -> None:
    x = np.array([[1, -2, 0.5], [0, 0, 0], [-0.0, 0, 0], [1e-42, 0, 0], [3e38, 3e38, -3e38]], np.float32)
    codes, scales = quantize_rows(x)
    assert codes.tolist() == [[64, -127, 32], [0, 0, 0], [0, 0, 0], [0, 0, 0], [127, 127, -127]]
    assert scales.tolist() == [
        float(np.float32(2) / np.float32(127)),
        float(SMALLEST),
        float(SMALLEST),
        float(SMALLEST),
        float(np.float32(3e38) / np.float32(127)),
    ]


def test_scales_never_are_subnormal() -> None:
    assert scale_of(np.float32(0)) == SMALLEST
    assert scale_of(np.float32(1e-45)) == SMALLEST
    assert scale_of(np.float32(127 * 2.0**-126)) == SMALLEST
    assert np.isnan(scale_of(np.float32(np.nan)))
    assert scale_of(np.float32(np.inf)) == np.inf


def test_epilogue_by_hand() -> None:
    acc = np.array([[3, -(2**24) - 1], [0, 7]], np.int32)
    out = epilogue(acc, np.array([0.5, 1], np.float32), np.array([2, np.nan], np.float32))
    assert out[0].tolist() == [3.0, -(2.0**25)]  # 2**24 + 1 is rounded to float32 before it is scaled
    assert np.isnan(out[1]).all()
    order = epilogue(np.array([[3]], np.int32), np.float32([0.1]), np.float32([0.7]))
    assert order[0, 0] == (np.float32(3) * np.float32(0.1)) * np.float32(0.7)


def test_non_finite_rows_are_nan_throughout_and_touch_no_other() -> None:
    x = np.ones((4, 5), np.float32)
    x[1, 2], x[2, 0], x[3, 4] = np.nan, np.inf, -np.inf
    codes, scales = quantize_rows(x)
    w = np.full((5, 3), 2, np.int8)
    y = epilogue(accumulate(codes, w), np.ones(3, np.float32), scales)
    assert np.isnan(y[1:]).all()
    alone, scale = quantize_rows(x[:1])
    assert np.array_equal(y[:1], epilogue(accumulate(alone, w), np.ones(3, np.float32), scale))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    row = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32) * 1e-3
    batch = np.concatenate([np.full((1, 64), 5000, np.float32), row, np.zeros((1, 64), np.float32)])
    one, scale = quantize_rows(row)
    many, scales = quantize_rows(batch)
    assert np.array_equal(one[0], many[1])
    assert scale[0] == scales[1]


@pytest.mark.parametrize("fill", [(127, 127), (-127, 127), (-128, -128), (127, -128), (1, 127)])
def test_accumulators_are_exact_at_the_extremes(fill: tuple[int, int]) -> None:
    a, w = np.full((2, 2048), fill[0], np.int8), np.full((2048, 3), fill[1], np.int8)
    assert np.array_equal(accumulate(a, w), np.full((2, 3), 2048 * fill[0] * fill[1]))


def test_accumulators_at_the_int32_bound() -> None:
    k = 133_144
    a, w = np.full((1, k), 127, np.int8), np.full((k, 1), -127, np.int8)
    assert accumulate(a, w)[0, 0] == -k * 127 * 127 >= np.iinfo(np.int32).min


# -- by property ---------------------------------------------------------------------------------------------------

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=finite)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(w=matrices)
def test_blocks_give_the_formula(w: Array) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes, scales, _ = quantize(w)
    expected, wanted = naive(w)
    assert np.array_equal(codes, expected)
    assert np.array_equal(scales, wanted)
    assert codes.min() >= -127
    assert (scales >= SMALLEST).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(w=matrices)
def test_decoding_is_within_half_a_step(w: Array) -> None:
    codes, scales, _ = quantize(w)
    back = codes * scales.astype(np.float64)
    inside = np.abs(w).max(axis=0) <= 3.4e38  # 127 steps may be beyond the largest float32
    with np.errstate(over="ignore"):
        decoded = dequantize_columns(codes, scales)
    assert np.array_equal(decoded[:, inside], back[:, inside].astype(np.float32))
    assert (np.abs(back - w) <= scales.astype(np.float64) * 0.5 * (1 + 1e-5)).all()


LAYOUTS = {
    "rows": lambda w: np.ascontiguousarray(w),
    "columns": lambda w: np.ascontiguousarray(w.T).T,
    "slice": lambda w: np.repeat(np.repeat(w, 2, 0), 3, 1)[::2, ::3],
    "slice of columns": lambda w: np.repeat(np.repeat(w.T, 2, 0), 3, 1)[::2, ::3].T,
    "reversed": lambda w: np.ascontiguousarray(w[::-1, ::-1])[::-1, ::-1],
    "read only": lambda w: np.frombuffer(w.tobytes(), w.dtype).reshape(w.shape),
    "unaligned": lambda w: np.frombuffer(b"\0" + w.tobytes(), np.uint8)[1:].view(w.dtype).reshape(w.shape),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_source_equals_the_float32_path(dtype: np.dtype[Any], layout: str) -> None:
    """Layout and type change nothing, and several blocks in both directions are involved."""
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((300, 1700)) * rng.lognormal(size=1700)).astype(dtype)
    w[:, 5] = 0
    expected = quantize(np.ascontiguousarray(w.astype(np.float32)))
    codes, scales, error = quantize(LAYOUTS[layout](w))
    assert np.array_equal(codes, expected[0])
    assert np.array_equal(scales, expected[1])
    figures = ErrorSums(float(error.residual.sum()), float(error.energy.sum())).figures()
    assert figures == ErrorSums(float(expected[2].residual.sum()), float(expected[2].energy.sum())).figures()


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (7, 70001), (40000, 3), (2049, 513)])
def test_shapes_around_the_blocks(shape: tuple[int, int]) -> None:
    w = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    amax = np.abs(w).max(axis=0)
    scales = np.maximum(amax, np.float32(127) * SMALLEST) / np.float32(127)
    codes = np.rint(w / scales).astype(np.int8)
    for source in (w, np.ascontiguousarray(w.T).T):
        found = quantize(source)
        assert np.array_equal(found[0], codes)
        assert np.array_equal(found[1], scales)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_weights(shape: tuple[int, int]) -> None:
    codes, scales, error = quantize(np.zeros(shape, np.float32))
    assert codes.shape == shape
    assert (scales == 1).all()
    assert error.energy.sum() == 0


def test_tiny_zero_and_subnormal_columns() -> None:
    w = np.array([[0, 1e-30, 1e-42, 1, -0.0, 1e-38], [0, -5e-31, -1e-42, -1, 0, 5e-39]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes, scales, error = quantize(w)
        assert ErrorSums(float(error.residual.sum()), float(error.energy.sum())).figures()["relative_rms"] < 0.01
    assert codes[:, 0].tolist() == codes[:, 4].tolist() == [0, 0]
    assert scales[[0, 4]].tolist() == [1, 1]
    assert codes[:, 1].tolist() == [127, -64]
    assert codes[:, 2].tolist() == [0, 0]
    assert scales[2] == scales[5] == SMALLEST
    assert codes[:, 5].tolist() == [1, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("at", [(0, 0), (299, 1699), (123, 1500)])
def test_non_finite_weights_are_named_by_index(value: float, order: str, at: tuple[int, int]) -> None:
    w = np.asarray(np.ones((300, 1700), np.float32), order=order)  # type: ignore[call-overload]
    w[at] = value
    with pytest.raises(ModelError) as caught:
        quantize(w)  # and no warning, which -W error would raise
    assert f"{np.float32(value)} at [{at[0]}, {at[1]}]" in caught.value.render()


def test_overflow_of_float64_to_float32_is_an_error_too() -> None:
    w = np.ones((4, 4), np.float64)
    w[2, 1] = 1e300
    with pytest.raises(ModelError, match=r"inf at \[2, 1\]"):
        quantize(w)


# -- error figures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_error_figures_equal_a_float64_recomputation(layout: str) -> None:
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((700, 900)) * rng.lognormal(sigma=3, size=900)).astype(np.float32)
    codes, scales, error = quantize(LAYOUTS[layout](w))
    exact = w.astype(np.float64)
    back = codes.astype(np.float64) * scales.astype(np.float64)
    assert np.allclose(error.residual, np.square(exact - back).sum(axis=0), rtol=1e-4)
    assert np.allclose(error.energy, np.square(exact).sum(axis=0), rtol=1e-5)
    figures = ErrorSums(float(error.residual.sum()), float(error.energy.sum())).figures()
    rms = np.sqrt(np.square(exact - back).sum() / np.square(exact).sum())
    assert figures == {"relative_rms": significant(float(rms))}


def test_error_figures_of_extreme_magnitudes() -> None:
    """1e38 squared is not a float32; 1e-38 squared neither."""
    w = np.array([[1e38, 1e-37], [-3e37, 7e-38]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, error = quantize(w)
    assert np.isfinite(error.energy).all()
    assert (error.energy > 0).all()


def test_error_figures_do_not_depend_on_threads() -> None:
    code = (
        "import numpy as np\n"
        "from onnxpack.quant.int8 import quantize_columns\n"
        "w = np.random.default_rng(0).standard_normal((500, 600)).astype('f4')\n"
        "e = quantize_columns(w, np.empty(w.shape, 'i1'), np.empty(600, 'f4'))\n"
        "print(e.residual.sum().hex(), e.energy.sum().hex())"
    )
    seen = set()
    for threads in ("1", "4"):
        env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        seen.add(ran.stdout)
    assert len(seen) == 1


# -- an independent oracle -----------------------------------------------------------------------------------------


def test_codes_are_those_of_onnxruntimes_quantizer(tmp_path) -> None:
    """quantize_dynamic with per-channel symmetric int8 weights: the same codes and the same scales."""
    import logging

    import onnx
    from model_maker import matmul, save
    from onnx import numpy_helper
    from onnxruntime.quantization import QuantType, quantize_dynamic

    rng = np.random.default_rng(4)
    w = (rng.standard_normal((48, 80)) * rng.lognormal(size=80)).astype(np.float32)
    source = save(tmp_path / "m.onnx", matmul(w=w, opset=13))
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantize_dynamic(
                source,
                tmp_path / "q.onnx",
                per_channel=True,
                weight_type=QuantType.QInt8,
                extra_options={"WeightSymmetric": True},
            )
    finally:
        logging.disable(logging.NOTSET)
    held = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "q.onnx").graph.initializer}
    codes, scales, _ = quantize(w)
    assert np.array_equal(held["W_quantized"], codes)
    assert np.array_equal(held["W_scale"].reshape(-1), scales)


# -- the format ----------------------------------------------------------------------------------------------------


def test_the_format_keeps_positions() -> None:
    """Codes that encode their place: a permutation of a rectangle shows."""
    form = Int8()
    for k, n in ((96, 160), (160, 96), (300, 257)):
        rows, columns = np.indices((k, n))
        w = ((rows * 131 + columns * 17) % 251 - 125).astype(np.float32)
        w[0] = 127  # scale 1: the codes are the weight
        encoded = form.encode(w)
        assert np.array_equal(encoded.fields["codes"], w)
        again = form.from_bytes(form.to_bytes(encoded), (k, n))
        assert np.array_equal(form.decode(again), w)
        assert encoded.nbytes == k * n + 4 * n


@settings(max_examples=30, deadline=None, derandomize=True)
@given(w=matrices, opset=st.sampled_from([7, 8, 9, 10, 11, 12, 13, 19, 21, 23]))
def test_the_graph_decodes_like_the_format(w: Array, opset: int) -> None:
    import onnxruntime as ort
    from model_maker import model, tensor

    form = Int8()
    encoded, decoder = form.encode(w), form.decoder(w.shape, opset)
    tensors = [tensor(name, encoded.fields[view.field]) for name, view in form.views(w.shape).items()]
    proto = model(decoder.nodes, tensors, [], [decoder.output], opset=opset)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (found,) = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, {})
    assert np.array_equal(found, form.decode(encoded))
