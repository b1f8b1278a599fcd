"""The host lowering: bare products become integer operators that onnxruntime runs fast and exactly.

For each product y = a @ weight, with w and w_scale the weight's int8 codes and column scales:

    amax = max(ReduceMax(a), -ReduceMin(a), 127 * 2**-126)      per row
    s    = (amax + MatMul(a, zeros[K, 1])) / 127                NaN for a row with a NaN or an infinity
    q    = QuantizeLinear(a / s, 1, 128)                        uint8, because signed activations are slow on x64
    y    = MatMulIntegerToFloat(q, w, 1, w_scale, 128) * s      (float32(acc) * w_scale) * s

Codes that the graph brought may have zero points, which the product takes as they are. Products of one graph that read
the same tensor share q and s. Any rank, zero rows included; every operator exists at the graph's own opset (7 and
later) or in com.microsoft. QDQ groups are lowered in lower_groups.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper

from onnxpack.pack.manifest import FieldRecord
from onnxpack.quant.int8 import AMAX_FLOOR
from onnxpack.quant.qdq import to_unsigned
from onnxpack.runtime.constants import Constants
from onnxpack.runtime.graphs import bodies, import_domain, opset, replace_nodes
from onnxpack.runtime.lower_groups import MICROSOFT, LoweredWeight, lower_group
from onnxpack.runtime.operands import Operand
from onnxpack.runtime.product import Product, as_product
from onnxpack.runtime.unsigned import make_unsigned

_REDUCE_TAKES_AXES_AS_INPUT = 18
_QUANTIZE_LINEAR = 10
_MAX_BROADCASTS = 8
_SMALL = 4096  # bytes that may stand in the graph itself


@dataclass(frozen=True)
class Lowered:
    """What a lowered model needs from its session."""

    products: int
    """How many products became integer operators."""
    arrays: dict[str, npt.NDArray[np.generic]]
    """Initializers that are not in the pack's files. Whoever holds the session holds these."""


def lower(
    model: onnx.ModelProto,
    constants: Constants,
    operand: Callable[[str], Operand],
    placeholder: str,
    unsigned_weights: Callable[[], bool],
) -> Lowered:
    """Replace, in place, every bare product of the main graph and of all bodies.

    `operand` gives the operand of a weight. What the pack stores as int8 is referenced where it is, never copied into
    the model. Other arrays come back: they must be handed to the session with `add_initializer`; until then their
    initializers point at the file `placeholder`. `unsigned_weights` is asked, when there is a product at all, whether
    this CPU needs weights as uint8.
    """
    make_unsigned(model, constants, opset(model))
    lowering = _Lowering(model, constants, operand, placeholder, unsigned_weights, opset(model))
    lowering.graph(model.graph)
    if lowering.products:
        import_domain(model, MICROSOFT)
    return Lowered(lowering.products, lowering.arrays)


