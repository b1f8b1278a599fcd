"""What every format offers: named fields, exact sizes, encode, decode, and a decoder of standard ONNX operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from onnxpack.errors import UsageError

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]


class Orientation(StrEnum):
    """Which way a format takes a weight: [K, N] as ONNX's MatMul has it, or [N, K] (rows are output features)."""

    KN = "kn"
    NK = "nk"


@dataclass(frozen=True)
class FieldSpec:
    """One stored tensor of an encoded weight."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class View:
    """An initializer of a decoder: the bytes of one field, seen as `spec`, which may be of another type."""

    field: str
    spec: FieldSpec


@dataclass(frozen=True)
class Encoded:
    """A weight in a format: its fields under the format's own tensor names."""

    format: str
    shape: tuple[int, ...]
    fields: Mapping[str, Array]
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all fields."""
        return sum(array.nbytes for array in self.fields.values())

    @property
    def bits_per_weight(self) -> float:
        """True bits per weight, scales and padding included."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return 8 * self.nbytes / count if count else 0.0


@dataclass(frozen=True)
class ErrorSums:
    """Sums over a whole weight that any error figure can be made of: sum of (w - decoded)**2 and of w**2."""

    residual: float
    energy: float

    @property
    def relative_rms(self) -> float:
        """sqrt(residual / energy); 0 for an all-zero weight."""
        return float(np.sqrt(self.residual / self.energy)) if self.energy else 0.0

    def figures(self) -> dict[str, float]:
        """What the manifest keeps: 4 significant digits, so that no machine's last bit shows.

        >>> ErrorSums(2.0, 3.0e4).figures()
        {'relative_rms': 0.008165}
        """
        return {"relative_rms": significant(self.relative_rms)}

    def bands(self) -> dict[str, list[float]]:
        """Figures per band of output features, for formats that know them: name to one value a band."""
        return {}

    @property
    def cosine(self) -> float:
        """Cosine between source and decoded weight; without further sums, the least that it can be.

        >>> round(ErrorSums(1.0, 100.0).cosine, 4)
        0.995
        """
        return float(np.sqrt(max(0.0, 1 - self.relative_rms**2)))


def significant(value: float, digits: int = 4) -> float:
    """Rounded to significant decimal digits."""
    return float(f"{value:.{digits}g}")


@dataclass(frozen=True)
class Decoder:
    """A piece of plain ONNX graph: the views of the fields (inputs, by name) in, the float32 weight out.

    `nodes` and `constants` are onnx NodeProtos and TensorProtos in topological order with names local to this piece;
    whoever splices it in prefixes them. `output` is the name of the result, in the format's own orientation.
    """

    nodes: tuple[Any, ...]
    output: str
    constants: tuple[Any, ...] = ()


class Format(ABC):
    """A way to store one weight. Instances are immutable; parameters are keyword arguments of the constructor."""

    name: ClassVar[str]
    row: ClassVar[str]
    """The row of the source table ("INT8 per-channel", "Q4_K", ...)."""
    family: ClassVar[str]
    orientation: ClassVar[Orientation]
    min_opset: ClassVar[int] = 13
    """Lowest ai.onnx opset at which `decoder` can be written."""
    encodes: ClassVar[bool] = True
    """Whether `encode` works; formats without an encoder can still be decoded."""
    source: ClassVar[str] = ""
    """Whose layout it is: project and file that define it."""
    differs: ClassVar[str] = ""
    """Where the source document describes something else."""
    profile: Any = None
    """The QuantizationProfile that the format is, where it is a declaration."""
    container: ClassVar[str] = "weights.safetensors"
    """File of the pack that holds the fields."""
    takes_any_float: ClassVar[bool] = False
    """Whether encode_into converts float16, bfloat16 and float64 itself, a block at a time."""

    refusal: str = ""
    """Why a pack cannot hold weights in it: nothing encodes them, or a decoded weight alone is not what is stored."""
    has_decoder: bool = True
    """Whether `decoder` can be written with standard operators."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters that differ between instances of the class, JSON values."""
        return {}

    def profile_for(self, shape: tuple[int, ...]) -> Any:
        """The profile for weights of a shape: `profile`, unless runs of codes depend on the number of columns."""
        return self.profile

    @abstractmethod
    def fields(self, shape: tuple[int, ...]) -> dict[str, FieldSpec]:
        """Stored tensors for a weight of this logical shape. UsageError on an impossible shape."""

    def views(self, shape: tuple[int, ...]) -> dict[str, View]:
        """The inputs of `decoder`: names of initializers over the stored bytes. By default the fields themselves."""
        return {name: View(name, spec) for name, spec in self.fields(shape).items()}

    @abstractmethod
    def encode_into(self, w: Array, out: Mapping[str, Array]) -> ErrorSums:
        """Encode `w` into preallocated arrays (shapes of `fields`), a block at a time. ModelError on NaN, infinity."""

    @abstractmethod
    def decode(self, encoded: Encoded) -> F32:
        """The float32 values that the stored fields mean, in the shape of the weight."""

    def decode_columns(self, encoded: Encoded, start: int, stop: int) -> F32:
        """Output features [start, stop) as float32 [K, stop - start]. Formats that can decode no more than that."""
        whole = self.decode(encoded)
        return whole[start:stop].T if self.orientation is Orientation.NK else whole[:, start:stop]

    @abstractmethod
    def decoder(self, shape: tuple[int, ...], opset: int) -> Decoder:
        """Standard operators at `opset` that give `decode`'s values, bit for bit."""

    def encode(self, w: Array) -> Encoded:
        """Encode a weight in memory."""
        out = {name: np.empty(spec.shape, spec.dtype) for name, spec in self.fields(w.shape).items()}
        self.encode_into(w, out)
        return Encoded(self.name, tuple(w.shape), out, self.params)

    def to_bytes(self, encoded: Encoded) -> bytes:
        """All fields, in order of declaration, as one string of bytes."""
        return b"".join(np.ascontiguousarray(encoded.fields[name]).tobytes() for name in self.fields(encoded.shape))

    def from_bytes(self, data: bytes, shape: tuple[int, ...]) -> Encoded:
        """Inverse of to_bytes. UsageError when the length is not the one that the shape asks for."""
        specs = self.fields(shape)
        wanted = sum(spec.nbytes for spec in specs.values())
        if len(data) != wanted:
            raise UsageError(f"format {self.name}: {len(data)} bytes for shape {list(shape)}, expected {wanted}")
        out, offset = {}, 0
        for name, spec in specs.items():
            out[name] = np.frombuffer(data, spec.dtype, int(np.prod(spec.shape)), offset).reshape(spec.shape)
            offset += spec.nbytes
        return Encoded(self.name, tuple(shape), out, self.params)
