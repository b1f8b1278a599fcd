"""A recorder with the names of mlir-aie's dialect API: a design program that runs on it leaves plain records behind.

What is replayed (see `replay`) is thereby what the same program emits through the real API. The signatures are those of
the real functions, so a call that would fail there fails here; what the real lowering checks and the recorder can see
(order of declarations, known tiles, legal links) is checked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np

from onnxpack.errors import OnnxpackError


class DesignError(OnnxpackError):
    """A design does something that the array, or its own description, does not allow. A bug of the design."""


class Port(Enum):
    """The end of a fifo that a core holds."""

    Produce = 0
    Consume = 1


@dataclass(frozen=True, order=True)
class Tile:
    """A place in the array: row 0 is shim, row 1 memory, the rest cores."""

    col: int
    row: int

    def __str__(self) -> str:
        return f"({self.col}, {self.row})"


@dataclass(frozen=True)
class Buffer:
    """A typed flat buffer."""

    elements: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size."""
        return self.elements * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Fifo:
    """An object fifo: one producer, one or several consumers that all see every element."""

    name: str
    producer: Tile
    consumers: tuple[Tile, ...]
    depths: tuple[int, ...]
    """Producer's end first, then each consumer's."""
    element: Buffer
    dims: tuple[tuple[int, int], ...]
    """(size, stride) pairs that the producer's DMA reads an element with; empty: straight."""


@dataclass(frozen=True)
class Link:
    """Elements of `sources` leave through `targets` on the memory tile where they meet."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    offsets: tuple[int, ...]
    """Where each part lies in the larger element."""


@dataclass(frozen=True)
class Acquire:
    """Take one element of a fifo; `slot` names it within the core."""

    slot: int
    fifo: str
    port: Port


@dataclass(frozen=True)
class Release:
    """Give the oldest held element back."""

    fifo: str
    port: Port


@dataclass(frozen=True)
class Call:
    """Run a function of the core kernel on held elements."""

    function: str
    object_file: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """Repeat the body."""

    count: int
    body: tuple[Step, ...]


Step = Acquire | Release | Call | Loop


@dataclass(frozen=True)
class Core:
    """The program of one core."""

    tile: Tile
    stack: int
    dynamic: bool
    body: tuple[Step, ...]


@dataclass(frozen=True)
class LoadPdi:
    """Configure the array."""

    device: str


@dataclass(frozen=True)
class Start:
    """Queue one transfer between a host buffer and a shim's fifo. Offset, sizes and strides are in elements."""

    task: int
    fifo: str
    argument: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    token: bool


@dataclass(frozen=True)
class Await:
    """Wait for a transfer; its descriptor is free again afterwards."""

    task: int


@dataclass(frozen=True)
class Free:
    """The descriptor of a transfer may be used again, because the transfer is known to be over."""

    task: int


Command = LoadPdi | Start | Await | Free


@dataclass(frozen=True)
class Recording:
    """Everything a design program declared."""

    device: str
    symbol: str
    sequence: str
    fifos: dict[str, Fifo]
    links: tuple[Link, ...]
    cores: tuple[Core, ...]
    arguments: tuple[Buffer, ...]
    commands: tuple[Command, ...]


@dataclass
class _State:
    device: str | None = None
    symbol: str = ""
    sequence: str | None = None
    tiles: set[Tile] = field(default_factory=set)
    fifos: dict[str, Fifo] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)
    arguments: tuple[Buffer, ...] = ()
    commands: list[Command] = field(default_factory=list)
    body: list[Step] | None = None
    slots: int = 0
    tasks: dict[int, Start] = field(default_factory=dict)


@dataclass(frozen=True)
class _Element:
    slot: int
    buffer: Buffer


@dataclass(frozen=True)
class _Task:
    number: int


@dataclass(frozen=True)
class _HostBuffer:
    index: int


