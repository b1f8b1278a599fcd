"""int8 with amax/127: weights per column, activations per row, and the float epilogue.

This file is the "Numbers" section of the design as code. Every device must give the same codes, the same int32
accumulators and the same float32 results, bit for bit.

>>> codes, scale = quantize_rows(np.array([[1.0, -2.0], [0.0, 0.0]], np.float32))
>>> codes.tolist()
[[64, -127], [0, 0]]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxpack.errors import ModelError

F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]

AMAX_FLOOR = np.float32(127 * 2.0**-126)
"""Below this amax a scale would be subnormal; the smallest scale is 2**-126."""

_BLOCK_BYTES = 512 * 1024  # of float32 temporary, so that it stays in a core's cache
_BLOCK_BYTES_TRANSPOSED = 128 * 1024  # the transposing copy of the codes wants room too
_MIN_BLOCK_ROWS = 8  # very wide matrices are cut into bands of columns instead of single rows


def scale_of(amax: F32) -> F32:
    """Scale for an absolute maximum: max(amax, 127 * 2**-126) / 127, in float32. NaN stays NaN.

    >>> float(scale_of(np.float32(254.0)))
    2.0
    """
    return np.asarray(np.maximum(amax, AMAX_FLOOR) / np.float32(127), np.float32)


@dataclass(frozen=True)
class ColumnError:
    """What quantizing cost, one figure per column, in units that add up: sums over K of squares.

    `residual` is the sum of (w - decoded)**2, `energy` the sum of w**2, both float64 [N].
    """

    residual: npt.NDArray[np.float64]
    energy: npt.NDArray[np.float64]


def quantize_columns(w: npt.NDArray[np.generic], codes: I8, scales: F32) -> ColumnError:
    """Quantize w [K, N] into `codes` int8 [K, N] and `scales` float32 [N], a cache-sized block at a time.

    `w` may be float32, float16, bfloat16 or float64 (rounded to float32 first), in any memory order: row-major and
    transposed weights each take the path that reads them in order. A column of zeros gets scale 1.
    ModelError with the position of the first NaN or infinity.

    >>> codes, scales = np.empty((2, 2), np.int8), np.empty(2, np.float32)
    >>> _ = quantize_columns(np.array([[1, 100], [2, 200]], np.float32), codes, scales)
    >>> codes.tolist(), [round(float(s), 4) for s in scales]
    ([[64, 64], [127, 127]], [0.0157, 1.5748])
    """
    if w.ndim != 2 or w.shape != codes.shape or scales.shape != w.shape[1:]:
        raise ValueError(f"shapes do not fit: w {w.shape}, codes {codes.shape}, scales {scales.shape}")
    error = ColumnError(np.zeros(w.shape[1]), np.zeros(w.shape[1]))
    if w.size:
        transposed = w.strides[0] < w.strides[1]
        with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is an infinity, and found as one
            (_by_columns if transposed else _by_rows)(w, codes, scales, error)
    else:
        scales[...] = 1
    return error


def _by_rows(w: npt.NDArray[np.generic], codes: I8, scales: F32, error: ColumnError) -> None:
    """Row-major weights: two passes over blocks of rows, in bands of columns when a row is long."""
    k, n = w.shape
    rows = max(_MIN_BLOCK_ROWS, _BLOCK_BYTES // (4 * n))
    band = min(n, max(64, _BLOCK_BYTES // (4 * rows)))
    rows = min(rows, k)
    quotient, codes_f = np.empty((rows, band), np.float32), np.empty((rows, band), np.float32)
    for start in range(0, n, band):
        columns = slice(start, min(n, start + band))
        width = columns.stop - start
        amax = np.zeros(width, np.float32)
        for row in range(0, k, rows):
            block = w[row : row + rows, columns]
            x = quotient[: len(block), :width]
            np.abs(block, out=x, casting="unsafe")
            np.maximum(amax, x.max(axis=0), out=amax)
        scales[columns] = _weight_scale(amax, w, columns)
        residual, energy = error.residual[columns], error.energy[columns]
        for row in range(0, k, rows):
            block = w[row : row + rows, columns]
            x, q = quotient[: len(block), :width], codes_f[: len(block), :width]
            np.divide(block, scales[columns], out=x, casting="unsafe", dtype=np.float32)
            np.rint(x, out=q)
            codes[row : row + rows, columns] = q
            _add_squares(x, q, residual, energy, axis=0)
        _in_units_of_weight(residual, energy, scales[columns])


def _by_columns(w: npt.NDArray[np.generic], codes: I8, scales: F32, error: ColumnError) -> None:
    """Weights stored as [N, K]: each column is contiguous, so one block of columns is read once."""
    stored, (k, n) = w.T, w.shape
    columns = min(n, max(1, _BLOCK_BYTES_TRANSPOSED // (4 * k)))
    quotient, codes_f = np.empty((columns, k), np.float32), np.empty((columns, k), np.float32)
    codes_t = np.empty((columns, k), np.int8)
    for start in range(0, n, columns):
        block, span = stored[start : start + columns], slice(start, min(n, start + columns))
        x, q, narrow = quotient[: len(block)], codes_f[: len(block)], codes_t[: len(block)]
        np.abs(block, out=x, casting="unsafe")
        scales[span] = _weight_scale(x.max(axis=1), w, span)
        np.divide(block, scales[span, None], out=x, casting="unsafe", dtype=np.float32)
        np.rint(x, out=q)
        narrow[...] = q
        codes[:, span] = narrow.T
        _add_squares(x, q, error.residual[span], error.energy[span], axis=1)
        _in_units_of_weight(error.residual[span], error.energy[span], scales[span])


def _weight_scale(amax: F32, w: npt.NDArray[np.generic], columns: slice) -> F32:
    bad = np.flatnonzero(~np.isfinite(amax))
    if bad.size:
        column = columns.start + int(bad[0])
        values = np.asarray(w[:, column], np.float32)
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        what = f"weight value {values[row]} at [{row}, {column}] is not finite"
        raise ModelError(what, hint="repair the checkpoint")
    return np.where(amax == 0, np.float32(1), scale_of(amax))


def _add_squares(x: F32, q: F32, residual: npt.NDArray[np.float64], energy: npt.NDArray[np.float64], axis: int) -> None:
    # Plain sums of elementwise products, never BLAS: the figures must not depend on threads or on the machine.
    np.subtract(x, q, out=q)
    np.multiply(q, q, out=q)
    residual += np.add.reduce(q, axis=axis)
    np.multiply(x, x, out=x)
    energy += np.add.reduce(x, axis=axis)


def _in_units_of_weight(residual: npt.NDArray[np.float64], energy: npt.NDArray[np.float64], scales: F32) -> None:
    squared = np.square(scales, dtype=np.float64)
    residual *= squared
    energy *= squared


def dequantize_columns(codes: I8, scales: F32) -> F32:
    """Inverse of quantize_columns: codes [K, N] times scales [N], float32, as ONNX's DequantizeLinear(axis=1)."""
    with np.errstate(over="ignore"):  # 127 times the scale of the largest float32 may round beyond it
        return codes.astype(np.float32) * scales


