"""PackSession: a pack, loaded, with the interface of onnxruntime.InferenceSession."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import onnxruntime as ort

from onnxpack.errors import EnvironmentFault, UsageError
from onnxpack.pack.read import Pack, open_pack
from onnxpack.runtime.host import HostEngine
from onnxpack.runtime.opening import Opener
from onnxpack.runtime.options import copy_options
from onnxpack.runtime.reference import ReferenceEngine
from onnxpack.runtime.trace import Trace, TraceRecord, runs_as_product

Device = Literal["auto", "host", "reference", "npu"]

_log = logging.getLogger("onnxpack")
_NO_NPU = "this version has no NPU device"


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


class PackSession:
    """Runs a pack. `run` may be called from several threads at once.

    The methods shared with onnxruntime.InferenceSession take the same arguments, return the same things and raise
    onnxruntime's own errors for wrong feeds and names.
    """

    def __init__(self, pack: Pack, engine: HostEngine | ReferenceEngine, device: str, note: str | None = None) -> None:
        self._pack, self._engine, self._device = pack, engine, device
        sites = pack.manifest.sites
        unbound = [site for site in sites if not runs_as_product(site)]
        at_load = [TraceRecord(0, site.path, "unbound", None, site.reason) for site in unbound]
        if note is not None:
            at_load.insert(0, TraceRecord(0, None, "host", None, note))
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
    "auto", the best there is. `strict` raises where "auto" would fall back from kernels that the pack has. `check`
    "full" compares every file with its digest.

    `session_options` is copied, never changed. Some of it onnxruntime does not let one read, so it is not taken over:
    free-dimension overrides, added initializers, custom-operator libraries, execution providers, callbacks. Without it
    the host runs at onnxruntime's default optimization level, the reference at ORT_ENABLE_BASIC.

    PackError for a damaged pack, UsageError for a wrong argument, EnvironmentFault for a device that is not here.
    """
    if device not in get_args(Device):
        raise UsageError(f"there is no device {device!r}", hint=f"one of {', '.join(get_args(Device))}")
    if check not in ("headers", "full"):
        raise UsageError(f"check is {check!r}", hint="one of headers, full")
    if device == "npu":
        raise EnvironmentFault(_NO_NPU, hint='use device="host": it gives the same numbers')
    pack = open_pack(path, check)
    if device == "reference":
        options = session_options if session_options is not None else basic_options()
        return PackSession(pack, ReferenceEngine(pack, _opener(pack, options)), device)
    note = None
    if device == "auto":
        note = f"{_NO_NPU}: every site runs on the host"
        if strict and pack.manifest.kernels:
            raise EnvironmentFault(_NO_NPU, where=str(path), hint="load without strict, or with device='host'")
        _log.info("%s: %s", path, note)
    return PackSession(pack, HostEngine(pack, _opener(pack, session_options)), "host", note)


def basic_options() -> ort.SessionOptions:
    """Options at ORT_ENABLE_BASIC, the level at which devices are compared."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return options


def _opener(pack: Pack, options: ort.SessionOptions | None) -> Opener:
    # The caller may change its object after this call; sessions that are opened later must not see that.
    copied = None if options is None else copy_options(options)
    return Opener(pack.path, copied)
