"""The one table of formats. Adding a format is one entry (and one module)."""

from __future__ import annotations

import importlib
from typing import Any

from onnxpack.errors import UsageError
from onnxpack.formats.base import Format

_TABLE: dict[str, str] = {
    "aqlm": "onnxpack.formats.aqlm:Aqlm",
    "bitnet_hf": "onnxpack.formats.bitnet:BitnetHf",
    "bitnet_i2_s": "onnxpack.formats.bitnet:BitnetI2S",
    "eetq": "onnxpack.formats.eetq:Eetq",
    "exl2": "onnxpack.formats.exl:Exl2",
    "exl3": "onnxpack.formats.exl:Exl3",
    "fp6_llm": "onnxpack.formats.fp6_llm:Fp6Llm",
    "fp8_e4m3": "onnxpack.formats.floats:Fp8E4M3",
    "hqq": "onnxpack.formats.hqq:Hqq",
    "int4_awq": "onnxpack.formats.gptq:Awq",
    "int4_gptq": "onnxpack.formats.gptq:Gptq",
    "int4_symmetric": "onnxpack.formats.linear:Int4Symmetric",
    "int8": "onnxpack.formats.int8:Int8",
    "int8_per_channel": "onnxpack.formats.linear:Int8PerChannel",
    "int8_symmetric": "onnxpack.formats.linear:Int8Symmetric",
    "iq1_s": "onnxpack.formats.iq:Iq1S",
    "iq4_nl": "onnxpack.formats.iq:Iq4Nl",
    "log": "onnxpack.formats.logarithmic:Log",
    "matmulnbits": "onnxpack.formats.matmulnbits:MatMulNBits",
    "mxfp4": "onnxpack.formats.floats:Mxfp4",
    "mxfp4_ggml": "onnxpack.formats.floats:Mxfp4Ggml",
    "mxfp6_e2m3": "onnxpack.formats.floats:Mxfp6E2M3",
    "mxfp6_e3m2": "onnxpack.formats.floats:Mxfp6E3M2",
    "nf4": "onnxpack.formats.codebooks:Nf4",
    "nvfp4": "onnxpack.formats.floats:Nvfp4",
    "nvfp4_ggml": "onnxpack.formats.floats:Nvfp4Ggml",
    "paretoq": "onnxpack.formats.bitnet:ParetoQ",
    "q1_0": "onnxpack.formats.codebooks:Q10",
    "q2_k": "onnxpack.formats.kquants:Q2K",
    "q3_k": "onnxpack.formats.kquants:Q3K",
    "q4_k": "onnxpack.formats.kquants:Q4K",
    "q4nx": "onnxpack.formats.q4nx:Q4NX",
    "q5_k": "onnxpack.formats.kquants:Q5K",
    "q6_k": "onnxpack.formats.kquants:Q6K",
    "q8_0": "onnxpack.formats.ggml:Q80",
    "quarot": "onnxpack.formats.rotated:QuaRot",
    "quip_sharp_e8p": "onnxpack.formats.quip:QuipSharp",
    "smoothquant": "onnxpack.formats.rotated:SmoothQuant",
    "spqr": "onnxpack.formats.spqr:Spqr",
    "stq1_0": "onnxpack.formats.ternary:Stq10",
    "tequila": "onnxpack.formats.bitnet:Tequila",
    "ternary": "onnxpack.formats.ternary:Ternary",
    "tq1_0": "onnxpack.formats.ternary:Tq10",
    "tq2_0": "onnxpack.formats.ternary:Tq20",
    "xnor": "onnxpack.formats.codebooks:Xnor",
}
"""Name to "module:class"; a module is imported when its format is first asked for."""


_ALIASES = {
    "hand_log": "log",
    "hand_xnor": "xnor",
    "awq": "int4_awq",
    "gptq": "int4_gptq",
    "quip_sharp": "quip_sharp_e8p",
    "i2_s": "bitnet_i2_s",
}
"""Other names that `get` understands: the stems of hand-derived vectors, and shorter ones."""


def names() -> list[str]:
    """All formats, sorted."""
    return sorted(_TABLE)


def get(name: str, **params: Any) -> Format:
    """The format called `name`, with its parameters. UsageError for an unknown name or parameter.

    An operator's name ("domain::Name") is the format of the plugin that decodes it.
    """
    if "::" in name and not params:
        from onnxpack.formats import plugins

        return plugins.get(name)
    try:
        module, cls = _TABLE[_ALIASES.get(name, name)].split(":")
    except KeyError:
        raise UsageError(f"no format is called {name!r}", hint="`onnxpack formats` lists them") from None
    try:
        made = getattr(importlib.import_module(module), cls)(**params)
    except TypeError as error:
        raise UsageError(f"format {name}: {error}") from None
    assert isinstance(made, Format)
    return made
