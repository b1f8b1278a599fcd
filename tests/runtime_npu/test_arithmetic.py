"""The host's half of a product, block by block, against quant.int8 and quant.qdq in one piece: the same bits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from onnxpack.pack.manifest import BiasRecord, QdqRecord, RequantizeRecord
from onnxpack.quant.int8 import accumulate, epilogue, quantize_rows
from onnxpack.quant.qdq import to_signed
from onnxpack.runtime.npu import arithmetic
from onnxpack.runtime.npu.arithmetic import Codes, FloatFinish, GroupFinish, Scratch, quantize
from onnxpack.runtime.operands import Operand
from onnxpack.runtime.reference import multiply
from onnxpack.runtime.reference_groups import multiply_codes

bounded = settings(max_examples=60, deadline=None, derandomize=True)

ODD = [0.0, -0.0, 1.0, -1.0, 127.0, 0.5, 3e38, -3e38, 1e-38, 1e-45, np.nan, np.inf, -np.inf]
floats = st.sampled_from(ODD) | st.floats(width=32)


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_array_equal(a, b)
    if a.dtype.kind == "f":
        known = ~np.isnan(a)
        np.testing.assert_array_equal(np.signbit(a[known]), np.signbit(b[known]))


@bounded
@given(x=arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 40)), elements=floats))
def test_codes_of_rows(x: npt.NDArray[np.float32]) -> None:
    with np.errstate(all="raise", under="ignore"):
        codes, scale = quantize(x, Scratch())
    wanted, wanted_scale = quantize_rows(x)
    same(codes, wanted)
    same(scale, wanted_scale)


def test_codes_of_more_rows_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_BLOCK_BYTES", 4 * 33 * 7)
    x = np.random.default_rng(0).standard_normal((50, 33)).astype(np.float32)
    x[20, 5], x[31, 0] = np.nan, -np.inf
    scratch = Scratch()
    for rows in (50, 3, 50, 29):
        for found, wanted in zip(quantize(x[:rows], scratch), quantize_rows(x[:rows]), strict=True):
            same(found, wanted)


def weight(rng: np.random.Generator, k: int, n: int, *, per_column: bool, zero_points: bool) -> Operand:
    codes = rng.integers(-128, 128, (k, n)).astype(np.int8)
    scales = rng.uniform(1e-4, 0.1, n if per_column else ()).astype(np.float32)
    points = rng.integers(-128, 128, n if per_column else ()) if zero_points else None
    return Operand(codes, scales, zero_points=points)


def in_pieces(
    rng: np.random.Generator, finish: Any, a: npt.NDArray[np.int8], w: npt.NDArray[np.int8], codes: Codes, out: Any
) -> None:
    """Finish every block of rows and range of columns by itself, as launches come."""
    acc = accumulate(a, w)
    row_cuts = [0, *sorted(rng.integers(0, len(a) + 1, 2)), len(a)]
    column_cuts = [0, *sorted(rng.integers(0, w.shape[1] + 1, 2)), w.shape[1]]
    for r0, r1 in pairwise(row_cuts):
        for c0, c1 in pairwise(column_cuts):
            if r0 < r1 and c0 < c1:
                rows, columns = slice(int(r0), int(r1)), slice(int(c0), int(c1))
                finish.write(acc[rows, columns], rows, columns, codes, out)


@bounded
@given(seed=st.integers(0, 10**6), per_column=st.booleans(), zero_points=st.booleans())
def test_float_results(seed: int, per_column: bool, zero_points: bool) -> None:
    rng = np.random.default_rng(seed)
    m, k, n = rng.integers(1, 12, 3)
    x = rng.standard_normal((m, k)).astype(np.float32) * np.float32(10.0 ** rng.integers(-40, 38))
    x[rng.random((m, k)) < 0.03] = rng.choice([np.nan, np.inf, 0.0])
    w = weight(rng, k, n, per_column=per_column, zero_points=zero_points)
    codes, scale = quantize(x, Scratch())
    out = np.empty((m, n), np.float32)
    with np.errstate(all="raise", under="ignore"):
        in_pieces(rng, FloatFinish(w), codes, w.codes, Codes(codes, scale, 1), out)
    same(out, multiply(x, w))
    if not zero_points:
        same(out, epilogue(accumulate(codes, w.codes), np.broadcast_to(w.scales, n), scale))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    x_dtype=st.sampled_from(["int8", "uint8"]),
    y_dtype=st.sampled_from([None, "int8", "uint8"]),
    per_column=st.booleans(),
    zero_points=st.booleans(),
    bias=st.sampled_from([None, "int32", "float32"]),
    axis=st.sampled_from([None, -2, -3]),
)
def test_group_results(
    seed: int,
    x_dtype: Any,
    y_dtype: Any,
    per_column: bool,
    zero_points: bool,
    bias: Any,
    axis: int | None,
) -> None:
    rng = np.random.default_rng(seed)
    b, m, k, n = (int(size) for size in rng.integers(1, 8, 4))
    limits = np.iinfo(x_dtype)
    x = rng.integers(limits.min, limits.max + 1, (b, m, k)).astype(x_dtype)
    count = 1 if axis is None else x.shape[axis]
    points = rng.integers(limits.min, limits.max + 1, count if rng.random() < 0.5 else 1).tolist()
    scales = rng.uniform(1e-3, 0.2, count).astype(np.float32).tolist()
    y = None
    if y_dtype is not None:
        y_limits = np.iinfo(y_dtype)
        y = RequantizeRecord(
            "q", float(rng.uniform(0.01, 9)), int(rng.integers(y_limits.min, y_limits.max + 1)), y_dtype
        )
    record = QdqRecord(
        "x", x_dtype, scales, points if count > 1 else points[:1], axis if count > 1 else None,
        None if bias is None else BiasRecord("b", bias, None), y,
    )  # fmt: skip
    w = weight(rng, k, n, per_column=per_column, zero_points=zero_points)
    added = None
    if bias is not None:
        added = (rng.standard_normal(rng.choice([1, n])) * 100).astype(bias)
    codes = to_signed(x).reshape(-1, k)
    out = np.empty((b * m, n), y_dtype or np.float32)
    held = Codes(codes, None, 1)
    with np.errstate(all="raise", under="ignore"):
        in_pieces(rng, GroupFinish(record, w).bind(x, held, added), codes, w.codes, held, out)
    same(out.reshape(b, m, n), multiply_codes(x, w, record, added))


def test_a_multiplier_without_a_number_gives_the_low_end() -> None:
    w = Operand(np.zeros((2, 1), np.int8), np.array(3e38, np.float32))
    record = QdqRecord("x", "int8", [3e38], [0], None, None, RequantizeRecord("q", 1.0, 0, "int8"))
    x = np.ones((1, 2), np.int8)
    out = np.empty((1, 1), np.int8)
    held = Codes(x, None, 1)
    GroupFinish(record, w).bind(x, held, None).write(np.zeros((1, 1), np.int32), slice(0, 1), slice(0, 1), held, out)
    with np.errstate(invalid="ignore"):
        same(out, multiply_codes(x, w, record, None))
    assert out.tolist() == [[-128]]


@pytest.mark.parametrize(
    ("axis", "scales", "shape", "bias"),
    [
        (-2, [0.1, 0.2], (3, 4), None),
        (-3, [0.1, 0.2], (2, 4), None),
        (None, [0.1], (2, 4), np.ones((2, 5), np.float32)),
    ],
)
def test_what_does_not_fit_is_said(axis: int | None, scales: list[float], shape: Any, bias: Any) -> None:
    w = Operand(np.zeros((4, 5), np.int8), np.ones(5, np.float32))
    record = QdqRecord("x", "int8", scales, [0], axis, None, None)
    with pytest.raises(ValueError, match=r"scales for codes|bias of shape"):
        GroupFinish(record, w).bind(np.zeros(shape, np.int8), Codes(np.zeros(shape, np.int8), None, 1), bias)
