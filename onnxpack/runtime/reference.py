"""The reference device: numpy multiplies, in the arithmetic of quant.int8, and onnxruntime runs what lies between.

It is the specification: slow, and without a choice of kernel, thread or instruction set in the products. Products in
If, Loop and Scan bodies stay inside their segment and are lowered as on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, TypeProto
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from onnxpack.pack.read import Pack
from onnxpack.quant.int8 import accumulate, epilogue, quantize_rows
from onnxpack.quant.qdq import row_sums
from onnxpack.runtime.between import door, product_type
from onnxpack.runtime.carry import cast_inputs, cast_outputs, parse_type, travels_as_float
from onnxpack.runtime.cut import Segment, cut, segment_model
from onnxpack.runtime.groups import facts
from onnxpack.runtime.opening import Opened, Opener
from onnxpack.runtime.operands import Operand
from onnxpack.runtime.prepare import Weights, isolated_graph, lower_graph
from onnxpack.runtime.product import Product, main_products
from onnxpack.runtime.reference_groups import multiply_codes
from onnxpack.runtime.trace import CountedRows, Placed, runs_as_product
from onnxpack.types import F32, Array

_BAND_BYTES = 64 << 20  # of float64 weight at a time

Values = dict[str, Any]


def multiply(x: npt.NDArray[np.float32], weight: Operand) -> F32:
    """x [..., K] times the weight, float32 [..., N]: quantize rows, multiply exactly, scale. Any rank from 1, any size.

    >>> w = Operand(np.array([[127], [0]], np.int8), np.array([2.0], np.float32))
    >>> multiply(np.array([127.0, -1.0], np.float32), w).tolist()
    [32258.0]
    """
    k, n = weight.codes.shape
    codes, scale = quantize_rows(x.reshape(-1, k))
    y = np.empty((len(codes), n), np.float32)
    scales = np.broadcast_to(weight.scales, n)
    offset = None
    if weight.zero_points is not None:  # codes that the graph brought
        offset = np.broadcast_to(weight.zero_points, n) * row_sums(codes)
    band = max(1, _BAND_BYTES // (8 * k))
    for start in range(0, n, band):
        columns = slice(start, start + band)
        acc = accumulate(codes, weight.codes[:, columns])
        if offset is not None:
            acc = (acc - offset[:, columns]).astype(np.int32)
        y[:, columns] = epilogue(acc, scales[columns], scale)
    return y.reshape(*x.shape[:-1], n)


@dataclass(frozen=True)
class _Piece:
    """A segment, ready to run. Feeds and results are pairs: name in the session, name in the graph."""

    opened: Opened
    feeds: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]

    def run(self, values: Values, rows: dict[str, int], options: ort.RunOptions | None) -> None:
        feeds = {inner: values[outer] for inner, outer in self.feeds if outer in values}
        found = self.opened.session.run([inner for inner, _ in self.results], feeds, options)
        values.update(zip((outer for _, outer in self.results), found, strict=True))


@dataclass(frozen=True)
class _Call:
    """One product on numpy."""

    product: Product
    weight: Operand

    def run(self, values: Values, rows: dict[str, int], options: ort.RunOptions | None) -> None:
        k, group = self.weight.codes.shape[0], self.product.group
        x = _array(values[self.product.a], np.dtype(np.float32 if group is None else group.x_dtype))
        if not x.ndim or x.shape[-1] != k:
            raise InvalidArgument(f"node {self.product.node}: an input of shape {list(x.shape)} does not fit K = {k}")
        if group is None:
            values[self.product.y] = multiply(x, self.weight)
        else:
            bias = None if group.bias is None else _array(values[group.bias.value], np.dtype(group.bias.dtype))
            try:
                values[self.product.y] = multiply_codes(x, self.weight, group, bias)
            except ValueError as error:
                raise InvalidArgument(f"node {self.product.node}: {error}") from None
        rows[self.product.node] = int(np.prod(x.shape[:-1], dtype=np.int64))


def _array(fed: Any, dtype: np.dtype[Any]) -> Array:
    """A value of the graph, which must be of this type; lists are taken, as onnxruntime takes them."""
    found = fed.numpy() if isinstance(fed, ort.OrtValue) else fed
    if isinstance(found, np.ndarray) and found.dtype != dtype:
        raise InvalidArgument(f"a product takes {dtype}, not {found.dtype}")
    return np.asarray(found, dtype)


class ReferenceEngine:
    """Runs a pack on the reference device."""

    def __init__(self, pack: Pack, opener: Opener) -> None:
        self._opener = opener
        self._weights = Weights(pack)
        model, _ = isolated_graph(pack)
        main = {product.node: product for product in main_products(model)}
        bound = [(site, facts(site, pack)) for site in pack.manifest.sites if runs_as_product(site)]
        self.placed = [
            Placed(site, "reference" if site.node in main else "host", site.node in main, what) for site, what in bound
        ]
        self._outputs = [value.name for value in model.graph.output]
        self._door, self._accepted = door(model, opener)
        self._no_numpy: dict[str, TypeProto] = {}
        """Values that cross as float32, with their real types."""
        self._steps = self._open(model, main)
        self._whole = _signature(model, opener, self._weights)
        self._last_use = self._last_uses()

    def _open(self, model: onnx.ModelProto, main: Mapping[str, Product]) -> list[_Piece | _Call]:
        steps = list[_Piece | _Call]()
        types: dict[str, TypeProto] = {value.name: value.type for value in model.graph.input}
        for step in cut(model, main.keys()):
            if isinstance(step, Segment):
                steps.append(self._piece(model, step, types))
                continue
            for index in step.nodes:
                product = main[model.graph.node[index].name]
                weight = self._weights(product.weight)
                steps.append(_Call(product, weight))
                rank = 0 if product.bias is None else len(types[product.bias].tensor_type.shape.dim)
                types[product.y] = product_type(types[product.a], product, weight.codes.shape[1], rank)
        return steps

    def _piece(self, model: onnx.ModelProto, segment: Segment, types: dict[str, TypeProto]) -> _Piece:
        part = segment_model(model, segment, types)
        lowered = lower_graph(part, self._weights)
        arriving = cast_inputs(part, [name for name in segment.inputs if name in self._no_numpy])
        opened = self._opener(part.SerializeToString(), lowered)
        leaving: list[str] = []
        for value in opened.session.get_outputs():
            types[value.name] = kind = parse_type(value.type, value.shape)
            if travels_as_float(kind):
                leaving.append(value.name)
                self._no_numpy[value.name] = kind
        renamed = cast_outputs(part, leaving)
        if renamed:
            opened = self._opener(part.SerializeToString(), lowered)
        return _Piece(
            opened,
            tuple((arriving.get(name, name), name) for name in segment.inputs),
            tuple((renamed.get(name, name), name) for name in segment.outputs),
        )

    def _last_uses(self) -> list[tuple[str, ...]]:
        """By step: the values that no later step and no caller needs."""
        kept, freed = set(self._outputs), []
        for step in reversed(self._steps):
            if isinstance(step, _Piece):
                used = [outer for _, outer in step.feeds]
            else:
                used = [name for name in (step.product.a, step.product.bias) if name is not None]
            freed.append(tuple(name for name in dict.fromkeys(used) if name not in kept))
            kept.update(used)
        return freed[::-1]

    @property
    def signature(self) -> ort.InferenceSession:
        """A session with the inputs, outputs and metadata of the pack's graph; it never runs."""
        return self._whole.session

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], run_options: ort.RunOptions | None
    ) -> tuple[list[Any], CountedRows]:
        """The outputs, and the rows that were multiplied at each site of the main graph."""
        names = list(output_names) if output_names else self._outputs
        self._door.session.run([self._accepted, *(n for n in names if n not in self._outputs)], feeds, run_options)
        for name in names:
            if name in self._no_numpy:
                kind = TensorProto.DataType.Name(self._no_numpy[name].tensor_type.elem_type).lower()
                raise RuntimeError(f"No corresponding Numpy type for Tensor Type. {kind}")
        values: Values = {name: value for name, value in feeds.items() if value is not None}
        rows: dict[str, int] = {}
        for step, freed in zip(self._steps, self._last_use, strict=True):
            step.run(values, rows, run_options)
            for name in freed:
                values.pop(name, None)
        return [values.get(name) for name in names], CountedRows(rows)

    def end_profiling(self) -> str:
        """End the profile of every segment; name of the first file."""
        files = [step.opened.session.end_profiling() for step in self._steps if isinstance(step, _Piece)]
        return str(files[0]) if files else ""


def _signature(model: onnx.ModelProto, opener: Opener, weights: Weights) -> Opened:
    """The whole graph, lowered, opened at little cost: nothing folded, nothing prepacked, weights mapped."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    lowered = lower_graph(whole, weights)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    return Opener(opener.folder, options)(whole.SerializeToString(), lowered)