@dataclass
class _Lowering:
    model: onnx.ModelProto
    constants: Constants
    operand: Callable[[str], Operand]
    placeholder: str
    unsigned_weights: Callable[[], bool]
    opset: int
    products: int = 0
    arrays: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    weights: dict[str, LoweredWeight] = field(default_factory=dict)
    known_scales: dict[str, str] = field(default_factory=dict)

    def graph(self, graph: onnx.GraphProto) -> None:
        quantized: dict[tuple[str, int], tuple[str, str]] = {}

        def expand(node: NodeProto) -> Iterable[NodeProto] | None:
            for body in bodies(node):
                self.graph(body)
            product = as_product(node)
            if product is None:
                return None
            self.products += 1
            if product.group is None:
                return self.product(product, quantized)
            return lower_group(product, product.group, self.weight(product.weight), self)

        replace_nodes(graph, expand)

    def product(self, product: Product, quantized: dict[tuple[str, int], tuple[str, str]]) -> Iterable[NodeProto]:
        weight = self.weight(product.weight)
        key = (product.a, weight.k)
        if key not in quantized:
            quantized[key] = yield from self.quantize(product.node, product.a, weight.k)
        q, s = quantized[key]
        unscaled = self.constants.names.fresh(f"{product.node}/unscaled")
        one, zero = self.constants.scalar(np.float32(1)), self.constants.scalar(np.uint8(128))
        inputs = [q, weight.codes, one, self.scales(weight), zero]
        inputs += [] if weight.zero_points is None else [weight.zero_points]
        yield helper.make_node("MatMulIntegerToFloat", inputs, [unscaled], product.node, domain=MICROSOFT)
        yield helper.make_node("Mul", [unscaled, s], [product.y], self.constants.names.fresh(f"{product.node}/scale"))

    def quantize(self, node: str, a: str, k: int) -> Generator[NodeProto, None, tuple[str, str]]:
        """Codes (uint8, 128 is zero) and scale of each row of `a`; gives their names."""
        names: dict[str, str] = {}

        def make(op: str, inputs: list[str], result: str, domain: str = "", **attributes: Any) -> NodeProto:
            names[result] = self.constants.names.fresh(f"{node}/{result}")
            return helper.make_node(op, inputs, [names[result]], names[result], domain=domain, **attributes)

        axes: list[str] = []
        attributes: dict[str, Any] = {"keepdims": 1}
        if self.opset >= _REDUCE_TAKES_AXES_AS_INPUT:
            axes = [self.constants.tensor(np.array([-1], np.int64), "onnxpack/last_axis")]
        else:
            attributes["axes"] = [-1]
        yield make("ReduceMax", [a, *axes], "high", **attributes)
        yield make("ReduceMin", [a, *axes], "low", **attributes)
        yield make("Neg", [names["low"]], "negative_low")
        extremes = [names["high"], names["negative_low"]]
        if self.opset >= _MAX_BROADCASTS:
            yield make("Max", [*extremes, self.constants.scalar(AMAX_FLOOR)], "amax")
        else:
            yield make("Max", extremes, "unbounded_amax")
            yield make("Clip", [names["unbounded_amax"]], "amax", min=float(AMAX_FLOOR))
        # Added after the floor, so that it does not matter whether Max and Clip pass a NaN on.
        zeros = self.constants.tensor(np.zeros((k, 1), np.float32), f"onnxpack/zeros_{k}")
        yield make("MatMul", [a, zeros], "not_finite")
        yield make("Add", [names["amax"], names["not_finite"]], "amax_or_nan")
        yield make("Div", [names["amax_or_nan"], self.constants.scalar(np.float32(127))], "a_scale")
        yield make("Div", [a, names["a_scale"]], "quotient")
        domain = "" if self.opset >= _QUANTIZE_LINEAR else MICROSOFT
        one, zero = self.constants.scalar(np.float32(1)), self.constants.scalar(np.uint8(128))
        yield make("QuantizeLinear", [names["quotient"], one, zero], "a_codes", domain)
        return names["a_codes"], names["a_scale"]

    def weight(self, name: str) -> LoweredWeight:
        """The initializers of a weight, added when it is first used."""
        if name not in self.weights:
            found = self.operand(name)
            self.weights[name] = self.as_uint8(name, found) if self.unsigned_weights() else self.as_int8(name, found)
        return self.weights[name]

    def as_int8(self, name: str, found: Operand) -> LoweredWeight:
        codes = self.initializer(f"{name}/codes", found.codes, found.codes_at)
        zero_points = None
        if found.zero_points is not None:
            zero_points = self.constants.tensor(found.zero_points.astype(np.int8), f"{name}/zero_points")
        return LoweredWeight(name, found, codes, zero_points)

    def as_uint8(self, name: str, found: Operand) -> LoweredWeight:
        codes = self.initializer(f"{name}/codes", to_unsigned(found.codes), None)
        points = np.zeros((), np.int64) if found.zero_points is None else found.zero_points
        zero_points = self.constants.tensor((points + 128).astype(np.uint8), f"{name}/zero_points")
        return LoweredWeight(name, found, codes, zero_points)

    def scales(self, weight: LoweredWeight) -> str:
        """The scales of a weight, added when they are first used: some groups have them in other constants."""
        if weight.name not in self.known_scales:
            found = weight.operand
            if found.scales.ndim:
                name = self.initializer(f"{weight.name}/scales", found.scales, found.scales_at)
            else:
                name = self.constants.scalar(np.float32(found.scales))
            self.known_scales[weight.name] = name
        return self.known_scales[weight.name]

    def array(self, wanted: str, array: npt.NDArray[np.generic]) -> str:
        """A constant that is not in the pack's files; gives its name."""
        small = array.nbytes <= _SMALL
        return self.constants.tensor(array, wanted) if small else self.initializer(wanted, array, None)

    def initializer(self, wanted: str, array: npt.NDArray[np.generic], at: FieldRecord | None) -> str:
        name = self.constants.names.fresh(wanted)
        tensor = self.model.graph.initializer.add(name=name, dims=array.shape)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        if array.size == 0:
            tensor.raw_data = b""
            return name
        if at is None:
            self.arrays[name] = array
        file, offset = (self.placeholder, 0) if at is None else (at.file, at.offset)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", file), ("offset", str(offset)), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=value)
        return name
