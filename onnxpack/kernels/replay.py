"""Run a recorded design in numpy: the same transfers, fifos, links and core loops move the same elements.

Nothing of the product is assumed. Host transfers gather and scatter by their sizes and strides, memory tiles reorder
their elements, cores acquire, call and release; the only thing put in by hand is what the two functions of the core
kernel do to elements in micro-tile order. So C = A @ B holds at the end only if every tap, loop and offset is right. A
read or write outside of its buffer, an element written twice or never, an overfull task queue, a descriptor freed too
early and a standstill are errors.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.kernels.recording import (
    Acquire,
    Await,
    Call,
    Command,
    Core,
    DesignError,
    Fifo,
    Free,
    Link,
    LoadPdi,
    Loop,
    Port,
    Recording,
    Release,
    Start,
    Step,
)
from onnxpack.kernels.target import Target

Array = npt.NDArray[Any]
POISON = 0x5A5A5A5A
"""Fresh memory: a sum that is not zeroed first shows."""

C_ARGUMENT = 2


def replay(
    recording: Recording, target: Target, a: Array, b: Array, launches: int = 1, seed: int | None = None
) -> npt.NDArray[np.int32]:
    """C of the last launch, int32 [M*N] flat, from int8 A [M*K] and B [K*N] flat.

    The launches share one array, as on a device whose firmware skips loading the same PDI again. With a `seed` the
    actors take their turns in random order: the result may not depend on it. DesignError says what went wrong.
    """
    array = _Machine(recording, target, random.Random(seed) if seed is not None else None)
    c = np.zeros(0, np.int32)
    for _ in range(launches):
        c = array.launch([a, b])
    return c


@dataclass
class _Pool:
    """The buffers of one end of a fifo."""

    size: int
    full: deque[Array] = field(default_factory=deque)
    held: int = 0
    """Elements that a core holds, or that a DMA is filling."""

    @property
    def room(self) -> bool:
        return len(self.full) + self.held < self.size

    @property
    def idle(self) -> bool:
        return not self.full


@dataclass
class _Transfer:
    """A queued shim transfer: which element of the host buffer is next."""

    start: Start
    indexes: Array
    position: int = 0

    @property
    def done(self) -> bool:
        return self.position == len(self.indexes)


class _Machine:
    def __init__(self, recording: Recording, target: Target, order: random.Random | None) -> None:
        self.recording = recording
        self.target = target
        self.order = order
        self.pools: dict[tuple[str, int], _Pool] = {}
        for fifo in recording.fifos.values():
            for end, depth in enumerate(fifo.depths):
                self.pools[fifo.name, end] = _Pool(depth)
        self._share_linked_buffers()
        self.queues: dict[str, deque[_Transfer]] = {
            f.name: deque() for f in recording.fifos.values() if 0 in (f.producer.row, f.consumers[0].row)
        }
        self.partial: dict[str, list[int]] = {}
        """Joined elements: how many have come from each source."""
        self.filling: dict[str, deque[Array]] = {}
        self.orders = {f.name: dims_order(f) for f in recording.fifos.values()}
        self.cores = [_CoreRun(self, core) for core in recording.cores]

    def _share_linked_buffers(self) -> None:
        """A link has one set of buffers on its memory tile: what arrives through one fifo leaves through the other."""
        for link in self.recording.links:
            if not self._is_join(link):
                self.pools[link.targets[0], 0] = self.pools[link.sources[0], 1]

    # --- one launch ---

    def launch(self, inputs: Sequence[Array]) -> npt.NDArray[np.int32]:
        arguments = self.recording.arguments
        self.host = [np.asarray(x) for x in inputs]
        for value, buffer in zip(self.host, arguments, strict=False):
            if value.size != buffer.elements or value.dtype != buffer.dtype:
                raise DesignError(f"an argument has {value.size} elements of {value.dtype}, wanted {buffer}")
        self.host.append(np.zeros(arguments[C_ARGUMENT].elements, arguments[C_ARGUMENT].dtype))
        self.moved = [np.zeros(buffer.elements, np.int32) for buffer in arguments]
        self.done: dict[int, bool] = {}
        self.live: dict[tuple[int, int], int] = {}
        self.commands = deque(self.recording.commands)
        if not isinstance(self.commands[0], LoadPdi) or self.commands[0].device != self.recording.symbol:
            raise DesignError("the sequence does not begin by loading the array's configuration")
        self._run()
        self._check_end()
        return self.host[C_ARGUMENT]

    def _run(self) -> None:
        actors = [self._host, *(self._mover(fifo) for fifo in self.recording.fifos.values())]
        actors += [self._joiner(link.sources, link.targets[0], link.offsets) for link in self._joins()]
        actors += [core.step for core in self.cores]
        moving = True
        while moving:
            if self.order is not None:
                self.order.shuffle(actors)
            moving = False
            for actor in actors:
                while actor():
                    moving = True
                    if self.order is not None and self.order.random() < 0.5:
                        break

    def _joins(self) -> list[Link]:
        return [link for link in self.recording.links if self._is_join(link)]

    def _is_join(self, link: Link) -> bool:
        """Parts from cores meet in a joined element (even a single part); what comes from the host passes through."""
        return self.recording.fifos[link.sources[0]].producer.row > 1

    def _check_end(self) -> None:
        if self.commands:
            raise DesignError(f"standstill: the sequence waits at {self.commands[0]}")
        for (name, end), pool in self.pools.items():
            if not pool.idle:
                raise DesignError(f"fifo {name} still holds elements at end {end} after the last transfer")
        for name, queue in self.queues.items():
            if queue:
                raise DesignError(f"a transfer of {name} was started and never completed")
        for name, parts in self.partial.items():
            if any(parts):
                raise DesignError(f"fifo {name} has half an element left")
        for argument, counts in enumerate(self.moved):
            low, high = int(counts.min()), int(counts.max())
            if low != high or low < 1 or (argument == C_ARGUMENT and high != 1):
                raise DesignError(f"argument {argument}: elements move between {low} and {high} times")
        if len({core.place for core in self.cores}) != 1:
            raise DesignError("the cores do not stop at the same place of their loop")

    # --- the host's sequence ---

    def _host(self) -> bool:
        if not self.commands or not self._host_step(self.commands[0]):
            return False
        self.commands.popleft()
        return True

    def _host_step(self, command: Command) -> bool:
        if isinstance(command, Start):
            self._start(command)
        elif isinstance(command, Await):
            if not self.done.get(command.task):
                return False
            self._release_descriptor(command.task)
        elif isinstance(command, Free):
            if not self.done.get(command.task):
                raise DesignError(f"the descriptor of transfer {command.task} is freed while it may still run")
            self._release_descriptor(command.task)
        return True

    def _start(self, start: Start) -> None:
        fifo = self.recording.fifos[start.fifo]
        tap = tap_indexes(start, self.recording.arguments[start.argument].elements)
        if len(tap) % fifo.element.elements:
            raise DesignError(f"a transfer of {len(tap)} elements does not fill whole elements of {fifo.name}")
        self.queues[fifo.name].append(_Transfer(start, tap))
        if len(self.queues[fifo.name]) > self.target.task_queue:
            raise DesignError(f"{len(self.queues[fifo.name])} transfers wait on {fifo.name}: its queue holds fewer")
        self.done[start.task] = False
        place = shim_of(fifo)
        self.live[place] = self.live.get(place, 0) + 1
        if self.live[place] > self.target.shim.descriptors:
            raise DesignError(f"{self.live[place]} descriptors are live on shim {place}")

    def _release_descriptor(self, task: int) -> None:
        start = next(c for c in self.recording.commands if isinstance(c, Start) and c.task == task)
        self.live[shim_of(self.recording.fifos[start.fifo])] -= 1

    # --- the DMAs ---

    def _mover(self, fifo: Fifo) -> Any:
        if fifo.producer.row == 0:
            return lambda: self._read_host(fifo)
        if fifo.consumers[0].row == 0:
            return lambda: self._write_host(fifo)
        if fifo.consumers[0].row == 1:
            return lambda: False  # a part of a joined element: the joiner moves it
        return lambda: self._multicast(fifo)

    def _read_host(self, fifo: Fifo) -> bool:
        queue, pool = self.queues[fifo.name], self.pools[fifo.name, 1]
        if not queue or not pool.room:
            return False
        pool.full.append(self._advance(queue, fifo, None))
        return True

    def _write_host(self, fifo: Fifo) -> bool:
        queue, pool = self.queues[fifo.name], self.pools[fifo.name, 0]
        if not queue or not pool.full:
            return False
        self._advance(queue, fifo, pool.full.popleft()[self.orders[fifo.name]])
        return True

    def _advance(self, queue: deque[_Transfer], fifo: Fifo, data: Array | None) -> Array:
        transfer = queue[0]
        argument = transfer.start.argument
        where = transfer.indexes[transfer.position : transfer.position + fifo.element.elements]
        transfer.position += fifo.element.elements
        self.moved[argument][where] += 1
        if data is not None:
            self.host[argument][where] = data
        if transfer.done:
            queue.popleft()
            self.done[transfer.start.task] = True
        return self.host[argument][where]

    def _multicast(self, fifo: Fifo) -> bool:
        source = self.pools[fifo.name, 0]
        ends = [self.pools[fifo.name, end] for end in range(1, len(fifo.depths))]
        if not source.full or not all(end.room for end in ends):
            return False
        data = source.full.popleft()[self.orders[fifo.name]]
        for end in ends:
            end.full.append(data)
        return True

    def _joiner(self, sources: tuple[str, ...], target: str, offsets: tuple[int, ...]) -> Any:
        joined = self.recording.fifos[target]
        pool = self.pools[target, 0]
        arrived = self.partial[target] = [0] * len(sources)
        filling = self.filling.setdefault(target, deque())

        def step() -> bool:
            moved = False
            for number, (source, offset) in enumerate(zip(sources, offsets, strict=True)):
                part = self.pools[source, 0]
                if not part.full:
                    continue
                if arrived[number] == len(filling):
                    if not pool.room:
                        continue
                    pool.held += 1
                    filling.append(np.full(joined.element.elements, POISON, joined.element.dtype))
                data = part.full.popleft()
                filling[arrived[number]][offset : offset + data.size] = data
                arrived[number] += 1
                moved = True
            if filling and min(arrived) > 0:
                pool.full.append(filling.popleft())
                pool.held -= 1
                arrived[:] = [count - 1 for count in arrived]
                moved = True
            return moved

        return step


class _CoreRun:
    """One core, stopped wherever it waits."""

    def __init__(self, machine: _Machine, core: Core) -> None:
        self.machine = machine
        self.core = core
        self.slots: dict[int, Array] = {}
        self.owner: dict[str, int] = {}
        """Fifo to the slot of the element held."""
        self.place: tuple[int, ...] = ()
        """Where it waits: the path of steps to the operation that it cannot do yet."""
        self.program = self._program(core.body, ())

    def step(self) -> bool:
        return next(self.program, False)

    def _program(self, body: Sequence[Step], path: tuple[int, ...]) -> Iterator[bool]:
        """Yields True after each operation done, False while the next one has to wait."""
        for number, step in enumerate(body):
            here = (*path, number)
            if isinstance(step, Loop):
                for _ in range(step.count):
                    yield from self._program(step.body, here)
                continue
            while not self._try(step):
                self.place = here
                yield False
            yield True

    def _try(self, step: Step) -> bool:
        if isinstance(step, Call):
            run_function(step, [self.slots[slot] for slot in step.slots])
            return True
        assert isinstance(step, (Acquire, Release))
        fifo = self.machine.recording.fifos[step.fifo]
        produce = step.port is Port.Produce
        pool = self.machine.pools[step.fifo, 0 if produce else 1 + fifo.consumers.index(self.core.tile)]
        if isinstance(step, Release):
            self._release(step, pool, produce)
            return True
        if produce and pool.room:
            self.slots[step.slot] = np.full(fifo.element.elements, POISON, fifo.element.dtype)
        elif not produce and pool.full:
            self.slots[step.slot] = pool.full.popleft()
        else:
            return False
        if step.fifo in self.owner:
            raise DesignError(f"core {self.core.tile} acquires {step.fifo} twice without releasing it")
        pool.held += 1
        self.owner[step.fifo] = step.slot
        return True

    def _release(self, step: Release, pool: _Pool, produce: bool) -> None:
        slot = self.owner.pop(step.fifo, None)
        if slot is None:
            raise DesignError(f"core {self.core.tile} releases {step.fifo}, of which it holds nothing")
        pool.held -= 1
        data = self.slots.pop(slot)
        if produce:
            pool.full.append(data)


def run_function(call: Call, buffers: list[Array]) -> None:
    """What the core kernel does: elements lie in 8x8 micro-tiles; m, k and n are compiled in and stand in its name."""
    named = re.fullmatch(r"mm_(\d+)x(\d+)x(\d+)\.o", call.object_file)
    if named is None:
        raise DesignError(f"{call.object_file} does not say its dimensions")
    m, k, n = map(int, named.groups())
    if call.function == "zero_i32" and buffers[0].size == m * n:
        buffers[0][:] = 0
    elif call.function == "matmul_i8_i32" and [b.size for b in buffers] == [m * k, k * n, m * n]:
        a, b, c = buffers
        product = _rows(a, m, k) @ _rows(b, k, n)  # float64: exact far beyond k * 128 * 128
        c += product.reshape(m // 8, 8, n // 8, 8).transpose(0, 2, 1, 3).reshape(-1).astype(np.int32)
    else:
        raise DesignError(f"{call.object_file} has no {call.function} for buffers of this size")


def _rows(block: Array, tall: int, wide: int) -> Array:
    tiles = block.reshape(tall // 8, wide // 8, 8, 8)
    return tiles.transpose(0, 2, 1, 3).reshape(tall, wide).astype(np.float64)


def tap_indexes(start: Start, elements: int) -> Array:
    """Flat indexes of a transfer, in its order. DesignError when one lies outside of the buffer."""
    if len(start.sizes) != 4 or len(start.strides) != 4 or min(start.sizes) < 1:
        raise DesignError(f"a transfer of {start.fifo} has sizes {start.sizes} and strides {start.strides}")
    last = start.offset + sum((n - 1) * s for n, s in zip(start.sizes, start.strides, strict=True))
    if start.offset < 0 or min(start.strides) < 0 or last >= elements:
        raise DesignError(f"a transfer of {start.fifo} reaches element {last} of a buffer of {elements}")
    return _grid(list(zip(start.sizes, start.strides, strict=True))) + start.offset


def dims_order(fifo: Fifo) -> Array:
    """The order in which the producer's DMA reads an element. DesignError unless each is read exactly once."""
    if not fifo.dims:
        return np.arange(fifo.element.elements)
    order = _grid(list(fifo.dims))
    if not np.array_equal(np.sort(order), np.arange(fifo.element.elements)):
        raise DesignError(f"fifo {fifo.name}: its dimensions do not read each element once")
    return order


def _grid(dims: list[tuple[int, int]]) -> Array:
    indexes = np.zeros(1, np.int64)
    for size, stride in dims:
        indexes = (indexes[:, None] + np.arange(size) * stride).reshape(-1)
    return indexes


def shim_of(fifo: Fifo) -> tuple[int, int]:
    """The shim tile of a fifo that touches the host."""
    tile = fifo.producer if fifo.producer.row == 0 else fifo.consumers[0]
    return tile.col, tile.row
