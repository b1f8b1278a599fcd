"""The codec as a format: the rule, padding, streaming, error figures, refusals."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpack.errors import ModelError, UsageError
from onnxpack.formats import get
from onnxpack.formats.q4nx import bf16, variants
from onnxpack.formats.q4nx.tile import TILE, unpack

Q4NX = get("q4nx")


def rounded(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def by_the_rule(w):
    """The rule of quantize.py in the plainest words: codes, scales and minimums of the padded matrix."""
    k, n = w.shape
    k_pad, n_pad = -(-k // 256) * 256, -(-n // 32) * 32
    codes = np.zeros((n_pad, k_pad), np.uint8)
    scales, minimums = np.zeros((n_pad, k_pad // 32), np.float32), np.zeros((n_pad, k_pad // 32), np.float32)
    for column in range(n):
        for group in range(-(-k // 32)):
            x = np.float32(w[32 * group : 32 * group + 32, column])
            if len(x) == 32:
                low = rounded(x.min() + np.float32(0))
                scale = rounded(max(x.max() - low, np.float32(0)) / np.float32(15))
            else:
                x = np.concatenate([x, np.zeros(32 - len(x), np.float32)])
                scale = rounded(max(x.min() / np.float32(-8), x.max() / np.float32(7)))
                low = np.float32(0) - 8 * scale
            if scale:
                codes[column, 32 * group : 32 * group + 32] = np.clip(np.rint((x - low) / scale), 0, 15)
            scales[column, group], minimums[column, group] = scale, low
    return codes, scales, minimums


weights = st.builds(
    lambda k, n, seed, scale, offset, kind: (
        (np.random.default_rng(seed).standard_normal((k, n)) * scale + offset).astype(np.float32).astype(kind)
    ),
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(0, 99),
    st.sampled_from([0.05, 1e-30, 1e-41, 1e30, 0.0, 1e-5]),
    st.sampled_from([0.0, 1.0, -3.0, 1e-6]),
    st.sampled_from([np.float32, np.float64, ml_dtypes.bfloat16]),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(w=weights, fortran=st.booleans())
def test_bytes_follow_the_rule_and_decode_to_it(w, fortran):
    stored = np.asfortranarray(w) if fortran else w
    encoded = Q4NX.encode(stored)
    k, n = w.shape
    planes = unpack(encoded.fields["tiles"].reshape(*TILE.grid(n, k), 5120))
    codes, scales, minimums = by_the_rule(w.astype(np.float32))
    np.testing.assert_array_equal(planes.codes, codes)
    np.testing.assert_array_equal(bf16.to_float(planes.scales), scales)
    np.testing.assert_array_equal(bf16.to_float(planes.minimums), minimums)
    values = codes * np.repeat(scales, 32, 1) + np.repeat(minimums, 32, 1)
    assert Q4NX.decode(encoded).tobytes() == np.ascontiguousarray(values[:n, :k].T).tobytes()
    assert not values[n:].any()
    assert not values[:, k:].any()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    k=st.integers(1, 600),
    n=st.integers(1, 1500),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    order=st.sampled_from("CF"),
)
def test_a_band_of_columns_decodes_alone(k, n, cut, order):
    w = np.random.default_rng(k + n).standard_normal((k, n), dtype=np.float32)
    encoded = Q4NX.encode(w)
    start, stop = sorted(int(c * n) for c in cut)
    out = np.full((k, stop - start), 9, np.float32, order)
    assert Q4NX.decode_columns(encoded, start, stop, out) is out
    np.testing.assert_array_equal(out, Q4NX.decode(encoded)[:, start:stop])


def test_relative_rms_of_normal_weights(normal):
    w = normal(1024, 1024)
    encoded = Q4NX.encode(w)
    error = float(np.sqrt(np.square(Q4NX.decode(encoded).astype(float) - w).sum() / np.square(w, dtype=float).sum()))
    assert error < 0.0790
    assert encoded.bits_per_weight == 5


@pytest.mark.parametrize("case", ["normal", "wide columns", "constant", "mixed sizes", "offset"])
def test_error_sums_are_those_of_the_decoded_weight(normal, case):
    w = normal(300, 1100)
    if case == "wide columns":
        w *= np.logspace(-4, 4, 1100, dtype=np.float32)
    elif case == "constant":
        w[:] = np.float32(0.1)
    elif case == "mixed sizes":
        w[:, ::2] *= np.float32(1e-22)
        w[:, 1::3] *= np.float32(1e18)
    elif case == "offset":
        w += 1
    out = {"tiles": np.empty(Q4NX.fields(w.shape)["tiles"].shape, np.int8)}
    sums = Q4NX.encode_into(w, out)
    exact = w.astype(np.float64)
    decoded = Q4NX.decode(Q4NX.encode(w)).astype(np.float64)
    bands = np.arange(1100) // 32

    def per_band(x):
        return np.bincount(bands, x.sum(axis=0))

    residual, energy = per_band((exact - decoded) ** 2), per_band(exact**2)
    cosine = per_band(exact * decoded) / np.sqrt(energy * per_band(decoded**2))
    np.testing.assert_allclose(sums.band_relative_rms, np.sqrt(residual / energy), rtol=2e-5)
    np.testing.assert_allclose(sums.band_cosine, cosine, rtol=2e-6)
    assert sums.relative_rms == pytest.approx(np.sqrt(residual.sum() / energy.sum()), rel=2e-5)
    total = (exact * decoded).sum() / np.sqrt(energy.sum() * (decoded**2).sum())
    assert sums.cosine == pytest.approx(total, rel=2e-6)


def test_the_worst_group_is_found(normal):
    w = normal(512, 2100)
    w[64:96, 1500] = 0.05 * np.sign(w[64:96, 1500])  # two values, far apart: exact
    w[96:128, 1777] = np.linspace(-1e-3, 1e-3, 32)
    w[100, 1777] = 0.5  # a spike leaves the others one code
    w[101, 1777] = -0.5
    sums = Q4NX.encode_into(w, {"tiles": np.empty(Q4NX.fields(w.shape)["tiles"].shape, np.int8)})
    exact, decoded = w.astype(np.float64), Q4NX.decode(Q4NX.encode(w)).astype(np.float64)
    ratio = (np.square(exact - decoded).reshape(16, 32, -1).sum(1)) / np.square(exact).reshape(16, 32, -1).sum(1)
    group, column = np.unravel_index(ratio.argmax(), ratio.shape)
    worst = sums.worst_group
    assert (worst.k, worst.n) == (32 * group, column)
    assert worst.relative_rms == pytest.approx(float(np.sqrt(ratio.max())), rel=1e-4)


def test_figures_do_not_depend_on_memory_order(normal):
    w = normal(700, 1300)
    a, b = (Q4NX.encode_into(x, {"tiles": np.empty((41 * 3, 5120), np.int8)}) for x in (w, np.asfortranarray(w)))
    assert (a.residual, a.energy, a.worst_group) == (b.residual, b.energy, b.worst_group)
    assert a.band_cross.tolist() == b.band_cross.tolist()


def test_an_all_zero_weight():
    w = np.zeros((300, 40), np.float32)
    w[0, 0] = -0.0
    out = {"tiles": np.full((4, 5120), 0x5A, np.int8)}
    sums = Q4NX.encode_into(w, out)
    assert not out["tiles"].any()
    assert (sums.relative_rms, sums.cosine, sums.worst_group) == (0, 1, None)
    assert sums.band_cosine.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.nan, "nan at .* not finite"),
        (np.inf, "inf at"),
        (-np.inf, "-inf at"),
        (3e38, "too large"),
        (-(2.0**120), "too large"),
    ],
)
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("shape", [(64, 32), (300, 1100), (33, 5)])
def test_values_that_do_not_fit_are_refused_with_their_position(value, match, order, shape):
    w = np.zeros(shape, np.float32, order)
    at = (shape[0] - 1, shape[1] - 2)
    w[at] = value
    with pytest.raises(ModelError, match=match) as caught:
        Q4NX.encode(w)
    assert f"[{at[0]}, {at[1]}]" in str(caught.value)


def test_a_float64_beyond_float32_is_refused_and_the_largest_allowed_is_not():
    with pytest.raises(ModelError, match="1e\\+300"):
        Q4NX.encode(np.full((32, 32), 1e300))
    w = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(32, 32) * np.float32(1.3e36)
    np.testing.assert_allclose(Q4NX.decode(Q4NX.encode(w)), w, atol=1e35)


def test_signed_sources_are_written_unsigned_and_exactly(golden):
    vector = golden("q4_0_64x512")
    tiles = vector["packed"].reshape(2, 2, 5120)
    unsigned = variants.to_unsigned(tiles, TILE)
    assert unpack(unsigned).minimums.any()
    np.testing.assert_array_equal(variants.unsigned(unsigned, TILE), vector["decoded"])
    padded = golden("q4_0_cols288")
    unsigned = variants.to_unsigned(padded["packed"].reshape(1, 2, 5120), TILE)
    np.testing.assert_array_equal(variants.unsigned(unsigned, TILE), padded["decoded"])
    assert not unpack(unsigned).codes[:, 288:].any()


def test_bytes_round_trip_and_are_the_same_every_time(normal):
    w = normal(256, 64)
    data = Q4NX.to_bytes(Q4NX.encode(w))
    assert data == Q4NX.to_bytes(Q4NX.encode(w.copy()))
    assert len(data) == 2 * 5120
    np.testing.assert_array_equal(Q4NX.decode(Q4NX.from_bytes(data, (256, 64))), Q4NX.decode(Q4NX.encode(w)))
    with pytest.raises(UsageError, match="10239 bytes"):
        Q4NX.from_bytes(data[:-1], (256, 64))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), ()])
def test_only_matrices(shape):
    with pytest.raises(UsageError, match="matrix"):
        Q4NX.encode(np.zeros(shape, np.float32))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices(shape):
    encoded = Q4NX.encode(np.zeros(shape, np.float32))
    assert encoded.nbytes == 0
    assert Q4NX.decode(encoded).shape == shape


@pytest.mark.parametrize("order", "CF")
def test_memory_is_bounded_by_a_block(normal, order):
    w = np.asarray(normal(1024, 6144), order=order)
    out = {"tiles": np.empty(Q4NX.fields(w.shape)["tiles"].shape, np.int8)}
    tracemalloc.start()
    Q4NX.encode_into(w, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_band_decoding_is_bounded_too(normal):
    encoded = Q4NX.encode(normal(1024, 4096))
    tracemalloc.start()
    Q4NX.decode_columns(encoded, 32, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
