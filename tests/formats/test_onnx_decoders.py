"""Where each format's decoder runs. The table is the claim; the tests run it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from onnxpack.errors import UsageError
from onnxpack.formats import get, names
from onnxpack.formats.functions import decoder_function, encoder_function, has_encoder_function

BOTH = ("onnxruntime", "reference")

RUNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("aqlm", "bitnet_hf", "bitnet_i2_s", "eetq", "exl2", "exl3", "fp6_llm", "hqq"), BOTH),
    **dict.fromkeys(("int4_awq", "int4_gptq", "paretoq", "q8_0", "quarot", "quip_sharp_e8p"), BOTH),
    **dict.fromkeys(("smoothquant", "spqr", "tequila"), BOTH),
    "fp8_e4m3": BOTH,
    "int4_symmetric": BOTH,
    "int8_per_channel": BOTH,
    "int8_symmetric": BOTH,
    "iq1_s": BOTH,
    "iq4_nl": BOTH,
    "log": BOTH,
    "matmulnbits": BOTH,
    "mxfp4": BOTH,
    "mxfp4_ggml": BOTH,
    "mxfp6_e2m3": BOTH,
    "mxfp6_e3m2": BOTH,
    "nf4": BOTH,
    "nvfp4": BOTH,
    "nvfp4_ggml": BOTH,
    "q1_0": BOTH,
    "q2_k": BOTH,
    "q3_k": BOTH,
    "q4_k": BOTH,
    "q5_k": BOTH,
    "q6_k": BOTH,
    "stq1_0": BOTH,
    "ternary": BOTH,
    "tq1_0": BOTH,
    "tq2_0": BOTH,
    "xnor": BOTH,
}
"""Format to the engines that run its decoder, from opset 13 (spqr: 16) to 26, with results equal to `decode`'s."""

VARIANTS: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    *((name, {}, (3, 512)) for name in RUNS),
    ("int8_per_channel", {"axis": 1}, (5, 3)),
    ("int4_symmetric", {"group": 0}, (5, 7)),
    ("int4_symmetric", {"group": 64, "scale_dtype": "bfloat16"}, (2, 128)),
    *(
        ("matmulnbits", {"bits": bits, "symmetric": symmetric, "block": 16}, (3, 83))
        for bits in (2, 4, 8)
        for symmetric in (True, False)
    ),
    ("nvfp4", {"tensor_scale": "divide"}, (2, 32)),
    ("nvfp4", {"tensor_scale": "none"}, (2, 32)),
    ("nf4", {"double_quant": True}, (7, 31)),
    ("nf4", {"block": 16}, (7, 31)),
    ("ternary", {}, (7, 3)),
    ("xnor", {"scale_dtype": "float32"}, (7, 3)),
    ("log", {"variant": "packed", "offset": -12}, (7, 3)),
    *(
        ("int4_gptq", {"bits": bits, "group": 32, "act_order": act_order, "zeros": zeros}, (32, 96))
        for bits, act_order, zeros in ((2, False, "v1"), (3, True, "v1"), (4, True, "v2"), (8, False, "v2"))
    ),
    *(("int4_awq", {"group": 32, "variant": variant}, (16, 320)) for variant in ("gemm", "gemv", "llm-awq")),
    *(("hqq", {"bits": bits, "axis": axis}, (12, 128)) for bits in (1, 2, 3, 8) for axis in (0, 1)),
    ("eetq", {"variant": "plain"}, (7, 5)),
    ("fp6_llm", {"kind": "e2m2"}, (64, 16)),
    ("aqlm", {"codebooks": 1, "bits": 12}, (3, 24)),
    ("bitnet_hf", {"linear": "autobitlinear"}, (8, 3)),
    ("bitnet_i2_s", {"build": "arm"}, (2, 64)),
    *(("paretoq", {"levels": levels}, (3, 64)) for levels in ("ternary", "3bit", "4bit")),
    ("paretoq", {"levels": "ternary", "scale_dtype": "float32"}, (3, 7)),
    ("tequila", {"group": 0}, (3, 7)),
    ("quarot", {"block": 64}, (3, 320)),
    ("quarot", {}, (3, 96)),
    ("smoothquant", {"axis": -1}, (3, 5)),
    ("smoothquant", {"smooth": False}, (3, 5)),
    ("spqr", {"count": 7}, (16, 32)),
    ("exl2", {"bits": 4.6, "group": 32}, (8, 352)),
    ("exl2", {"bits": 2}, (8, 32)),
    *(("exl3", {"bits": bits, "codebook": rule}, (128, 128)) for bits, rule in ((1, "mcg"), (5, "mul1"), (8, "3inst"))),
]


