"""Stand-in for the aie dialect: every declaration becomes a line of text."""

from __future__ import annotations

from enum import Enum
from typing import Any

LINES: list[str] = []


class AIEDevice(Enum):
    npu1 = "npu1"
    npu2 = "npu2"


class ObjectFifoPort(Enum):
    Produce = 0
    Consume = 1


def device(kind: AIEDevice, *, sym_name: str = "main") -> Any:
    def region(body: Any) -> None:
        LINES.append(f"aie.device({kind.value}) @{sym_name} {{")
        body()
        LINES.append("}")

    return region


def tile(col: int, row: int) -> str:
    LINES.append(f"%tile_{col}_{row} = aie.tile({col}, {row})")
    return f"%tile_{col}_{row}"


class object_fifo:  # noqa: N801
    def __init__(self, name, producerTile, consumerTiles, depth, datatype, dimensionsToStream=None):  # noqa: N803
        self.name = name
        LINES.append(f"aie.objectfifo @{name}({producerTile}, {consumerTiles}, {depth}) {dimensionsToStream or []}")

    def acquire(self, port, num_elem):
        LINES.append(f"aie.objectfifo.acquire @{self.name}({port.name}, {num_elem})")
        return self.name

    def release(self, port, num_elem):
        LINES.append(f"aie.objectfifo.release @{self.name}({port.name}, {num_elem})")


def object_fifo_link(fifoIns, fifoOuts, srcOffsets=[], dstOffsets=[]):  # noqa: B006, N803
    LINES.append("aie.objectfifo.link")


def external_func(name, inputs, outputs=None, visibility="private", link_with=None):
    LINES.append(f'func.func {visibility} @{name} {{link_with = "{link_with}"}}')
    return lambda *args: LINES.append(f"func.call @{name}{args}")


def core(tile, link_with=None, dynamic_objfifo_lowering=None, stack_size=None):
    def region(body):
        LINES.append(f"aie.core({tile}) {{stack_size = {stack_size}}}")
        body()

    return region
