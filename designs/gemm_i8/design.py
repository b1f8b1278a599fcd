"""int8 x int8 -> int32 GEMM over the whole array of an XDNA2 NPU. C[M,N] = A[M,K] @ B[K,N], all three plain row-major.

The first half of this file is the planning half: what the design accepts, how large everything gets, what moves where.
It imports only the standard library. The second half, from `build` on, is the design program itself, written on the
dialect level of mlir-aie, which is the layer that two generations of it share; `aie` is imported when it runs.

How it works, for `rows` x `cols` cores and tiles of m x k x n:

* The output is cut into groups of (rows*m) x (cols*n). Core (row, col) makes tile (row, col) of each group, summing
  over K in steps of k in an int32 accumulator that stays in its memory.
* A strip of A (m x K) enters through one shim per row, is cut into m x k elements in a memory tile, and each element
  goes to all cores of that row at once. A strip of B (K x n) does the same per column. A multicast is one fifo with a
  list of consumers; never a link from one fifo to several, which would deal the elements out instead.
* The memory tile's DMA turns a row-major element into 8x8 micro-tiles on its way out (`dimensionsToStream`), the order
  in which the multiplier wants them; on the way back the joined C tiles of a column are turned into rows again.
* The sequence begins with `load_pdi`, as a full ELF needs, and works on one group of columns at a time: at most `batch`
  groups of rows are in flight, then their C is awaited.

Run as a script it prints the MLIR: ``python design.py '{"M": 128, "K": 1024, "N": 4096, "m": 32, ...}'``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

NAME = "gemm_i8"
VERSION = 1
DEVICE_SYMBOL = "main"
SEQUENCE_SYMBOL = "sequence"
ARGUMENTS = ("A", "B", "C")
KERNEL_SOURCE = "mm.cc"
"""Of mlir-aie's own `aie_kernels`; it includes zero.cc."""
SYMBOLS = ("zero_i32", "matmul_i8_i32")

CORE_FIFO_DEPTH = 2
"""What the lowering gives a core's end of a fifo that acquires one element, whatever one asks for."""
MEMORY_FIFO_DEPTH = 2
FIFO_INDEX_BYTES = 4
"""A core keeps an index for each of its fifos in its own memory."""
MAX_K = 131_071
"""An int32 sum of products of codes in [-128, 127] is exact up to here."""
MAX_BUFFER = 1 << 32
DESCRIPTOR_BYTES = 4 * (12 + 12 + 7 + 6 + 4)
"""Control code of one transfer: block write, address patch, masked write, queue write, wait."""
PROLOGUE_BYTES = 16 + 16
"""Header and load_pdi."""


@dataclass(frozen=True)
class Parameters:
    """Everything that is chosen for a shape; part of the kernel's identity."""

    m: int
    k: int
    n: int
    rows: int
    cols: int
    batch: int = 1
    """Groups of rows in flight."""
    c_depth: int = 2
    """C buffers of a core: 2 lets it compute while the last tile leaves."""
    stack: int = 4096


@dataclass(frozen=True)
class Shape:
    """M, K, N."""

    M: int
    K: int
    N: int


@dataclass(frozen=True)
class Violation:
    """A limit that a design breaks: which, what was found, what is allowed."""

    limit: str
    found: int
    allowed: int
    what: str

    def __str__(self) -> str:
        return f"{self.limit}: {self.what} ({self.found}, allowed {self.allowed})"


# --- sizes ---------------------------------------------------------------------------------------------------------


def object_name(p: Parameters) -> str:
    """Name of the compiled core kernel. Its dimensions are compile-time constants, so they belong into the name.

    >>> object_name(Parameters(32, 64, 128, 4, 8))
    'mm_32x64x128.o'
    """
    return f"mm_{p.m}x{p.k}x{p.n}.o"


def defines(p: Parameters) -> tuple[str, ...]:
    """Preprocessor definitions of the core kernel. int32 output only: int16 variants exist and would wrap."""
    return (f"DIM_M={p.m}", f"DIM_K={p.k}", f"DIM_N={p.n}", "i8_i32_ONLY")


def core_bytes(p: Parameters) -> int:
    """Data memory that one core uses.

    >>> core_bytes(Parameters(32, 64, 128, 4, 8))
    57356
    """
    fifos = CORE_FIFO_DEPTH * (p.m * p.k + p.k * p.n) + p.c_depth * 4 * p.m * p.n
    return p.stack + fifos + 3 * FIFO_INDEX_BYTES


