"""Make a Qwen3-shaped ONNX model with random weights: the shapes, tying and graph of the real export, no download.

    python benchmarks/make_qwen3.py out/qwen3.onnx            # 0.6B: 28 layers, 2.4 GB of float32 beside the graph
    python benchmarks/make_qwen3.py out/tiny.onnx --tiny      # the same graph, 2 layers, 3 MB
    python benchmarks/make_qwen3.py out/a8w8.onnx --a8w8      # quantized: 1.2 GB, of which the float table is half

Plain ai.onnx at opset 21 (20 where quantized); weights are external data; 197 weight products in six (K, N) shapes, 56
attention products, and one rotary product at full size. With --a8w8 each of the 197 is a QDQ group as quantizers write
them: int8 weights with a scale a column, int8 activations and results with one scale each; the embedding stays float,
so the head's weight is one of its own. Seeded: the same call gives the same bytes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_PIECE = 1 << 22  # random numbers a time
_CODE_SPREAD = 32  # standard deviation of int8 weights


@dataclass(frozen=True)
class Config:
    """The numbers of a Qwen3 model."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 3072
    vocab: int = 151936
    a8w8: bool = False


TINY = Config(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=300)


class Builder:
    """Collects nodes and initializers; large weights go to the data file as they are named."""

    def __init__(self, data_file: Path, seed: int) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._file = data_file.open("wb")
        self._name = data_file.name
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._quantized: dict[str, str] = {}

    def close(self) -> None:
        self._file.close()

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output; returns the output's name."""
        output = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], f"node_{output}", **attributes))
        return output

    def const(self, name: str, value: Any, dtype: Any = np.int64) -> str:
        """A small inline initializer."""
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, name: str, *shape: int, scale: float = 0.02) -> str:
        """Random normal weights in the data file."""
        tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        count = int(np.prod(shape))
        for key, value in (("location", self._name), ("offset", self._file.tell()), ("length", 4 * count)):
            tensor.external_data.add(key=key, value=str(value))
        for start in range(0, count, _PIECE):
            piece = self._rng.standard_normal(min(_PIECE, count - start), np.float32) * np.float32(scale)
            self._file.write(piece.tobytes())
        self.initializers.append(tensor)
        return name

    def codes(self, name: str, k: int, n: int) -> tuple[str, str]:
        """Random int8 weights in the data file and a scale a column; names. The numbers are those of `weight`."""
        tensor = TensorProto(name=name, dims=(k, n), data_type=TensorProto.INT8, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self._name), ("offset", self._file.tell()), ("length", k * n)):
            tensor.external_data.add(key=key, value=str(value))
        for start in range(0, k * n, _PIECE):
            piece = self._rng.standard_normal(min(_PIECE, k * n - start), np.float32) * np.float32(_CODE_SPREAD)
            self._file.write(np.clip(np.rint(piece), -127, 127).astype(np.int8).tobytes())
        self.initializers.append(tensor)
        scales = self._rng.uniform(0.8, 1.2, n) * (0.02 / _CODE_SPREAD)
        return name, self.const(f"{name}_scale", scales, np.float32)

    def quantized(self, x: str, name: str, largest: float) -> str:
        """x through QuantizeLinear and DequantizeLinear: int8, one scale, zero point 0. Each value once."""
        if x not in self._quantized:
            scale = self.const(f"{name}_scale", largest / 127, np.float32)
            zero = self.const(f"{name}_zero_point", 0, np.int8)
            self._quantized[x] = self.op("DequantizeLinear", self.op("QuantizeLinear", x, scale, zero), scale, zero)
        return self._quantized[x]

    def group(self, x: str, name: str, k: int, n: int, largest_x: float, largest_y: float) -> str:
        """One A8W8 product: x [..., k] times an int8 weight, quantized again."""
        codes, scales = self.codes(f"{name}.weight", k, n)
        decoded = self.op("DequantizeLinear", codes, scales, axis=1)
        y = self.op("MatMul", self.quantized(x, f"{name}.input", largest_x), decoded)
        return self.quantized(y, f"{name}.output", largest_y)

    def norm(self, x: str, name: str, size: int) -> str:
        """RMS normalization as exporters decompose it."""
        scale = self.const(name, np.ones(size), np.float32)
        mean = self.op("ReduceMean", self.op("Pow", x, "two"), "last_axis", keepdims=1)
        root = self.op("Reciprocal", self.op("Sqrt", self.op("Add", mean, "epsilon")))
        return self.op("Mul", scale, self.op("Mul", x, root))


def build(path: Path, config: Config, seed: int = 0) -> None:
    """Write the graph to `path` and its weights to `path` + ".data"."""
    b = Builder(path.with_name(path.name + ".data"), seed)
    _constants(b, config)
    table = b.weight("model.embed_tokens.weight", config.vocab, config.hidden)
    x = b.op("Gather", table, "input_ids")
    cos, sin, mask = _positions(b, config)
    for layer in range(config.layers):
        x = _layer(b, config, f"model.layers.{layer}", x, cos, sin, mask)
    x = b.norm(x, "model.norm.weight", config.hidden)
    if config.a8w8:
        b.group(x, "lm_head", config.hidden, config.vocab, 5, 4)
    else:
        b.op("MatMul", x, b.op("Transpose", table, perm=[1, 0]))
    b.nodes[-1].output[0] = "logits"
    b.close()
    graph = helper.make_graph(
        b.nodes,
        "qwen3",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "seq"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "seq", config.vocab])],
        b.initializers,
    )
    # At 21 onnxruntime 1.32 moves a QuantizeLinear whose type it then gets wrong, and refuses the quantized graph.
    opset = 20 if config.a8w8 else 21
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model.producer_name = "qwen3-shaped random model"
    path.write_bytes(model.SerializeToString(deterministic=True))


