"""What stock onnxruntime needs for Q4NX weights: memory and processor time of loading and running.

    python benchmarks/q4nx_stock.py                        # 1024x3072, 1024x151936 and four layers of a Qwen3 shape
    python benchmarks/q4nx_stock.py 512x512 --layers 0     # other products, no model
    python benchmarks/q4nx_stock.py --layers 28            # the 0.6B shape; folding it whole takes 15 GB

Three forms of each: float32 weights in a file, Q4NX with every decoder folded whole (as small weights are), and Q4NX as
packs have it. Every form and level runs in a process of its own, with one thread. Memory is anonymous, as a multiple of
the float32 bytes of the Q4NX weights: the peak of loading, what is held then, and the peak of running (one row or
token). Times are nanoseconds of processor time per weight; the rows of float32 are the measure of the others.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import make_qwen3
import numpy as np
import onnx
from harness import weight
from onnx import TensorProto, helper

import onnxpack
from onnxpack.cli.output import print_table
from onnxpack.formats.q4nx import Q4NX, graph
from onnxpack.pack.read import open_pack

SHAPES = [(1024, 3072), (1024, 151936)]
LEVELS = ("ALL", "BASIC")
TYPES = {"uint8": TensorProto.UINT8, "bfloat16": TensorProto.BFLOAT16, "float32": TensorProto.FLOAT}
FLOAT, FOLDED, Q4NX_FORM = "float32", "folded whole", "q4nx"

_CHILD = """
import json, sys, threading, time
import numpy as np, onnxruntime as ort

def anonymous():
    return 1024 * int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

path, level = sys.argv[1:]
options = ort.SessionOptions()
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, "ORT_ENABLE_" + level)
options.intra_op_num_threads = 1
peak = before = anonymous()
threading.Thread(target=watch, daemon=True).start()
start = time.process_time()
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
load = time.process_time() - start
memory = [peak - before, anonymous() - before]
types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
feed = {i.name: np.ones([d if isinstance(d, int) else 1 for d in i.shape], types[i.type]) for i in session.get_inputs()}
peak, runs = anonymous(), []
for _ in range(6):
    start = time.process_time()
    session.run(None, feed)
    runs.append(time.process_time() - start)
print(json.dumps([*memory, peak - before, load, min(runs)]))
"""


def measure(model: Path, level: str) -> list[float]:
    """Bytes at the peak of loading, after it and at the peak of running; CPU-seconds of loading and of a run."""
    command = [sys.executable, "-c", _CHILD, str(model), level]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@contextmanager
def form(name: str) -> Iterator[None]:
    """Write decoders as `name` says."""
    folded = functools.partial(graph.decoder, folded_bytes=1 << 62)
    with mock.patch.object(graph, "decoder", folded if name == FOLDED else graph.decoder):
        yield


def product(folder: Path, name: str, k: int, n: int) -> Path:
    """A model that is one product with a weight [K, N] of its own."""
    w = weight(k, n, 0)
    q4nx, stored = Q4NX(), []
    (folder / "weight.bin").write_bytes(w.tobytes() if name == FLOAT else q4nx.to_bytes(q4nx.encode(w)))
    views = {"weight": ("float32", (k, n))}
    nodes, constants, output = [], [], "weight"
    if name != FLOAT:
        decoder = q4nx.decoder((k, n), 21)
        nodes, constants, output = [*decoder.nodes], decoder.constants, decoder.output
        views = {view: (v.spec.dtype.name, v.spec.shape) for view, v in q4nx.views((k, n)).items()}
    for view, (dtype, shape) in views.items():
        tensor = TensorProto(name=view, data_type=TYPES[dtype], dims=shape, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="weight.bin")
        stored.append(tensor)
    info = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    nodes.append(helper.make_node("MatMul", ["x", output], ["y"]))
    inputs, outputs = [info("x", shape=["rows", k])], [info("y", shape=["rows", n])]
    made = helper.make_graph(nodes, "g", inputs, outputs, [*constants, *stored])
    onnx.save(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "model.onnx"
    )
    return folder / "model.onnx"


def compare(label: str, weights: int, make: Callable[[Path, str], Path]) -> None:
    """One table: three forms at two levels. `weights` is how many are Q4NX."""
    rows = []
    for name in (FLOAT, FOLDED, Q4NX_FORM):
        with tempfile.TemporaryDirectory() as folder, form(name):
            model = make(Path(folder), name)
            for level in LEVELS:
                *memory, load, run = measure(model, level)
                ratios = [f"{value / (4 * weights):.2f}" for value in memory]
                rows.append((name, level, *ratios, f"{load / weights * 1e9:.2f}", f"{run / weights * 1e9:.3f}"))
    print(f"{label}: {4 * weights / 1e6:.0f} MB of float32")
    print_table(("form", "level", "load peak", "held", "run peak", "load ns", "run ns"), rows)
    print(flush=True)


def compare_model(layers: int) -> None:
    """A Qwen3-shaped model and its pack."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "qwen3.onnx"
        make_qwen3.build(source, make_qwen3.Config(layers=layers))

        def make(place: Path, name: str) -> Path:
            if name == FLOAT:
                return source
            onnxpack.build(source, place / "pack", weights="q4nx")
            return place / "pack" / "model.onnx"

        with tempfile.TemporaryDirectory() as place:
            pack = open_pack(make(Path(place), Q4NX_FORM).parent)
            weights = sum(int(np.prod(tensor.shape)) for tensor in pack.manifest.tensors)
        compare(f"Qwen3 shape, {layers} layers", weights, make)


def main(arguments: list[str] | None = None) -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", help="KxN")
    parser.add_argument("--layers", type=int, default=4, help="of the model; 0: none")
    chosen = parser.parse_args(arguments)
    shapes = [(int(k), int(n)) for k, _, n in (a.partition("x") for a in chosen.shapes)] or SHAPES
    for k, n in shapes:
        compare(f"{k}x{n}", k * n, functools.partial(product, k=k, n=n))
    if chosen.layers:
        compare_model(chosen.layers)


if __name__ == "__main__":
    main()
