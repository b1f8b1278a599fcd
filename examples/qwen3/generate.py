"""Greedy decoding four ways: the float model and its pack, each without and with a cache, side by side.

    python examples/qwen3/generate.py out/qwen3                                # what export.py wrote, both forms
    python examples/qwen3/generate.py out/qwen3 --transformers 0.6b            # and transformers' own greedy loop
    python examples/qwen3/generate.py --model a.onnx --cached b.onnx --prompts rows.npy --lengths 8 16

All forms take a step in turn, in one process. Prompts are made up from a seed, or are the beginnings of the rows of a
file. For each prompt length: how many times as fast a token is as with the float model, by processor time, step beside
step; ms/token on the clock; the tokens beside the float model's (equal, or the step where they part); the mean KL over
the steps before which all tokens were equal.

--transformers (tiny, 0.6b, or the folder of weights that was exported; needs the extra `export`) also checks both
float exports against transformers: top-1 identical at every step, mean KL at most 1e-6; exit 4 when not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import onnxpack
from onnxpack.cli.output import print_table
from onnxpack.errors import GateError, OnnxpackError, UsageError
from onnxpack.verify.accuracy import float_session
from onnxpack.verify.bench import Spread, bench_options, conditions, load
from onnxpack.verify.inputs import read_arrays
from onnxpack.verify.metrics import kl_divergence, log_softmax

LENGTHS = (8, 32, 64, 128, 256)
MAX_KL = 1e-6
Array = np.ndarray[Any, Any]
Step = Callable[[Array], Array]
"""All tokens so far [n] -> logits of the next one [vocab]."""


def whole(session: Any) -> Step:
    """The form without a cache: the whole sequence at every step."""
    return lambda tokens: session.run(["logits"], {"input_ids": tokens[None]})[0][0, -1]


def cached(session: Any) -> Step:
    """The form with a cache: only the tokens that it does not hold yet."""
    shape = next(value.shape for value in session.get_inputs() if value.name == "past")
    cache = np.zeros([0 if isinstance(dim, str) else dim for dim in shape], np.float32)

    def step(tokens: Array) -> Array:
        nonlocal cache
        feed = {"input_ids": tokens[None, cache.shape[3] :], "past": cache}
        logits, cache = session.run(["logits", "present"], feed)
        return logits[0, -1]

    return step


@dataclass
class Decoding:
    """What one form has given so far for one prompt."""

    step: Step
    tokens: Array
    logits: list[Array] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def take_step(self) -> None:
        cpu, start = time.process_time(), time.perf_counter()
        self.logits.append(self.step(self.tokens))
        self.seconds.append(time.perf_counter() - start)
        self.cpu.append(time.process_time() - cpu)
        self.tokens = np.append(self.tokens, self.logits[-1].argmax())


@dataclass(frozen=True)
class Agreement:
    """One run of greedy decoding beside another from the same prompt."""

    parted: int | None
    """The first step that chose another token; null when all are equal."""
    kl: float
    """Mean over the steps up to that one, nats."""

    def __str__(self) -> str:
        return "equal" if self.parted is None else f"part at {self.parted + 1}"


def agreement(reference: Sequence[Array], found: Sequence[Array]) -> Agreement:
    """Compare logits step by step, as long as both sides have seen the same tokens."""
    divergences = []
    for step, (r, f) in enumerate(zip(reference, found, strict=True)):
        divergences.append(float(kl_divergence(log_softmax(r), log_softmax(f))))
        if r.argmax() != f.argmax():
            return Agreement(step, float(np.mean(divergences)))
    return Agreement(None, float(np.mean(divergences)))


def decode(steps: dict[str, Step], prompt: Array, new: int) -> dict[str, Decoding]:
    """`new` tokens with each form, a step each in turn; which is first changes from step to step."""
    runs = {name: Decoding(step, prompt) for name, step in steps.items()}
    order = list(runs.values())
    for _ in range(new):
        for run in order:
            run.take_step()
        order.append(order.pop(0))
    return runs


def transformers_logits(source: str, seed: int) -> Callable[[Array, int], list[Array]]:
    """transformers' own greedy loop over the same weights: the logits of each step."""
    import torch
    from export import make_model

    folder = None if source in ("tiny", "0.6b") else Path(source)
    model = make_model(folder, source == "tiny", seed)
    model.generation_config.eos_token_id = None  # go on to the end, as the other loops do

    def run(prompt: Array, new: int) -> list[Array]:
        ids = torch.from_numpy(prompt[None])
        with torch.no_grad():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return [step[0].numpy() for step in found.logits]

    return run


def sessions(model: Path, with_cache: Path | None, packs: Path | None, weights: str, threads: int) -> dict[str, Any]:
    """How each form takes a step, and its session, by name. Packs are made where they are not there."""
    made: dict[str, Any] = {}
    for suffix, path, form in (("", model, whole), (" cached", with_cache, cached)):
        if path is None:
            continue
        pack = (packs or path.parent) / f"{path.stem}.{weights}.pack"
        if not pack.exists():
            print(f"packing {path.name}", file=sys.stderr)
            pack.parent.mkdir(parents=True, exist_ok=True)
            onnxpack.build(path, pack, weights)
        made[f"float{suffix}"] = (form, float_session(path, bench_options(threads)))
        made[f"pack{suffix}"] = (form, onnxpack.load(pack, "host", bench_options(threads)))
    return made


