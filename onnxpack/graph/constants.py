"""Constants seen through views: what a weight is, without reading its bytes.

A weight is rarely an initializer pure and simple. `ConstantResolver` follows a value back through the operators of
`VIEWS` to the tensors it is made of, and knows shape and type of every step; `evaluate` makes the numbers, without a
copy wherever numpy can view the stored bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxpack.errors import ModelError
from onnxpack.graph import views
from onnxpack.graph.constant import Constant
from onnxpack.graph.paths import path_of
from onnxpack.graph.tensors import TensorStore, shape_of
from onnxpack.reasons import Reason
from onnxpack.types import Array


class ConstantResolver:
    """Finds constants; remembers what it has found."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._known: dict[ir.Value, Constant | None] = {}

    def resolve(self, value: ir.Value | None) -> Constant | None:
        """The constant behind a value, or None when it is computed at run time. ModelError on malformed views."""
        if value is None:
            return None
        stack = [value]  # explicit: chains of views may be longer than Python's recursion limit
        while stack:
            at = stack[-1]
            if at in self._known:
                stack.pop()
                continue
            waiting = [v for v in self._needs(at) if v not in self._known]
            if waiting:
                stack += waiting
            else:
                self._known[at] = self._make(at)
                stack.pop()
        return self._known[value]

    def _needs(self, value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        if node is None or node.domain not in views.DOMAINS or node.op_type not in views.VIEWS:
            return []
        return [v for v in node.inputs if v is not None]

    def _make(self, value: ir.Value) -> Constant | None:
        node, name = value.producer(), value.name or ""
        if node is None:
            return self._initializer(value, name)
        if node.domain in views.DOMAINS and node.op_type == "Constant":
            tensor = views.constant_tensor(node)
            return None if tensor is None else _leaf(name, tensor)
        if not self._needs(value) or any(attribute.is_ref() for attribute in node.attributes.values()):
            return None
        inputs = [None if v is None else self._known[v] for v in node.inputs]
        missing = [i for i, v in enumerate(node.inputs) if v is not None and inputs[i] is None]
        reason = next((c.reason for c in inputs if c is not None and c.reason is not None), None)
        if missing:
            if node.op_type != "DequantizeLinear" or 0 in missing:
                return None
            reason = Reason.SCALE_NOT_CONSTANT
        index = value.index() or 0
        view = views.VIEWS[node.op_type]
        try:
            shape, dtype = view.result(node, inputs, index, self._small)
            if math.prod(shape) > MAX_ELEMENTS:
                raise ValueError(f"its result {list(shape)} has more elements than memory has bytes")
        except (ValueError, IndexError, TypeError, KeyError, OverflowError) as error:
            raise ModelError(f"{error}", where=path_of(node)) from None
        return Constant(name, shape, dtype, None, node, index, tuple(inputs), reason)

    def _initializer(self, value: ir.Value, name: str) -> Constant | None:
        if value.const_value is None:
            return None
        reason = Reason.OVERRIDABLE_WEIGHT if value.is_graph_input() else None
        return _leaf(name, value.const_value, reason)

    def _small(self, constant: Constant) -> Array:
        """Values of a shape or an axis list: the only bytes that are read to know what a weight is."""
        if any(math.prod(part.shape) > _SMALL_ELEMENTS for part in _parts(constant)):
            raise ValueError(f"{constant.name!r} is too long for a shape")
        return evaluate(constant, self._store)


def _leaf(name: str, tensor: ir.TensorProtocol, reason: Reason | None = None) -> Constant:
    return Constant(name, shape_of(tensor), tensor.dtype, tensor, reason=reason)


MAX_ELEMENTS = 2**62
"""So that every count of elements and bytes is an int64."""

_SMALL_ELEMENTS = 1024
_GROWTH, _ALWAYS_ALLOWED = 64, 256 << 20
"""A constant that is computed may take that many times its stored bytes, and so many bytes in any case. The most that
formats need is 16 (two bits to float32); a fill value blown up by Expand and added to itself could ask for anything."""


def _parts(constant: Constant) -> list[Constant]:
    """A constant and everything it is made of, each once."""
    found: dict[Constant, None] = {}
    stack = [constant]
    while stack:
        at = stack.pop()
        if at not in found:
            found[at] = None
            stack += [c for c in at.inputs if c is not None]
    return list(found)


def evaluate(constant: Constant, store: TensorStore, *, widen: bool = True) -> Array:
    """The numbers of a constant. A view of the stored bytes where possible; do not write to it.

    Without `widen`, a weight that is stored in 16 bits and only cast and viewed on its way comes as it is stored, so
    that whoever reads it block by block never has all of it in float32; its values are the same.

    ModelError when an operator cannot be applied, or would need far more memory than the bytes it starts from.
    """
    limit = max(_ALWAYS_ALLOWED, _GROWTH * sum(part.nbytes for part in _parts(constant) if part.tensor is not None))
    skipped = set() if widen else _widening_casts(constant)
    done: dict[Constant, Array] = {}
    stack = [constant]
    while stack:
        at = stack[-1]
        if at in done:
            stack.pop()
            continue
        waiting = [c for c in at.inputs if c is not None and c not in done]
        if waiting:
            stack += waiting
            continue
        if at.tensor is not None:
            done[at] = store.array(at.tensor)
        elif at in skipped:
            assert at.inputs[0] is not None
            done[at] = done[at.inputs[0]]
        else:
            assert at.node is not None
            done[at] = _apply(at, at.node, [None if c is None else done[c] for c in at.inputs], limit)
        stack.pop()
    return done[constant]


def _widening_casts(constant: Constant) -> set[Constant]:
    """The casts from 16-bit floats to float32 between a weight and its root, when all else between is views."""
    at, found = constant, set[Constant]()
    while at.tensor is None:
        inner = at.inputs[0] if at.inputs else None
        if inner is None or at.node is None:
            return set()
        if at.node.op_type == "Cast" and at.dtype == ir.DataType.FLOAT and inner.dtype in _SIXTEEN_BIT:
            found.add(at)
        elif at.node.op_type not in views.SAME_VALUES:
            return set()
        at = inner
    return found


_SIXTEEN_BIT = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _apply(at: Constant, node: ir.Node, arrays: Sequence[Array | None], limit: int) -> Array:
    if at.nbytes > limit and node.op_type not in views.WITHOUT_COPY:
        raise ModelError(f"{at.nbytes} bytes would have to be computed", where=path_of(node), hint="fold constants")
    try:
        return views.VIEWS[node.op_type].apply(node, arrays, at.index)
    except (ValueError, IndexError, TypeError, KeyError, OverflowError) as error:
        raise ModelError(f"cannot be computed: {error}", where=path_of(node)) from None


def structure(constant: Constant) -> str:
    """Equal for constants that are made of the same stored tensor in the same way, whatever their values are called."""
    done: dict[Constant, str] = {}
    stack = [constant]
    while stack:
        at = stack[-1]
        waiting = [c for c in at.inputs if c is not None and c not in done]
        if at in done or waiting:
            stack = stack[:-1] if at in done else stack + waiting
            continue
        done[at] = _structure_of(at, ["" if c is None else done[c] for c in at.inputs])
        stack.pop()
    return done[constant]


def _structure_of(at: Constant, inputs: list[str]) -> str:
    if at.tensor is not None:
        return f"{at.name!r}@{id(at.tensor)}"
    assert at.node is not None
    if at.node.op_type == "Identity":
        return inputs[0]
    attributes = sorted(f"{name}={attribute.value!r}" for name, attribute in at.node.attributes.items())
    text = f"{at.node.op_type}[{at.index}]({','.join(attributes)})({';'.join(inputs)})"
    return hashlib.sha256(text.encode()).hexdigest()