def random_weight(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 0.05, shape).astype(np.float32)


def test_the_table_is_complete() -> None:
    assert set(RUNS) == {name for name in names() if get(name).profile is not None}


@pytest.mark.parametrize(("name", "params", "shape"), VARIANTS, ids=lambda v: str(v).replace(" ", ""))
@pytest.mark.parametrize("opset", [13, 14, 18, 21, 26])
def test_decoders_run_where_the_table_says(
    name: str, params: dict[str, Any], shape: tuple[int, int], opset: int, tools: Any
) -> None:
    made = get(name, **params)
    encoded = tools.stored(made, shape if params else tools.fitting(name, shape))
    if opset < made.min_opset:
        with pytest.raises(UsageError, match=f"opset {made.min_opset}"):
            made.decoder(encoded.shape, opset)
        return
    model = tools.model(made, encoded, opset)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    expected = made.decode(encoded)
    assert "onnxruntime" in RUNS[name]
    assert tools.same(tools.onnxruntime(model), expected)
    if opset == 21 and "reference" in RUNS[name]:
        assert tools.same(tools.reference(model), expected)


def test_an_opset_without_the_operators_is_refused() -> None:
    with pytest.raises(UsageError, match="opset 13"):
        get("q4_k").decoder((1, 256), 12)


def calling(
    function: Any,
    inputs: dict[str, np.ndarray],
    outputs: dict[str, Any],
    wanted: str = "weight",
    dtype: Any = np.float32,
) -> onnx.ModelProto:
    """A model that calls a function on constants and returns one of its outputs."""
    from onnx import helper, numpy_helper

    call = helper.make_node(function.name, list(function.input), list(function.output), domain=function.domain)
    output = helper.make_tensor_value_info(wanted, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
    assert list(function.output) == list(outputs)
    fields = [numpy_helper.from_array(np.array(v), k) for k, v in inputs.items()]
    graph = helper.make_graph([call], "g", [], [output], fields)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(function.domain, 1)]
    return helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10)


def test_columns_of_a_decoded_weight(tools: Any) -> None:
    for name, params, shape in VARIANTS:
        made = get(name, **params)
        encoded = tools.stored(made, shape if params else tools.fitting(name, shape))
        whole, n = made.decode(encoded), encoded.shape[0]
        for start, stop in ((0, 1), (n // 3, n // 2 + 1), (n - 1, n)):
            assert tools.same(made.decode_columns(encoded, start, stop), whole[start:stop].T), (name, params)


@pytest.mark.parametrize("name", ["q4_k", "nf4", "int8_symmetric"])
def test_the_decoder_as_a_function(name: str, tools: Any) -> None:
    made = get(name)
    encoded = made.encode(random_weight((2, 256)))
    model = calling(decoder_function(made, encoded.shape), dict(encoded.fields), {"weight": np.float32})
    assert tools.same(tools.onnxruntime(model), made.decode(encoded))
    assert tools.same(tools.reference(model), made.decode(encoded))


@pytest.mark.parametrize(
    ("name", "params"), [("int8_symmetric", {}), ("int8_per_channel", {}), ("int8_per_channel", {"axis": 1})]
)
def test_the_encoder_as_a_function(name: str, params: dict[str, Any], tools: Any) -> None:
    made = get(name, **params)
    w = random_weight((6, 20))
    w[2], w[:, 3] = 0, 0
    expected = made.encode(w).fields
    for output, dtype in (("values", np.int8), ("scale", np.float32)):
        model = calling(encoder_function(made), {"weight": w}, {"values": np.int8, "scale": np.float32}, output, dtype)
        assert tools.same(tools.onnxruntime(model), expected[output])


def test_only_plain_int8_has_an_encoder_function() -> None:
    assert [n for n in RUNS if has_encoder_function(get(n))] == ["int8_per_channel", "int8_symmetric"]
    with pytest.raises(UsageError, match="no encoder"):
        encoder_function(get("q4_k"))
