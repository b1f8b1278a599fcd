"""A quantized group as the manifest records it: names and numbers, nothing that has to be matched again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from onnxpack.graph.constant import Constant
from onnxpack.graph.constants import evaluate
from onnxpack.graph.paths import path_of
from onnxpack.graph.quantized import Bias, Group, Requantize
from onnxpack.graph.tensors import TensorStore
from onnxpack.pack.manifest import BiasRecord, QdqRecord, RequantizeRecord

_CODES: dict[str, Literal["int8", "uint8"]] = {"INT8": "int8", "UINT8": "uint8"}


def qdq_record(group: Group, node_names: Mapping[str, str], store: TensorStore) -> QdqRecord:
    """The record of a group; `node_names` gives the name in the packed graph of the node with a path."""
    x = group.activation
    bias = None if group.bias is None else _bias(group.bias, node_names)
    requantize = None if group.requantize is None else _requantize(group.requantize, node_names, store)
    if x is None:
        return QdqRecord(None, None, [], [], None, bias, requantize)
    return QdqRecord(
        x.value.name,
        _CODES[x.dtype.name],
        _numbers(x.scale, store),
        [0] if x.zero_point is None else _numbers(x.zero_point, store),
        x.axis,
        bias,
        requantize,
    )


def _bias(bias: Bias, node_names: Mapping[str, str]) -> BiasRecord:
    node = None if bias.node is None else node_names[path_of(bias.node)]
    return BiasRecord(bias.constant.name, "int32" if bias.in_accumulator else "float32", node)


def _requantize(found: Requantize, node_names: Mapping[str, str], store: TensorStore) -> RequantizeRecord:
    zero_point = 0 if found.zero_point is None else _numbers(found.zero_point, store)[0]
    return RequantizeRecord(
        node_names[path_of(found.node)], _numbers(found.scale, store)[0], zero_point, _CODES[found.dtype.name]
    )


def _numbers(constant: Constant, store: TensorStore) -> list[Any]:
    return np.asarray(evaluate(constant, store)).reshape(-1).tolist()