def prompts(source: Path | None, lengths: Sequence[int], vocab: int, seed: int) -> dict[int, Array]:
    """A prompt of each length."""
    rng = np.random.default_rng(seed)
    if source is None:
        return {length: rng.integers(0, vocab, length) for length in lengths}
    rows = read_arrays(source)
    if isinstance(rows, dict) or rows.ndim != 2 or rows.dtype.kind not in "iu" or rows.shape[1] < max(lengths):
        raise UsageError(f"is not [rows, at least {max(lengths)}] tokens", where=str(source))
    return {length: rows[i % len(rows), :length].astype(np.int64) for i, length in enumerate(lengths)}


def table_rows(runs: dict[str, Decoding], length: int) -> list[tuple[Any, ...]]:
    """A row for each form. The first step reads the prompt and is a figure of its own."""
    base = runs["float"]
    rows = []
    for name, run in runs.items():
        ratio = Spread.of([theirs / ours for theirs, ours in zip(base.cpu[1:], run.cpu[1:], strict=True)])
        ms = Spread.of([1e3 * seconds for seconds in run.seconds[1:]])
        close = agreement(base.logits, run.logits)
        rows.append(
            (
                f"{ratio.median:.2f}",
                f"{ratio.low:.2f} to {ratio.high:.2f}",
                length,
                name,
                f"{ms.median:.2f}",
                f"{1e3 * run.seconds[0]:.1f}",
                close,
                f"{close.kl:.2e}",
            )
        )
    return rows


def files(arguments: argparse.Namespace) -> tuple[Path, Path | None]:
    """The model without a cache, and the one with a cache if there is one."""
    if arguments.folder is None:
        return arguments.model, arguments.cached
    there = arguments.folder / "model_cached.onnx"
    return arguments.model or arguments.folder / "model.onnx", arguments.cached or (there if there.exists() else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="holds model.onnx and model_cached.onnx")
    parser.add_argument("--model", type=Path, help="another file than FOLDER/model.onnx")
    parser.add_argument("--cached", type=Path, help="another file than FOLDER/model_cached.onnx")
    parser.add_argument("--packs", type=Path, metavar="FOLDER", help="where packs go; default: beside each model")
    parser.add_argument("--weights", default="q4nx", help="format of the packs' weights")
    parser.add_argument("--prompts", type=Path, metavar="NPY", help="rows of tokens; default: made up")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of prompts")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate, at least 6")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0, help="of made-up prompts, and of exported random weights")
    parser.add_argument("--transformers", metavar="tiny|0.6b|FOLDER", help="compare with transformers' own loop")
    arguments = parser.parse_args()
    if arguments.folder is None and arguments.model is None:
        parser.error("name a folder, or a file with --model")
    model, with_cache = files(arguments)
    before = load()
    made = sessions(model, with_cache, arguments.packs, arguments.weights, arguments.threads)
    vocab = made["float"][1].get_outputs()[0].shape[-1]
    chosen = prompts(arguments.prompts, arguments.lengths, vocab, arguments.seed)
    theirs = None
    if arguments.transformers is not None:
        theirs = transformers_logits(arguments.transformers, arguments.seed)
    rows: list[tuple[Any, ...]] = []
    against: list[tuple[Any, ...]] = []
    failed = []
    for length, prompt in chosen.items():
        for form, session in made.values():
            form(session)(prompt)  # to warm up
        runs = decode({name: form(session) for name, (form, session) in made.items()}, prompt, arguments.new)
        rows += table_rows(runs, length)
        if theirs is not None:
            reference = theirs(prompt, arguments.new)
            for name in (name for name in runs if name.startswith("float")):
                close = agreement(reference, runs[name].logits)
                against.append((length, name, close, f"{close.kl:.2e}"))
                if close.parted is not None or close.kl > MAX_KL:
                    failed.append(f"{name} at {length}: {close}, KL {close.kl:.2e}")
    headers = ("ratio", "spread", "prompt", "form", "ms/token", "first ms", "tokens", "mean KL")
    print(f"greedy decoding of {arguments.new} tokens over {model.name}, weights {arguments.weights}\n")
    print_table(headers, rows, right=(2, 4, 5))
    if against:
        print("\nbeside transformers' own greedy loop\n")
        print_table(("prompt", "form", "tokens", "mean KL"), against, right=(0,))
    feeds = {f"prompt {length}": prompt for length, prompt in chosen.items()}
    found = conditions(arguments.new - 1, arguments.threads, before, feeds, warm_up=1)
    print("\n" + "\n".join(found.lines()))
    if failed:
        raise GateError("; ".join(failed), hint="exported from other weights, or another seed?")


if __name__ == "__main__":
    try:
        main()
    except OnnxpackError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
