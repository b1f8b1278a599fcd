"""Qwen3 from transformers to plain ONNX: opset 21, ai.onnx only, float32, dynamic sequence. No download.

    python examples/qwen3/export.py out/qwen3 --tiny --check              # 2 layers, a second or two
    python examples/qwen3/export.py out/qwen3 --check                     # the 0.6B shape, seeded random weights
    python examples/qwen3/export.py out/qwen3 --weights Qwen3-0.6B        # a folder with config.json and safetensors
    python examples/qwen3/export.py out/qwen3 --cached --check            # the key and value cache goes in and out

Writes model.onnx, or with --cached model_cached.onnx, and their weights beside them. The default form takes the whole
sequence at every step: input_ids [1, seq] -> logits [1, seq, vocab]. The cached one takes what is new, and one stacked
cache: input_ids [1, seq], past [2*layers, 1, kv heads, past, head_dim] -> logits, present [.., past + seq, ..]; layer i
has its keys at 2i and its values at 2i + 1, and `past` may be 0.

--check takes the census of what was written and compares it with the one that the shape has (at 0.6B: 254 MatMul, of
which 197 have a weight, in 6 shapes, and no operator outside ai.onnx); exit 1 when it differs.

Needs the extra `export`: pip install "onnxpack[export]".
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import onnxpack

OPSET = 21
QWEN3_0_6B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
TINY = QWEN3_0_6B | {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}


class Rotary(torch.nn.Module):
    """Rotary angles as the matrix product of frequencies and positions. transformers computes the same numbers, some
    versions by this product, some by a multiplication; written out, the census does not depend on the version."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", original.inv_freq.clone(), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (self.inv_freq[None, :, None] @ position_ids[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class StackedCache:
    """All that a layer's attention asks of a cache: append keys and values, give back everything so far."""

    def __init__(self, past: torch.Tensor) -> None:
        self.past = past
        self.present: list[torch.Tensor] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        whole = tuple(torch.cat((self.past[2 * layer + i], new), dim=2) for i, new in enumerate((keys, values)))
        self.present += whole
        return whole

    def get_seq_length(self, *_: Any) -> int:
        return self.past.shape[3]


def causal_mask(past: int, new: int) -> torch.Tensor:
    """[1, 1, new, past + new]: 0 where a position sees another, the smallest float where not."""
    columns = torch.arange(past + new)[None, :]
    rows = torch.arange(past, past + new)[:, None]
    return torch.where(columns <= rows, 0.0, torch.finfo(torch.float32).min)[None, None]


class Whole(torch.nn.Module):
    """input_ids [1, seq] -> logits [1, seq, vocab]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        new = input_ids.shape[1]
        positions = torch.arange(new)[None]
        found = self.model.model(
            input_ids=input_ids, attention_mask=causal_mask(0, new), position_ids=positions, use_cache=False
        )
        return self.model.lm_head(found.last_hidden_state)


class Cached(torch.nn.Module):
    """input_ids [1, seq], past [2*layers, 1, kv heads, past, head_dim] -> logits, present."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before, new = past.shape[3], input_ids.shape[1]
        cache = StackedCache(past)
        found = self.model.model(
            input_ids=input_ids,
            attention_mask=causal_mask(before, new),
            position_ids=torch.arange(before, before + new)[None],
            past_key_values=cache,
            use_cache=True,
        )
        return self.model.lm_head(found.last_hidden_state), torch.stack(cache.present)


def make_model(weights: Path | None = None, tiny: bool = False, seed: int = 0) -> Any:
    """The transformers model in float32: from a local folder, or of a known shape with seeded random weights."""
    if weights is not None:
        model = Qwen3ForCausalLM.from_pretrained(
            weights, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
        )
    else:
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM._from_config(
            Qwen3Config(**(TINY if tiny else QWEN3_0_6B)), attn_implementation="eager"
        )
        model = model.float()
    return model.eval()


def empty_cache(model: Any, length: int = 0) -> torch.Tensor:
    """A stacked cache of `length` positions, all zero."""
    c = model.config
    return torch.zeros(2 * c.num_hidden_layers, 1, c.num_key_value_heads, length, c.head_dim)


def export(model: Any, path: Path, cached: bool) -> None:
    """Write one form. The weights are external data, in one file beside the graph."""
    model.model.rotary_emb = Rotary(model.model.rotary_emb)
    seq = torch.export.Dim("seq", min=1, max=2**20)
    ids = torch.zeros(1, 7, dtype=torch.int64)
    arguments: tuple[torch.Tensor, ...] = (ids,)
    shapes: dict[str, Any] = {"input_ids": {1: seq}}
    if cached:
        arguments += (empty_cache(model, 5),)
        shapes["past"] = {3: torch.export.Dim("past", min=0, max=2**20)}
    with torch.no_grad(), quiet():
        program = torch.onnx.export(
            (Cached if cached else Whole)(model),
            arguments,
            dynamo=True,
            opset_version=OPSET,
            input_names=["input_ids", "past"][: 1 + cached],
            output_names=["logits", "present"][: 1 + cached],
            dynamic_shapes=shapes,
            verbose=False,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces, with the paths of this machine
        program.save(path, external_data=True)


@contextlib.contextmanager
def quiet() -> Any:
    """The exporter talks at length to both streams; what it raises is enough."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def expected_shapes(config: Any) -> Counter[tuple[int, int]]:
    """How many products have a weight of which (K, N): seven in each layer, and the head."""
    hidden, ffn, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden)]
    counts = Counter(layer * config.num_hidden_layers)
    counts[hidden, config.vocab_size] += 1
    return counts


def check(path: Path, config: Any) -> list[str]:
    """Print the census; lines that say where it differs from what the shape has."""
    census = onnxpack.census(str(path))
    found = Counter({(group.k, group.n): group.count for group in census.groups})
    wanted = expected_shapes(config)
    # in each layer queries by keys, and scores by values; the rotary angles once
    products = wanted.total() + 2 * config.num_hidden_layers + 1
    graph = onnx.load(str(path), load_external_data=False)
    opsets = {entry.domain or "ai.onnx": entry.version for entry in graph.opset_import}
    print(f"{path.name}: {census.totals.sites} MatMul, {census.totals.weight} with a weight, in {len(found)} shapes")
    for (k, n), count in sorted(found.items(), key=lambda item: -item[1]):
        print(f"  {count:3} x  K={k} N={n}")
    print(f"operators: {', '.join(f'{domain} {version}' for domain, version in opsets.items())}")
    problems = []
    if census.totals.sites != products:
        problems.append(f"{census.totals.sites} products, expected {products}")
    if found != wanted:
        problems.append(f"products with a weight by (K, N): {dict(found)}, expected {dict(wanted)}")
    if not all(site.op == "MatMul" for site in census.sites):
        problems.append("products that are not MatMul")
    if opsets != {"ai.onnx": OPSET}:
        problems.append(f"operators of {opsets}, expected ai.onnx {OPSET} alone")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model.onnx or model_cached.onnx goes")
    parser.add_argument("--cached", action="store_true", help="the form with a key and value cache")
    parser.add_argument("--tiny", action="store_true", help="2 layers, hidden 64, vocabulary 300")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="config.json and safetensors; default: random")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--check", action="store_true", help="exit 1 when the census is not what the shape has")
    arguments = parser.parse_args()
    if arguments.weights is not None and not (arguments.weights / "config.json").is_file():
        parser.error(f"{arguments.weights} is no folder with a config.json and weights")
    path = arguments.folder / ("model_cached.onnx" if arguments.cached else "model.onnx")
    model = make_model(arguments.weights, arguments.tiny, arguments.seed)
    export(model, path, arguments.cached)
    print(f"wrote {path}")
    if not arguments.check:
        return 0
    problems = check(path, model.config)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
