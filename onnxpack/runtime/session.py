"""PackSession: a pack, loaded, with the interface of onnxruntime.InferenceSession."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import onnxruntime as ort

from onnxpack.errors import EnvironmentFault, PackError, UsageError
from onnxpack.pack.read import Pack, open_pack
from onnxpack.runtime.host import HostEngine
from onnxpack.runtime.npu.engine import NpuEngine, open_engine
from onnxpack.runtime.npu.switches import QDQ, Switches
from onnxpack.runtime.npu.unfold import without_groups
from onnxpack.runtime.opening import Opener
from onnxpack.runtime.options import copy_options
from onnxpack.runtime.reference import ReferenceEngine
from onnxpack.runtime.trace import Trace, TraceRecord, runs_as_product

Device = Literal["auto", "host", "reference", "npu"]

Engine = HostEngine | ReferenceEngine | NpuEngine

_log = logging.getLogger("onnxpack")
_ON_HOST = "every site runs on the host"


@dataclass(frozen=True)
class SessionCoverage:
    """Counts of the pack's sites: where they run, and why not on the NPU."""

    device: str
    sites: int
    weight: int
    bound: int
    where: dict[str, int]
    """Sites by the place that runs them; "unbound" is onnxruntime, as the graph says."""
    reasons: dict[str, int]
    """Sites by reason code."""
    counters: dict[str, int] = field(default_factory=dict)
    """On the NPU, since the pack was loaded: sites run on it ("npu"), routed to the host by their rows ("host_rows"),
    fallen back ("fallback"); launches; faults by kind; and what the device has done for this whole process."""


