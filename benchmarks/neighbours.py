"""What a user would run instead: onnxruntime's own quantizers on the same model, in onnxruntime.

* ``nbits4 a4``: MatMulNBits, 4 bits in blocks of 32, accuracy level 4 (activations to int8 inside the kernel);
  ``a0`` computes in float32; ``b128`` has blocks of 128, the quantizer's default: faster, and further from the model
* ``nbits8``: the same with 8 bits
* ``dynamic``: quantize_dynamic, int8 weights, one scale a tensor for weights and for each activation

Their quantizers see a weight only where it is an initializer itself. A language model's head often is the embedding
behind a Transpose; `own_head` gives it a weight of its own first, so that they are compared on all products.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

LARGE = 1 << 30
"""Bytes of weights from which on they go to a file of their own."""

NBITS = {
    "nbits4 a0": (4, 0, 32),
    "nbits4 a4": (4, 4, 32),
    "nbits4 a4 b128": (4, 4, 128),
    "nbits8 a0": (8, 0, 32),
    "nbits8 a4": (8, 4, 32),
}
"""Bits, accuracy level and block."""

NAMES = (*NBITS, "dynamic")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Quantizers log each node."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def make(name: str, model: Path, out: Path) -> Path:
    """The model as the neighbour called `name` would run it."""
    with quiet():
        if name == "dynamic":
            large = weight_bytes(model) > LARGE
            kinds = ["MatMul", "Gemm"]
            quantize_dynamic(model, out, kinds, weight_type=QuantType.QInt8, use_external_data_format=large)
        else:
            bits, level, block = NBITS[name]
            quantizer = MatMulNBitsQuantizer(
                onnx.load(model), bits=bits, block_size=block, is_symmetric=True, accuracy_level=level
            )
            quantizer.process()
            quantizer.model.save_model_to_file(str(out), weight_bytes(model) > LARGE)
    return out


def weight_bytes(model: Path) -> int:
    """Bytes of the model's file and of its external data."""
    graph = onnx.load(model, load_external_data=False).graph
    files = {e.value for t in graph.initializer for e in t.external_data if e.key == "location"}
    return sum(path.stat().st_size for path in [model, *(model.parent / name for name in files)])


def stored_bytes(model: Path) -> int:
    """Bytes that a neighbour's model stores for its quantized products: codes, scales, zero points."""
    graph = onnx.load(model, load_external_data=False).graph
    sizes = {t.name: math.prod(t.dims) * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
             for t in graph.initializer}  # fmt: skip
    kinds = ("MatMulNBits", "MatMulInteger", "DynamicQuantizeMatMul")
    codes = {name for node in graph.node if node.op_type in kinds for name in node.input[1:] if name in sizes}
    # quantize_dynamic multiplies by its weight scales in nodes of their own
    roots = {name.removesuffix("_quantized") for name in codes if name.endswith("_quantized")}
    return sum(sizes[name] for name in codes | ({f"{root}_scale" for root in roots} & sizes.keys()))


def own_head(model: Path, out: Path) -> Path:
    """A copy in which a weight behind a Transpose is an initializer; the model itself where there is none."""
    graph = onnx.load(model, load_external_data=False).graph
    stored = {tensor.name for tensor in graph.initializer}
    used = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    turned = [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in stored and n.output[0] in used]
    if not turned:
        return model
    whole = onnx.load(model)
    tensors = {tensor.name: tensor for tensor in whole.graph.initializer}
    for node in [node for node in whole.graph.node if node.output[0] in {n.output[0] for n in turned}]:
        perm = next((tuple(a.ints) for a in node.attribute if a.name == "perm"), None)
        value = np.ascontiguousarray(numpy_helper.to_array(tensors[node.input[0]]).transpose(perm))
        whole.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
        whole.graph.node.remove(node)
    large = weight_bytes(model) > LARGE
    onnx.save(whole, out, save_as_external_data=large, location=f"{out.name}.data")
    return out
