"""Write everything of a pack but its manifest into a directory: graph, float data, weights.

The graph is rewritten before a weight is read: sizes are known from shapes alone, so every tensor has its place first
and its bytes, in threads over tensors, afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxpack.errors import GateError, ModelError
from onnxpack.formats.base import FieldSpec
from onnxpack.graph.changes import Change
from onnxpack.graph.externalize import drop_unused_initializers, inline_attribute_tensors, inlined, large_tensors
from onnxpack.graph.load import Model
from onnxpack.graph.paths import all_graphs, all_nodes, foreign_operators
from onnxpack.graph.rewrite import PackedWeight, rewrite
from onnxpack.graph.sites import Site
from onnxpack.graph.tensors import TensorStore, shape_of
from onnxpack.pack import data as float_data
from onnxpack.pack import manifest as m
from onnxpack.pack.container import create
from onnxpack.pack.read import DATA, GRAPH, file_sha256
from onnxpack.pack.sources import FloatSource, OwnSource, Source
from onnxpack.pack.space import require
from onnxpack.pack.weights import (
    Containers,
    Stored,
    containers,
    distinct,
    encode,
    external_leaves,
)
from onnxpack.threads import in_threads
from onnxpack.types import Array

Leaves = dict[int, ir.ExternalTensor]
"""External tensors of the source, by id."""
_TRACE = "stack_trace"
"""Exporters note where on their machine a node came from; a pack says nothing of any machine."""
OnWeight = Callable[[Stored], None]
Clock = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Written:
    """What was written, for the manifest."""

    stored: dict[str, Stored]
    aliases: dict[str, str]
    users: dict[str, list[Site]]
    changes: list[Change]
    node_names: dict[str, str]
    files: list[m.FileRecord]
    source_digests: list[tuple[str, str]]
    """Name and digest of every external tensor that was read."""
    opset: int
    domains: dict[str, list[str]]


def write(
    draft: Path,
    model: Model,
    store: TensorStore,
    sources: list[Source],
    users: dict[str, list[Site]],
    on_weight: OnWeight | None,
    min_cosine: float,
    clock: Clock,
) -> Written:
    """Rewrite the model, in place, and write its files into `draft`."""
    with clock("layout"):
        aliases = distinct(sources, store)
        kept = [source for source in sources if aliases[source.name] == source.name]
        boxes = containers(kept)
    with clock("graph"):
        leaves: Leaves = {}
        for constant in (c for source in sources for c in source.constants):
            leaves |= external_leaves(constant)
        packed = _packed_weights(kept, boxes, model.opset)
        joined = [
            (weight, [u for n, us in users.items() if aliases[n] == name for u in us])
            for name, weight in packed.items()
        ]
        changes, node_names = rewrite(model, joined)
        ours = [tensor for weight in packed.values() for tensor in weight.tensors.values()]
        ours += _redirect_codes(sources, aliases, boxes)
        floats = _externalize(model, store, ours, leaves)
        graph = _serialize(model)
        (draft / GRAPH).write_bytes(graph)
        require(draft, boxes.nbytes + floats.nbytes)
    with clock("weights"):
        stored, data_sha, digests = _fill(draft, store, kept, boxes, floats, leaves, on_weight, min_cosine)
    with clock("digests"):
        files = [m.FileRecord(GRAPH, len(graph), hashlib.sha256(graph).hexdigest())]
        if floats.nbytes:
            files.append(m.FileRecord(DATA, floats.nbytes, data_sha))
        files += [m.FileRecord(file, plan.nbytes, file_sha256(draft / file)) for file, plan in boxes.layouts.items()]
        files.sort(key=lambda record: record.path)
    foreign = foreign_operators(model.ir.graph)
    return Written(stored, aliases, users, changes, node_names, files, digests, model.opset, foreign)


def _packed_weights(kept: list[Source], boxes: Containers, opset: int) -> dict[str, PackedWeight]:
    packed = {}
    for source in kept:
        if not isinstance(source, FloatSource):
            continue
        made, shape = source.encoder, source.format_shape
        tensors = {
            name: _external(made.container, boxes.place(source.name, view.field).offset, view.spec, name)
            for name, view in made.views(shape).items()
        }
        packed[source.name] = PackedWeight(source.name, tensors, made.decoder(shape, opset), made.orientation)
    return packed


def _external(file: str, offset: int, spec: FieldSpec, name: str) -> ir.ExternalTensor:
    dtype = ir.DataType.from_numpy(spec.dtype)
    return ir.ExternalTensor(file, offset, spec.nbytes, dtype, shape=ir.Shape(spec.shape), name=name)


def _redirect_codes(sources: list[Source], aliases: dict[str, str], boxes: Containers) -> list[ir.ExternalTensor]:
    """Let the graph's own codes be read where they are stored as operands, so that no byte is stored twice."""
    made = []
    for source in sources:
        value = source.own.initializer if isinstance(source, OwnSource) else None
        if value is None:
            continue
        place = boxes.place(aliases[source.name], "codes")
        tensor = _external(source.container, place.offset, place.spec, value.name or "")
        value.const_value = tensor
        made.append(tensor)
    return made


