"""Walk NPU control code: the header, then operations that must end exactly where the header says.

The same bytes are the `.ctrltext` of an ELF and a raw instruction file. Little-endian 32-bit words throughout.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

HEADER_BYTES = 16
GENERATIONS = {0x06040100: "XDNA2", 0x06030100: "XDNA", 0x06040001: "XDNA2 (preemption)"}
XDNA2 = 0x06040100
LIMIT = 8 << 20
"""Larger than any control code; longer ones are not walked."""

WRITE, BLOCK_WRITE, MASKED_WRITE, MASKED_POLL, NO_OP, PREEMPT, LOAD_PDI = 0x00, 0x01, 0x03, 0x04, 0x05, 0x06, 0x08
WAIT, PATCH = 0x80, 0x81
_FIXED = {WRITE: 24, MASKED_WRITE: 28, MASKED_POLL: 28, NO_OP: 4, PREEMPT: 4, LOAD_PDI: 16}
_SIZE_WORD = {BLOCK_WRITE: 3, WAIT: 1, PATCH: 1, 0x82: 1, 0x83: 1, 0x84: 1}
"""Operations that carry their size in bytes, and in which word."""
_LEAST = {BLOCK_WRITE: 20, WAIT: 8, PATCH: 44, 0x82: 8, 0x83: 8, 0x84: 8}

SHIM_DESCRIPTORS = 0x1D000
SHIM_DESCRIPTOR_BYTES = 0x20
SHIM_DESCRIPTOR_COUNT = 16


class BadCode(ValueError):
    """The control code breaks its own structure; the message says where."""


@dataclass(frozen=True)
class ControlCode:
    """What a walk finds. Offsets are bytes from the start of the code."""

    generation: int
    columns: int
    declared_operations: int
    declared_bytes: int
    operations: int
    load_pdi: tuple[int, ...]
    """Offset of each load_pdi."""
    shim_descriptors: frozenset[int]
    """Offset of word 0 of each shim descriptor that a block write fills."""
    patches: Counter[int]
    """Address patches by argument index."""
    tail: int
    """Bytes after the declared end."""


def walk(code: bytes | memoryview) -> ControlCode:
    """Read the code once, front to back. BadCode when it is not exactly a header and whole known operations.

    >>> nop = struct.pack("<5I", XDNA2, 0x108, 1, 20, 5)
    >>> walk(nop).operations, walk(nop).columns
    (1, 8)
    """
    size = len(code)
    if size < HEADER_BYTES or size % 4:
        raise BadCode(f"{size} bytes are no control code (a header of 16 bytes and whole words)")
    if size > LIMIT:
        raise BadCode(f"{size} bytes are more than any control code")
    generation, shape, count, declared = struct.unpack_from("<4I", code)
    if generation not in GENERATIONS:
        raise BadCode(f"its first word is {generation:#010x}, not {XDNA2:#010x}")
    if declared > size:
        raise BadCode(f"it declares {declared} bytes and has {size}")
    operations, loads, filled, patches = _operations(code, declared)
    return ControlCode(
        generation,
        shape & 0xFF,
        count,
        declared,
        operations,
        tuple(loads),
        frozenset(filled),
        patches,
        size - declared,
    )


def _operations(code: bytes | memoryview, end: int) -> tuple[int, list[int], list[int], Counter[int]]:
    loads: list[int] = []
    filled: list[int] = []
    patches: Counter[int] = Counter()
    at, operations = HEADER_BYTES, 0
    while at < end:
        opcode = code[at]
        size = _FIXED.get(opcode) or _declared_size(code, at, opcode, end)
        if at + size > end:
            raise BadCode(f"operation {opcode:#04x} at {at:#x} runs past the end at {end:#x}")
        if opcode == LOAD_PDI:
            loads.append(at)
        elif opcode == BLOCK_WRITE:
            (address,) = struct.unpack_from("<I", code, at + 8)
            filled += _shim_words(address, at + 16, size - 16)
        elif opcode == PATCH:
            (argument,) = struct.unpack_from("<I", code, at + 32)
            patches[argument] += 1
        at += size
        operations += 1
    return operations, loads, filled, patches


def _declared_size(code: bytes | memoryview, at: int, opcode: int, end: int) -> int:
    if opcode not in _SIZE_WORD:
        raise BadCode(f"unknown operation {opcode:#04x} at {at:#x}")
    if at + _LEAST[opcode] > end:
        raise BadCode(f"operation {opcode:#04x} at {at:#x} runs past the end at {end:#x}")
    (size,) = struct.unpack_from("<I", code, at + 4 * _SIZE_WORD[opcode])
    if size < _LEAST[opcode] or size % 4:
        raise BadCode(f"operation {opcode:#04x} at {at:#x} declares {size} bytes")
    return int(size)


def _shim_words(address: int, offset: int, nbytes: int) -> list[int]:
    """Offsets of the descriptors that a block write of `nbytes` to `address` fills; row 0 is the shim."""
    first = (address & 0x01FF_FFFF) - SHIM_DESCRIPTORS
    last = SHIM_DESCRIPTOR_BYTES * SHIM_DESCRIPTOR_COUNT
    if not 0 <= first < last or first % SHIM_DESCRIPTOR_BYTES:
        return []
    whole = min(nbytes, last - first) // SHIM_DESCRIPTOR_BYTES
    return [offset + number * SHIM_DESCRIPTOR_BYTES for number in range(whole)]
