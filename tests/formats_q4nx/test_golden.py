"""Every golden vector, made by other implementations, is read bit for bit; what can be packed again gives its bytes."""

from __future__ import annotations

import numpy as np
import pytest

from onnxpack.formats.q4nx import bf16, variants
from onnxpack.formats.q4nx.dequantize import decode_columns
from onnxpack.formats.q4nx.tile import TILE, TILE_128, Planes, pack, unpack

FOUR_BIT = {
    "q4_1_64x512": TILE,
    "q4_1_cols320": TILE,
    "q4_1_cols32": TILE,
    "q4_1_degenerate": TILE,
    "q4_1_from_q5_0": TILE,
    "q4_1_ramp_64x512": TILE,
    "q4_0_64x512": TILE,
    "q4_0_cols288": TILE,
    "q4_0_ramp_64x512": TILE,
    "q4_1_gptoss_tile128": TILE_128,
}


def grid(vector, geometry):
    tiles = geometry.grid(*vector["shape"])
    return vector["packed"].reshape(*tiles, geometry.nbytes)


def same_bits(a, b):
    return a.shape == b.shape and a.tobytes() == np.ascontiguousarray(b, np.float32).tobytes()


@pytest.mark.parametrize("name", FOUR_BIT)
def test_planes_and_codes(golden, name):
    vector, geometry = golden(name), FOUR_BIT[name]
    planes = unpack(grid(vector, geometry), geometry)
    np.testing.assert_array_equal(planes.codes, vector["codes"])
    np.testing.assert_array_equal(planes.scales, vector["scale_bits"])
    np.testing.assert_array_equal(planes.minimums, vector["min_bits"])


@pytest.mark.parametrize("name", FOUR_BIT)
def test_packing_gives_the_converters_bytes(golden, name):
    vector, geometry = golden(name), FOUR_BIT[name]
    cols = vector["shape"][1]
    groups = cols // 32  # of the matrix itself: padding is the packer's work
    planes = Planes(vector["codes"][:, :cols], vector["scale_bits"][:, :groups], vector["min_bits"][:, :groups])
    assert pack(planes, geometry).tobytes() == vector["packed"].tobytes()


@pytest.mark.parametrize("name", FOUR_BIT)
def test_values(golden, name):
    vector, geometry = golden(name), FOUR_BIT[name]
    decode = variants.signed if name.startswith("q4_0") else variants.unsigned
    assert same_bits(decode(grid(vector, geometry), geometry), vector["decoded"])


@pytest.mark.parametrize("name", [n for n, g in FOUR_BIT.items() if g is TILE and n.startswith("q4_1")])
def test_the_streaming_decoder_gives_the_same_values(golden, name):
    vector = golden(name)
    rows, cols = (int(d) for d in vector["shape"])
    tiles = vector["packed"].reshape(-1, 5120)
    for start, stop in ((0, rows), (5, 7), (rows - 1, rows), (17, 17)):
        found = decode_columns(tiles, (cols, rows), start, stop)
        assert same_bits(np.ascontiguousarray(found), vector["decoded"][start:stop, :cols].T)


@pytest.mark.parametrize("name", ["q8_0_64x256", "q8_0_cols160"])
def test_int8_in_a_4_bit_slot(golden, name):
    vector = golden(name)
    assert same_bits(variants.int8_slot(vector["packed"]), vector["decoded"])


@pytest.mark.parametrize(("field", "order"), [("colmajor", "column"), ("lane16", "block"), ("rowmajor", "row")])
def test_wide_int8_in_three_orders(golden, field, order):
    vector = golden("alt_q8_8704_three_layouts")
    tiles = vector[field].reshape(2, 2, 8704)
    assert same_bits(variants.int8_wide(tiles, order), vector["decoded"])
    for other in set(variants.INT8_ORDERS) - {order}:
        assert abs(np.corrcoef(variants.int8_wide(tiles, other).ravel(), vector["w"].ravel())[0, 1]) < 0.05


def test_two_level(golden):
    vector = golden("alt_q4k_4736_synthetic")
    assert same_bits(variants.two_level(vector["packed"].reshape(2, 2, 4736)), vector["decoded"])


def test_mxfp4(golden):
    vector = golden("mxfp4_2x40x160")
    for expert in range(2):
        assert same_bits(variants.mxfp4(vector["packed"][expert]), vector["decoded"][expert])


def test_zero_point_codec(golden):
    vector = golden("alt_codecA_synthetic")
    assert same_bits(variants.zero_point(grid(vector, TILE), TILE), vector["decoded"])


def test_bfloat16_rounding(golden):
    vector = golden("bf16_passthrough")
    finite = np.isfinite(vector["x"])
    np.testing.assert_array_equal(bf16.to_bits(vector["x"][finite]), vector["bits"][finite])
