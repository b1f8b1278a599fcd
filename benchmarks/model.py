"""A whole model: census, build, load and run of the Qwen3-0.6B shape (or any other), beside onnxruntime in float32.

Also beside onnxruntime's quantizers, with --beside.

    python benchmarks/model.py                       # makes the model first: 2.4 GB in build/bench/
    python benchmarks/model.py --model m.onnx --rows 32 128 1 --dim seq
    python benchmarks/model.py --weights q4nx --threads 2 --check
    python benchmarks/model.py --only speed --beside "nbits4 a4" dynamic

Census, build and load each run in processes of their own, so that their memory is theirs alone: RssAnon is what they
really hold, mapped files are not counted. The runs alternate in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_qwen3
import neighbours
from harness import Report, finish, ratios, rounds

import onnxpack
from onnxpack.errors import GateError, UsageError
from onnxpack.pack.read import open_pack
from onnxpack.runtime.prepare import read_graph
from onnxpack.verify.accuracy import float_session
from onnxpack.verify.bench import Spread, bench_options
from onnxpack.verify.inputs import input_specs
from onnxpack.verify.synthetic import random_feed, table_lengths

FLOAT = "float32"
AS_EXPORTED = " as exported"
PROCESSES = 5
GOALS = {1: 2.0, 32: 2.4, 128: 2.4}
"""Times as fast as float32, by tokens, for the 0.6B shape."""


@dataclass(frozen=True)
class Used:
    """What a process used."""

    seconds: float
    cpu: float
    peak_anon_mb: float
    peak_mb: float
    said: str


def watch(*command: str) -> Used:
    """Run a command and look at its memory every few milliseconds."""
    with tempfile.TemporaryFile("w+") as out:  # a pipe that nobody reads would stop a process that says much
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], stdout=out)
        # Not ru_maxrss: that begins with the memory of the process that started this one.
        anon = peak = 0.0
        while True:
            anon, peak = max(anon, status(process.pid, "RssAnon")), max(peak, status(process.pid, "VmHWM"))
            pid, code, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.004)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(code)
        if process.returncode:
            raise UsageError(f"exit code {process.returncode}", where=" ".join(command))
        out.seek(0)
        return Used(seconds, usage.ru_utime + usage.ru_stime, anon, peak, out.read())


def status(pid: int | str, field: str) -> float:
    """A line of /proc/PID/status in MB; 0 when the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


LOAD = """
import json, sys, time
import numpy, onnxruntime, onnxpack, onnxpack.runtime.session
from pathlib import Path
def anon():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) / 1024
how, path = sys.argv[1:]
before, start, cpu = anon(), time.perf_counter(), time.process_time()
session = onnxpack.load(path) if how == "pack" else onnxruntime.InferenceSession(path)
print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, anon() - before]))
"""


def loads(how: str, path: Path) -> list[list[float]]:
    """Seconds, CPU-seconds and growth of RssAnon in MB of loading, once for each process."""
    return [json.loads(watch("-c", LOAD, how, str(path)).said) for _ in range(PROCESSES)]


def census(report: Report, model: Path) -> None:
    """Time and memory of the census."""
    found = [watch("-m", "onnxpack", "census", str(model), "--json") for _ in range(PROCESSES)]
    report.fact("census, whole command", "s", [used.seconds for used in found], 1.0)
    report.fact("census, processor time", "s", [used.cpu for used in found])
    report.fact("census, peak RSS", "MB", [used.peak_mb for used in found], 250)


def resources(report: Report, model: Path, pack: Path, weights: str) -> None:
    """Build and load."""
    command = ("build", str(model), "-o", str(pack), "--force", "--quiet", "--json", "--weights", weights)
    builds = [watch("-m", "onnxpack", *command) for _ in range(PROCESSES)]
    build, load = f"build {weights}", f"load {weights}"
    report.fact(f"{build}, whole command", "s", [used.seconds for used in builds], 8.0)
    report.fact(f"{build}, processor time", "s", [used.cpu for used in builds])
    report.fact(f"{build}, peak RssAnon", "MB", [used.peak_anon_mb for used in builds], 900)
    passes = [json.loads(used.said)["passes"] for used in builds]
    for name in passes[0]:
        report.fact(f"{build}, pass {name}", "s", [one[name] for one in passes])
    operands = sum(t.shape[0] * t.shape[1] for t in open_pack(pack).manifest.tensors) / 2**20
    mine, theirs = loads("pack", pack), loads("float", model)
    report.fact(load, "s", [one[0] for one in mine], 1.5 if weights == "int8" else None)
    report.fact(f"{load}, processor time", "s", [one[1] for one in mine])
    report.fact(f"{load}, RssAnon growth", "MB", [one[2] for one in mine], operands + 100)
    report.fact("load float model", "s", [one[0] for one in theirs])
    report.fact("load float model, processor time", "s", [one[1] for one in theirs])
    report.fact("load float model, RssAnon growth", "MB", [one[2] for one in theirs])
    ratios = [b[1] / a[1] for a, b in zip(mine, theirs, strict=True)]
    report.add(load, "processor time", ratio=Spread.of(ratios))
    report.add(load, "RssAnon", ratio=Spread.of([b[2] / a[2] for a, b in zip(mine, theirs, strict=True)]))


