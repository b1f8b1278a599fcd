"""A pack on the NPU: two forms of one graph, and the choice between them on every run.

The whole graph, lowered, runs what has too few rows to be worth a launch; the graph cut at its claimed sites runs the
rest. Both are held, so a weight is there twice: as onnxruntime has ordered it, and as the device wants it. What is
mapped from the pack's files is shared, and so are operands that had to be made.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from onnxpack.errors import EnvironmentFault
from onnxpack.pack.manifest import SiteRecord
from onnxpack.pack.read import Pack
from onnxpack.reasons import Reason
from onnxpack.runtime.between import door
from onnxpack.runtime.groups import facts
from onnxpack.runtime.host import HostEngine
from onnxpack.runtime.npu import device as devices
from onnxpack.runtime.npu.calls import Call, Outcome, Session
from onnxpack.runtime.npu.claims import ClaimedCall, claim, execution_of, kernel_files
from onnxpack.runtime.npu.device import Device
from onnxpack.runtime.npu.faults import Tally
from onnxpack.runtime.npu.graph import CutGraph
from onnxpack.runtime.npu.openers import Openers
from onnxpack.runtime.npu.slot import KernelFile
from onnxpack.runtime.npu.switches import Switches
from onnxpack.runtime.opening import Opener
from onnxpack.runtime.prepare import Weights, isolated_graph
from onnxpack.runtime.product import main_products
from onnxpack.runtime.trace import Placed, Rows, SiteOutcome, SymbolRows, TraceRecord, runs_as_product
from onnxpack.shapes import Gemm

_ACCEPTED = 256

_GROUP_REASONS = {
    Reason.SCALE_ALONG_K,
    Reason.ZERO_POINT_ALONG_K,
    Reason.SCALE_NOT_CONSTANT,
    Reason.SIXTEEN_BIT_ACTIVATION,
    Reason.BLOCK_SCALES,
    Reason.FLOAT8,
    Reason.SHARED_OUTPUT,
}
"""Why a quantized product is not a group that can be folded."""


@dataclass(frozen=True)
class NpuRows(Rows):
    """What became of each site of one run."""

    symbols: SymbolRows
    outcomes: tuple[Outcome, ...]

    def of(self, placed: Placed) -> int | None:
        """Rows of A at the site, if known."""
        found = self._by_node.get(placed.site.node)
        return sum(outcome.rows for outcome in found) if found else self.symbols.of(placed)

    def at(self, placed: Placed) -> list[SiteOutcome]:
        """One entry for each place that rows of the site ran in."""
        found = self._by_node.get(placed.site.node, ())
        return [SiteOutcome(o.where, o.rows, o.reason, o.event) for o in found] or super().at(placed)

    @cached_property
    def _by_node(self) -> dict[str, list[Outcome]]:
        found: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            for member in outcome.call.members:
                found.setdefault(member.claimed.site.node, []).append(outcome)
        return found


@dataclass(frozen=True)
class WholeRows(Rows):
    """A run of the whole graph on the host, because no claimed site had enough rows."""

    symbols: SymbolRows

    def of(self, placed: Placed) -> int | None:
        """Rows of A at the site, if known."""
        return self.symbols.of(placed)

    def at(self, placed: Placed) -> list[SiteOutcome]:
        """On the host."""
        if placed.where != "npu":
            return super().at(placed)
        kind = "qdq" if placed.site.qdq is not None and placed.site.qdq.x is not None else "float"
        reason = Reason.BELOW_ROW_THRESHOLD.value
        return [SiteOutcome("host", self.of(placed), reason, f"npu_{kind}_host_rows")]


class NpuEngine:
    """Runs a pack on the NPU. Runs take turns: the device is one."""

    def __init__(self, pack: Pack, opener: Opener, switches: Switches, device: Device) -> None:
        """Takes over `device` (device.acquire), and gives it back when it is collected or the process ends."""
        self._device = device
        owner = object()
        kernels: tuple[KernelFile, ...] = ()
        try:
            files = kernel_files(pack)
            kernels = tuple(files.values())
            self._load(pack, opener, switches, owner, files)
            device.enter(kernels)
        except BaseException:
            devices.release(device)
            raise
        weakref.finalize(self, _leave, device, owner, kernels)

    def _load(
        self, pack: Pack, opener: Opener, switches: Switches, owner: object, files: Mapping[Gemm, KernelFile]
    ) -> None:
        weights = Weights(pack)
        self._host = HostEngine(pack, opener, weights)
        model, _ = isolated_graph(pack)
        execution = execution_of(pack.manifest)
        products = main_products(model)
        claimed = claim(execution, pack.manifest.sites, products, files)
        if any(not _is_numeric(value) for value in model.graph.input):
            claimed = []  # strings, sequences: onnxruntime takes them in a whole run only
        self._openers = Openers(opener, model, weights)
        min_rows = execution.min_rows if switches.min_rows is None else switches.min_rows
        self._session = Session(owner, self._device, files, self._openers.product, min_rows, switches.strict)
        self._session.events = _print_event if switches.trace else None
        calls = [Call(call, weights, self._session) for call in claimed]
        self._cut = CutGraph(model, calls, self._openers, weights) if calls else None
        self._door, self._accepted = door(model, opener)
        self._known: dict[tuple[Any, ...], None] = {}
        self._types = {value.name: value.type for value in model.graph.input}
        self._guard = Lock()
        self._sites = [member.site for call in claimed for member in call.members]
        self.first_kernel = next((files[gemm] for call in claimed if (gemm := call.first_kernel) is not None), None)
        """A kernel that is going to be used."""
        self._row_counts = tuple(dict.fromkeys(site.m for site in self._sites))
        self.placed = _placed(pack, claimed, {product.node for product in products})
        self._refused = [site for site in pack.manifest.sites if site.weight is None and _is_refused_group(site)]
        self._note_claims(claimed)

    def _note_claims(self, claimed: list[ClaimedCall]) -> None:
        members = [member for call in claimed for member in call.members]
        groups = sum(member.product.group is not None for member in members)
        self._tally.counts.update({"claimed": len(members), "qdq_groups": groups})
        line = f"claimed={len(members)} qdq_groups={groups} min={self._session.min_rows}"
        refused = Counter(site.reason for site in self._refused)
        lines = [line, *(f"qdq_refused why={why} count={count}" for why, count in sorted(refused.items(), key=str))]
        self.at_load = [
            TraceRecord(0, None, "npu" if text is line else "host", None, None, text, text.partition("=")[0].split()[0])
            for text in lines
        ]
        if self._session.events is not None:
            described = {placed.site.node: placed.facts for placed in self.placed}
            lines += [f"{described[m.site.node]} site={m.site.path}" for m in members if m.product.group is not None]
            for text in lines:
                self._session.events(text)

    @property
    def _tally(self) -> Tally:
        return self._session.tally

    @property
    def claimed(self) -> int:
        """Sites that may run on the device."""
        return len(self._sites)

    @property
    def signature(self) -> ort.InferenceSession:
        """A session with the inputs, outputs and metadata of the pack's graph."""
        return self._host.signature

    def counters(self) -> dict[str, int]:
        """What happened so far: sites by event, launches, faults by kind; and what the device holds for everybody."""
        with self._guard:
            counts = {"launches": self._tally.launches, "npu": self._tally.on_device, **self._tally.counts}
        counts |= {f"device:{name}": count for name, count in self._device.counts.items()}
        counts["device:resident_bytes"] = self._device.resident
        return dict(sorted(counts.items()))

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(
        self, output_names: Sequence[str] | None, feeds: Any, run_options: ort.RunOptions | None
    ) -> tuple[list[Any], Rows]:
        """The outputs, and what became of each claimed site."""
        if not isinstance(feeds, Mapping):  # onnxruntime says so
            return list(self._host.run(output_names, feeds, run_options)[0]), SymbolRows({})
        symbols = SymbolRows(self._host.symbols(feeds))
        if self._cut is None or self._too_few(symbols):
            results, _ = self._host.run(output_names, feeds, run_options)
            return results, self._whole(symbols)
        with self._guard:
            names, values, key = self._admit(output_names, feeds, run_options)
            found, outcomes = self._cut.run(values, key, run_options)
            results = [self._result(name, found[name]) for name in names]
        return results, NpuRows(symbols, tuple(outcomes))

    def _too_few(self, symbols: SymbolRows) -> bool:
        """Whether the shapes of the feeds tell of every claimed site that it has fewer rows than are worth a launch."""
        least = self._session.min_rows
        rows = map(symbols.value, self._row_counts)
        return all(count is not None and count < least for count in rows)

    def _whole(self, symbols: SymbolRows) -> Rows:
        with self._guard:
            self._tally.counts["host_rows"] += len(self._sites)
        if self._session.events is not None:
            for site in self._sites:
                kind = "qdq" if site.qdq is not None and site.qdq.x is not None else "float"
                rows = symbols.value(site.m)
                shape = f"m={rows} k={site.k} n={site.n} min={self._session.min_rows}"
                self._session.events(f"npu_{kind}_host_rows {shape} sites={site.path}")
        return WholeRows(symbols)

    def _admit(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], options: ort.RunOptions | None
    ) -> tuple[list[str], dict[str, ort.OrtValue], tuple[Any, ...]]:
        """Names of the outputs, and the feeds as values; onnxruntime itself judges them, once for each shape."""
        assert self._cut is not None
        known = self._cut.outputs
        names = list(output_names) if output_names else list(known)
        key = _key(feeds)
        if key is None or key not in self._known or any(name not in known for name in names):
            wanted = [self._accepted, *(name for name in names if name not in known)]
            self._door.session.run(wanted, feeds, options)
            if key is not None:
                if len(self._known) >= _ACCEPTED:
                    self._known.clear()
                self._known[key] = None
        values = {name: self._value(name, fed) for name, fed in feeds.items() if fed is not None}
        if key is None:
            key = tuple((name, value.data_type(), *value.shape()) for name, value in values.items())
        return names, values, key

    def _value(self, name: str, fed: Any) -> ort.OrtValue:
        if isinstance(fed, ort.OrtValue):
            return fed
        kind = onnx.helper.tensor_dtype_to_np_dtype(self._types[name].tensor_type.elem_type)
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(fed, kind))

    def _result(self, name: str, value: Any) -> Any:
        if not isinstance(value, ort.OrtValue):
            return value
        array = value.numpy()
        return array.copy() if self._cut is not None and name in self._cut.inputs else array

    def end_profiling(self) -> str:
        """End the profile of every session; name of the first file."""
        first = self._host.end_profiling()
        for session in [] if self._cut is None else self._cut.sessions:
            session.end_profiling()
        return first


