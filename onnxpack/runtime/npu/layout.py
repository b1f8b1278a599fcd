"""Where values of the cut graph lie: nowhere in particular, or all in one piece of memory with every binding made.

The first runs with feeds of some shapes let onnxruntime allocate. When the same shapes come again, the shapes of all
values in between are known; they get places in one arena, shared by values that are not needed at the same time, and
each segment's binding is made once and for all. Then a cut costs one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpack.types import Array

_ALIGN = 64

_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
}


@dataclass(frozen=True)
class Shaped:
    """What a value was on the run that was watched."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def shaped(value: ort.OrtValue) -> Shaped | None:
    """Shape and type of a value; None for what cannot lie in plain memory."""
    if not value.is_tensor() or value.data_type() not in _NUMPY:
        return None
    return Shaped(tuple(value.shape()), np.dtype(_NUMPY[value.data_type()]))


@dataclass(frozen=True)
class Lifetime:
    """Steps between which a value is needed, both included."""

    made: int
    last: int


def place(sizes: Mapping[int, int], lifetimes: Mapping[int, Lifetime]) -> tuple[dict[int, int], int]:
    """Offsets for values, and the size of the whole: values whose lifetimes meet do not overlap.

    >>> place({0: 64, 1: 64, 2: 100}, {0: Lifetime(0, 1), 1: Lifetime(1, 2), 2: Lifetime(2, 2)})
    ({0: 0, 1: 64, 2: 128}, 256)
    >>> place({0: 64, 1: 64, 2: 50}, {0: Lifetime(0, 1), 1: Lifetime(1, 2), 2: Lifetime(2, 2)})[1]
    128
    """
    offsets, end = dict[int, int](), 0
    free: list[tuple[int, int]] = []
    """Offset and size of gaps, in order."""
    expiring: dict[int, list[int]] = {}
    step = 0
    for value in sorted(sizes, key=lambda value: (lifetimes[value].made, -sizes[value], value)):
        while step < lifetimes[value].made:
            free += [(offsets[gone], _rounded(sizes[gone])) for gone in expiring.pop(step, ())]
            free = _merged(free)
            step += 1
        wanted = _rounded(sizes[value])
        gap = next((index for index, (_, size) in enumerate(free) if size >= wanted), None)
        if gap is not None:
            at, size = free[gap]
            free[gap : gap + 1] = [(at + wanted, size - wanted)] if size > wanted else []
        else:
            if free and sum(free[-1]) == end:  # the last gap grows
                at, _ = free.pop()
            else:
                at = end
            end = at + wanted
        offsets[value] = at
        expiring.setdefault(lifetimes[value].last, []).append(value)
    return offsets, end


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _merged(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for at, size in sorted(gaps):
        if made and sum(made[-1]) == at:
            made[-1] = (made[-1][0], made[-1][1] + size)
        else:
            made.append((at, size))
    return made


def _wrap() -> Callable[[Array], ort.OrtValue]:
    """How an array becomes a value that shares its memory: through DLPack where this onnxruntime takes it, because that
    is cheaper and keeps the array alive."""
    try:
        probe = np.zeros(2, np.float32)
        if ort.OrtValue.from_dlpack(probe).data_ptr() == probe.ctypes.data:
            return ort.OrtValue.from_dlpack  # type: ignore[no-any-return]
    except (AttributeError, TypeError, RuntimeError):
        pass
    return ort.OrtValue.ortvalue_from_numpy  # type: ignore[no-any-return]


wrap = _wrap()


class Lent:
    """Memory on loan, and what it was last used as: the layers of a model ask for the same shapes again and again."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes, np.uint8)
        self.shape: tuple[int, ...] | None = None
        self.dtype: np.dtype[Any] | None = None
        self.array: Array
        self.value: ort.OrtValue

    def become(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Be an array of this shape."""
        self.shape, self.dtype = shape, dtype
        self.array = np.ndarray(shape, dtype, self.memory)
        self.value = wrap(self.array)


class Pool:
    """Buffers that are used again: as many as a run needs at once, as large as the largest was."""

    def __init__(self) -> None:
        self._free: list[Lent] = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> Lent:
        """Memory as an array of this shape, which has so many bytes."""
        free = self._free
        for index in range(len(free) - 1, -1, -1):
            if free[index].shape == shape and free[index].dtype == dtype:
                return free.pop(index)
        fitting = next((index for index, lent in enumerate(free) if len(lent.memory) >= nbytes), None)
        if fitting is not None:
            found = free.pop(fitting)
        else:
            if free:
                free.pop()  # too small; the new one takes its place
            found = Lent(nbytes + nbytes // 4)
        found.become(shape, dtype)
        return found

    def give(self, lent: Lent) -> None:
        """Back; nothing may refer to it any more."""
        self._free.append(lent)


class Arena:
    """Memory that all layouts of one session share: only one of them runs at a time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def holds(self, nbytes: int) -> bool:
        """Whether it is large enough."""
        return len(self._memory) >= nbytes + _ALIGN

    def grow(self, nbytes: int) -> None:
        """New memory; layouts in the old one must go."""
        self._memory = np.empty(nbytes + _ALIGN, np.uint8)

    def view(self, offset: int, what: Shaped) -> Array:
        """An array at an offset."""
        start = offset + (-self._memory.ctypes.data) % _ALIGN
        return self._memory[start : start + what.nbytes].view(what.dtype).reshape(what.shape)


_NOTHING = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))
"""Bound where a run's own values were, so that they are let go."""


@dataclass
class Binding:
    """One segment's binding. Loose values change from run to run; the others stay bound."""

    io: ort.IOBinding
    loose_inputs: tuple[tuple[str, int], ...]
    loose_outputs: tuple[tuple[str, int, int, ort.OrtValue], ...]
    """Name in the session, position among its outputs, slot, and a value that is not there: bound as an output, it is
    allocated by the run. That is what `bind_output` does, at eight times the cost."""
    lists: tuple[tuple[int, int], ...]
    """Position and slot of outputs of the graph that are no tensors: they leave as Python objects."""
    kept: bool
    """Whether anything stays bound."""

    def before(self, values: Sequence[ort.OrtValue | None]) -> None:
        """Bind what is loose. An input without a value is left to its default."""
        io = self.io
        for name, slot in self.loose_inputs:
            value = values[slot]
            if value is not None:
                io.bind_ortvalue_input(name, value)
        if not self.kept:
            for name, _, _, absent in self.loose_outputs:
                io.bind_ortvalue_output(name, absent)

    def after(self, values: list[ort.OrtValue | None], own: dict[int, Any]) -> None:
        """Take the loose results, and let go of everything that belongs to this run."""
        io = self.io
        if self.lists:
            objects = io.copy_outputs_to_cpu()
            own.update((slot, objects[position]) for position, slot in self.lists)
        if self.loose_outputs:
            results = io.get_outputs_as_ortvaluevector()
            for _, position, slot, _ in self.loose_outputs:
                values[slot] = ort.OrtValue(results[position])
        if not self.kept:
            io.clear_binding_inputs()
            io.clear_binding_outputs()
            return
        for name, slot in self.loose_inputs:
            if values[slot] is not None:
                io.bind_ortvalue_input(name, _NOTHING)
        for name, _, _, absent in self.loose_outputs:
            io.bind_ortvalue_output(name, absent)

    def clear(self) -> None:
        """After a failure."""
        self.io.clear_binding_inputs()
        self.io.clear_binding_outputs()


@dataclass
class Layout:
    """Bindings of all segments, and the values that have a place of their own."""

    bindings: list[Binding | None]
    """By step; None for calls."""
    arrays: dict[int, Array] = field(default_factory=dict)
    """By slot."""
    owners: dict[int, ort.OrtValue] = field(default_factory=dict)
    """What is bound must live as long as the bindings."""
    frames: dict[Any, tuple[list[Array | None], list[Array]]] = field(default_factory=dict)
    """By call: biases and results as matrices, where all of them have a place of their own."""
