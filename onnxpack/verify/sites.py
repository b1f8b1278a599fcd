"""Each bound product by itself, and each stored weight, so that a failure has an address.

A product is compared with its float form, A times the weight as the pack stores it, on activations that really arrive
there: the source model runs with the inputs of its products as outputs, so no site is judged by the errors of those
before it. What storing a weight cost is another question: the weight is decoded, compared with the source's, and must
be as near as the manifest says it was when it was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper

from onnxpack import formats
from onnxpack.errors import ModelError, UsageError
from onnxpack.graph.constants import evaluate
from onnxpack.graph.load import Model, load
from onnxpack.graph.sites import Site, find_sites
from onnxpack.graph.tensors import TensorStore
from onnxpack.pack.manifest import QdqRecord, TensorRecord
from onnxpack.pack.read import Pack
from onnxpack.planning.records import OWN_CODES
from onnxpack.runtime.operands import Operand, operand
from onnxpack.runtime.reference import multiply
from onnxpack.runtime.reference_groups import codes_of, multiply_codes
from onnxpack.runtime.session import basic_options
from onnxpack.types import F32, Array
from onnxpack.verify.inputs import Feed
from onnxpack.verify.refusal import quiet, refused_as

MAX_SITE_ERROR = 0.02
"""Of the largest float result."""
MEASURED_RUNS = 4
"""Activations of so many runs are held in memory at once, and no more."""

_WEIGHT_SLACK = 0.02  # the manifest rounds to 4 digits and adds up in another order
_FOLDER = "session.model_external_initializers_file_folder_path"
_BAND_BYTES = 64 << 20  # of float32 results at a time


@dataclass
class SiteError:
    """One bound site."""

    path: str
    weight: str
    weight_rms: float | None = None
    """Relative RMS difference between the stored weight, decoded, and the source's."""
    recorded_rms: float | None = None
    """The same when it was written, from the manifest."""
    rows: int = 0
    """Rows that were multiplied, over all runs."""
    compared: int = 0
    """Results that are finite in the float product."""
    max_abs: float = 0.0
    max_reference: float = 0.0
    residual: float = 0.0
    energy: float = 0.0
    in_body: bool = False

    @property
    def max_rel(self) -> float | None:
        """max_abs over the largest absolute result of the float product; NaN where the int8 product is NaN."""
        return self.max_abs / self.max_reference if self.max_reference else None

    @property
    def rel_rms(self) -> float | None:
        """RMS of the error over RMS of the float results: tells a wrong weight (near 1) from coarse activations."""
        return math.sqrt(self.residual / self.energy) if self.energy else None

    @property
    def unmeasured(self) -> str | None:
        """Why nothing is known about the site."""
        if self.in_body:
            return "in a body, whose values cannot be seen from outside"
        if not self.compared:
            return "no finite result" if self.rows else "no row was multiplied"
        return "all results are 0" if not self.max_reference and not self.max_abs else None

    def failures(self, limit: float) -> list[str]:
        """What is wrong with it."""
        found = []
        now, then = self.weight_rms, self.recorded_rms
        if now is not None and then is not None and not now <= then * (1 + _WEIGHT_SLACK) + 1e-6:  # NaN is above
            found.append(
                f"{self.path}: weight {self.weight} is {now:.4g} away from the source's, {then:.4g} when it was written"
            )
        if self.unmeasured is not None:
            return found
        if self.max_rel is None:
            found.append(f"{self.path}: the float product is 0 everywhere, the int8 one is not")
        elif not self.max_rel <= limit:
            found.append(f"{self.path}: error {self.max_rel:.4g} of the largest result is above {limit:g}")
        return found

    def add(self, reference: F32, found: F32) -> None:
        """Results of some rows. Where the float product is not finite the int8 one is NaN: those are left out."""
        known = np.isfinite(reference)
        if not known.any():
            return
        with np.errstate(invalid="ignore"):
            difference = np.abs(reference - found, dtype=np.float64)[known]
        worst = float(difference.max())
        self.residual += float(np.square(difference).sum())
        self.energy += float(np.square(reference[known], dtype=np.float64).sum())
        self.compared += int(np.count_nonzero(known))
        self.max_abs = float(np.maximum(self.max_abs, worst))  # unlike max, it keeps a NaN
        self.max_reference = max(self.max_reference, float(np.abs(reference[known]).max()))


def site_errors(pack: Pack, model: str | Path, feeds: Sequence[Feed]) -> list[SiteError]:
    """The error of every bound site of `pack` on the activations that `model`, its source, has there.

    Of the products in bodies only the weights are compared: their inputs cannot be seen from outside. The first
    MEASURED_RUNS feeds are used. UsageError when the sites of the pack are not those of the model.
    """
    loaded = load(model)
    sites = {site.path: site for site in find_sites(loaded)}
    by_weight: dict[str, list[tuple[Site, SiteError]]] = {}
    groups = {record.path: record.qdq for record in pack.manifest.sites}
    errors = []
    for record in pack.manifest.sites:
        if record.weight is None:
            continue
        site = sites.get(record.path)
        if site is None or site.weight is None or (site.k, site.n) != (record.k, record.n):
            raise UsageError(f"has no product {record.path}", where=str(model), hint="name the model of this pack")
        errors.append(SiteError(record.path, record.weight, in_body=site.node.graph is not loaded.ir.graph))
        by_weight.setdefault(record.weight, []).append((site, errors[-1]))
    visible = [site for users in by_weight.values() for site, error in users if not error.in_body]
    activations = _activations(loaded, visible, feeds[:MEASURED_RUNS]) if visible else []
    store = TensorStore(loaded.regions)
    for name, users in by_weight.items():
        _measure(pack, name, users, store, activations, groups)
    return errors