def _leave(device: Device, owner: object, kernels: tuple[KernelFile, ...]) -> None:
    device.leave(owner, kernels)
    devices.release(device)


def _placed(pack: Pack, claimed: list[ClaimedCall], main: set[str]) -> list[Placed]:
    on_npu = {member.site.node for call in claimed for member in call.members}
    made = []
    for site in pack.manifest.sites:
        if runs_as_product(site):
            in_main = site.node in main
            made.append(Placed(_with_reason(site, in_main, on_npu), _where(site, on_npu), in_main, facts(site, pack)))
    return made


def _where(site: SiteRecord, on_npu: set[str]) -> Any:
    return "npu" if site.node in on_npu else "host"


def _with_reason(site: SiteRecord, in_main: bool, on_npu: set[str]) -> SiteRecord:
    """A site that a kernel was bound to and that runs on the host all the same needs another reason than none."""
    if site.reason is not None or site.node in on_npu:
        return site
    return replace(site, reason=(Reason.NO_KERNEL if in_main else Reason.IN_SUBGRAPH).value)


def _is_refused_group(site: SiteRecord) -> bool:
    return site.reason in _GROUP_REASONS


def _is_numeric(value: onnx.ValueInfoProto) -> bool:
    if not value.type.HasField("tensor_type"):
        return False
    return value.type.tensor_type.elem_type != TensorProto.STRING


def _key(feeds: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Names, types and shapes of arrays; None when something else is fed."""
    made: list[Any] = []
    for name, fed in feeds.items():
        if type(fed) is not np.ndarray:
            return None
        made.append((name, fed.dtype, fed.shape))
    return tuple(made)


def _print_event(line: str) -> None:
    print(f"onnxpack: {line}", file=sys.stderr)


def open_engine(pack: Pack, opener: Opener, switches: Switches) -> NpuEngine:
    """The engine of a pack. EnvironmentFault when there is no device, or another process has it."""
    if not switches.npu:
        raise EnvironmentFault("ONNXPACK_NPU=0 forbids the NPU", hint="unset it, or use device='host'")
    device = devices.acquire(switches)
    engine = NpuEngine(pack, opener, switches, device)
    if engine.first_kernel is not None:
        device.try_context(engine.first_kernel)
    return engine
