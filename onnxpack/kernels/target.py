"""What an NPU array can hold, as data. Designs are checked against it before anything is compiled.

Sizes are bytes unless the name says otherwise; a word is 4 bytes. Where two generations of the lowering differ, the
stricter limit stands here, so that a design that passes does so in both.

>>> get("npu2").columns, get("npu1").full_elf
(8, False)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxpack.errors import UsageError

WORD = 4


@dataclass(frozen=True)
class Dma:
    """Limits of the DMA of one kind of tile."""

    inputs: int
    outputs: int
    descriptors: int
    wrap: int
    """Largest size of an inner dimension, in words for the innermost."""
    step_words: int
    """Largest step of any dimension."""
    descriptors_per_parity: int | None = None
    """Memory tiles: even channels share one half of the descriptors, odd channels the other."""


@dataclass(frozen=True)
class Target:
    """One array."""

    name: str
    device: str
    """Name in mlir-aie's AIEDevice."""
    family: str
    """Architecture, as in Peano's target triple and the folder of `aie_kernels`."""
    columns: int
    core_rows: int
    core_memory: int
    program_memory: int
    memory_tile: int
    core: Dma
    memory: Dma
    shim: Dma
    locks: int
    memory_locks: int
    shim_iteration: int
    """Largest outermost size (repeat) of a shim transfer."""
    task_queue: int
    """Transfers that may wait on one shim channel. Nothing checks this; a full queue hangs."""
    instruction_bytes: int
    """Longest control code that we emit: our own caution, somewhat above the longest that is known to run (197 KB)."""
    contexts: int
    """Hardware contexts of one device, for all processes."""
    mac_block: tuple[int, int, int]
    """Micro-tile (rows of A, columns of A, columns of B) of the int8 multiplier."""
    macs_per_cycle: int
    """int8 products of one core in one cycle, at most."""
    full_elf: bool
    """Whether a full ELF exists for it."""
    refusal: str | None = None
    """Why nothing can be built for it, if nothing can."""


NPU2 = Target(
    name="npu2",
    device="npu2",
    family="aie2p",
    columns=8,
    core_rows=4,
    core_memory=64 << 10,
    program_memory=16 << 10,
    memory_tile=512 << 10,
    core=Dma(inputs=2, outputs=2, descriptors=16, wrap=255, step_words=1 << 13),
    memory=Dma(inputs=6, outputs=6, descriptors=48, wrap=1023, step_words=1 << 17, descriptors_per_parity=24),
    shim=Dma(inputs=2, outputs=2, descriptors=16, wrap=1023, step_words=1 << 20),
    locks=16,
    memory_locks=64,
    shim_iteration=64,
    task_queue=4,
    instruction_bytes=256 << 10,
    contexts=16,
    mac_block=(8, 8, 8),
    macs_per_cycle=512,
    full_elf=True,
)
"""XDNA2: Strix, Strix Halo, Krackan."""

NPU1 = replace(
    NPU2,
    name="npu1",
    device="npu1",
    family="aie2",
    columns=4,
    mac_block=(4, 8, 8),
    macs_per_cycle=256,
    full_elf=False,
    refusal="npu1 (XDNA, Phoenix and Hawk Point) has no full ELF: neither the assembler nor the loader knows one",
)
"""XDNA: described so that the refusal can say why."""

TARGETS = {target.name: target for target in (NPU2, NPU1)}


def get(name: str) -> Target:
    """The target of that name; UsageError otherwise."""
    if name not in TARGETS:
        raise UsageError(f"unknown target {name!r}", hint=f"known: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]


def require_elf(target: Target) -> None:
    """UsageError when no ELF can be made for the target, with the reason."""
    if target.refusal is not None:
        raise UsageError(target.refusal, where=target.name, hint="ELFs are built for npu2")
