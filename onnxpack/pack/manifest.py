"""The manifest `pack.json`: the only file of a pack that a reader must parse.

No time, host name or absolute path stands anywhere in it: the same input gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from onnxpack.graph.changes import Change
from onnxpack.planning.records import Execution

SCHEMA = "onnxpack/pack/1.0"
"""Schema name and version. A reader refuses another major version and ignores keys it does not know."""

Dim = int | str | None
"""A dimension: a number, a symbol of the graph, or null when unknown."""


@dataclass(frozen=True)
class FileRecord:
    """One file of the pack, POSIX path relative to it. Covered by the files digest."""

    path: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class FieldRecord:
    """One stored tensor: where its bytes are and what they mean."""

    file: str
    offset: int
    nbytes: int
    dtype: str
    """numpy or ml_dtypes name, little endian."""
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """One packed weight, stored once however many sites use it."""

    name: str
    shape: tuple[int, ...]
    """Logical shape, [K, N]."""
    format: str
    params: dict[str, Any]
    fields: dict[str, FieldRecord]
    source: str
    """Root tensor in the source model."""
    source_nbytes: int
    error: dict[str, float]
    """Against the source: relative_rms, and what more the format tells. 4 significant digits."""
    bands: dict[str, list[float]] = field(default_factory=dict)
    """The same figures per band of 32 output features, where the format has bands."""


@dataclass(frozen=True)
class BiasRecord:
    """A constant added per column. `value` names it in the graph: int32 codes, or float32 values."""

    value: str
    dtype: Literal["int32", "float32"]
    node: str | None
    """The Add that is part of the group; null when it is the C of a Gemm."""


@dataclass(frozen=True)
class RequantizeRecord:
    """The output QuantizeLinear of a group: y_q = clip(round(y / scale) + zero_point)."""

    node: str
    scale: float
    zero_point: int
    dtype: Literal["int8", "uint8"]


@dataclass(frozen=True)
class QdqRecord:
    """A quantized product that is one site. Without `x` only the weight is quantized and the input is float."""

    x: str | None
    """Name of the quantized activation in the graph."""
    x_dtype: Literal["int8", "uint8"] | None
    x_scale: list[float]
    """One, or one along `x_axis`; float32 values."""
    x_zero_point: list[int]
    """As many as scales, or one."""
    x_axis: int | None
    """Counted from the end: -2 is the row axis. Null: per tensor."""
    bias: BiasRecord | None
    requantize: RequantizeRecord | None


@dataclass(frozen=True)
class SiteRecord:
    """One matrix product of the graph, bound or not."""

    path: str
    node: str
    """Name of the node in model.onnx; unique over all its graphs."""
    op: str
    kind: Literal["weight", "dynamic", "other"]
    m: Dim
    k: Dim
    n: Dim
    dtype: str | None
    weight: str | None = None
    """Name of the packed weight (TensorRecord.name) when the site is bound."""
    kernel: str | None = None
    reason: str | None = None
    """Why it does not run on the NPU; null only when a kernel is bound."""
    qdq: QdqRecord | None = None
    """What surrounds the product, when the graph brings its own codes."""


@dataclass(frozen=True)
class SourceRecord:
    """What the pack was made from."""

    name: str
    """File name of the model, without its directory."""
    graph_sha256: str
    weights_sha256: str
    """Over name and digest of every weight that was read from outside the graph file."""
    opset: int


@dataclass(frozen=True)
class Coverage:
    """Counts of sites: all weight sites, those bound to int8 operands, those with a kernel."""

    sites: int
    weight: int
    bound: int
    covered: int


@dataclass(frozen=True)
class KernelRecord:
    """One kernel of the pack."""

    key: str
    m: int
    k: int
    n: int
    file: str
    sha256: str
    design: str
    parameters: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    canary: dict[str, Any] | None = None


@dataclass(frozen=True)
class Manifest:
    """The whole of pack.json."""

    schema: str
    producer: str
    source: SourceRecord
    target: str
    opset: int
    """ai.onnx opset of model.onnx."""
    domains: dict[str, list[str]]
    """Operators outside ai.onnx that the source brought along, by domain."""
    tensors: list[TensorRecord]
    sites: list[SiteRecord]
    kernels: list[KernelRecord]
    coverage: Coverage
    changes: list[Change]
    files: list[FileRecord]
    content_digest: str
    files_digest: str
    plan: Execution | None = None
    """How each site that a kernel may run is run, launch by launch; null: all on the host."""
