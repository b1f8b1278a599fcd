"""How the sessions of the cut form are opened: many small ones, which must not each have memory and threads to itself.

A segment that only does elementwise work and moves data gets one thread. The others get as many as the caller asked for
and let them sleep between runs, because a hundred pools that spin would starve each other.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime as ort
from onnx import helper

from onnxpack.runtime.carry import tensor_type
from onnxpack.runtime.cut import frame
from onnxpack.runtime.graphs import bodies
from onnxpack.runtime.lower import Lowered
from onnxpack.runtime.npu.claims import Claimed
from onnxpack.runtime.opening import Opened, Opener
from onnxpack.runtime.options import copy_options
from onnxpack.runtime.prepare import Weights, lower_graph
from onnxpack.types import Array

_STOP_SPINNING = "session.force_spinning_stop"

_NAMES = (
    "Abs Add And Cast Ceil Clip Concat Constant ConstantOfShape Cos DequantizeLinear Div Dropout Equal Erf Exp Expand "
    "Flatten Floor Gather Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity LayerNormalization LeakyRelu Less "
    "LessOrEqual Log Max Mean Min Mul Neg Not Or Pow QuantizeLinear RMSNormalization Range Reciprocal ReduceMax "
    "ReduceMean ReduceMin ReduceSum Relu Reshape Round Shape Sigmoid Sign SimplifiedLayerNormalization Sin Slice Split "
    "Sqrt Squeeze Sub Sum Swish Tanh Tile Transpose Trilu Unsqueeze Where"
)
_LIGHT = frozenset(_NAMES.split())
"""Operators that one thread does as fast as many, on activations."""


class Openers:
    """Opens segments, and products by themselves."""

    def __init__(self, opener: Opener, model: onnx.ModelProto, weights: Weights) -> None:
        self._plain, self._frame, self._weights = opener, frame(model), weights
        threads = 0 if opener.options is None else int(opener.options.intra_op_num_threads)
        self._heavy = _opener(opener, threads)
        self._light = _opener(opener, threads or 1)
        self._products: dict[str, tuple[Opened, list[str]]] = {}

    def segment(self, part: onnx.ModelProto, lowered: Lowered) -> Opened:
        """A session over one segment."""
        light = all(node.op_type in _LIGHT and not any(bodies(node)) for node in part.graph.node)
        return (self._light if light else self._heavy)(part.SerializeToString(), lowered)

    def product(self, claimed: Claimed, x: Array, bias: Array | None) -> Array:
        """One product on the host: the lowering that the whole graph gets there, so the same bits. Opened when first
        needed, and kept: it holds a copy of its weight, in onnxruntime's own order."""
        node = claimed.product.node
        if node not in self._products:
            self._products[node] = self._open(claimed, x, bias)
        opened, names = self._products[node]
        feeds: dict[str, Any] = dict(zip(names, [x] if bias is None else [x, bias], strict=True))
        [found] = opened.session.run(None, feeds)
        return found  # type: ignore[no-any-return]

    def _open(self, claimed: Claimed, x: Array, bias: Array | None) -> tuple[Opened, list[str]]:
        part, product = onnx.ModelProto(), claimed.product
        part.CopyFrom(self._frame)
        part.graph.node.append(product.to_node())
        names = [product.a] if product.bias is None else [product.a, product.bias]
        for name, array in zip(names, [x] if bias is None else [x, bias], strict=True):
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            part.graph.input.add(name=name, type=tensor_type(kind, None))
        part.graph.output.add(name=product.y)
        lowered = lower_graph(part, self._weights)
        return self._plain(part.SerializeToString(), lowered), names


def _opener(opener: Opener, threads: int) -> Opener:
    options: ort.SessionOptions = copy_options(opener.options)
    options.intra_op_num_threads = threads
    # Memory comes from the process, not from an arena of each session; patterns are kept per shape, for ever.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.optimized_model_filepath = ""  # the whole graph's
    if threads != 1:
        options.add_session_config_entry(_STOP_SPINNING, "1")
    return Opener(opener.folder, options)