@dataclass(frozen=True)
class _FifoHandle:
    state: _State
    fifo: Fifo

    def acquire(self, port: Port, num_elem: int) -> _Element:
        if num_elem != 1:
            raise DesignError(f"fifo {self.fifo.name}: {num_elem} elements acquired at once; only 1 is recorded")
        self.state.slots += 1
        _emit(self.state, Acquire(self.state.slots, self.fifo.name, port))
        return _Element(self.state.slots, self.fifo.element)

    def release(self, port: Port, num_elem: int) -> None:
        if num_elem != 1:
            raise DesignError(f"fifo {self.fifo.name}: {num_elem} elements released at once; only 1 is recorded")
        _emit(self.state, Release(self.fifo.name, port))


@dataclass(frozen=True)
class _Function:
    state: _State
    name: str
    inputs: tuple[Buffer, ...]
    object_file: str

    def __call__(self, *call_args: _Element) -> None:
        if tuple(arg.buffer for arg in call_args) != self.inputs:
            raise DesignError(f"function {self.name} is called with other types than it declares")
        _emit(self.state, Call(self.name, self.object_file, tuple(arg.slot for arg in call_args)))


def _emit(state: _State, step: Step) -> None:
    if state.body is None:
        raise DesignError("a core operation stands outside of a core")
    state.body.append(step)


def record(program: Callable[[Any], None]) -> Recording:
    """Run `program(api)` on a recorder. DesignError when it does what the real API would refuse."""
    state = _State()
    program(_api(state))
    if state.device is None or state.sequence is None:
        raise DesignError("the program declares no device or no runtime sequence")
    return Recording(
        state.device,
        state.symbol,
        state.sequence,
        dict(state.fifos),
        tuple(state.links),
        tuple(state.cores),
        state.arguments,
        tuple(state.commands),
    )


def _api(state: _State) -> SimpleNamespace:
    return SimpleNamespace(
        AIEDevice=SimpleNamespace(npu1="npu1", npu2="npu2"),
        ObjectFifoPort=Port,
        **_declarations(state),
        **_core_api(state),
        **_sequence_api(state),
    )


def _declarations(state: _State) -> dict[str, Any]:
    def device(device: str, *, sym_name: str = "main") -> Callable[[Callable[[], None]], None]:
        def region(body: Callable[[], None]) -> None:
            state.device, state.symbol = device, sym_name
            body()

        return region

    def tile(col: int, row: int) -> Tile:
        if state.fifos:
            raise DesignError(f"tile ({col}, {row}) is declared below a fifo; operands must dominate their use")
        state.tiles.add(Tile(col, row))
        return Tile(col, row)

    def object_fifo(
        name: str,
        producerTile: Tile,  # noqa: N803
        consumerTiles: Tile | list[Tile],  # noqa: N803
        depth: int | list[int],
        datatype: Any,
        dimensionsToStream: list[tuple[int, int]] | None = None,  # noqa: N803
    ) -> _FifoHandle:
        consumers = tuple(consumerTiles) if isinstance(consumerTiles, list) else (consumerTiles,)
        ends = 1 + len(consumers)
        depths = tuple(depth) if isinstance(depth, list) else (depth,) * ends
        if name in state.fifos:
            raise DesignError(f"two fifos are called {name}")
        if len(depths) != ends:
            raise DesignError(f"fifo {name}: {len(depths)} depths for {ends} ends")
        for place in (producerTile, *consumers):
            if place not in state.tiles:
                raise DesignError(f"fifo {name}: tile {place} is not declared")
        fifo = Fifo(name, producerTile, consumers, depths, _buffer(datatype), tuple(dimensionsToStream or ()))
        state.fifos[name] = fifo
        return _FifoHandle(state, fifo)

    def object_fifo_link(
        fifoIns: Any,  # noqa: N803
        fifoOuts: Any,  # noqa: N803
        srcOffsets: list[int] | None = None,  # noqa: N803
        dstOffsets: list[int] | None = None,  # noqa: N803
    ) -> None:
        sources = tuple(f.fifo.name for f in (fifoIns if isinstance(fifoIns, list) else [fifoIns]))
        targets = tuple(f.fifo.name for f in (fifoOuts if isinstance(fifoOuts, list) else [fifoOuts]))
        _add_link(state, sources, targets, tuple(srcOffsets or ()), tuple(dstOffsets or ()))

    def external_func(name: str, inputs: list[Any], link_with: str | None = None) -> _Function:
        if link_with is None:
            raise DesignError(f"function {name} names no object file")
        return _Function(state, name, tuple(_buffer(t) for t in inputs), link_with)

    return {
        "device": device,
        "tile": tile,
        "object_fifo": object_fifo,
        "object_fifo_link": object_fifo_link,
        "external_func": external_func,
    }


