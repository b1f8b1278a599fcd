"""Checks on the protobuf before anything else looks at it.

onnx's checker and onnxruntime disagree on what a valid model is; these are our rules. Refused: whatever has no
single meaning (two initializers of one name, a value defined twice, cycles, undefined values, data that does not fit
its shape). Accepted though others refuse it: unsorted nodes, duplicate node names, the domain "ai.onnx" spelled
out, unknown external-data keys, unknown protobuf fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
import onnx_ir as ir

from onnxpack.errors import ModelError
from onnxpack.graph.external import Folder, Region, locate, refuse_overlaps
from onnxpack.graph.functions import check_functions
from onnxpack.graph.text import text_of

_MIN_IR, _MAX_ELEMENTS = 3, 2**62
_STANDARD = ("", "ai.onnx")


def check(proto: onnx.ModelProto, folder: Folder | None) -> dict[str, Region]:
    """Refuse what has no single meaning; returns the region of each external tensor by its location key.

    `folder` is None for a model that came as an object, which then may hold no external data. ModelError otherwise.
    """
    _check_header(proto)
    domains = _check_opsets(proto.opset_import)
    regions: list[tuple[str, Region]] = []
    for tensor in tensors(proto):
        _check_tensor(tensor, folder, regions)
    refuse_overlaps(regions)
    _check_sparse(proto)
    local = check_functions(proto)
    _check_graph(proto.graph, "graph", set(), domains, local)
    for function in proto.functions:
        own = domains | _check_opsets(function.opset_import)
        known = _names(function.input, f"function {function.name}", "input")
        _check_nodes(function.node, known, list(function.output), f"function {function.name}", own, local)
    return {external_key(tensor): region for tensor, region in _external(proto, regions)}


def external_key(tensor: Any) -> str:
    """What identifies a piece of external data inside one model: location, offset and length as written."""
    entries = {e.key: e.value for e in tensor.external_data}
    numbers = (entries.get("offset") or "0", entries.get("length") or "")
    return "\0".join((entries.get("location", ""), *(number and str(int(number)) for number in numbers)))


def _external(proto: onnx.ModelProto, regions: list[tuple[str, Region]]) -> Iterator[tuple[onnx.TensorProto, Region]]:
    external = [t for t in tensors(proto) if t.data_location == onnx.TensorProto.EXTERNAL]
    yield from zip(external, (region for _, region in regions), strict=True)


def tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every dense tensor of the model: initializers and attributes, in all graphs and functions."""
    for scope in scopes(proto):
        yield from getattr(scope, "initializer", ())
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def sparse_tensors(proto: onnx.ModelProto) -> Iterator[onnx.SparseTensorProto]:
    """Every sparse tensor: initializers and attributes, in all graphs and functions."""
    for scope in scopes(proto):
        yield from getattr(scope, "sparse_initializer", ())
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor"):
                    yield attribute.sparse_tensor
                yield from attribute.sparse_tensors


def scopes(proto: onnx.ModelProto) -> Iterator[Any]:
    """The main graph, the functions, and every graph inside their nodes."""
    stack: list[Any] = [proto.graph, *proto.functions]
    while stack:
        scope = stack.pop()
        yield scope
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    stack.append(attribute.g)
                stack.extend(attribute.graphs)


def _check_header(proto: onnx.ModelProto) -> None:
    if not proto.HasField("graph") or not proto.ir_version:
        raise ModelError("not an ONNX model: it has no graph or no IR version", hint="is this the right file?")
    if not _MIN_IR <= proto.ir_version <= onnx.IR_VERSION:
        raise ModelError(
            f"IR version {proto.ir_version} is not one of {_MIN_IR} to {onnx.IR_VERSION}", hint="export the model again"
        )
    texts = [proto.producer_name, proto.producer_version, proto.domain, proto.doc_string]
    texts += [text for entry in proto.metadata_props for text in (entry.key, entry.value)]
    for scope in scopes(proto):
        texts += [scope.name, scope.doc_string]
    for text in texts:
        text_of(text)


def _check_opsets(imports: Any) -> dict[str, int]:
    newest = onnx.defs.onnx_opset_version()
    versions: dict[str, int] = {}
    for entry in imports:
        domain = "" if entry.domain in _STANDARD else entry.domain
        if versions.setdefault(domain, entry.version) != entry.version:
            raise ModelError(
                f"domain {domain or 'ai.onnx'!r} is imported at two versions", hint="keep one opset_import"
            )
    if "" in versions and not 1 <= versions[""] <= newest:
        raise ModelError(f"opset {versions['']} is unknown", hint=f"opsets 1 to {newest} are known; update onnx")
    if not versions:
        raise ModelError("no opset_import: operators have no meaning without one", hint="export the model again")
    return versions


