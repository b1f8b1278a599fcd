"""Checks on model-local functions before they are inlined: no two of one name, no recursion, no explosion.

A chain of functions that each call the next one twice doubles with every link, so a small file could ask for any
amount of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx

from onnxpack.errors import ModelError
from onnxpack.graph.text import text_of

MAX_NODES = 500_000
"""More nodes than this are not made out of functions; the largest exports have some ten thousand."""

Key = tuple[str, str]


def check_functions(proto: onnx.ModelProto) -> set[Key]:
    """The functions of a model by (domain, name). ModelError when inlining them would not end, or not end well."""
    functions: dict[Key, onnx.FunctionProto] = {}
    for function in proto.functions:
        for name in (function.domain, function.name, *function.input, *function.output):
            text_of(name)
        if (function.domain, function.name) in functions:
            raise ModelError("is defined twice", where=_label((function.domain, function.name)))
        functions[function.domain, function.name] = function
    calls = {key: _calls(function, functions) for key, function in functions.items()}
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise ModelError("calls itself", where=_label(error.args[1][0])) from None
    size: dict[Key, int] = {}
    for key in order:
        size[key] = sum(1 for _ in _nodes(functions[key])) + sum(size[callee] for callee in calls[key])
    total = sum(size[callee] for callee in _calls(proto.graph, functions))
    if total > MAX_NODES:
        raise ModelError(f"its local functions stand for {total} nodes", hint=f"at most {MAX_NODES} are read")
    return set(functions)


def _calls(scope: Any, functions: dict[Key, onnx.FunctionProto]) -> list[Key]:
    return [key for node in _nodes(scope) if (key := (node.domain, node.op_type)) in functions]


def _nodes(scope: Any) -> Iterator[onnx.NodeProto]:
    stack = [scope]
    while stack:
        for node in stack.pop().node:
            yield node
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    stack.append(attribute.g)
                stack.extend(attribute.graphs)


def _label(key: Key) -> str:
    return f"function {key[0]}.{key[1]}"
