"""A whole model: census, build, load and run of the Qwen3-0.6B shape (or any other), beside onnxruntime in float32.

    python benchmarks/model.py                       # makes the model first: 2.4 GB in build/bench/
    python benchmarks/model.py --model m.onnx --rows 32 128 1 --dim seq
    python benchmarks/model.py --weights q4nx --threads 2 --check

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
from dataclasses import dataclass
from pathlib import Path

import make_qwen3
from harness import Report, finish

import onnxpack
from onnxpack.errors import UsageError
from onnxpack.pack.read import open_pack
from onnxpack.runtime.prepare import read_graph
from onnxpack.verify.accuracy import float_session
from onnxpack.verify.bench import Spread, bench_options, interleave
from onnxpack.verify.inputs import input_specs
from onnxpack.verify.synthetic import random_feed, table_lengths

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
        anon = 0.0
        while True:
            anon = max(anon, status(process.pid, "RssAnon"))
            pid, code, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.004)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(code)
        if process.returncode:
            raise UsageError(f"exit code {process.returncode}", where=" ".join(command))
        out.seek(0)
        return Used(seconds, usage.ru_utime + usage.ru_stime, anon, usage.ru_maxrss / 1024, out.read())


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


def resources(report: Report, model: Path, pack: Path, weights: str) -> None:
    """Census, build and load."""
    census = [watch("-m", "onnxpack", "census", str(model), "--json") for _ in range(PROCESSES)]
    report.fact("census, whole command", "s", [used.seconds for used in census], 1.0)
    report.fact("census, peak RSS", "MB", [used.peak_mb for used in census], 250)
    command = ("build", str(model), "-o", str(pack), "--force", "--quiet", "--json", "--weights", weights)
    builds = [watch("-m", "onnxpack", *command) for _ in range(PROCESSES)]
    report.fact("build, whole command", "s", [used.seconds for used in builds], 8.0)
    report.fact("build, processor time", "s", [used.cpu for used in builds])
    report.fact("build, peak RssAnon", "MB", [used.peak_anon_mb for used in builds], 900)
    passes = [json.loads(used.said)["passes"] for used in builds]
    for name in passes[0]:
        report.fact(f"build, pass {name}", "s", [one[name] for one in passes])
    int8 = sum(t.shape[0] * t.shape[1] for t in open_pack(pack).manifest.tensors) / 2**20
    mine, theirs = loads("pack", pack), loads("float", model)
    report.fact("load pack", "s", [one[0] for one in mine], 2.0 if weights == "int8" else None)
    report.fact("load pack, RssAnon growth", "MB", [one[2] for one in mine], int8 + 100)
    report.fact("load float model", "s", [one[0] for one in theirs])
    report.fact("load float model, RssAnon growth", "MB", [one[2] for one in theirs])
    ratios = [b[1] / a[1] for a, b in zip(mine, theirs, strict=True)]
    report.add("load", "processor time", ratio=Spread.of(ratios))
    report.add("load", "RssAnon", ratio=Spread.of([b[2] / a[2] for a, b in zip(mine, theirs, strict=True)]))


def speed(report: Report, model: Path, pack: Path, dim: str, rows: list[int], runs: int, threads: int) -> None:
    """Runs of several lengths."""
    float32 = float_session(model, bench_options(threads))
    ours = onnxpack.load(pack, "host", bench_options(threads))
    lengths = table_lengths(read_graph(open_pack(pack)))
    for m in rows:
        feed = random_feed(input_specs(ours), 0, {dim: m}, lengths)
        for name, array in feed.items():
            report.fed(f"{name} {m}", array)
        pairs = interleave(lambda f=feed: float32.run(None, f), lambda f=feed: ours.run(None, f), runs, 2)
        wall = Spread.of([pair.baseline_wall / pair.pack_wall for pair in pairs])
        cpu = Spread.of([pair.baseline_cpu / pair.pack_cpu for pair in pairs])
        report.add(f"run, {dim}={m}", "clock", ratio=wall, goal=GOALS.get(m))
        report.add(f"run, {dim}={m}", "processor time", ratio=cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/bench/qwen3.onnx"))
    parser.add_argument("--weights", default="int8", help="format of the weights")
    parser.add_argument("--dim", default="seq", help="dimension that has the number of rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("resources", "speed"), help="one half of it")
    parser.add_argument("--check", action="store_true", help="exit 4 when a goal is missed")
    arguments = parser.parse_args()
    if not arguments.model.exists():
        print(f"making {arguments.model}", file=sys.stderr)
        arguments.model.parent.mkdir(parents=True, exist_ok=True)
        make_qwen3.build(arguments.model, make_qwen3.Config())
    pack = arguments.model.with_name(f"{arguments.model.stem}.{arguments.weights}.pack")
    report = Report(("what", "of"), arguments.runs, arguments.threads, 2)
    if arguments.only != "speed":
        resources(report, arguments.model, pack, arguments.weights)
    elif not pack.exists():
        onnxpack.build(arguments.model, pack, weights=arguments.weights)
    if arguments.only != "resources":
        speed(report, arguments.model, pack, arguments.dim, arguments.rows, arguments.runs, arguments.threads)
    print(f"{arguments.model.name} packed as {arguments.weights}, over onnxruntime in float32")
    report.print(arguments.check)


if __name__ == "__main__":
    finish(main)
