"""How values cross from one session to the next: as Python objects, so types that numpy lacks travel as float32.

bfloat16, the float8 types and the 2 and 4 bit types all fit float32 exactly; a Cast on either side changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
from onnx import TensorProto, TypeProto, helper

from onnxpack.errors import PackError
from onnxpack.runtime.graphs import Names

_NUMPY_HAS = {
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.FLOAT16,
    TensorProto.INT8,
    TensorProto.INT16,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT8,
    TensorProto.UINT16,
    TensorProto.UINT32,
    TensorProto.UINT64,
    TensorProto.BOOL,
    TensorProto.STRING,
}


def tensor_type(kind: int, shape: Sequence[int | str | None] | None) -> TypeProto:
    """Type of a tensor; a dimension of None is unknown, a shape of None has an unknown rank."""
    return helper.make_tensor_type_proto(kind, shape)


def parse_type(text: str, shape: Sequence[int | str | None]) -> TypeProto:
    """The type that onnxruntime writes as `text`, for example ``seq(tensor(float))``.

    onnxruntime gives the shape [] both for scalars and for unknown rank, so [] says nothing.

    >>> parse_type("tensor(int64)", [2, "n"]).tensor_type.shape.dim[1].dim_param
    'n'
    >>> parse_type("seq(tensor(float16))", []).sequence_type.elem_type.tensor_type.elem_type
    10
    """
    outer, _, inner = text.removesuffix(")").partition("(")
    if outer == "tensor":
        return tensor_type(_element(inner), shape or None)
    made = TypeProto()
    if outer == "seq":
        made.sequence_type.elem_type.CopyFrom(parse_type(inner, []))
    elif outer == "optional":
        made.optional_type.elem_type.CopyFrom(parse_type(inner, []))
    elif outer == "map":
        key, _, value = inner.partition(",")
        made.map_type.key_type = _element(key)
        made.map_type.value_type.CopyFrom(parse_type(value.strip(), []))
    elif outer == "sparse_tensor":
        made.sparse_tensor_type.elem_type = _element(inner)
    else:
        raise PackError(f"values of type {text} cannot be handed from one session to the next", hint=_HOST)
    return made


_HOST = "use device='host'"


def _element(name: str) -> int:
    try:
        return int(TensorProto.DataType.Value(name.strip().upper()))
    except ValueError:
        raise PackError(f"element type {name!r} is not one this version knows", hint=_HOST) from None


def travels_as_float(kind: TypeProto) -> bool:
    """Whether a value of this type must be cast to cross. PackError for containers of such tensors."""
    if kind.HasField("tensor_type"):
        return kind.tensor_type.elem_type not in _NUMPY_HAS
    for holder in ("sequence_type", "optional_type"):
        if kind.HasField(holder) and travels_as_float(getattr(kind, holder).elem_type):
            raise PackError("a sequence of a type that numpy lacks cannot cross between sessions", hint=_HOST)
    return False


def cast_inputs(part: onnx.ModelProto, inputs: Iterable[str]) -> dict[str, str]:
    """Make these inputs of a segment arrive as float32; gives their new names. In place."""
    names, renamed, wanted = Names(part), {}, set(inputs)
    for value in part.graph.input:
        if value.name in wanted:
            inner, outer = value.name, names.fresh(f"{value.name}/from_float32")
            renamed[inner] = outer
            part.graph.node.insert(
                0, helper.make_node("Cast", [outer], [inner], outer, to=value.type.tensor_type.elem_type)
            )
            value.name, value.type.tensor_type.elem_type = outer, TensorProto.FLOAT
    return renamed


def cast_outputs(part: onnx.ModelProto, outputs: Iterable[str]) -> dict[str, str]:
    """Make these outputs of a segment leave as float32; gives their new names. In place."""
    names, renamed, wanted = Names(part), {}, set(outputs)
    for value in part.graph.output:
        if value.name in wanted:
            inner, outer = value.name, names.fresh(f"{value.name}/to_float32")
            renamed[inner] = outer
            part.graph.node.append(helper.make_node("Cast", [inner], [outer], outer, to=TensorProto.FLOAT))
            value.name = outer
    return renamed
