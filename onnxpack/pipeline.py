"""A build: named passes from a model and a plan to a published pack.

load -> plan -> kernels -> layout -> graph -> weights -> digests -> manifest -> publish

Each pass is a function; the report says how long each took. Nothing of that time is in the pack.
"""

from __future__ import annotations

import hashlib
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onnxpack import records
from onnxpack.errors import ModelError, PackError, UsageError
from onnxpack.formats.registry import get
from onnxpack.graph.externalize import lift_large_constants
from onnxpack.graph.load import Model, load
from onnxpack.graph.paths import foreign_operators
from onnxpack.graph.sites import Site, find_sites
from onnxpack.graph.tensors import TensorStore
from onnxpack.kernels.generate import Result
from onnxpack.kernels.listing import result_dict
from onnxpack.kernels.supply import Supply
from onnxpack.pack import manifest as m
from onnxpack.pack.digest import content_digest, files_digest
from onnxpack.pack.kernels import Bound, bind, kernels_of_sites
from onnxpack.pack.publish import publishing, refuse_existing
from onnxpack.pack.qdq import qdq_record
from onnxpack.pack.read import DATA, GRAPH, MANIFEST, open_pack
from onnxpack.pack.sources import FloatSource, OwnSource, Source
from onnxpack.pack.write import OnWeight, Written, write
from onnxpack.plan import Plan, PlannedWeight, weights_of
from onnxpack.planning.fits import check_plan
from onnxpack.reasons import Reason
from onnxpack.shapes import Gemm

_VENDOR = "com.amd"
MIN_COSINE = 0.99
"""A weight that decodes to less than this fails the build unless it is allowed to."""


@dataclass(frozen=True)
class BuildReport:
    """What a build did."""

    pack: str
    content_digest: str
    files_digest: str
    weights: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    coverage: m.Coverage
    seconds: float
    passes: dict[str, float]
    bytes_before: int
    bytes_after: int
    hints: list[str]
    """Lines for the person who built it: what could be had for less loss."""

    def to_dict(self) -> dict[str, Any]:
        """What `build --json` prints."""
        made = records.to_dict(self)
        assert isinstance(made, dict)
        return made


@dataclass
class Clock:
    """Seconds by pass."""

    passes: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.passes[name] = self.passes.get(name, 0.0) + time.perf_counter() - start


def run_build(
    model: Model | str | Path,
    out: str | Path,
    make_plan: Callable[[Model, Sequence[Site]], Plan],
    *,
    supply: Supply | None = None,
    force: bool = False,
    min_cosine: float = MIN_COSINE,
    on_weight: OnWeight | None = None,
) -> BuildReport:
    """Build a pack. UsageError, ModelError, GateError or EnvironmentFault leave `out` as it was."""
    goal, clock = Path(out), Clock()
    refuse_existing(goal, force)
    with clock("load"):
        loaded = model if isinstance(model, Model) else load(model)
    with clock("plan"):
        lifted = lift_large_constants(loaded.ir)
        sites = find_sites(loaded)
        plan = make_plan(loaded, sites)
        _refuse_unpackable(loaded, sites)
        store = TensorStore(loaded.regions)
        sources, users = _sources(loaded, plan, sites)
        check_plan(plan, sites)
    with clock("kernels"):
        kernels = [] if supply is None else supply.get(Gemm.parse(planned.kernel) for planned in plan.kernels)
    with publishing(goal, force) as draft, loaded.located():
        written = write(draft, loaded, store, sources, users, on_weight, min_cosine, clock)
        with clock("manifest"):
            written.changes[:0] = lifted
            bound = bind((result.kernel for result in kernels if result.kernel is not None), draft)
            made = _manifest(loaded, sites, written, store, plan, bound)
            _check_plan_is_met(plan, made)
        with clock("publish"):
            (draft / MANIFEST).write_text(records.dumps(made, indent=1))
            open_pack(draft)
            load(draft / GRAPH)
    left_out = [] if supply is None else [f"kernel left out: {problem}" for problem in supply.library.problems]
    return _report(goal, made, clock, left_out + _notes(plan) + _hints(written), kernels)


def _refuse_unpackable(model: Model, sites: Sequence[Site]) -> None:
    foreign = foreign_operators(model.ir.graph)
    vendor = [f"{domain}.{op}" for domain, ops in foreign.items() if domain.startswith(_VENDOR) for op in ops]
    where = model.where
    if vendor:
        raise ModelError(
            f"uses vendor operators: {', '.join(vendor[:5])}",
            where=where,
            hint="quantize with plain QuantizeLinear/DequantizeLinear (in Quark: A8W8, not BF16, BFP16 or MX types)",
        )
    if not any(site.kind == "weight" for site in sites):
        raise ModelError("it has no matrix product with a constant weight", where=where, hint="see `onnxpack census`")


def _sources(model: Model, plan: Plan, sites: Sequence[Site]) -> tuple[list[Source], dict[str, list[Site]]]:
    """The weights of the plan as they are in this model. UsageError when the plan belongs to another one."""
    if plan.model != model.graph_sha256:
        raise UsageError("the plan was made for another model", where=model.name, hint="run `onnxpack plan` again")
    known = weights_of([site for site in sites if site.bindable])
    sources: list[Source] = []
    users = {}
    for planned in plan.weights:
        if planned.name not in known:
            raise UsageError(
                f"the plan stores weight {planned.name!r}, which the model does not have", where=model.name
            )
        all_users = known[planned.name]
        chosen = [site for site in all_users if site.path in planned.sites]
        if len(chosen) != len(planned.sites) or (planned.k, planned.n) != (all_users[0].k, all_users[0].n):
            raise UsageError(f"the plan does not fit weight {planned.name!r}", where=model.name)
        sources.append(_source(planned, all_users[0]))
        users[planned.name] = chosen
    return sources, users