class PackSession:
    """Runs a pack. `run` may be called from several threads at once.

    The methods shared with onnxruntime.InferenceSession take the same arguments, return the same things and raise
    onnxruntime's own errors for wrong feeds and names.
    """

    def __init__(self, pack: Pack, engine: Engine, device: str, notes: Sequence[str] = ()) -> None:
        self._engine = engine
        sites = pack.manifest.sites
        unbound = [site for site in sites if not runs_as_product(site)]
        at_load = [TraceRecord(0, site.path, "unbound", None, site.reason) for site in unbound]
        at_load = [*(TraceRecord(0, None, "host", None, note) for note in notes), *at_load]
        if isinstance(engine, NpuEngine):
            at_load = [*engine.at_load, *at_load]
        self._trace = Trace(at_load, engine.placed)
        where = Counter[str](placed.where for placed in engine.placed)
        self._coverage = SessionCoverage(
            device=device,
            sites=len(sites),
            weight=sum(site.kind == "weight" for site in sites),
            bound=len(engine.placed),
            where={**where, "unbound": len(unbound)},
            reasons=dict(sorted(Counter(site.reason for site in sites if site.reason is not None).items())),
        )

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: ort.RunOptions | None = None,
    ) -> list[Any]:
        """Compute the named outputs, or all of them for None."""
        results, rows = self._engine.run(output_names, input_feed, run_options)
        self._trace.add(rows)
        return results

    def get_inputs(self) -> list[ort.NodeArg]:
        """Inputs of the graph: name, type, shape."""
        return list(self._engine.signature.get_inputs())

    def get_outputs(self) -> list[ort.NodeArg]:
        """Outputs of the graph: name, type, shape."""
        return list(self._engine.signature.get_outputs())

    def get_overridable_initializers(self) -> list[ort.NodeArg]:
        """Initializers that a feed may replace."""
        return list(self._engine.signature.get_overridable_initializers())

    def get_modelmeta(self) -> ort.ModelMetadata:
        """Metadata of the graph."""
        return self._engine.signature.get_modelmeta()

    def get_providers(self) -> list[str]:
        """Execution providers of the onnxruntime sessions inside."""
        return list(self._engine.signature.get_providers())

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Options of those providers."""
        return dict(self._engine.signature.get_provider_options())

    def end_profiling(self) -> str:
        """Stop profiling (session_options.enable_profiling) and give the name of the profile."""
        return self._engine.end_profiling()

    def coverage(self) -> SessionCoverage:
        """How many sites run where, and why not elsewhere."""
        if isinstance(self._engine, NpuEngine):
            return replace(self._coverage, counters=self._engine.counters())
        return self._coverage

    def trace(self) -> list[TraceRecord]:
        """Decisions made at load, then one record per bound site and run; the oldest runs are forgotten."""
        return self._trace.records()


def load(
    path: str | Path,
    device: Device = "auto",
    session_options: ort.SessionOptions | None = None,
    strict: bool = False,
    check: Literal["headers", "full"] = "headers",
) -> PackSession:
    """Open a pack and make it ready to run.

    `device`: "host" (onnxruntime with integer products), "reference" (numpy products, the specification), "npu", or
    "auto", the best there is. `strict` raises where "auto" would fall back from kernels that the pack has, and where a
    call on the NPU would fall back to the host. `check` "full" compares every file with its digest.

    `session_options` is copied, never changed. Some of it onnxruntime does not let one read, so it is not taken over:
    free-dimension overrides, added initializers, custom-operator libraries, execution providers, callbacks. Without it
    the host and the NPU run at onnxruntime's default optimization level, the reference at ORT_ENABLE_BASIC.

    Environment variables, ONNXPACK_NPU and others, are read here: see docs/runtime.md. PackError for a damaged pack,
    UsageError for a wrong argument, EnvironmentFault for a device that is not here.
    """
    if device not in get_args(Device):
        raise UsageError(f"there is no device {device!r}", hint=f"one of {', '.join(get_args(Device))}")
    if check not in ("headers", "full"):
        raise UsageError(f"check is {check!r}", hint="one of headers, full")
    switches = Switches.read(os.environ)
    switches = replace(switches, strict=switches.strict or strict)
    pack = open_pack(path, check)
    notes = []
    if not switches.qdq:
        pack, unfolded = without_groups(pack)
        notes = [f"{QDQ}=0: the graph's own nodes run {unfolded} QDQ groups"]
    if device == "reference":
        options = session_options if session_options is not None else basic_options()
        return PackSession(pack, ReferenceEngine(pack, _opener(pack, options)), device, notes)
    opener = _opener(pack, session_options)
    if device != "host":
        engine, note = _open_npu(pack, opener, switches, device == "auto")
        if engine is not None:
            return PackSession(pack, engine, "npu", notes)
        notes.insert(0, f"{note}: {_ON_HOST}")
    return PackSession(pack, HostEngine(pack, opener), "host", notes)


def _open_npu(pack: Pack, opener: Opener, switches: Switches, auto: bool) -> tuple[NpuEngine | None, str]:
    """An engine that runs something on the NPU, or one line why there is none. Raises where a caller insists."""
    try:
        if auto and not pack.manifest.kernels:
            reason, level = "the pack has no kernels, so no NPU device is looked for", logging.INFO
        else:
            engine = open_engine(pack, opener, switches)
            if engine.claimed:
                return engine, ""
            reason, level = "the pack has no kernel that runs any of its sites", logging.WARNING
            if switches.strict:
                raise PackError(reason, where=str(pack.path), hint="build it with --kernels")
    except EnvironmentFault as error:
        insists = not auto and switches.npu
        if insists or switches.strict:
            raise
        reason, level = error.what, logging.INFO if auto else logging.WARNING
    _log.log(level, "%s: %s: %s", pack.path, reason, _ON_HOST)
    return None, reason


def basic_options() -> ort.SessionOptions:
    """Options at ORT_ENABLE_BASIC, the level at which devices are compared."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return options


def _opener(pack: Pack, options: ort.SessionOptions | None) -> Opener:
    # The caller may change its object after this call; sessions that are opened later must not see that.
    copied = None if options is None else copy_options(options)
    return Opener(pack.path, copied)
