"""The graph, cut at its claimed sites: segments in onnxruntime, calls in between, values handed on without copies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TypeProto
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from onnxpack.errors import OnnxpackError
from onnxpack.runtime.between import product_type
from onnxpack.runtime.carry import parse_type
from onnxpack.runtime.cut import Segment, cut, segment_model
from onnxpack.runtime.npu.calls import Call, CodesOnce, Outcome
from onnxpack.runtime.npu.layout import Arena, Binding, Layout, Lent, Lifetime, Pool, Shaped, place, shaped, wrap
from onnxpack.runtime.npu.openers import Openers
from onnxpack.runtime.opening import Opened
from onnxpack.runtime.prepare import Weights, lower_graph
from onnxpack.types import Array

_LAYOUTS = 8
_WATCHED = 256

Values = list[ort.OrtValue | None]
Results = dict[str, Any]
"""OrtValues, arrays, lists for sequences, None for what is absent."""
Key = tuple[Any, ...]


@dataclass(frozen=True)
class _Segment:
    """A segment, opened. Feeds and results are pairs of name and slot."""

    opened: Opened
    feeds: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]
    lists: tuple[tuple[int, int], ...]
    """Position and slot of results that are no tensors."""


@dataclass(frozen=True)
class _Batch:
    """Calls that read the same value, so that it is quantized once."""

    a: int
    k: int
    calls: tuple[Call, ...]
    slots: tuple[tuple[tuple[int | None, int], ...], ...]
    """By call, by member: slots of bias and result."""


_Step = _Segment | tuple[_Batch, ...]


class CutGraph:
    """Runs the graph; one run at a time."""

    def __init__(self, model: onnx.ModelProto, calls: Sequence[Call], openers: Openers, weights: Weights) -> None:
        self._slots: dict[str, int] = {}
        self._openers, self._weights = openers, weights
        self.inputs = {value.name: self._slot(value.name) for value in model.graph.input}
        self._steps = self._open(model, calls)
        self.outputs = {value.name: self._slot(value.name) for value in model.graph.output}
        self._lifetimes, self._freed = self._live()
        self._fresh = Layout([self._binding(step, {}) for step in self._steps])
        self._arena, self._pool = Arena(), Pool()
        self._results = frozenset(self.outputs.values())
        self._layouts: OrderedDict[Key, Layout] = OrderedDict()
        self._seen: OrderedDict[Key, int] = OrderedDict()
        """Runs by shapes of the feeds; negative where shapes in between change from run to run."""

    # --- at load ------------------------------------------------------------------------------------------------------

    def _slot(self, name: str) -> int:
        return self._slots.setdefault(name, len(self._slots))

    def _open(self, model: onnx.ModelProto, calls: Sequence[Call]) -> list[_Step]:
        steps, types = list[_Step](), {value.name: value.type for value in model.graph.input}
        by_node = {m.claimed.product.node: call for call in calls for m in call.members}
        for step in cut(model, by_node.keys()):
            if isinstance(step, Segment):
                steps.append(self._segment(model, step, types))
                continue
            here = {id(call): call for i in step.nodes if (call := by_node[model.graph.node[i].name])}
            for call in here.values():
                for member in call.members:
                    product = member.claimed.product
                    rank = 0 if product.bias is None else len(types[product.bias].tensor_type.shape.dim)
                    types[product.y] = product_type(types[product.a], product, member.weight.codes.shape[1], rank)
            ordered = sorted(here.values(), key=lambda call: self._slot(call.claimed.a))
            batches = groupby(ordered, key=lambda call: call.claimed.a)
            steps.append(tuple(self._batch(a, tuple(group)) for a, group in batches))
        return steps

    def _batch(self, a: str, calls: tuple[Call, ...]) -> _Batch:
        slots = tuple(
            tuple(
                (None if p.bias is None else self._slot(p.bias), self._slot(p.y))
                for p in (member.claimed.product for member in call.members)
            )
            for call in calls
        )
        return _Batch(self._slot(a), calls[0].claimed.k, calls, slots)

    def _segment(self, model: onnx.ModelProto, segment: Segment, types: dict[str, TypeProto]) -> _Segment:
        part = segment_model(model, segment, types)
        lowered = lower_graph(part, self._weights)
        opened = self._openers.segment(part, lowered)
        for value in opened.session.get_outputs():
            types[value.name] = parse_type(value.type, value.shape)
        names = [value.name for value in opened.session.get_outputs()]
        lists = [at for at, name in enumerate(names) if not types[name].HasField("tensor_type")]
        return _Segment(
            opened,
            tuple((name, self._slot(name)) for name in segment.inputs),
            tuple((name, self._slot(name)) for name in names),
            tuple((at, self._slot(names[at])) for at in lists),
        )

    def _live(self) -> tuple[dict[int, Lifetime], list[tuple[int, ...]]]:
        """Lifetimes of what steps make and the caller does not get; and by step the slots that nobody needs after."""
        made, last = dict[int, int](), dict[int, int]()
        for index, step in enumerate(self._steps):
            read, written = _touches(step)
            last.update(dict.fromkeys(read, index))
            made.update(dict.fromkeys(written, index))
            last.update({slot: max(index, last.get(slot, 0)) for slot in written})
        kept = set(self.outputs.values())
        freed: list[list[int]] = [[] for _ in self._steps]
        for slot, index in last.items():
            if slot not in kept:
                freed[index].append(slot)
        own = set(made) - kept
        return {slot: Lifetime(made[slot], last[slot]) for slot in sorted(own)}, [tuple(slots) for slots in freed]

    def _binding(self, step: _Step, fixed: Mapping[int, ort.OrtValue]) -> Binding | None:
        if not isinstance(step, _Segment):
            return None
        io = step.opened.session.io_binding()
        loose_inputs = tuple((name, slot) for name, slot in step.feeds if slot not in fixed)
        for name, slot in step.feeds:
            if slot in fixed:
                io.bind_ortvalue_input(name, fixed[slot])
        for name, slot in step.results:
            if slot in fixed:
                io.bind_ortvalue_output(name, fixed[slot])
            else:  # in the order of the results, so that positions are those of the binding
                io.bind_output(name)
        absent = io.get_outputs()
        loose = tuple((n, at, slot, absent[at]) for at, (n, slot) in enumerate(step.results) if slot not in fixed)
        kept = set(self.outputs.values())  # of the graph
        return Binding(io, loose_inputs, loose, tuple(pair for pair in step.lists if pair[1] in kept), bool(fixed))

    @property
    def sessions(self) -> list[ort.InferenceSession]:
        """The sessions of all segments, in order."""
        return [step.opened.session for step in self._steps if isinstance(step, _Segment)]

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(
        self, feeds: Mapping[str, ort.OrtValue], key: Key, options: ort.RunOptions | None
    ) -> tuple[Results, list[Outcome]]:
        """All outputs of the graph, and what became of each call. `key` tells names, types and shapes of the feeds."""
        layout = self._layouts.get(key)
        if layout is not None:
            self._layouts.move_to_end(key)
            try:
                return self._run(layout, feeds, options, None)
            except (OnnxpackError, InvalidArgument):
                raise
            except Exception:  # a shape in between may have changed: with fresh memory it shows what it is
                del self._layouts[key]
                self._seen[key] = -1
        times = self._seen.get(key, 0)
        watched = dict[int, Shaped | None]() if times > 0 else None
        found = self._run(self._fresh, feeds, options, watched)
        self._seen[key] = times if times < 0 else times + 1
        self._seen.move_to_end(key)
        if len(self._seen) > _WATCHED:
            self._seen.popitem(last=False)
        if watched is not None:
            self._lay_out(key, watched)
        return found

    def _run(
        self,
        layout: Layout,
        feeds: Mapping[str, ort.OrtValue],
        options: ort.RunOptions | None,
        watched: dict[int, Shaped | None] | None,
    ) -> tuple[Results, list[Outcome]]:
        own, lent = dict[int, Any](), dict[int, Lent]()
        values: Values = [None] * len(self._slots)
        for name, value in feeds.items():
            values[self.inputs[name]] = value
        outcomes: list[Outcome] = []
        for step, binding, freed in zip(self._steps, layout.bindings, self._freed, strict=True):
            if isinstance(step, _Segment):
                assert binding is not None
                try:
                    binding.before(values)
                    step.opened.session.run_with_iobinding(binding.io, options)
                    binding.after(values, own)
                except BaseException:
                    binding.clear()
                    raise
            else:
                for batch in step:
                    self._run_batch(batch, values, layout, own, lent, outcomes)
            if watched is not None:
                for slot in _touches(step)[1]:
                    value = values[slot]
                    watched[slot] = None if value is None else shaped(value)
            for slot in freed:
                values[slot] = None
                if slot in lent:
                    self._pool.give(lent.pop(slot))
        for loan in lent.values():
            self._pool.give(loan)
        return {name: own.get(slot, values[slot]) for name, slot in self.outputs.items()}, outcomes

    def _lay_out(self, key: Key, watched: Mapping[int, Shaped | None]) -> None:
        known = {slot: what for slot in self._lifetimes if (what := watched.get(slot)) is not None}
        offsets, nbytes = place({slot: what.nbytes for slot, what in known.items()}, self._lifetimes)
        if not self._arena.holds(nbytes):
            self._layouts.clear()
            self._arena.grow(nbytes)
        arrays = {slot: self._arena.view(offsets[slot], what) for slot, what in known.items()}
        values = {slot: ort.OrtValue.ortvalue_from_numpy(array) for slot, array in arrays.items()}
        shared = [slot for slot, value in values.items() if value.data_ptr() == arrays[slot].ctypes.data]
        values, arrays = {slot: values[slot] for slot in shared}, {slot: arrays[slot] for slot in shared}
        if values:
            self._layouts[key] = Layout([self._binding(step, values) for step in self._steps], arrays, values)
        if len(self._layouts) > _LAYOUTS:
            self._layouts.popitem(last=False)

    def _run_batch(
        self,
        batch: _Batch,
        values: Values,
        layout: Layout,
        own: dict[int, Any],
        lent: dict[int, Lent],
        outcomes: list[Outcome],
    ) -> None:
        """`own` and `lent` take results that are in memory of ours: an OrtValue over it does not keep it alive."""
        x = _array(batch.a, values, layout)
        session = batch.calls[0].session
        if not x.ndim or x.shape[-1] != batch.k or x.dtype != batch.calls[0].x_dtype:
            node = batch.calls[0].members[0].claimed.product.node
            raise InvalidArgument(f"node {node}: {x.dtype}{list(x.shape)} does not fit K = {batch.k}")
        codes = CodesOnce(x, batch.k, session.scratch)
        arrays, rows = layout.arrays, x.size // batch.k
        for call, slots in zip(batch.calls, batch.slots, strict=True):
            frame = layout.frames.get(call)
            if frame is None:
                frame = self._frame(call, x, rows, slots, values, layout, own, lent)
                if arrays and all(y in arrays and (bias is None or bias in arrays) for bias, y in slots):
                    layout.frames[call] = frame
            outcomes += call.run(x, codes, *frame)

    def _frame(
        self,
        call: Call,
        x: Array,
        rows: int,
        slots: tuple[tuple[int | None, int], ...],
        values: Values,
        layout: Layout,
        own: dict[int, Any],
        lent: dict[int, Lent],
    ) -> tuple[list[Array | None], list[Array]]:
        """Biases and results [rows, N] of a call."""
        biases = [None if bias is None else _array(bias, values, layout) for bias, _ in slots]
        results: list[Array] = []
        for member, bias, (_, y) in zip(call.members, biases, slots, strict=True):
            made, n = layout.arrays.get(y), member.claimed.n
            if made is None:
                shape: tuple[int, ...] = (*x.shape[:-1], n)
                if bias is not None and bias.ndim > x.ndim:
                    shape = np.broadcast_shapes(shape, bias.shape)
                if y in self._results:
                    made = own[y] = np.empty(shape, member.dtype)
                    values[y] = wrap(made)
                else:
                    lent[y] = loan = self._pool.take(shape, member.dtype, rows * member.row_bytes)
                    made, values[y] = loan.array, loan.value
            results.append(made.reshape(rows, n))
        return biases, results


def _touches(step: _Step) -> tuple[list[int], list[int]]:
    """Slots that a step reads, and those that it makes."""
    if isinstance(step, _Segment):
        return [slot for _, slot in step.feeds], [slot for _, slot in step.results]
    read, made = [batch.a for batch in step], list[int]()
    for batch in step:
        for call in batch.slots:
            read += [bias for bias, _ in call if bias is not None]
            made += [y for _, y in call]
    return read, made


def _array(slot: int, values: Values, layout: Layout) -> Array:
    found = layout.arrays.get(slot)
    if found is None:
        value = values[slot]
        assert value is not None
        found = value.numpy()
    return found