def quantize_rows(x: F32) -> tuple[I8, F32]:
    """Quantize activations x [M, K] per row: codes int8 [M, K] and scales float32 [M].

    A row with a NaN or an infinity gets a NaN scale, which the epilogue spreads over that row only. K must be > 0.
    """
    finite = np.logical_and.reduce(np.isfinite(x), axis=1)
    amax = np.where(finite, np.abs(x).max(axis=1, initial=0), np.float32(np.nan))
    scale = scale_of(amax)
    with np.errstate(invalid="ignore"):
        quotient = np.rint(x / scale[:, None])
    codes = np.where(finite[:, None], np.clip(quotient, -127, 127), 0).astype(np.int8)
    return codes, scale


def accumulate(a: I8, w: I8) -> I32:
    """Exact int32 product of a [M, K] and w [K, N].

    Goes through float64 BLAS: every partial sum is an integer below 2**53, so any order of addition is exact.
    """
    return np.asarray(a.astype(np.float64) @ w.astype(np.float64)).astype(np.int32)


def epilogue(acc: I32, w_scale: F32, a_scale: F32) -> F32:
    """(float32(acc) * w_scale[column]) * a_scale[row], float32 [M, N]."""
    with np.errstate(over="ignore"):
        return np.asarray((acc.astype(np.float32) * w_scale) * a_scale[:, None], np.float32)