def _externalize(
    model: Model, store: TensorStore, packed: list[ir.ExternalTensor], leaves: Leaves
) -> float_data.DataLayout:
    """Give every large tensor that stays float its place in the data file; remember the external ones among them."""
    drop_unused_initializers(model.ir)
    inline_attribute_tensors(model.ir, store)
    for graph in all_graphs(model.ir.graph):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor) and not value.const_value.nbytes:
                value.const_value = inlined(value.const_value, store)  # no bytes: there may be no file to name
    values = large_tensors(model.ir, {id(tensor) for tensor in packed})
    tensors = [value.const_value for value in values if value.const_value is not None]
    leaves.update({id(t): t for t in tensors if isinstance(t, ir.ExternalTensor)})
    plan = float_data.lay_out(tensors, store)
    for value, tensor in zip(values, tensors, strict=True):
        offset = plan.offsets[plan.place_of[id(tensor)]]
        value.const_value = ir.ExternalTensor(
            DATA,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(shape_of(tensor)),
            name=value.name or "",
        )
    return plan


def _serialize(model: Model) -> bytes:
    for node in all_nodes(model.ir.graph):
        for key in [key for key in node.metadata_props if key.endswith(_TRACE)]:
            del node.metadata_props[key]
    try:
        data: bytes = ir.serde.serialize_model(model.ir).SerializeToString(deterministic=True)
    except (ir.serde.SerdeError, ValueError, TypeError) as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise ModelError(f"the graph cannot be written: {cause[:200]}") from None
    return data


def _fill(
    draft: Path,
    store: TensorStore,
    kept: list[Source],
    boxes: Containers,
    floats: float_data.DataLayout,
    leaves: Leaves,
    on_weight: OnWeight | None,
    min_cosine: float,
) -> tuple[dict[str, Stored], str, list[tuple[str, str]]]:
    """Write all bytes: float data, weights, and the digests of what was read, in threads over tensors."""
    tasks: list[Callable[[], Any]] = []
    sizes = []
    if floats.nbytes:
        tasks.append(partial(float_data.write, draft / DATA, floats, store))
        sizes.append(floats.nbytes)
    with ExitStack() as stack:
        arrays: dict[tuple[str, str], Array] = {}
        for file, plan in boxes.layouts.items():
            mapped = stack.enter_context(create(draft / file, plan))
            arrays |= {(file, name): array for name, array in mapped.items()}
        for tensor in leaves.values():
            tasks.append(partial(_digest, store, tensor))
            sizes.append(tensor.nbytes)
        for source in kept:
            tasks.append(partial(_encode, source, store, boxes, arrays, on_weight, min_cosine))
            sizes.append(source.constants[0].nbytes)
        results = in_threads(tasks, sizes)
        arrays.clear()
    stored = {result.record.name: result for result in results if isinstance(result, Stored)}
    digests = [result for result in results if isinstance(result, tuple)]
    return stored, results[0] if floats.nbytes else "", digests


def _digest(store: TensorStore, tensor: ir.ExternalTensor) -> tuple[str, str]:
    return tensor.name, store.digest(tensor)


def _encode(
    source: Source,
    store: TensorStore,
    boxes: Containers,
    out: dict[tuple[str, str], Array],
    on_weight: OnWeight | None,
    min_cosine: float,
) -> Stored:
    made = encode(source, store, boxes, out)
    if made.cosine < min_cosine:
        raise GateError(
            f"cosine {made.cosine:.4f} with its source in format {source.format}, {min_cosine:g} is asked for",
            where=f"tensor {source.root.name}",
            hint="choose another format for it, or allow the loss with --min-cosine",
        )
    if on_weight is not None:
        on_weight(made)
    return made
