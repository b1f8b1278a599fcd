"""Each bound product by itself: its float form beside its int8 form, on the activations that really arrive there.

The source model runs once more with the inputs of its products as further outputs, so no site is judged by the errors
of those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper

from onnxpack.errors import ModelError, UsageError
from onnxpack.graph.constants import evaluate
from onnxpack.graph.load import Model, load
from onnxpack.graph.sites import Site, find_sites
from onnxpack.graph.tensors import TensorStore
from onnxpack.pack.read import Pack
from onnxpack.runtime.operands import Operand, operand
from onnxpack.runtime.reference import multiply
from onnxpack.runtime.session import basic_options
from onnxpack.types import F32, Array
from onnxpack.verify.inputs import Feed
from onnxpack.verify.refusal import refused_as

MAX_SITE_ERROR = 0.02
"""Of the largest float result: what int8 with a scale per row and per column stays well below."""

_FOLDER = "session.model_external_initializers_file_folder_path"
_BAND_BYTES = 64 << 20  # of float32 results at a time


@dataclass
class SiteError:
    """One bound site."""

    path: str
    weight: str
    rows: int = 0
    """Rows that were multiplied, over all runs."""
    compared: int = 0
    """Results that are finite in the float product."""
    max_abs: float = 0.0
    max_reference: float = 0.0
    in_body: bool = False

    @property
    def max_rel(self) -> float | None:
        """max_abs over the largest absolute result of the float product; NaN where the int8 product is NaN."""
        return self.max_abs / self.max_reference if self.max_reference else None

    @property
    def unmeasured(self) -> str | None:
        """Why nothing is known about the site."""
        if self.in_body:
            return "in a body, whose values cannot be seen from outside"
        if not self.compared:
            return "no finite result" if self.rows else "no row was multiplied"
        return "all results are 0" if not self.max_reference and not self.max_abs else None

    def failure(self, limit: float) -> str | None:
        """What is wrong with it."""
        if self.unmeasured is not None:
            return None
        if self.max_rel is None:
            return f"{self.path}: the float product is 0 everywhere, the int8 one is not"
        if not self.max_rel <= limit:  # NaN is not below anything
            return f"{self.path}: error {self.max_rel:.4g} of the largest result is above {limit:g}"
        return None

    def add(self, reference: F32, found: F32) -> None:
        """Results of some rows. Where the float product is not finite the int8 one is NaN: those are left out."""
        known = np.isfinite(reference)
        if not known.any():
            return
        with np.errstate(invalid="ignore"):
            worst = float(np.abs(reference - found)[known].max())
        self.compared += int(np.count_nonzero(known))
        self.max_abs = worst if not worst <= self.max_abs else self.max_abs
        self.max_reference = max(self.max_reference, float(np.abs(reference[known]).max()))


def site_errors(pack: Pack, model: str | Path, feeds: Iterable[Feed]) -> list[SiteError]:
    """The error of every bound site of `pack` on the activations that `model`, its source, has there.

    Sites in bodies are listed and not measured: their inputs cannot be seen from outside. UsageError when the sites of
    the pack are not those of the model.
    """
    loaded = load(model)
    sites = {site.path: site for site in find_sites(loaded)}
    errors, measured = [], []
    for record in pack.manifest.sites:
        if record.weight is None:
            continue
        site = sites.get(record.path)
        if site is None or site.weight is None or (site.k, site.n) != (record.k, record.n):
            raise UsageError(f"has no product {record.path}", where=str(model), hint="name the model of this pack")
        error = SiteError(record.path, record.weight, in_body=site.node.graph is not loaded.ir.graph)
        errors.append(error)
        if not error.in_body:
            measured.append((site, error))
    if measured:
        _measure(pack, loaded, measured, feeds)
    return errors


def _measure(pack: Pack, model: Model, measured: Sequence[tuple[Site, SiteError]], feeds: Iterable[Feed]) -> None:
    names = [site.a.name or "" for site, _ in measured if site.a is not None]
    session, outputs = _with_outputs(model, list(dict.fromkeys(names)))
    store = TensorStore(model.regions)
    operands: dict[str, Operand] = {}
    for feed in feeds:
        values = _run(session, outputs, feed, model.where)
        for site, error in measured:
            assert site.a is not None
            if error.weight not in operands:
                operands[error.weight] = operand(pack, error.weight)
            _one(site, error, values[site.a.name or ""], _matrix(site, store), operands[error.weight])


def _one(site: Site, error: SiteError, x: F32, w: Array, weight: Operand) -> None:
    a = x.T if site.transposed_a else x
    a = np.ascontiguousarray(a.reshape(-1, w.shape[0]))
    error.rows += len(a)
    if not len(a):
        return
    band = max(1, _BAND_BYTES // (4 * max(len(a), w.shape[0])))
    for start in range(0, w.shape[1], band):
        columns = slice(start, start + band)
        with np.errstate(over="ignore", invalid="ignore"):
            reference = np.asarray(a @ w[:, columns].astype(np.float32, copy=False), np.float32)
            part = Operand(weight.codes[:, columns], weight.scales[columns])
            error.add(reference, multiply(a, part))


def _matrix(site: Site, store: TensorStore) -> Array:
    """The weight in the source, [K, N]."""
    assert site.weight is not None
    array = evaluate(site.weight, store)
    array = array.reshape(array.shape[-2:])
    return array.T if site.transposed_b else array


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
    options = basic_options()
    if model.path is not None:
        options.add_session_config_entry(_FOLDER, str(model.path.absolute().parent))
    with refused_as(lambda why: ModelError(f"onnxruntime refuses it: {why}", where=model.where)):
        return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]), outputs


def _run(session: ort.InferenceSession, outputs: dict[str, str], feed: Feed, where: str) -> dict[str, F32]:
    with refused_as(lambda why: UsageError(f"does not run on these inputs: {why}", where=where)):
        found = session.run(list(outputs.values()), feed)
    return dict(zip(outputs, found, strict=True))


def failures(errors: Sequence[SiteError], limit: float) -> list[str]:
    """What is wrong with these sites. That none was measured is a failure too."""
    if all(error.unmeasured is not None for error in errors):
        return ["no site could be measured"]
    return [failed for error in errors if (failed := error.failure(limit)) is not None]
