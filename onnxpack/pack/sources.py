"""What is to be stored: float weights that a format encodes, and weights whose codes the graph already has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpack.formats.base import ErrorSums, FieldSpec, Format, Orientation
from onnxpack.graph.constant import Constant
from onnxpack.graph.constants import evaluate
from onnxpack.graph.quantized import OwnWeight
from onnxpack.graph.tensors import TensorStore
from onnxpack.planning.records import OWN_CODES
from onnxpack.quant.grid import on_a_grid
from onnxpack.types import Array


class Source(ABC):
    """One weight to store."""

    name: str
    transposed: bool

    @property
    @abstractmethod
    def constants(self) -> tuple[Constant, ...]:
        """What it is made of; the first is the weight itself."""

    @property
    @abstractmethod
    def format(self) -> str:
        """Format id."""

    @property
    @abstractmethod
    def params(self) -> Mapping[str, Any]:
        """Parameters of the format."""

    @property
    @abstractmethod
    def container(self) -> str:
        """The file that holds the fields."""

    @abstractmethod
    def fields(self) -> dict[str, FieldSpec]:
        """Stored tensors."""

    @abstractmethod
    def numbers(self, store: TensorStore) -> list[Array]:
        """What two sources of one format and shape must have in common to be one weight."""

    @abstractmethod
    def fill(self, store: TensorStore, out: Mapping[str, Array]) -> ErrorSums:
        """Write the fields. ModelError when a value is not finite."""

    def looks_dequantized(self, store: TensorStore) -> bool:
        """Whether it is float, but its values are those of int8 codes times a scale."""
        return False

    @property
    def root(self) -> Constant:
        """The stored tensor of the model that the weight comes from."""
        return self.constants[0].root

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        k, n = self.constants[0].shape[-2:]
        return (n, k) if self.transposed else (k, n)


@dataclass(frozen=True)
class FloatSource(Source):
    """A float constant, seen as a matrix [K, N], to be encoded."""

    name: str
    constant: Constant
    transposed: bool
    encoder: Format

    @property
    def constants(self) -> tuple[Constant, ...]:
        return (self.constant,)

    @property
    def format(self) -> str:
        return self.encoder.name

    @property
    def params(self) -> Mapping[str, Any]:
        return self.encoder.params

    @property
    def container(self) -> str:
        return self.encoder.container

    @property
    def format_shape(self) -> tuple[int, int]:
        """The shape in the orientation that the format takes."""
        k, n = self.shape
        return (k, n) if self.encoder.orientation is Orientation.KN else (n, k)

    def fields(self) -> dict[str, FieldSpec]:
        return self.encoder.fields(self.format_shape)

    def numbers(self, store: TensorStore) -> list[Array]:
        array = evaluate(self.constant, store, widen=not self.encoder.takes_any_float)
        array = array.reshape(array.shape[-2:])
        return [array.T if self.transposed else array]

    def fill(self, store: TensorStore, out: Mapping[str, Array]) -> ErrorSums:
        return self.encoder.encode_into(self._matrix(store), out)

    def looks_dequantized(self, store: TensorStore) -> bool:
        return on_a_grid(self.numbers(store)[0])

    def _matrix(self, store: TensorStore) -> Array:
        """The numbers in the format's orientation; a view of the stored bytes wherever that is possible."""
        (array,) = self.numbers(store)
        if self.encoder.orientation is Orientation.NK:
            array = array.T
        if not self.encoder.takes_any_float and array.dtype != np.float32:
            array = array.astype(np.float32)
        return array


@dataclass(frozen=True)
class OwnSource(Source):
    """Codes, scales and zero points of the graph, copied as they are."""

    name: str
    own: OwnWeight

    @property
    def transposed(self) -> bool:  # type: ignore[override]
        return self.own.transposed

    @property
    def constants(self) -> tuple[Constant, ...]:
        return self.own.constants

    @property
    def format(self) -> str:
        return OWN_CODES

    @property
    def params(self) -> Mapping[str, Any]:
        return {"transposed": self.own.transposed}

    @property
    def container(self) -> str:
        return "weights.safetensors"

    def fields(self) -> dict[str, FieldSpec]:
        names = ("codes", "scales", "zero_points")
        return {n: FieldSpec(_stored_type(c.dtype), c.shape) for n, c in zip(names, self.constants, strict=False)}

    def numbers(self, store: TensorStore) -> list[Array]:
        return [evaluate(constant, store) for constant in self.constants]

    def fill(self, store: TensorStore, out: Mapping[str, Array]) -> ErrorSums:
        for constant, array in zip(self.constants, out.values(), strict=True):
            array[...] = evaluate(constant, store)
        return ErrorSums(0.0, 0.0)


def _stored_type(dtype: ir.DataType) -> np.dtype[Any]:
    """Codes of less than a byte are stored as bytes: they are operands, and the graph keeps its own packed ones."""
    wide = {ir.DataType.INT4: np.int8, ir.DataType.UINT4: np.uint8}
    return np.dtype(wide[dtype]) if dtype in wide else dtype.numpy()
