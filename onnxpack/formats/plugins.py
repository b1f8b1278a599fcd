"""Formats whose meaning is an operator's: a function profile, found by the operator's name, with code from a plugin.

A plugin registers what decodes (and encodes) its payload; `formats.get("vendor::Dequantize")` then is a format like any
other. Packages may also offer one under the entry point group "onnxpack.formats", the operator's name being the key.

>>> def decode(payload, shape):
...     return payload.view(np.int8).reshape(shape) * np.float32(0.5)
>>> register(Plugin(FunctionUniform(DataType.INT8, 8, "vendor::Quantize", "vendor::Dequantize"), decode))
>>> made = get("vendor::Dequantize")
>>> made.decode(made.from_bytes(bytes([2, 255]), (1, 2))).tolist(), made.encodes, made.has_decoder
([[1.0, -0.5]], False, False)
>>> unregister("vendor::Dequantize")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

import numpy as np

from onnxpack.errors import ModelError, UsageError
from onnxpack.formats.base import F32, Array, Decoder, Encoded, ErrorSums, FieldSpec, Format, Orientation
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.declared import square_sum
from onnxpack.formats.geometry import matrix
from onnxpack.formats.kinds import FunctionUniform
from onnxpack.formats.profiles import QuantizationProfile
from onnxpack.formats.translate import to_structure

__all__ = ["DataType", "FunctionFormat", "FunctionUniform", "Plugin", "find", "get", "register", "unregister"]

GROUP = "onnxpack.formats"
PAYLOAD = "payload"

Shape = tuple[int, int]


@dataclass(frozen=True)
class Plugin:
    """What an operator does, in Python: payload uint8 and shape [N, K] to float32 values; the way back; ONNX nodes.

    `nodes` writes the decoder with standard operators, its input called "payload": without it a weight can be read and
    stored as bytes, but a pack, which adds no operator of other domains, cannot hold it.
    """

    profile: FunctionUniform
    decode: Callable[[Array, Shape], F32]
    encode: Callable[[F32], Array] | None = None
    nodes: Callable[[Shape, int], Decoder] | None = None


_PLUGINS: dict[str, Plugin] = {}


def register(plugin: Plugin) -> None:
    """Make a plugin known under its dequantizing operator. UsageError unless that is "domain::Name", and free."""
    name = plugin.profile.dequantize_op
    domain, colons, op = name.partition("::")
    if not (domain and colons and op):
        raise UsageError(f"operator {name!r} is not domain::Name")
    if name in _PLUGINS:
        raise UsageError(f"a plugin for operator {name} is registered already")
    _PLUGINS[name] = plugin


def unregister(name: str) -> None:
    """Forget a plugin."""
    _PLUGINS.pop(name, None)


def find(name: str) -> Plugin:
    """The plugin for an operator: registered, or an entry point of an installed package."""
    if name not in _PLUGINS:
        for point in entry_points(group=GROUP, name=name):
            plugin = point.load()
            if not isinstance(plugin, Plugin):
                raise UsageError(f"entry point {name} of {GROUP} is no plugin")
            register(plugin)
            break
    try:
        return _PLUGINS[name]
    except KeyError:
        raise UsageError(f"no plugin decodes operator {name}", hint="install or register it") from None


def get(name: str) -> FunctionFormat:
    """The format of an operator. UsageError when no plugin is known for it."""
    return FunctionFormat(find(name))


class FunctionFormat(Format):
    """One tensor of bytes that an operator decodes; the names of both operators are its metadata."""

    row = "plugin"
    family = "function"
    orientation = Orientation.NK
    takes_any_float = True
    source = "a plugin"

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.name = plugin.profile.dequantize_op  # type: ignore[misc]
        self.encodes = plugin.encode is not None  # type: ignore[misc]
        self.has_decoder = plugin.nodes is not None
        self.profile = QuantizationProfile(function=plugin.profile)
        if not self.has_decoder:
            self.refusal = "its plugin has no decoder of standard operators, and a pack adds no operator domain"
        elif not self.encodes:
            self.refusal = "its plugin has no encoder"

    def fields(self, shape: tuple[int, ...]) -> dict[str, FieldSpec]:
        return {PAYLOAD: FieldSpec(np.dtype(np.uint8), (self._nbytes(shape),))}

    def _nbytes(self, shape: tuple[int, ...]) -> int:
        n, k = matrix(shape, self.name)
        layout = self.plugin.profile.block_layout
        if layout is not None and n * k % layout.block_size:
            raise UsageError(
                f"format {self.name}: {n * k} values are not a multiple of its block of {layout.block_size}"
            )
        return to_structure(self.profile, (n, k), "PAYLOAD").nbytes()

    def encode_into(self, w: Array, out: Mapping[str, Array]) -> ErrorSums:
        if self.plugin.encode is None:
            raise UsageError(f"format {self.name} has no encoder", hint="its plugin offers none")
        (spec,) = self.fields(w.shape).values()
        x = np.ascontiguousarray(w, np.float32)
        if not np.isfinite(x).all():
            row, column = np.argwhere(~np.isfinite(x))[0]
            raise ModelError(f"weight value {x[row, column]} at {[int(row), int(column)]} is not finite")
        payload = np.asarray(self.plugin.encode(x))
        self._check("encoded to", payload, spec)
        out[PAYLOAD][...] = payload
        decoded = self.decode(Encoded(self.name, x.shape, out))
        return ErrorSums(square_sum(x - decoded), square_sum(x))

    def _check(self, what: str, array: Array, spec: FieldSpec) -> None:
        have = (array.dtype, array.shape)
        if have != (spec.dtype, spec.shape):
            raise UsageError(
                f"format {self.name} {what} {have[0]} {list(have[1])}, not {spec.dtype} {list(spec.shape)}"
            )

    def decode(self, encoded: Encoded) -> F32:
        (spec,) = self.fields(encoded.shape).values()
        payload = encoded.fields.get(PAYLOAD)
        if payload is None:
            raise UsageError(f"format {self.name}: field {PAYLOAD} is missing")
        self._check("has a payload of", payload, spec)
        n, k = matrix(encoded.shape, self.name)
        value = np.asarray(self.plugin.decode(payload, (n, k)))
        self._check("decoded to", value, FieldSpec(np.dtype(np.float32), (n, k)))
        return value

    def decoder(self, shape: tuple[int, ...], opset: int) -> Decoder:
        if self.plugin.nodes is None:
            raise UsageError(
                f"operator {self.name} has no decoder of standard operators", hint="its plugin offers none"
            )
        return self.plugin.nodes(matrix(shape, self.name), opset)