def _constants(b: Builder, c: Config) -> None:
    b.const("two", 2.0, np.float32)
    b.const("epsilon", 1e-6, np.float32)
    b.const("last_axis", [-1])
    for name, value in (("zero", 0), ("one", 1)):
        b.const(name, value)
    b.const("unsqueeze_0", [0])
    b.const("unsqueeze_2", [2])
    b.const("split_heads", [1, -1, c.heads, c.head_dim])
    b.const("split_kv", [1, -1, c.kv_heads, c.head_dim])
    b.const("group_heads", [1, c.kv_heads, c.heads // c.kv_heads, -1, c.head_dim])
    b.const("ungroup_heads", [1, c.heads, -1, c.head_dim])
    b.const("join_heads", [1, -1, c.heads * c.head_dim])
    b.const("half", [c.head_dim // 2])
    b.const("start", [0])
    b.const("end", [2**31])
    b.const("softmax_scale", c.head_dim**-0.5, np.float32)
    b.const("blocked", np.finfo(np.float32).min, np.float32)
    b.const("open", 0.0, np.float32)
    inverse = 1e6 ** (-np.arange(0, c.head_dim, 2, dtype=np.float32) / c.head_dim)
    b.const("inv_freq", inverse.reshape(1, -1, 1), np.float32)


def _positions(b: Builder, c: Config) -> tuple[str, str, str]:
    """Rotary cosine and sine [1, seq, head_dim], and the causal mask [seq, seq]."""
    length = b.op("Gather", b.op("Shape", "input_ids"), "one", axis=0)
    index = b.op("Range", "zero", length, "one")
    row = b.op("Unsqueeze", b.op("Unsqueeze", index, "unsqueeze_0"), "unsqueeze_0")
    angles = b.op("MatMul", "inv_freq", b.op("Cast", row, to=TensorProto.FLOAT))
    angles = b.op("Transpose", angles, perm=[0, 2, 1])
    angles = b.op("Concat", angles, angles, axis=-1)
    column = b.op("Transpose", b.op("Unsqueeze", index, "unsqueeze_0"), perm=[1, 0])
    visible = b.op("LessOrEqual", b.op("Unsqueeze", index, "unsqueeze_0"), column)
    mask = b.op("Where", visible, "open", "blocked")
    return b.op("Cos", angles), b.op("Sin", angles), mask


def _layer(b: Builder, c: Config, name: str, x: str, cos: str, sin: str, mask: str) -> str:
    def linear(value: str, part: str, k: int, n: int, largest_x: float = 5, largest_y: float = 4) -> str:
        if c.a8w8:
            return b.group(value, f"{name}.{part}", k, n, largest_x, largest_y)
        return b.op("MatMul", value, b.weight(f"{name}.{part}.weight", k, n))

    h = b.norm(x, f"{name}.input_layernorm.weight", c.hidden)
    q = _heads(b, linear(h, "self_attn.q_proj", c.hidden, c.heads * c.head_dim), "split_heads")
    k = _heads(b, linear(h, "self_attn.k_proj", c.hidden, c.kv_heads * c.head_dim), "split_kv")
    v = _heads(b, linear(h, "self_attn.v_proj", c.hidden, c.kv_heads * c.head_dim), "split_kv")
    q = _rotate(b, b.norm(q, f"{name}.self_attn.q_norm.weight", c.head_dim), cos, sin)
    k = _rotate(b, b.norm(k, f"{name}.self_attn.k_norm.weight", c.head_dim), cos, sin)
    grouped = b.op("Reshape", q, "group_heads")
    scores = b.op("MatMul", grouped, b.op("Transpose", b.op("Unsqueeze", k, "unsqueeze_2"), perm=[0, 1, 2, 4, 3]))
    scores = b.op("Softmax", b.op("Add", b.op("Mul", scores, "softmax_scale"), mask), axis=-1)
    joined = b.op("Reshape", b.op("MatMul", scores, b.op("Unsqueeze", v, "unsqueeze_2")), "ungroup_heads")
    joined = b.op("Reshape", b.op("Transpose", joined, perm=[0, 2, 1, 3]), "join_heads")
    x = b.op("Add", x, linear(joined, "self_attn.o_proj", c.heads * c.head_dim, c.hidden, 3, 4))
    h = b.norm(x, f"{name}.post_attention_layernorm.weight", c.hidden)
    gate, up = linear(h, "mlp.gate_proj", c.hidden, c.ffn), linear(h, "mlp.up_proj", c.hidden, c.ffn)
    h = b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), up)
    return b.op("Add", x, linear(h, "mlp.down_proj", c.ffn, c.hidden, 3, 3))


def _heads(b: Builder, x: str, shape: str) -> str:
    return b.op("Transpose", b.op("Reshape", x, shape), perm=[0, 2, 1, 3])


def _rotate(b: Builder, x: str, cos: str, sin: str) -> str:
    first, second = b.op("Slice", x, "start", "half", "last_axis"), b.op("Slice", x, "half", "end", "last_axis")
    turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
    return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--tiny", action="store_true", help="2 layers, hidden 64, vocabulary 300")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--a8w8", action="store_true", help="quantized: int8 activations and weights, as QDQ")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = TINY if arguments.tiny else Config()
    if arguments.layers:
        config = replace(config, layers=arguments.layers)
    config = replace(config, a8w8=arguments.a8w8)
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    build(arguments.path, config, arguments.seed)
    onnx.checker.check_model(arguments.path)
    print(f"{arguments.path}: {arguments.path.stat().st_size} bytes of graph")


if __name__ == "__main__":
    main()