def _measure(
    pack: Pack,
    name: str,
    users: list[tuple[Site, SiteError]],
    store: TensorStore,
    activations: list[dict[str, F32]],
    groups: Mapping[str, QdqRecord | None],
) -> None:
    """All sites of one weight: it is decoded once, and let go."""
    record, weight = pack.tensors[name], operand(pack, name)
    w = stored_matrix(pack, record)
    for site, error in users:
        error.weight_rms = relative_rms(_matrix(site, store), w)
        error.recorded_rms = record.error.get("relative_rms")
        for values in activations:
            if not error.in_body and site.a is not None:
                _one(site, error, values[site.a.name or ""], w, weight, groups[site.path])


def stored_matrix(pack: Pack, record: TensorRecord) -> F32:
    """A packed weight as its format decodes it, float32 [K, N]."""
    if record.format == OWN_CODES:
        return operand(pack, record.name).decoded()
    form = formats.get(record.format, **record.params)
    transposed = form.orientation is formats.Orientation.NK
    shape = record.shape[::-1] if transposed else record.shape
    fields = {name: pack.field(stored) for name, stored in record.fields.items()}
    w = form.decode(formats.Encoded(record.format, tuple(shape), fields, record.params))
    return np.asarray(w.T if transposed else w, np.float32)


def relative_rms(reference: Array, found: F32) -> float:
    """Root of sum (reference - found)**2 over sum reference**2, float64, a few rows at a time.

    >>> relative_rms(np.array([[3.0, 4.0]], np.float32), np.array([[3.0, 3.0]], np.float32))
    0.2
    """
    residual = energy = 0.0
    step = max(1, (_BAND_BYTES // 8) // max(1, reference.shape[1]))
    for start in range(0, len(reference), step):
        r = reference[start : start + step].astype(np.float64)
        residual += float(np.square(r - found[start : start + step]).sum())
        energy += float(np.square(r).sum())
    if energy == 0:
        return 0.0 if residual == 0 else math.inf
    return math.sqrt(residual / energy)


def _one(site: Site, error: SiteError, x: F32, w: F32, weight: Operand, group: QdqRecord | None) -> None:
    a = x.T if site.transposed_a else x
    rows = np.ascontiguousarray(a.reshape(-1, w.shape[0]))
    error.rows += len(rows)
    if not len(rows):
        return
    product = _product(a, rows, group)
    band = max(1, _BAND_BYTES // (4 * max(len(rows), w.shape[0])))
    for start in range(0, w.shape[1], band):
        columns = slice(start, start + band)
        with np.errstate(over="ignore", invalid="ignore"):
            error.add(rows @ w[:, columns], product(weight.columns(columns)))


def _product(a: F32, rows: F32, group: QdqRecord | None) -> Callable[[Operand], F32]:
    """What the devices compute at a site before bias and rounding, as a matrix."""
    if group is None or group.x is None:
        return lambda weight: multiply(rows, weight)
    codes, bare = codes_of(a, group), replace(group, bias=None, requantize=None)
    return lambda weight: multiply_codes(codes, weight, bare, None).reshape(len(rows), -1)


def _matrix(site: Site, store: TensorStore) -> Array:
    """The weight in the source, [K, N]."""
    assert site.weight is not None
    array = evaluate(site.weight, store)
    array = array.reshape(array.shape[-2:])
    return array.T if site.transposed_b else array


def _activations(model: Model, sites: Sequence[Site], feeds: Sequence[Feed]) -> list[dict[str, F32]]:
    """What arrives at the sites in each run, by the name of the value."""
    names = [site.a.name or "" for site in sites if site.a is not None]
    session, outputs = _with_outputs(model, list(dict.fromkeys(names)))
    return [_run(session, outputs, feed, model.where) for feed in feeds]


def _with_outputs(model: Model, names: Sequence[str]) -> tuple[ort.InferenceSession, dict[str, str]]:
    """The model with the values called `names` as its only outputs, float32; gives the output of each name."""
    proto = ir.serde.serialize_model(model.ir)
    assert isinstance(proto, onnx.ModelProto)
    del proto.graph.output[:]
    outputs = {}
    for index, name in enumerate(names):
        outputs[name] = f"onnxpack/a_{index}"
        proto.graph.node.append(helper.make_node("Cast", [name], [outputs[name]], outputs[name], to=TensorProto.FLOAT))
        proto.graph.output.add(name=outputs[name])
    options = quiet(basic_options())
    if model.path is not None:
        options.add_session_config_entry(_FOLDER, str(model.path.absolute().parent))
    with refused_as(lambda why: ModelError(f"onnxruntime refuses it: {why}", where=model.where)):
        return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]), outputs


def _run(session: ort.InferenceSession, outputs: dict[str, str], feed: Feed, where: str) -> dict[str, F32]:
    with refused_as(lambda why: UsageError(f"does not run on these inputs: {why}", where=where)):
        found = session.run(list(outputs.values()), feed)
    return dict(zip(outputs, found, strict=True))


def failures(errors: Sequence[SiteError], limit: float) -> list[str]:
    """What is wrong with these sites. That no product was measured is a failure too."""
    found = [failed for error in errors for failed in error.failures(limit)]
    if not found and all(error.unmeasured is not None for error in errors):
        return ["no site could be measured"]
    return found