def memory_tile_bytes(p: Parameters) -> int:
    """What the fullest memory tile holds: A (columns that bring a row of it), B and the joined C."""
    return MEMORY_FIFO_DEPTH * (p.m * p.k + p.k * p.n + 4 * p.rows * p.m * p.n)


def groups(s: Shape, p: Parameters) -> tuple[int, int]:
    """How many groups of rows and of columns the output is cut into."""
    return s.M // (p.m * p.rows), s.N // (p.n * p.cols)


def descriptors(s: Shape, p: Parameters) -> dict[str, int]:
    """Transfers per argument over the whole sequence; the patches of the ELF must show the same numbers."""
    down, across = groups(s, p)
    return {"A": down * across * p.rows, "B": down * across * p.cols, "C": down * across * p.cols}


def instruction_bytes(s: Shape, p: Parameters) -> int:
    """Length of the control code, at most (waits are counted for every transfer, though only C is waited for)."""
    return PROLOGUE_BYTES + DESCRIPTOR_BYTES * sum(descriptors(s, p).values())


def a_column(row: int, p: Parameters) -> int:
    """The column whose shim and memory tile bring the A of a row: spread out, so that no shim has two."""
    return row * (p.cols // p.rows)


# --- data movement: sizes and strides in elements, outermost first, always four -------------------------------------


def a_tap(s: Shape, p: Parameters, row_tile: int) -> tuple[int, list[int], list[int]]:
    """Offset, sizes and strides of the strip of A for one row of output tiles: m x k elements along K."""
    return row_tile * p.m * s.K, [1, s.K // p.k, p.m, p.k], [0, p.k, s.K, 1]


def b_tap(s: Shape, p: Parameters, col_tile: int, step_elements: int) -> tuple[int, list[int], list[int]]:
    """The strip of B for one column of output tiles. Its rows come in order, so they may be cut anywhere: here into the
    longest runs that a step can still jump."""
    rows = b_run(s, step_elements)
    return col_tile * p.n, [1, s.K // rows, rows, p.n], [0, rows * s.N, s.N, 1]


def b_run(s: Shape, step_elements: int, wrap: int = 1023) -> int:
    """Rows of B in one run of its tap: a divisor of K that fits the wrap and whose step fits the register."""
    most = max(1, min(wrap, s.K, step_elements // s.N))
    return next(run for run in range(most, 0, -1) if s.K % run == 0)


def c_tap(s: Shape, p: Parameters, row_group: int, col_tile: int) -> tuple[int, list[int], list[int]]:
    """The joined C tiles of one column, as rows."""
    tall = p.rows * p.m
    return row_group * tall * s.N + col_tile * p.n, [1, 1, tall, p.n], [0, s.N, s.N, 1]


def micro_tiles(tall: int, wide: int) -> list[tuple[int, int]]:
    """(size, stride) per dimension that reads a row-major tall x wide element as 8x8 blocks, each row-major."""
    return [(tall // 8, 8 * wide), (wide // 8, 8), (8, wide), (8, 1)]


def rows_again(tall: int, wide: int) -> list[tuple[int, int]]:
    """(size, stride) per dimension that reads a tall x wide element stored as 8x8 blocks in row-major order."""
    return [(tall // 8, 8 * wide), (8, 8), (wide // 8, 64), (8, 1)]


# --- what is accepted ------------------------------------------------------------------------------------------------


def check_design(s: Shape, p: Parameters, target: Any) -> list[Violation]:
    """Every limit of `target` that this design would break; empty when it fits. Sizes first: the rest needs them."""
    return list(_check_shape(s, p, target)) or list(_check_budgets(s, p, target))


def _check_shape(s: Shape, p: Parameters, target: Any) -> Iterator[Violation]:
    for name, value in (asdict(s) | asdict(p)).items():
        if value < 1:
            yield Violation("positive", value, 1, f"{name} must be at least 1")
            return
    a, b, c = target.mac_block
    for name, value, unit in (("m", p.m, 2 * a), ("k", p.k, b), ("n", p.n, 2 * c)):
        if value % unit:
            yield Violation("micro-tile", value, unit, f"{name} must be a multiple of {unit}")
    for name, value, unit in (("M", s.M, p.m * p.rows), ("K", s.K, p.k), ("N", s.N, p.n * p.cols)):
        if value % unit:
            yield Violation("divisible", value, unit, f"{name} must be a multiple of {unit}")
    if not 2 <= p.cols <= target.columns:
        what = "one column gives zeros on the device" if p.cols < 2 else "more columns than the array has"
        yield Violation("columns", p.cols, target.columns, what)
    if p.rows > min(target.core_rows, p.cols):
        what = "each row's A needs a shim of its own" if p.rows > p.cols else "more rows than the array has"
        yield Violation("rows", p.rows, min(target.core_rows, p.cols), what)
    if p.batch > target.task_queue:
        yield Violation("task-queue", p.batch, target.task_queue, "transfers in flight on one shim channel")
    if p.c_depth > CORE_FIFO_DEPTH:
        yield Violation("depth", p.c_depth, CORE_FIFO_DEPTH, "C buffers of a core")


def _check_budgets(s: Shape, p: Parameters, target: Any) -> Iterator[Violation]:
    for limit, found, allowed, what in _budgets(s, p, target):
        if found > allowed:
            yield Violation(limit, found, allowed, what)


def _budgets(s: Shape, p: Parameters, target: Any) -> Iterator[tuple[str, int, int, str]]:
    word = 4
    shim, memory = target.shim, target.memory
    yield "core-memory", core_bytes(p), target.core_memory, "bytes of one core's data memory"
    yield "memory-tile", memory_tile_bytes(p), target.memory_tile, "bytes of one memory tile"
    yield "memory-inputs", 2 + p.rows, memory.inputs, "input channels of a memory tile: A, B and C of each row"
    yield "core-descriptors", 2 * CORE_FIFO_DEPTH + p.c_depth, target.core.descriptors, "descriptors of a core"
    per_channel = MEMORY_FIFO_DEPTH * (2 + p.rows + 3)
    yield "memory-descriptors", per_channel, memory.descriptors, "descriptors of a memory tile"
    yield "shim-descriptors", 3 * p.batch, shim.descriptors, "descriptors of one shim that are live at once"
    yield "accumulator", s.K, MAX_K, "K of an exact int32 sum"
    yield "step", s.K // word, shim.step_words, "words between two rows of A"
    yield "step", s.N // word, shim.step_words, "words between two rows of B"
    yield "step", s.N, shim.step_words, "words between two rows of C"
    yield "step", 2 * p.n * word, memory.step_words, "words between two blocks of C in a memory tile"
    yield "wrap", p.rows * p.m, min(shim.wrap, 8 * memory.wrap), "rows of a joined C"
    yield "wrap", p.n, shim.wrap, "words of a row of C"
    yield "wrap", p.k // word, shim.wrap, "words of a row of A"
    yield "buffer", max(s.M * s.K, s.K * s.N, 4 * s.M * s.N), MAX_BUFFER - 1, "bytes of one buffer"
    yield "instructions", instruction_bytes(s, p), target.instruction_bytes, "bytes of control code"


# --- choosing --------------------------------------------------------------------------------------------------------

GROUP_CYCLES = 5000
"""Cost of one group beside its products: launching, waiting, filling the pipeline. An estimate, for ranking only."""
DESCRIPTOR_CYCLES = 400
TILE_CYCLES = 300
STREAM_BYTES = 4
"""Bytes that a stream carries in one cycle."""


def cycles(s: Shape, p: Parameters, target: Any) -> int:
    """Predicted cycles of one launch. Nothing here is measured: it ranks the tilings of one shape, no more."""
    down, across = groups(s, p)
    compute = 2 * p.m * p.k * p.n // target.macs_per_cycle  # half of the peak
    stream = max(p.m * p.k, p.k * p.n) // STREAM_BYTES
    steps = s.K // p.k * (max(compute, stream) + TILE_CYCLES)
    drain = 4 * p.rows * p.m * p.n // STREAM_BYTES
    descriptor = DESCRIPTOR_CYCLES * (p.rows + 2 * p.cols)
    return down * across * (GROUP_CYCLES + descriptor + (max(steps, drain) if p.c_depth > 1 else steps + drain))


def choose(s: Shape, target: Any) -> Parameters | None:
    """The tiling with the fewest predicted cycles, or None when none fits. The same shape gives the same answer."""
    legal = [p for p in candidates(s, target) if not check_design(s, p, target)]
    return min(legal, key=lambda p: (cycles(s, p, target), -p.k, -p.n, -p.m, -p.cols, p.rows), default=None)


def candidates(s: Shape, target: Any) -> Iterator[Parameters]:
    """Tilings worth a look: those whose sizes divide the shape."""
    ms = [m for m in (16, 32, 48, 64, 96, 128) if s.M % m == 0]
    ks = [k for k in (256, 128, 96, 64, 48, 32, 16, 8) if s.K % k == 0]
    ns = [n for n in (256, 192, 128, 96, 64, 48, 32, 16) if s.N % n == 0]
    for m in ms:
        for rows in (r for r in range(1, target.core_rows + 1) if s.M % (m * r) == 0):
            batch = min(target.task_queue, s.M // (m * rows))
            for n in ns:
                for cols in (c for c in (8, 4, 2) if c <= target.columns and s.N % (n * c) == 0):
                    yield from (Parameters(m, k, n, rows, cols, batch, depth) for k in ks for depth in (2, 1))


def refusal(s: Shape, target: Any) -> str:
    """Why `choose` finds nothing: the smallest tiling's first broken limit."""
    a, b, c = target.mac_block
    smallest = Parameters(2 * a, b, 2 * c, 1, 2, 1, 1)
    broken = check_design(s, smallest, target)
    return str(broken[0]) if broken else "every tiling that divides the shape breaks a limit of the array"


# --- the design program ----------------------------------------------------------------------------------------------


def build(s: Shape, p: Parameters, device: str, api: Any) -> None:
    """Emit the design through `api`: mlir-aie's names (see `load_api`), or a recorder with the same names."""
    import numpy as np

    i8, i32 = np.dtype[np.int8], np.dtype[np.int32]
    a_type = np.ndarray[(p.m * p.k,), i8]
    b_type = np.ndarray[(p.k * p.n,), i8]
    c_type = np.ndarray[(p.m * p.n,), i32]
    joined_type = np.ndarray[(p.rows * p.m * p.n,), i32]
    produce, consume = api.ObjectFifoPort.Produce, api.ObjectFifoPort.Consume

    @api.device(getattr(api.AIEDevice, device), sym_name=DEVICE_SYMBOL)
    def _() -> None:
        zero = api.external_func(SYMBOLS[0], inputs=[c_type], link_with=object_name(p))
        matmul = api.external_func(SYMBOLS[1], inputs=[a_type, b_type, c_type], link_with=object_name(p))

        # Every tile before the first fifo: a fifo may only name tiles that stand above it.
        shims = [api.tile(col, 0) for col in range(p.cols)]
        memories = [api.tile(col, 1) for col in range(p.cols)]
        cores = [[api.tile(col, 2 + row) for col in range(p.cols)] for row in range(p.rows)]

        a_in, a_out = [], []
        for row in range(p.rows):
            col = a_column(row, p)
            a_in.append(api.object_fifo(f"A{row}_in", shims[col], memories[col], MEMORY_FIFO_DEPTH, a_type))
            a_out.append(
                api.object_fifo(
                    f"A{row}",
                    memories[col],
                    cores[row],
                    MEMORY_FIFO_DEPTH,
                    a_type,
                    dimensionsToStream=micro_tiles(p.m, p.k),
                )
            )
            api.object_fifo_link(a_in[row], a_out[row])

        b_in, b_out = [], []
        for col in range(p.cols):
            column = [cores[row][col] for row in range(p.rows)]
            b_in.append(api.object_fifo(f"B{col}_in", shims[col], memories[col], MEMORY_FIFO_DEPTH, b_type))
            b_out.append(
                api.object_fifo(
                    f"B{col}",
                    memories[col],
                    column,
                    MEMORY_FIFO_DEPTH,
                    b_type,
                    dimensionsToStream=micro_tiles(p.k, p.n),
                )
            )
            api.object_fifo_link(b_in[col], b_out[col])

        c_parts, c_out = [], []
        for col in range(p.cols):
            # Both depths are given: a single number would not be what the core gets.
            parts = [
                api.object_fifo(f"C{row}_{col}", cores[row][col], memories[col], [p.c_depth, MEMORY_FIFO_DEPTH], c_type)
                for row in range(p.rows)
            ]
            c_parts.append(parts)
            c_out.append(
                api.object_fifo(
                    f"C{col}_out",
                    memories[col],
                    shims[col],
                    MEMORY_FIFO_DEPTH,
                    joined_type,
                    dimensionsToStream=rows_again(p.rows * p.m, p.n),
                )
            )
            offsets = [row * p.m * p.n for row in range(p.rows)] if p.rows > 1 else []
            api.object_fifo_link(parts, c_out[col], offsets, [])

        def core_program(row: int, col: int) -> None:
            @api.core(cores[row][col], stack_size=p.stack, dynamic_objfifo_lowering=True)
            def _() -> None:
                # For ever, tile by tile: a second launch finds the core where the first one found it.
                for _ in api.range_(sys.maxsize):
                    c = c_parts[col][row].acquire(produce, 1)
                    zero(c)
                    for _ in api.range_(s.K // p.k):
                        a = a_out[row].acquire(consume, 1)
                        b = b_out[col].acquire(consume, 1)
                        matmul(a, b, c)
                        a_out[row].release(consume, 1)
                        b_out[col].release(consume, 1)
                    c_parts[col][row].release(produce, 1)

        for row in range(p.rows):
            for col in range(p.cols):
                core_program(row, col)

        @api.runtime_sequence(
            np.ndarray[(s.M * s.K,), i8],
            np.ndarray[(s.K * s.N,), i8],
            np.ndarray[(s.M * s.N,), i32],
            sym_name=SEQUENCE_SYMBOL,
        )
        def _(a_host: Any, b_host: Any, c_host: Any) -> None:
            api.npu_load_pdi(device_ref=DEVICE_SYMBOL)
            down, across = groups(s, p)
            for col_group in range(across):
                for first in range(0, down, p.batch):
                    reads, writes = [], []
                    for row_group in range(first, min(first + p.batch, down)):
                        for col in range(p.cols):
                            tap = c_tap(s, p, row_group, col_group * p.cols + col)
                            writes.append(_start(api, c_out[col], c_host, tap, wait=True))
                        for row in range(p.rows):
                            tap = a_tap(s, p, row_group * p.rows + row)
                            reads.append(_start(api, a_in[row], a_host, tap))
                        for col in range(p.cols):
                            tap = b_tap(s, p, col_group * p.cols + col, B_STEP_ELEMENTS)
                            reads.append(_start(api, b_in[col], b_host, tap))
                    # C can only be complete when all its A and B are through, so waiting for C frees those as well.
                    api.dma_await_task(*writes)
                    api.dma_free_task(*reads)


B_STEP_ELEMENTS = 4 << 20
"""Bytes that one step of a shim transfer can jump (2^20 words)."""


def _start(api: Any, fifo: Any, host: Any, tap: tuple[int, list[int], list[int]], *, wait: bool = False) -> Any:
    offset, sizes, strides = tap
    task = api.shim_dma_single_bd_task(fifo, host, offset=offset, sizes=sizes, strides=strides, issue_token=wait)
    api.dma_start_task(task)
    return task


def load_api() -> SimpleNamespace:
    """mlir-aie's names, from wherever this generation of it keeps them. ImportError when it is not installed."""
    from aie.dialects import aie, aiex

    return SimpleNamespace(
        AIEDevice=aie.AIEDevice,
        ObjectFifoPort=aie.ObjectFifoPort,
        core=aie.core,
        device=aie.device,
        external_func=aie.external_func,
        object_fifo=aie.object_fifo,
        object_fifo_link=aie.object_fifo_link,
        tile=aie.tile,
        dma_await_task=aiex.dma_await_task,
        dma_free_task=aiex.dma_free_task,
        dma_start_task=aiex.dma_start_task,
        npu_load_pdi=aiex.npu_load_pdi,
        runtime_sequence=aiex.runtime_sequence,
        shim_dma_single_bd_task=aiex.shim_dma_single_bd_task,
        range_=_load_range(),
    )


def _load_range() -> Any:
    """`scf.for` as a Python loop. Not through `aie.iron`, whose import looks for a device in some versions."""
    import importlib

    for module, name in (
        ("aie.helpers.dialects.scf", "_for"),
        ("aie.helpers.dialects.ext.scf", "_for"),
        ("aie.iron.controlflow", "range_"),
    ):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError("this mlir-aie has no scf.for helper where any known version keeps it")


def main(argv: list[str]) -> int:
    """Print the MLIR of the design that the JSON argument describes."""
    wanted = json.loads(argv[0])
    device = wanted.pop("device", "npu2")
    shape = Shape(wanted.pop("M"), wanted.pop("K"), wanted.pop("N"))
    from aie.extras.context import mlir_mod_ctx

    with mlir_mod_ctx() as context:
        build(shape, Parameters(**wanted), device, load_api())
        if not context.module.operation.verify():
            print("the module does not verify", file=sys.stderr)
            return 1
        print(context.module)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