def sessions(model: Path, pack: Path, beside: Sequence[str], threads: int, folder: Path) -> dict[str, Any]:
    """The pack, the float model, and the neighbours, whose models are made in `folder`.

    A neighbour is made from a model whose head has a weight of its own; called "... as exported", from the model as it
    is. Where that is the same, it is left out.
    """
    made: dict[str, Any] = {
        "pack": onnxpack.load(pack, "host", bench_options(threads)),
        FLOAT: float_session(model, bench_options(threads)),
    }
    source = neighbours.own_head(model, folder / "own_head.onnx") if beside else model
    for name in beside:
        kind, as_exported = name.removesuffix(AS_EXPORTED), name.endswith(AS_EXPORTED)
        if as_exported and source == model:
            continue
        out = folder / f"{name.replace(' ', '_')}.onnx"
        there = neighbours.make(kind, model if as_exported else source, out)
        made[name] = float_session(there, bench_options(threads))
    return made


def speed(
    report: Report, label: str, held: dict[str, Any], pack: Path, sizes: Sequence[dict[str, int]], runs: int, goals: Any
) -> None:
    """Runs at several sizes of the symbolic dimensions: a row by the clock and one by processor time."""
    lengths = table_lengths(read_graph(open_pack(pack)))
    for given in sizes:
        feed = random_feed(input_specs(held["pack"]), 0, given, lengths)
        shown = ", ".join(f"{name}={size}" for name, size in given.items())
        for name, array in feed.items():
            report.fed(f"{name} {shown}", array)
        calls = {name: (lambda s=session, f=feed: s.run(None, f)) for name, session in held.items()}
        found = rounds(calls, runs, 2)
        report.add_row(label, shown, "clock", over=ratios(found, "pack", clock=True), goals=goals(given))
        report.add_row(label, shown, "processor", over=ratios(found, "pack"))


def qwen3_goals(dim: str) -> Callable[[dict[str, int]], dict[str, float]]:
    """What the 0.6B shape is to reach at each number of tokens."""

    def goals(sizes: dict[str, int]) -> dict[str, float]:
        m = sizes.get(dim)
        return {FLOAT: GOALS[m], f"nbits4 a4{AS_EXPORTED}": 1.0} if m in GOALS else {}

    return goals


def default_model() -> Path:
    """The Qwen3-0.6B shape, made when it is not there."""
    path = Path("build/bench/qwen3.onnx")
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        make_qwen3.build(path, make_qwen3.Config())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: made first, in build/bench")
    parser.add_argument("--weights", default="int8", help="format of the weights")
    parser.add_argument("--dim", default="seq", help="dimension that has the number of rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("resources", "speed"), help="one half of it")
    parser.add_argument("--check", action="store_true", help="exit 4 when a goal is missed")
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="NAME", help=f"{', '.join(neighbours.NAMES)}; NAME as exported"
    )
    arguments = parser.parse_args()
    model = arguments.model or default_model()
    pack = model.with_name(f"{model.stem}.{arguments.weights}.pack")
    what = f"{model.name} packed as {arguments.weights}"
    missed: list[str] = []
    if arguments.only != "speed":
        report = Report(
            ("what", "of"), PROCESSES, 1, 0, title=f"{what}: how many times as good as onnxruntime in float32"
        )
        census(report, model)
        resources(report, model, pack, arguments.weights)
        report.print()
        missed += report.missed
    elif not pack.exists():
        onnxpack.build(model, pack, weights=arguments.weights)
    if arguments.only != "resources":
        headers = ("model", "size", "by")
        title = f"{what}: how many times as fast it runs on the host"
        report = Report(
            headers, arguments.runs, arguments.threads, 2, neighbours=(FLOAT, *arguments.beside), title=title
        )
        with tempfile.TemporaryDirectory() as folder:
            held = sessions(model, pack, arguments.beside, arguments.threads, Path(folder))
            sizes = [{arguments.dim: m} for m in arguments.rows]
            speed(report, model.stem, held, pack, sizes, arguments.runs, qwen3_goals(arguments.dim))
        report.print()
        missed += report.missed
    if arguments.check and missed:
        raise GateError("; ".join(missed))


if __name__ == "__main__":
    finish(main)