def _source(planned: PlannedWeight, site: Site) -> Source:
    assert site.weight is not None
    if site.group is not None:
        return OwnSource(planned.name, site.group.weight)
    form = get(planned.format, **planned.params)
    if form.refusal:
        raise UsageError(f"the plan stores weight {planned.name!r} in format {form.name}: {form.refusal}")
    return FloatSource(planned.name, site.weight, site.transposed_b, form)


def _manifest(
    model: Model, sites: Sequence[Site], written: Written, store: TensorStore, plan: Plan, bound: Bound
) -> m.Manifest:
    weight_of = {site.path: written.aliases[name] for name, users in written.users.items() for site in users}
    names = written.node_names
    reasons = {site.path: site.reason for site in plan.unplanned}
    on_kernel = kernels_of_sites(plan.execution, bound)
    made = [
        _site(site, names, weight_of.get(site.path), on_kernel.get(site.path), reasons.get(site.path), store)
        for site in sites
    ]
    files = sorted([*written.files, *bound.files], key=lambda record: record.path)
    tensors = [stored.record for stored in written.stored.values()]
    digests = {file.path: file.sha256 for file in written.files}
    weights_sha = hashlib.sha256(records.dumps(sorted(written.source_digests)).encode()).hexdigest()
    return m.Manifest(
        schema=m.SCHEMA,
        producer=f"onnxpack {version('onnxpack')}",
        source=m.SourceRecord(_portable(model.name), model.graph_sha256, weights_sha, model.opset),
        target=plan.target,
        opset=written.opset,
        domains=written.domains,
        tensors=tensors,
        sites=made,
        kernels=list(bound.records),
        coverage=_coverage(made),
        changes=written.changes,
        files=files,
        content_digest=content_digest(
            digests[GRAPH], digests.get(DATA, ""), tensors, made, bound.records, plan.execution
        ),
        files_digest=files_digest(files),
        plan=plan.execution,
    )


def _portable(name: str) -> str:
    """A file name that is the same text on every system, whatever its bytes were."""
    return unicodedata.normalize("NFC", os.fsencode(name).decode("utf-8", "replace"))


def _site(
    site: Site,
    names: dict[str, str],
    weight: str | None,
    kernel: str | None,
    unplanned: Reason | None,
    store: TensorStore,
) -> m.SiteRecord:
    """`unplanned`: why the plan has no kernel for the site; a planned one has none until its ELF is in the pack."""
    reason = None if kernel is not None else (site.reason or unplanned or Reason.NO_KERNEL).value
    qdq = None if site.group is None or weight is None else qdq_record(site.group, names, store)
    return m.SiteRecord(
        site.path, names[site.path], site.op, site.kind, site.m, site.k, site.n, site.dtype, weight, kernel,
        reason, qdq,
    )  # fmt: skip


def _coverage(sites: Sequence[m.SiteRecord]) -> m.Coverage:
    weight = [site for site in sites if site.kind == "weight"]
    return m.Coverage(
        len(sites),
        len(weight),
        sum(site.weight is not None for site in sites),
        sum(site.kernel is not None for site in sites),
    )


def _check_plan_is_met(plan: Plan, made: m.Manifest) -> None:
    """Every planned site is bound, to a weight in the planned format: what was promised is what was written."""
    formats = {tensor.name: tensor.format for tensor in made.tensors}
    bound = {site.path: formats[site.weight] for site in made.sites if site.weight is not None}
    wanted = {path: weight.format for weight in plan.weights for path in weight.sites}
    if bound != wanted:
        raise PackError("the pack does not hold what the plan says", hint="this is a bug; please report it")


def _notes(plan: Plan) -> list[str]:
    """One line for each reason why weights are not stored as they were asked for."""
    counts = Counter(weight.note for weight in plan.weights if weight.note is not None)
    names = {weight.note: weight.name for weight in reversed(plan.weights)}
    return [f"{names[note]!r}{f' and {count - 1} more' if count > 1 else ''}: {note}" for note, count in counts.items()]


def _hints(written: Written) -> list[str]:
    if not written.users:
        return ["nothing is bound to int8: the pack runs as the source does (`onnxpack census` says why)"]
    grids = sum(stored.looks_dequantized for stored in written.stored.values())
    if not grids:
        return []
    return [
        f"{grids} float weights have the values of dequantized int8: build from the quantized graph (QDQ), "
        "whose own codes are kept without a second loss"
    ]


def _report(goal: Path, made: m.Manifest, clock: Clock, hints: list[str], kernels: Sequence[Result]) -> BuildReport:
    weights = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "format": tensor.format,
            "bytes_before": tensor.source_nbytes,
            "bytes_after": sum(stored.nbytes for stored in tensor.fields.values()),
            **tensor.error,
        }
        for tensor in made.tensors
    ]
    passes = {name: round(seconds, 4) for name, seconds in clock.passes.items()}
    return BuildReport(
        str(goal),
        made.content_digest,
        made.files_digest,
        weights,
        [result_dict(result) for result in kernels],
        made.coverage,
        round(sum(clock.passes.values()), 4),
        passes,
        sum(tensor.source_nbytes for tensor in made.tensors),
        sum(stored.nbytes for tensor in made.tensors for stored in tensor.fields.values()),
        hints,
    )
