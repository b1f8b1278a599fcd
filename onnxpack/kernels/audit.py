"""Check a recorded design against a target: what it declares, not what its planning half computed.

The planning half predicts budgets; here they are counted again from the emitted program. Tests demand that both agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnxpack.kernels.recording import Fifo, LoadPdi, Recording, Start, Tile
from onnxpack.kernels.target import WORD, Dma, Target

INDEX_BYTES = 4


@dataclass(frozen=True)
class Usage:
    """What one tile needs."""

    inputs: int
    outputs: int
    descriptors: int
    nbytes: int


def usage(recording: Recording) -> dict[Tile, Usage]:
    """Channels, descriptors and memory by tile."""
    inputs, outputs, descriptors, nbytes = Counter[Tile](), Counter[Tile](), Counter[Tile](), Counter[Tile]()
    linked = {name for link in recording.links for name in (link.targets if len(link.sources) == 1 else link.sources)}
    for fifo in recording.fifos.values():
        outputs[fifo.producer] += 1
        for end, tile in enumerate((fifo.producer, *fifo.consumers)):
            inputs[tile] += end > 0
            if tile.row == 0:
                continue  # the host's sequence brings the shim's descriptors
            descriptors[tile] += fifo.depths[end]
            # Linked fifos share their buffers on the memory tile: the larger element holds the smaller ones.
            if not (tile.row == 1 and fifo.name in linked):
                nbytes[tile] += fifo.depths[end] * fifo.element.nbytes
            nbytes[tile] += INDEX_BYTES * (tile.row > 1)
    for core in recording.cores:
        nbytes[core.tile] += core.stack
    tiles = {*inputs, *outputs}
    return {t: Usage(inputs[t], outputs[t], descriptors[t], nbytes[t]) for t in sorted(tiles)}


def audit(recording: Recording, target: Target) -> list[str]:
    """Every limit of the target that the recorded program breaks, one line each."""
    return [*_tiles(recording, target), *_transfers(recording, target), *_streams(recording, target)]


def _tiles(recording: Recording, target: Target) -> Iterator[str]:
    for tile, used in usage(recording).items():
        if tile.col >= target.columns or tile.row >= 2 + target.core_rows:
            yield f"tile {tile} is outside of the array"
        dma = _dma(tile, target)
        if used.inputs > dma.inputs or used.outputs > dma.outputs:
            yield f"tile {tile} needs {used.inputs} input and {used.outputs} output channels"
        if used.descriptors > dma.descriptors:
            yield f"tile {tile} needs {used.descriptors} descriptors"
        memory = {0: 0, 1: target.memory_tile}.get(tile.row, target.core_memory)
        if used.nbytes > memory:
            yield f"tile {tile} needs {used.nbytes} bytes of {memory}"


def _dma(tile: Tile, target: Target) -> Dma:
    return {0: target.shim, 1: target.memory}.get(tile.row, target.core)


def _transfers(recording: Recording, target: Target) -> Iterator[str]:
    if not recording.commands or not isinstance(recording.commands[0], LoadPdi):
        yield "the sequence does not begin with load_pdi"
    for start in recording.commands:
        if not isinstance(start, Start):
            continue
        size = np.dtype(recording.arguments[start.argument].dtype).itemsize
        yield from (f"transfer {start.task} of {start.fifo}: {line}" for line in _shim_tap(start, size, target))


def _shim_tap(start: Start, itemsize: int, target: Target) -> Iterator[str]:
    repeat, _, rows, run = start.sizes
    if repeat > target.shim_iteration:
        yield f"it repeats {repeat} times"
    if run * itemsize // WORD > target.shim.wrap or rows > target.shim.wrap:
        yield f"its inner sizes {rows} and {run} exceed {target.shim.wrap}"
    if run * itemsize % WORD or start.offset * itemsize % WORD:
        yield "its runs do not lie on words"
    if start.strides[3] != 1:
        yield "its runs are not contiguous"
    for dim, stride in enumerate(start.strides[:3]):
        used = dim > 0 or repeat > 1
        if used and (stride < 1 or stride * itemsize % WORD or stride * itemsize // WORD > target.shim.step_words):
            yield f"stride {stride} of dimension {3 - dim} is no step of 1 to {target.shim.step_words} words"


def _streams(recording: Recording, target: Target) -> Iterator[str]:
    for fifo in recording.fifos.values():
        if fifo.element.nbytes % WORD:
            yield f"fifo {fifo.name}: its element is not a whole number of words"
        if fifo.dims:
            yield from (f"fifo {fifo.name}: {line}" for line in _dims(fifo, _dma(fifo.producer, target)))


def _dims(fifo: Fifo, dma: Dma) -> Iterator[str]:
    itemsize = np.dtype(fifo.element.dtype).itemsize
    if len(fifo.dims) > 4:
        yield f"{len(fifo.dims)} dimensions"
    if max(size for size, _ in fifo.dims) > dma.wrap:
        yield f"a size above {dma.wrap}"
    if fifo.dims[-1][1] != 1 or fifo.dims[-1][0] * itemsize % WORD:
        yield "inner runs that are not whole words"
    for _, stride in fifo.dims[:-1]:
        if stride * itemsize % WORD or stride * itemsize // WORD > dma.step_words:
            yield f"stride {stride} is no step of 1 to {dma.step_words} words"
