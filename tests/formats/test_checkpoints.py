"""Checkpoint layouts: golden arrays beyond a decode, parameters read off stored tensors, exact encoders."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpack.errors import UsageError
from onnxpack.formats import get, names
from onnxpack.formats.base import Encoded
from onnxpack.formats.hadamard import factors, transform
from onnxpack.formats.quip import entries, nearest, sign_factors
from onnxpack.formats.rotated import smoothing
from onnxpack.formats.rules import rule_table
from onnxpack.formats.scaling import halved
from onnxpack.formats.tensor_numpy import Tensors


def packed(made: Any, shape: tuple[int, int], **values: np.ndarray) -> Encoded:
    """Stored tensors made from codes and numbers by the names of their views."""
    plan = made.plan(shape)
    fields = {name: np.zeros(spec.shape, spec.dtype) for name, spec in made.fields(shape).items()}
    tensors = Tensors(plan.layout, plan.sizes, fields)
    for name, value in values.items():
        tensors.put(name, value, 0, plan.frame[0])
    return Encoded(made.name, shape, fields, made.params)


def weight(shape: tuple[int, int], seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)


def pick(arrays: Any, prefix: str, *keys: str) -> dict[str, np.ndarray]:
    return {key: arrays[prefix + key] for key in keys}


# Parameters that stored tensors show ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_shows_bits_group_and_order(bits: int, golden: Any, tools: Any) -> None:
    arrays = golden("int4_gptq")
    fields = pick(arrays, f"b{bits}_", "qweight", "qzeros", "scales", "g_idx")
    y = arrays[f"b{bits}_y_IxO"].T
    assert tools.same(get("gptq").decode(Encoded("int4_gptq", y.shape, fields)), y)


def test_the_others_show_theirs(golden: Any, tools: Any) -> None:
    exl2, spqr, hqq, aqlm = (golden(name) for name in ("exl2", "spqr", "hqq", "aqlm"))
    stored = [
        ("exl2", pick(exl2, "", "q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm"), exl2["y_fp16"].T),
        (
            "spqr",
            {
                "dense_weights": spqr["dense_weights_u64"],
                "row_offsets": spqr["row_offsets"],
                "col_vals": spqr["col_vals_u32"],
            },
            spqr["y_fp16"],
        ),
        ("hqq", {"W_q": hqq["a0_b3_Wq"], "scale": hqq["a0_b3_scale"], "zero": hqq["a0_b3_zero"]}, hqq["a0_b3_y"]),
        (
            "aqlm",
            {"codes": aqlm["1x12_codes_stored"], **pick(aqlm, "1x12_", "codebooks", "scales")},
            aqlm["1x12_y"],
        ),
        ("fp6_llm", {"weight": golden("fp6_llm")["e2m2_prepacked"], "scales": golden("fp6_llm")["e2m2_scale_fp16"]},
         golden("fp6_llm")["e2m2_y_fp16"]),
    ]  # fmt: skip
    for name, fields, y in stored:
        assert tools.same(get(name).decode(Encoded(name, y.shape, fields)), y), name


# GPTQ and AWQ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_codes_are_packed_as_the_reference_packs_them(bits: int, golden: Any) -> None:
    arrays = golden("int4_gptq")
    group = int(arrays[f"b{bits}_group_size"])
    codes, zeros = arrays[f"b{bits}_codes_IxO"].T, arrays[f"b{bits}_zeros_GxO"].T
    made = get("gptq", bits=bits, group=group)
    stored = packed(made, codes.shape, codes=codes, zeros=zeros - np.uint8(1), scales=arrays[f"b{bits}_scales"].T)
    for key in ("qweight", "qzeros", "scales"):
        assert np.array_equal(stored.fields[key], arrays[f"b{bits}_{key}"]), key


def test_gptq_v1_reads_the_highest_zero_back_as_zero(tools: Any) -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(8, 8) % 16
    numbers = {"codes": codes, "zeros": np.full((8, 1), 15, np.uint8), "scales": np.ones((8, 1), np.float16)}
    for zeros, expected in (("v1", codes), ("v2", codes - 15.0)):
        made = get("gptq", group=8, zeros=zeros)
        assert tools.same(made.decode(packed(made, (8, 8), **numbers)), expected)


def test_gptq_v1_never_wants_to_store_a_zero_point_of_zero(tools: Any) -> None:
    w = np.abs(weight((8, 128)))
    for zeros in ("v1", "v2"):
        made = get("gptq", zeros=zeros)
        assert np.abs(made.decode(made.encode(w)) - w).max() < 0.01


def test_act_order_gives_large_columns_a_group_of_their_own() -> None:
    w = weight((8, 256))
    w[:, ::4] *= 50
    made = get("gptq", act_order=True, group=64)
    encoded = made.encode(w)
    assert set(encoded.fields["g_idx"][::4]) == {0}
    assert np.bincount(encoded.fields["g_idx"]).tolist() == [64] * 4
    plain = get("gptq", group=64)
    small = np.delete(w, np.s_[::4], axis=1)
    losses = [np.delete(m.decode(m.encode(w)), np.s_[::4], axis=1) - small for m in (made, plain)]
    assert np.square(losses[0]).sum() < 0.01 * np.square(losses[1]).sum()


def test_awq_packings(golden: Any, tools: Any) -> None:
    arrays = golden("int4_awq")
    codes, zeros, group = arrays["codes_IxO"].T, arrays["zeros_GxO"].T, int(arrays["group_size"])
    scales = arrays["gemm_scales"].T
    gemm = packed(get("awq", group=group), codes.shape, codes=codes, zeros=zeros, scales=scales)
    assert all(np.array_equal(gemm.fields[k], arrays[f"gemm_{k}"]) for k in ("qweight", "qzeros", "scales"))
    gemv = packed(get("awq", group=group, variant="gemv"), codes.shape, codes=codes, zeros=zeros, scales=scales)
    assert all(np.array_equal(gemv.fields[k], arrays[f"gemv_{k}"]) for k in ("qweight", "qzeros", "scales"))
    made = get("awq", group=group, variant="llm-awq")
    shifted = -(zeros.astype(np.float32) * scales.astype(np.float32)).astype(np.float16)
    llm = packed(made, codes.shape, codes=codes, scales=scales, scaled_zeros=shifted)
    assert np.array_equal(llm.fields["qweight"], arrays["llmawq_qweight_int16"])
    assert np.array_equal(llm.fields["scales"], arrays["llmawq_scales"])
    assert np.array_equal(llm.fields["scaled_zeros"], arrays["llmawq_scaled_zeros"])
    wide = [np.repeat(a.astype(np.float32), group, axis=1) for a in (scales, shifted)]
    assert tools.same(made.decode(llm), codes * wide[0] + wide[1])


# BitNet, ParetoQ, Tequila --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", ["x86", "arm"])
def test_i2_s_as_one_string_of_bytes(build: str, golden: Any, tools: Any) -> None:
    arrays, made = golden("bitnet_i2_s"), get("bitnet_i2_s", build=build)
    raw = arrays[f"{build}_packed_with_tail32"].tobytes()
    stored = made.from_bytes(raw, arrays["w"].shape)
    assert made.to_bytes(stored) == raw
    assert tools.same(made.decode(stored), arrays["ternary"] * arrays["scale"])
    assert tools.same(tools.onnxruntime(tools.model(made, stored, 21)), made.decode(stored))
    # The vectors' scale is max |w|; ours is the mean, and the codes are the same.
    assert np.array_equal(made.encode(arrays["w"]).fields["data"], stored.fields["data"])


def test_bitnet_divides_or_multiplies(golden: Any, tools: Any) -> None:
    arrays = golden("bitnet_hf")
    fields = {"weight": arrays["packed"], "weight_scale": np.array(0.5, np.float32)}
    for linear, scale in (("bitlinear", 2.0), ("autobitlinear", 0.5)):
        decoded = get("bitnet_hf", linear=linear).decode(Encoded("bitnet_hf", arrays["w"].shape, fields))
        assert tools.same(decoded, arrays["ternary"] * scale)


LEVELS = {"ternary": "seq_ternary", "2bit": "seq_2bit", "3bit": "lsq_3bit", "4bit": "lsq_4bit"}


@pytest.mark.parametrize("levels", LEVELS)
def test_paretoq_levels(levels: str, golden: Any, tools: Any) -> None:
    arrays, made = golden("paretoq"), get("paretoq", levels=levels, scale_dtype="float32")
    codes = made.codes_for(arrays["w"], arrays["alpha"])
    stored = packed(made, arrays["w"].shape, codes=codes, alpha=arrays["alpha"])
    y = arrays[f"{LEVELS[levels]}_y"]
    assert tools.same(made.decode(stored), y)
    assert tools.same(tools.onnxruntime(tools.model(made, stored, 13)), y)


def test_tequila_values_and_bias(golden: Any, tools: Any) -> None:
    arrays = golden("tequila")
    made = get("tequila", scale_dtype="float32")
    w, scale = arrays["w"], arrays["scale_per_group"].reshape(6, 2, 1)
    here = made.encode(w)
    assert np.array_equal(np.sign(made.decode(here)), arrays["ternary"])
    assert np.allclose(here.fields["scale"], scale[..., 0], rtol=2e-7)
    codes = (arrays["ternary"] + 1).astype(np.uint8).reshape(6, 2, 128)
    stored = packed(made, w.shape, codes=codes, scale=scale)
    assert tools.same(made.decode(stored), arrays["A"])
    rows = get("tequila", group=0, scale_dtype="float32")
    whole = rows.encode(w)
    assert np.allclose(rows.decode(whole), arrays["v2_per_channel_A"], rtol=3e-7)
    assert np.allclose(whole.fields["bias"], arrays["v2_folded_bias"], rtol=1e-6)


# Rotations and diagonals ---------------------------------------------------------------------------------------------


def test_hadamard_matrices(golden: Any) -> None:
    assert np.array_equal(transform(np.eye(24, dtype=np.float32), 24), golden("quarot")["hadamard_24_rows"])
    sylvester = np.array([[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
    assert np.array_equal(transform(np.eye(64, dtype=np.float32), 64), sylvester)


@given(st.integers(0, 9), st.sampled_from([1, 12]), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_hadamard_undoes_itself(power: int, odd: int, seed: int) -> None:
    size = odd << power
    x = np.random.default_rng(seed).integers(-8, 9, (3, size)).astype(np.float32)
    assert factors(size) == (odd, 1 << power)
    assert np.array_equal(transform(transform(x, size), size, inverse=True), x * size)


def quarot_fields(arrays: Any) -> dict[str, np.ndarray]:
    signs = np.packbits((arrays["Q_signs"] < 0).astype(np.uint8), bitorder="little")
    return {"weight": arrays["packed"], "scales": arrays["scale"][:, 0], "signs": signs}


def test_quarot(golden: Any, tools: Any) -> None:
    arrays, made = golden("quarot"), get("quarot", scale_dtype="float32")
    stored = Encoded("quarot", arrays["W"].shape, quarot_fields(arrays), made.params)
    decoded = made.decode(stored)
    assert np.abs(decoded - arrays["W_deq_unrotated"]).max() < 1e-6 * np.abs(decoded).max()
    assert tools.same(tools.onnxruntime(tools.model(made, stored, 13)), decoded)
    assert not np.allclose(decoded, arrays["W_rot_deq"])
    # The codes themselves are those of the rotated weight, bit for bit.
    again = packed(made, arrays["W"].shape, codes=arrays["codes"].view(np.uint8) & 15)
    assert np.array_equal(again.fields["weight"], arrays["packed"])


def test_quarot_spreads_outliers() -> None:
    w = weight((16, 256))
    w[:, 7] *= 60
    rotated, plain = get("quarot"), get("int4_symmetric", group=256)
    losses = [np.square(m.decode(m.encode(w)) - w)[:, np.arange(256) != 7].sum() for m in (rotated, plain)]
    assert losses[0] < losses[1] / 3


def test_a_side_without_a_matrix_is_refused() -> None:
    for name, shape in (("quarot", (8, 80)), ("quip_sharp_e8p", (80, 64)), ("exl3", (64, 128))):
        with pytest.raises(UsageError, match=f"{name} cannot store"):
            get(name).fields(shape)
    assert get("quarot", block=16).fields((8, 80))


def test_smoothquant(golden: Any, tools: Any) -> None:
    arrays, made = golden("smoothquant"), get("smoothquant")
    factor = smoothing(arrays["act_absmax"], [arrays["W0"], arrays["W1"]], float(arrays["alpha"]))
    assert np.allclose(factor, arrays["smooth_scales"], rtol=2e-7)
    encoded = made.encode_smoothed(arrays["W0"], arrays["act_absmax"], [arrays["W1"]])
    assert np.array_equal(encoded.fields["weight"], arrays["W0_pc_codes"])
    assert np.array_equal(encoded.fields["weight_scale"], arrays["W0_pc_scale"][:, 0])
    smoothed = made.decode(Encoded("smoothquant", encoded.shape, {**encoded.fields, "smooth_scale": factor * 0 + 1}))
    assert tools.same(smoothed, arrays["W0_pc_deq"])
    # With its diagonal the decoded weight is the weight: nothing is left for the activations.
    whole = made.decode(encoded)
    assert tools.same(whole, (arrays["W0_pc_deq"] / factor).astype(np.float32))
    step = encoded.fields["weight_scale"][:, None] / factor
    assert (np.abs(whole - arrays["W0"]) <= 0.51 * step).all()
    assert tools.same(tools.onnxruntime(tools.model(made, encoded, 21)), whole)


# QuIP#, EXL3 ---------------------------------------------------------------------------------------------------------


def test_the_lattice_codebook() -> None:
    factor, shift = sign_factors()
    code = np.arange(1 << 16)
    values = entries()[code >> 8] * factor[code & 255] + shift[code & 255][:, None]
    quarters = (values * 4).astype(np.int8)
    assert np.array_equal(quarters, values * 4)
    assert hashlib.sha256(quarters.tobytes()).hexdigest() == E8P
    # Halves of odd numbers plus a quarter, an even lattice: all sixty-five thousand are different.
    assert len(np.unique(quarters, axis=0)) == 1 << 16


def quip_fields(arrays: Any, codes: str) -> dict[str, np.ndarray]:
    return {"Qidxs": arrays[codes], "SU": arrays["SU"].astype(np.float16), "SV": arrays["SV"].astype(np.float16)}


def test_quip(golden: Any, tools: Any) -> None:
    arrays, made = golden("quip_sharp_e8p"), get("quip_sharp")
    shape = arrays["W"].shape
    stored = Encoded(made.name, shape, quip_fields(arrays, "Qidxs_int64"))
    decoded = made.decode(stored)
    assert np.abs(decoded - arrays["W"]).max() < 1e-6 * np.abs(decoded).max()
    assert tools.same(tools.onnxruntime(tools.model(made, stored, 13)), decoded)
    # Packed from the reference's 16-bit indices.
    index = arrays["rand_idx"]
    again = packed(made, shape, entries=(index >> 8).astype(np.uint8), signs=(index & 255).astype(np.uint8))
    assert np.array_equal(again.fields["Qidxs"], arrays["rand_Qidxs_int64"])


@pytest.mark.parametrize(("codes", "values"), [("Qidxs_int64", "hatW"), ("rand_Qidxs_int64", "rand_hatW")])
def test_quip_before_its_rotations(codes: str, values: str, golden: Any, tools: Any) -> None:
    from onnxpack.formats.evaluate import evaluate_tensors
    from onnxpack.formats.tensor_numpy import TensorNumpyOps

    arrays, made = golden("quip_sharp_e8p"), get("quip_sharp_e8p")
    plan = made.plan(arrays["W"].shape)
    ops = TensorNumpyOps(Tensors(plan.layout, plan.sizes, quip_fields(arrays, codes)), 0, plan.frame[0])
    assert tools.same(evaluate_tensors(plan.profile, ops).reshape(plan.shape), arrays[values])


def test_the_nearest_codeword_is_the_reference_s(golden: Any) -> None:
    arrays = golden("quip_sharp_e8p")
    entry, signs = nearest(arrays["x"].reshape(-1, 8))
    assert np.array_equal((entry.astype(np.uint16) << 8 | signs).reshape(arrays["idx"].shape), arrays["idx"])


TRELLIS = [("K2_cb2", 2, "mul1"), ("K3_cb0", 3, "3inst"), ("K4_cb1", 4, "mcg")]


@pytest.mark.parametrize(("prefix", "bits", "codebook"), TRELLIS)
def test_exl3(prefix: str, bits: int, codebook: str, golden: Any, tools: Any) -> None:
    from onnxpack.formats.evaluate import evaluate_tensors
    from onnxpack.formats.tensor_numpy import TensorNumpyOps

    arrays = golden("exl3")
    fields = {"trellis": arrays[f"{prefix}_trellis_int16"], **pick(arrays, f"{prefix}_", "suh", "svh")}
    made = get("exl3", bits=bits, codebook=codebook)
    plan = made.plan((128, 128))
    ops = TensorNumpyOps(Tensors(plan.layout, plan.sizes, fields), 0, 128)
    inner = evaluate_tensors(plan.profile, ops)
    assert tools.same(inner[:, :64].T, arrays[f"{prefix}_inner_fp16_rows0_63"])
    stored = Encoded("exl3", (128, 128), fields, made.params)
    decoded, expected = made.decode(stored), arrays[f"{prefix}_weight_f32_noround_rows0_15"]
    assert np.abs(decoded.T[:16] - expected).max() < 1e-6 * np.abs(expected).max()
    h = transform(np.eye(128), 128).astype(np.float64) / np.sqrt(128)
    exact = fields["suh"].astype(np.float64)[:, None] * (h @ inner.T.astype(np.float64) @ h) * fields["svh"]
    assert np.abs(decoded.T - exact).max() < 2e-7 * np.abs(exact).max()
    assert tools.same(tools.onnxruntime(tools.model(made, stored, 21)), decoded)
    # Bits follow from the tensor, the codebook from the markers that checkpoints carry.
    marker = {} if codebook == "3inst" else {codebook: np.zeros((), np.int32)}
    assert tools.same(get("exl3").decode(Encoded("exl3", (128, 128), fields | marker)), decoded)


def test_trellis_codebooks(golden: Any, tools: Any) -> None:
    head = golden("exl3")["codebook_head"]
    for i, rule in enumerate(("3inst", "mcg", "mul1")):
        assert tools.same(rule_table(rule)[:64], head[i])


def test_exl3_is_only_read() -> None:
    with pytest.raises(UsageError, match="exl3 has no encoder"):
        get("exl3").encode(weight((128, 128)))


# SpQR, EXL2 ----------------------------------------------------------------------------------------------------------


def test_spqr_without_its_outliers(golden: Any, tools: Any) -> None:
    arrays = golden("spqr")
    fields = {
        "dense_weights": arrays["dense_weights_u64"],
        "row_offsets": np.zeros_like(arrays["row_offsets"]),
        "col_vals": arrays["col_vals_u32"],
    }
    with pytest.raises(UsageError, match="spqr: the rows of outliers"):
        get("spqr").decode(Encoded("spqr", (48, 64), fields))
    # All entries in the last row, all of them +0.
    offsets = np.append(np.zeros(48, np.int32), np.int32(63))
    fields |= {"row_offsets": offsets, "col_vals": np.arange(63, dtype=np.uint32)}
    assert tools.same(get("spqr").decode(Encoded("spqr", (48, 64), fields)), arrays["y_dense_only_fp16"])


def test_spqr_keeps_outliers_exact() -> None:
    w = weight((32, 64))
    w[3, 5], w[17, 60] = 7.5, -2.25
    made = get("spqr", one_in=256)
    encoded = made.encode(w)
    decoded = made.decode(encoded)
    assert abs(decoded[3, 5] - 7.5) < 0.005
    assert abs(decoded[17, 60] + 2.25) < 0.002
    assert encoded.fields["col_vals"].shape == (8,)
    assert encoded.fields["row_offsets"][-1] == 8
    # The second copy of a tile's parameters is written too.
    bytes_ = (encoded.fields["dense_weights"] >> np.uint64(54) & np.uint64(255)).reshape(-1, 2)
    assert np.array_equal(bytes_[:, 0], bytes_[:, 1])


@pytest.mark.parametrize(
    ("name", "field", "value"), [("exl2", "q_invperm", 99), ("exl2", "q_invperm", -1), ("gptq", "g_idx", 2)]
)
def test_indices_that_point_nowhere_are_refused(name: str, field: str, value: int) -> None:
    made = get(name, act_order=True, group=32) if name == "gptq" else get(name)
    encoded = made.encode(weight((32, 64)))
    encoded.fields[field][3] = value
    with pytest.raises(UsageError, match=field):
        made.decode(encoded)


def test_exl2_widths_fall_and_follow_energy() -> None:
    w = weight((8, 256))
    w[:, 100:132] *= 30
    made = get("exl2", bits=4.5, group=32)
    encoded = made.encode(w)
    widths = encoded.fields["q_groups"][::2]
    assert widths.tolist() == [5] * 4 + [4] * 4
    assert sorted(encoded.fields["q_invperm"][100:132]) == list(range(32))
    assert sorted(encoded.fields["q_invperm"]) == list(range(256))


def test_exl2_groups_must_be_whole() -> None:
    encoded = get("exl2").encode(weight((8, 256)))
    encoded.fields["q_groups"][0] = 7
    with pytest.raises(UsageError, match="exl2"):
        get("exl2").decode(encoded)


# Rounding ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_float16_rounding(values: list[float]) -> None:
    x = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    assert np.array_equal(halved(x), expected, equal_nan=True)


def test_float16_rounding_of_every_boundary() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    for x in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)), -middle):
        assert np.array_equal(halved(x), x.astype(np.float16).astype(np.float32))


def test_what_encoders_write_does_not_depend_on_bands() -> None:
    """Bands are a matter of speed: a weight of several bands is encoded row by row as each of its parts."""
    for name in ("int4_gptq", "int4_awq", "eetq", "fp6_llm", "paretoq", "hqq"):
        made, w = get(name), weight((256, 1024))
        whole = made.decode(made.encode(w))
        parts = [made.decode(made.encode(w[i : i + 64])) for i in range(0, 256, 64)]
        assert np.array_equal(whole, np.concatenate(parts)), name


E8P = "ea3883a85a627590ca74626320a2a691943386a8c89ac72cdb6388bfe7da5cc0"
"""Digest of the reference's 65536 codewords times four, int8."""


@pytest.mark.parametrize("name", [n for n in names() if getattr(get(n).profile, "tensors", None) is not None])
def test_stored_tensors_of_any_other_shape_are_refused(name: str) -> None:
    made, shape = get(name), (128, 256)
    specs = made.fields(shape)
    zeros = {key: np.zeros(spec.shape, spec.dtype) for key, spec in specs.items()}
    for key, array in zeros.items():
        for wrong in (array.reshape(-1)[:0], array.astype(np.float64), np.zeros((3, 3, 3, 3), np.int8), array[None]):
            with pytest.raises(UsageError, match=name):
                made.decode(Encoded(name, shape, {**zeros, key: wrong}))
