"""Every format against the arrays of its reference implementation. One row of CASES is one golden decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from onnxpack.formats import get, names
from onnxpack.formats.base import Encoded


@dataclass(frozen=True)
class Case:
    """A golden decode: the file's arrays that are the stored fields, and the array that they mean.

    `x`: the reference's input; then encoding it must give `fields` byte for byte, where `exact` says so.
    """

    stem: str
    fields: Mapping[str, str]
    y: str
    params: Mapping[str, Any] = field(default_factory=dict)
    x: str = ""
    exact: tuple[str, ...] = ()
    transpose: bool = False
    name: str = ""

    @property
    def format(self) -> str:
        return self.name or self.stem


def _ggml(stem: str, exact: bool = False) -> list[Case]:
    first = Case(stem, {"blocks": "packed"}, "y", x="x", exact=("blocks",) if exact else ())
    return [first, Case(stem, {"blocks": "rand_packed"}, "rand_y")]


def _mx(stem: str, mode: str, codes: str) -> Case:
    fields = {"codes": codes, "scales": f"{mode}_scale"}
    return Case(stem, fields, f"{mode}_y", {"scale_mode": mode}, "x", ("codes", "scales"))


def _nbits(i: int, bits: int, block: int, symmetric: bool) -> Case:
    p = f"c{i}_{'sym' if symmetric else 'asym'}_"
    fields = {"B": f"{p}B", "scales": f"{p}scales"} | ({} if symmetric else {"zero_points": f"{p}zp"})
    params = {"bits": bits, "block": block, "symmetric": symmetric, "scale_dtype": "float32"}
    return Case("matmulnbits", fields, f"{p}Y_identity", params, f"{p}W", tuple(fields), transpose=True)


def _gptq(prefix: str, bits: int, group: int, *more: str) -> Case:
    fields = {key: f"{prefix}_{key}" for key in ("qweight", "qzeros", "scales", *more)}
    params = {"bits": bits, "group": group, "act_order": bool(more)}
    return Case("int4_gptq", fields, f"{prefix}_y_IxO", params, transpose=True)


def _hqq(axis: int, bits: int, more: str = "") -> Case:
    p = f"a{axis}_b{bits}{more}_"
    params = {"axis": axis, "bits": bits, "scale_dtype": "float32"}
    exact = () if more else ("W_q", "scale", "zero")
    return Case("hqq", {"W_q": f"{p}Wq", "scale": f"{p}scale", "zero": f"{p}zero"}, f"{p}y", params, "w", exact)


CASES: list[Case] = [
    *_ggml("q2_k"),
    *_ggml("q3_k"),
    *_ggml("q4_k"),
    *_ggml("q5_k"),
    *_ggml("q6_k"),
    *_ggml("iq1_s"),
    *_ggml("iq4_nl"),
    *_ggml("q1_0", exact=True),
    *_ggml("tq1_0", exact=True),
    *_ggml("tq2_0", exact=True),
    *_ggml("stq1_0", exact=True),
    *_ggml("mxfp4_ggml", exact=True),
    *_ggml("nvfp4_ggml", exact=True),
    Case("tq1_0", {"blocks": "packed_ggufpy"}, "y"),
    Case("tq2_0", {"blocks": "packed_ggufpy"}, "y"),
    Case("mxfp4_ggml", {"blocks": "packed_ggufpy"}, "y"),
    Case("int8_symmetric", {"values": "absmax_q", "scale": "absmax_scale"}, "absmax_y", {}, "x", ("values", "scale")),
    Case("int8_symmetric", {"values": "pow2_q", "scale": "pow2_scale"}, "pow2_y"),
    *(
        Case(
            "int8_per_channel",
            {"values": f"axis{a}_q", "scale": f"axis{a}_scale"},
            f"axis{a}_y",
            {"axis": a},
            "x",
            ("values", "scale"),
        )
        for a in (0, 1)
    ),
    *(
        Case(
            "int4_symmetric",
            {"values": f"{p}_packed", "scale": f"{p}_scale"},
            f"{p}_y",
            {"group": group, "scale_dtype": "float32"},
            "x",
            ("values", "scale"),
        )
        for p, group in (("pt", 0), ("g32", 32), ("g64", 64))
    ),
    Case(
        "int4_symmetric",
        {"values": "rand_packed", "scale": "rand_scale"},
        "rand_y",
        {"group": 32, "scale_dtype": "float32"},
    ),
    *(
        _nbits(i, *how, symmetric)
        for i, how in enumerate(((4, 32), (4, 32), (8, 16), (2, 64)))
        for symmetric in (True, False)
    ),
    Case("fp8_e4m3", {"codes": "w_codes", "scale": "w_scale"}, "w_decoded", {}, "w", ("codes", "scale")),
    *(_mx("mxfp4", mode, f"{mode}_codes") for mode in ("floor", "even", "rceil")),
    _mx("mxfp6_e3m2", "floor", "floor_packed"),
    _mx("mxfp6_e2m3", "floor", "floor_packed"),
    Case(
        "nvfp4",
        {"codes": "single_codes", "scales": "single_scale"},
        "single_y",
        {"tensor_scale": "none"},
        "x",
        ("scales", "codes"),
    ),
    Case(
        "nvfp4",
        {"codes": "two_codes", "scales": "two_scale", "tensor_scale": "two_global"},
        "two_y",
        {},
        "x",
        ("scales", "codes", "tensor_scale"),
    ),
    Case(
        "nvfp4",
        {"codes": "ct_packed", "scales": "ct_scale", "tensor_scale": "ct_global_scale"},
        "ct_y",
        {"tensor_scale": "divide"},
        "x",
        ("scales", "codes", "tensor_scale"),
    ),
    *(
        Case(
            "nf4",
            {"packed": f"nf4_b{b}_packed", "absmax": f"nf4_b{b}_absmax"},
            f"nf4_b{b}_y",
            {"block": b},
            "x",
            ("packed", "absmax"),
        )
        for b in (64, 128)
    ),
    Case(
        "hand_xnor",
        {"bits": "packed_lsbfirst", "alpha": "alpha_mean_abs"},
        "y",
        {"scale_dtype": "float32"},
        "w",
        ("bits", "alpha"),
        name="xnor",
    ),
    Case("hand_log", {"codes": "A_packed_lowfirst", "signs": "A_signs_lsbfirst"}, "A_y", name="log"),
    *_ggml("q8_0", exact=True),
    Case("q8_0", {"blocks": "packed_ggufpy"}, "y"),
    *(_gptq(f"b{bits}", bits, group) for bits, group in ((2, 32), (3, 32), (4, 64), (8, 32))),
    *(_gptq(f"b{bits}", bits, group, "g_idx") for bits, group in ((2, 32), (3, 32), (4, 64), (8, 32))),
    _gptq("actorder", 4, 32, "g_idx"),
    *(
        Case(
            "int4_awq",
            {key: f"{variant}_{key}" for key in ("qweight", "qzeros", "scales")},
            "gemm_y_IxO",
            {"group": 64, "variant": variant},
            transpose=True,
        )
        for variant in ("gemm", "gemv")
    ),
    *(_hqq(axis, bits) for axis in (0, 1) for bits in (8, 4, 3, 2, 1)),
    _hqq(1, 4, "_opt"),
    *(
        Case(
            "eetq",
            {"qweight": stored, "weight_scales": "scales_fp16"},
            "y_in_out",
            {"variant": variant},
            "w_in_out_fp16",
            ("qweight", "weight_scales"),
            transpose=True,
        )
        for variant, stored in (("sm80", "q_processed_sm80"), ("plain", "q_unprocessed"))
    ),
    *(
        Case(
            "fp6_llm", {"weight": f"{kind}_prepacked", "scales": f"{kind}_scale_fp16"}, f"{kind}_y_fp16", {"kind": kind}
        )
        for kind in ("e3m2", "e2m2")
    ),
    *(
        Case(
            "aqlm",
            {"codes": f"{books}x{bits}_codes_stored"} | {k: f"{books}x{bits}_{k}" for k in ("codebooks", "scales")},
            f"{books}x{bits}_y",
            {"codebooks": books, "bits": bits},
        )
        for books, bits in ((2, 8), (1, 12))
    ),
    Case(
        "bitnet_hf",
        {"weight": "packed", "weight_scale": "inv_scale_absmean"},
        "w_dequant",
        {"scale_dtype": "float32"},
        "w",
        ("weight", "weight_scale"),
    ),
    Case(
        "spqr",
        {"dense_weights": "dense_weights_u64", "row_offsets": "row_offsets", "col_vals": "col_vals_u32"},
        "y_fp16",
        {"count": 63},
    ),
    Case(
        "exl2",
        {key: key for key in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")},
        "y_fp16",
        {"groups": [[8, 32], [6, 32], [5, 64], [4, 32], [3, 32], [2, 64]]},
        transpose=True,
    ),
    Case("smoothquant", {"weight": "W0_pc_codes", "weight_scale": "W0_pc_scale"}, "W0_pc_deq", {"smooth": False}),
]


def _id(case: Case) -> str:
    return f"{case.stem}-{case.y}" + ("-g_idx" if "g_idx" in case.fields else "")


def encoded(case: Case, arrays: Mapping[str, np.ndarray]) -> tuple[Any, Encoded, np.ndarray]:
    """Format, stored fields and expected values of a case, everything as [N, K]."""
    made = get(case.format, **case.params)
    y = np.atleast_2d(arrays[case.y].T if case.transpose else arrays[case.y])
    specs = made.fields(y.shape)
    fields = {name: arrays[key].reshape(specs[name].shape) for name, key in case.fields.items()}
    return made, Encoded(made.name, y.shape, fields, made.params), y


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_decode_is_bit_exact(case: Case, golden: Any, tools: Any) -> None:
    made, stored, y = encoded(case, golden(case.stem))
    assert tools.same(made.decode(stored), y)


@pytest.mark.parametrize("case", CASES, ids=_id)
@pytest.mark.parametrize("opset", [13, 21])
def test_graph_decoder_is_bit_exact(case: Case, opset: int, golden: Any, tools: Any) -> None:
    made, stored, y = encoded(case, golden(case.stem))
    opset = 18 if opset < made.min_opset else opset
    assert tools.same(tools.onnxruntime(tools.model(made, stored, opset)), y)


@pytest.mark.parametrize("case", [c for c in CASES if c.exact], ids=_id)
def test_encode_is_byte_exact(case: Case, golden: Any, tools: Any) -> None:
    arrays = golden(case.stem)
    made, stored, _ = encoded(case, arrays)
    x = np.ascontiguousarray(arrays[case.x].T if case.transpose else arrays[case.x])
    made_here = made.encode(x)
    for name in case.exact:
        assert made_here.fields[name].tobytes() == stored.fields[name].tobytes(), name


SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq1_s")


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_encoders_are_no_worse_than_the_reference(name: str, golden: Any) -> None:
    arrays, made = golden(name), get(name)
    x = arrays["x"].astype(np.float64)
    ours = np.sqrt(np.square(made.decode(made.encode(arrays["x"])) - x).mean(axis=1))
    theirs = np.sqrt(np.square(arrays["y"] - x).mean(axis=1))
    assert (ours <= 1.02 * theirs + 1e-12).all(), ours / theirs
    assert np.sqrt(np.square(ours).sum()) <= 1.02 * np.sqrt(np.square(theirs).sum())


def test_every_format_of_the_room_has_a_vector() -> None:
    # Other rooms' tests; ternary has no public format; the rest are in test_checkpoints.
    without = {"int8", "q4nx", "ternary", "bitnet_i2_s", "paretoq", "tequila", "quarot", "quip_sharp_e8p", "exl3"}
    assert {case.format for case in CASES} >= {n for n in names() if get(n).profile is not None} - without


def test_double_quantized_nf4(golden: Any, tools: Any) -> None:
    arrays, made = golden("nf4"), get("nf4", double_quant=True)
    keys = {"packed": "dq_packed", "absmax": "dq_absmax_u8", "nested_absmax": "dq_nested_absmax", "offset": "dq_offset"}
    shape = tuple(int(d) for d in arrays["dq_shape"])
    specs = made.fields(shape)
    stored = Encoded("nf4", shape, {k: arrays[v].reshape(specs[k].shape) for k, v in keys.items()})
    assert tools.same(made.decode(stored)[:4], arrays["dq_y_first_rows"])
    here = made.encode(arrays["dq_x"])
    assert here.fields["packed"].tobytes() == arrays["dq_packed"].tobytes()
    # The reference sums the offset in float32, in an order of its own: levels may differ by one.
    assert np.abs(here.fields["absmax"].astype(int) - arrays["dq_absmax_u8"]).max() <= 1
    assert abs(here.bits_per_weight - (4 + 8 / 64 + 32 / 64 / 256)) < 0.01


def test_log_encoders(golden: Any, tools: Any) -> None:
    arrays = golden("hand_log")
    x = arrays["x"][None]
    plane, packed = get("log", offset=int(arrays["offset"])), get("log", variant="packed")
    assert tools.same(plane.decode(plane.encode(x))[0], arrays["A_x_y"])
    assert tools.same(packed.decode(packed.encode(x))[0], arrays["B_x_y"])
    nibbles = packed.encode(x).fields["codes"]
    assert [*(nibbles & 15), *(nibbles >> 4)] == [*arrays["B_x_nibbles"][::2], *arrays["B_x_nibbles"][1::2], 0]


@pytest.mark.parametrize(
    ("stem", "widths"),
    [("fp8_e4m3", (4, 3, 7)), ("fp6_e3m2_elem", (3, 2, 3)), ("fp6_e2m3_elem", (2, 3, 1)), ("fp4_e2m1_elem", (2, 1, 1))],
)
def test_small_floats(stem: str, widths: tuple[int, int, int], golden: Any, tools: Any) -> None:
    from onnxpack.formats.datatypes import float_table
    from onnxpack.formats.scaling import small_float

    arrays, has_nan = golden(stem), stem == "fp8_e4m3"
    assert tools.same(float_table(1, *widths, has_nan=has_nan), arrays["table"])
    assert tools.same(small_float(arrays["x"], *widths, has_nan=has_nan), arrays["code"])


def test_fp8_saturates(golden: Any, tools: Any) -> None:
    from onnxpack.formats.floats import e4m3

    arrays = golden("fp8_e4m3")
    finite = np.isfinite(arrays["overflow_x"])
    assert tools.same(e4m3(arrays["overflow_x"][finite]), arrays["overflow_ort_sat"][finite])


def test_scale_bytes(golden: Any, tools: Any) -> None:
    from onnxpack.formats.datatypes import DataType, scale_table

    assert tools.same(scale_table(DataType.FLOAT8E8M0), golden("e8m0_elem")["table"])


def test_early_stq_layout_is_another_one(golden: Any) -> None:
    arrays, made = golden("stq1_0"), get("stq1_0")
    old = Encoded("stq1_0", arrays["x"].shape, {"blocks": arrays["packed_old_contiguous_layout"]})
    assert not np.array_equal(made.decode(old), arrays["y"])