_DENSE_BYTES = 1 << 28
"""Sparse tensors are made dense; a hostile model could ask for any amount."""


def _check_sparse(proto: onnx.ModelProto) -> None:
    total = 0
    for sparse in sparse_tensors(proto):
        where = f"sparse tensor {text_of(sparse.values.name) or '(unnamed)'}"
        for part in (sparse.values, sparse.indices):
            if part.data_location == onnx.TensorProto.EXTERNAL:
                raise ModelError("it has external data", where=where, hint="save it as a dense tensor")
            _check_tensor(part, None, [])
        if sparse.indices.data_type != onnx.TensorProto.INT64 or sparse.values.data_type == onnx.TensorProto.STRING:
            raise ModelError("its indices are not int64, or its values not numbers", where=where)
        total += math.prod(sparse.dims) * max(1, ir.DataType(sparse.values.data_type).bitwidth // 8)
        if min(sparse.dims, default=0) < 0 or total > _DENSE_BYTES:
            raise ModelError(f"shape {list(sparse.dims)} cannot be made dense", where=where)
        count, indices = list(sparse.values.dims), list(sparse.indices.dims)
        if len(count) != 1 or indices not in (count, [*count, len(sparse.dims)]):
            raise ModelError(f"indices {indices} do not fit values {count}", where=where)


def _check_tensor(tensor: onnx.TensorProto, folder: Folder | None, regions: list[tuple[str, Region]]) -> None:
    where = f"tensor {text_of(tensor.name) or '(unnamed)'}"
    if tensor.data_type not in onnx.TensorProto.DataType.values() or not tensor.data_type:
        raise ModelError(f"data type {tensor.data_type} does not exist", where=where)
    count = 1
    for dim in tensor.dims:
        if dim < 0:
            raise ModelError(f"shape {list(tensor.dims)} has a negative dimension", where=where)
        count *= dim
    if count > _MAX_ELEMENTS:
        raise ModelError(f"shape {list(tensor.dims)} has more elements than memory has bytes", where=where)
    if tensor.data_type == onnx.TensorProto.STRING:
        return
    nbytes = -(-count * ir.DataType(tensor.data_type).bitwidth // 8)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if folder is None:
            raise ModelError("a model given as an object cannot have external data", where=where, hint="pass its path")
        entries = ((text_of(e.key), text_of(e.value)) for e in tensor.external_data)
        regions.append((tensor.name, locate(entries, nbytes, folder, tensor.name)))
        return
    held = _bytes_held(tensor)
    if held != nbytes:
        raise ModelError(
            f"its data has {held} bytes, shape and type need {nbytes}", where=where, hint="file is damaged"
        )


_TYPED_FIELDS: Mapping[int, tuple[str, int]] = {
    onnx.TensorProto.FLOAT: ("float_data", 4),
    onnx.TensorProto.COMPLEX64: ("float_data", 4),
    onnx.TensorProto.DOUBLE: ("double_data", 8),
    onnx.TensorProto.COMPLEX128: ("double_data", 8),
    onnx.TensorProto.INT64: ("int64_data", 8),
    onnx.TensorProto.UINT64: ("uint64_data", 8),
    onnx.TensorProto.UINT32: ("uint64_data", 4),
}
"""Where a type's elements are when they are not raw, and the bytes of one entry; the others are in int32_data."""


def _bytes_held(tensor: onnx.TensorProto) -> int:
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data)
    # int32_data: one element an entry, but types of less than a byte are packed into bytes first
    packed = ("int32_data", max(1, ir.DataType(tensor.data_type).bitwidth // 8))
    field, width = _TYPED_FIELDS.get(tensor.data_type, packed)
    return len(getattr(tensor, field)) * width


def _names(values: Any, where: str, what: str) -> set[str]:
    seen: set[str] = set()
    for name in map(text_of, values):
        if not name:
            raise ModelError(f"an {what} has no name", where=where)
        if name in seen:
            raise ModelError(f"two {what}s are called {name!r}", where=where, hint="they cannot be told apart")
        seen.add(name)
    return seen


def _check_graph(
    graph: onnx.GraphProto, where: str, outer: set[str], domains: Mapping[str, int], local: set[tuple[str, str]]
) -> None:
    known = _names((v.name for v in graph.input), where, "input")
    known |= _names((t.name for t in graph.initializer), where, "initializer")
    known |= _names((t.values.name for t in graph.sparse_initializer), where, "initializer")
    _check_nodes(graph.node, known, [v.name for v in graph.output], where, domains, local, outer)


def _check_nodes(
    nodes: Any,
    known: set[str],
    outputs: list[str],
    where: str,
    domains: Mapping[str, int],
    local: set[tuple[str, str]],
    outer: set[str] | None = None,
) -> None:
    outer = outer or set()
    producer: dict[str, int] = {}
    for index, node in enumerate(nodes):
        _check_node(node, _label(node, index), domains, local)
        for name in filter(None, node.output):
            if name in known or name in producer:
                raise ModelError(f"value {name!r} is defined twice", where=where)
            producer[name] = index
    scope = known | producer.keys() | outer
    order: TopologicalSorter[int] = TopologicalSorter()
    for index, node in enumerate(nodes):
        label = _label(node, index)
        reads = set(filter(None, node.input))
        for attribute in node.attribute:
            for body in [*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs]:
                _check_graph(body, f"{label}, {attribute.name}", scope - set(node.output), domains, local)
                reads |= _captured(body)
        for name in node.input:
            if name and name not in scope:
                raise ModelError(f"input {name!r} is defined nowhere", where=label)
        order.add(index, *(producer[name] for name in reads if name in producer))
    for name in outputs:
        if name and name not in scope:
            raise ModelError(f"output {name!r} is defined nowhere", where=where)
    try:
        order.prepare()
    except CycleError as error:
        first = error.args[1][0]
        raise ModelError("the nodes form a cycle", where=_label(nodes[first], first)) from None


def _captured(body: onnx.GraphProto) -> set[str]:
    """Names that a body reads from outside (a few of its own among them do no harm)."""
    names: set[str] = {v.name for v in body.output}
    stack = [body]
    while stack:
        graph = stack.pop()
        for node in graph.node:
            names.update(node.input)
            for attribute in node.attribute:
                stack += [*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs]
                names.update(v.name for g in attribute.graphs for v in g.output)
    own = {v.name for v in body.input} | {t.name for t in body.initializer}
    own.update(name for node in body.node for name in node.output)
    return names - own


def _label(node: onnx.NodeProto, index: int) -> str:
    return f"node {node.name!r} ({node.op_type})" if node.name else f"node {index} ({node.op_type})"


_PAYLOADS = {
    onnx.AttributeProto.TENSOR: "t",
    onnx.AttributeProto.GRAPH: "g",
    onnx.AttributeProto.SPARSE_TENSOR: "sparse_tensor",
}


def _check_node(node: onnx.NodeProto, label: str, domains: Mapping[str, int], local: set[tuple[str, str]]) -> None:
    for name in (node.domain, node.op_type, node.name, *node.input, *node.output):
        text_of(name)
    for attribute in node.attribute:
        field = _PAYLOADS.get(attribute.type)
        if field and not attribute.HasField(field) and not attribute.ref_attr_name:
            raise ModelError(f"attribute {text_of(attribute.name)!r} is empty", where=label, hint="file is damaged")
    domain = "" if node.domain in _STANDARD else node.domain
    if (node.domain, node.op_type) in local:
        return
    if domain not in domains:
        shown = domain or "ai.onnx"
        raise ModelError(
            f"operator domain {shown!r} is not imported", where=label, hint=f"add an opset_import for {shown!r}"
        )
    schema = None if domain else _schema(node.op_type, domains[domain])
    if schema is None:  # not every operator is known here: exporters put some of their own into ai.onnx
        return
    fewest, types = schema
    if len(node.input) < fewest:
        raise ModelError(f"{len(node.input)} inputs are too few", where=label)
    for attribute in node.attribute:
        wanted = types.get(text_of(attribute.name), attribute.type)
        if attribute.type not in (wanted, onnx.AttributeProto.UNDEFINED):
            kind = onnx.AttributeProto.AttributeType.Name(wanted)
            raise ModelError(f"attribute {attribute.name!r} is not of type {kind}", where=label)


@cache
def _schema(op: str, opset: int) -> tuple[int, Mapping[str, int]] | None:
    """What an operator asks for: how many inputs at least, and the types of its attributes."""
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return None
    attributes: Any = schema.attributes  # its stubs do not say that the types are numbers
    return schema.min_input, {name: int(attribute.type) for name, attribute in attributes.items()}