def _add_link(
    state: _State, sources: tuple[str, ...], targets: tuple[str, ...], src: tuple[int, ...], dst: tuple[int, ...]
) -> None:
    if len(sources) > 1 and len(targets) > 1:
        raise DesignError(f"link {sources} -> {targets} joins and distributes at once")
    if len(targets) > 1:
        raise DesignError(f"link {sources[0]} -> {targets} would deal elements out; a multicast is one fifo")
    if len(src) != (len(sources) if len(sources) > 1 else 0) or dst:
        raise DesignError(f"link {sources} -> {targets}: {len(src)} and {len(dst)} offsets do not fit")
    state.links.append(Link(sources, targets, src or (0,)))


def _core_api(state: _State) -> dict[str, Any]:
    def core(
        tile: Tile, link_with: None = None, dynamic_objfifo_lowering: bool = False, stack_size: int = 1024
    ) -> Callable[[Callable[[], None]], None]:
        if link_with is not None:
            raise DesignError("core() takes no link_with any more; it belongs on external_func")

        def region(body: Callable[[], None]) -> None:
            with _nested(state) as steps:
                body()
            state.cores.append(Core(tile, stack_size, dynamic_objfifo_lowering, tuple(steps)))

        return region

    def range_(stop: int) -> Iterator[None]:
        with _nested(state) as steps:
            yield None
        _emit(state, Loop(stop, tuple(steps)))

    return {"core": core, "range_": range_}


@contextmanager
def _nested(state: _State) -> Iterator[list[Step]]:
    outer, steps = state.body, []  # type: tuple[list[Step] | None, list[Step]]
    state.body = steps
    yield steps
    state.body = outer


def _sequence_api(state: _State) -> dict[str, Any]:
    def runtime_sequence(*inputs: Any, sym_name: str | None = None) -> Callable[[Callable[..., None]], None]:
        def region(body: Callable[..., None]) -> None:
            state.sequence = sym_name or body.__name__
            state.arguments = tuple(_buffer(kind) for kind in inputs)
            body(*(_HostBuffer(index) for index in range(len(inputs))))

        return region

    def npu_load_pdi(*, device_ref: str) -> None:
        state.commands.append(LoadPdi(device_ref))

    def shim_dma_single_bd_task(
        alloc: _FifoHandle,
        mem: _HostBuffer,
        *,
        offset: int,
        sizes: list[int],
        strides: list[int],
        issue_token: bool = False,
    ) -> _Task:
        number = len(state.tasks)
        state.tasks[number] = Start(
            number, alloc.fifo.name, mem.index, offset, tuple(sizes), tuple(strides), issue_token
        )
        return _Task(number)

    def dma_start_task(*args: _Task) -> None:
        state.commands.extend(state.tasks[task.number] for task in args)

    def dma_await_task(*args: _Task) -> None:
        for task in args:
            if not state.tasks[task.number].token:
                raise DesignError("awaiting a transfer that was not configured to issue a token")
            state.commands.append(Await(task.number))

    def dma_free_task(*args: _Task) -> None:
        state.commands.extend(Free(task.number) for task in args)

    return {
        "runtime_sequence": runtime_sequence,
        "npu_load_pdi": npu_load_pdi,
        "shim_dma_single_bd_task": shim_dma_single_bd_task,
        "dma_start_task": dma_start_task,
        "dma_await_task": dma_await_task,
        "dma_free_task": dma_free_task,
    }


def _buffer(kind: Any) -> Buffer:
    """`np.ndarray[(n,), np.dtype[t]]`, as mlir-aie spells a memref type."""
    shape, dtype = get_args(kind)
    elements = 1
    for size in shape:
        elements *= size
    return Buffer(elements, np.dtype(get_args(dtype)[0]).name)
