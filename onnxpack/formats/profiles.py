"""Quantization profiles: a kind, nested as deep as a format needs, with layout, rotations and diagonal scalings.

Field names are those of the source document; what real formats need beyond it is marked "extension".

>>> p = QuantizationProfile(linear=LinearUniform(DataType.INT4, bits=4, symmetric=True, scale_float=0.5))
>>> p.kind, p.chain
('linear', ['linear'])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from onnxpack.formats.datatypes import DataType
from onnxpack.formats.kinds import (
    CastUniform,
    Codebook,
    FieldWeight,
    FloatingPointUniform,
    FunctionUniform,
    LinearUniform,
    LogUniform,
    Parameter,
    Rounding,
    Scatter,
    StructuredBlockUniform,
)
from onnxpack.formats.layout import BlockLayout, Per, ProfileError, StorageOrder, require
from onnxpack.formats.tensors import TensorLayout

__all__ = [
    "KINDS",
    "CastUniform",
    "Codebook",
    "Diagonal",
    "FieldWeight",
    "FloatingPointUniform",
    "FunctionUniform",
    "LinearUniform",
    "LogUniform",
    "OutlierMode",
    "Parameter",
    "QuantizationProfile",
    "Rotation",
    "RotationType",
    "Rounding",
    "Scatter",
    "Side",
    "SparseQuantization",
    "StructuredBlockUniform",
    "TilingQuantization",
]


class OutlierMode(StrEnum):
    """What an outlier does to the value below it."""

    REPLACE = "REPLACE"
    ADD = "ADD"


@dataclass(frozen=True)
class SparseQuantization:
    """A base profile plus outliers kept apart.

    Extensions: `mode` (SpQR adds, the document replaces); `index_data_type`; `csr`: row offsets and columns instead
    of flat indices.
    """

    base_quant: QuantizationProfile
    outlier_data_type: DataType = DataType.FLOAT16
    outlier_threshold: float = 0.0
    outlier_ratio: float = 0.0
    mode: OutlierMode = OutlierMode.REPLACE
    index_data_type: DataType = DataType.INT64
    csr: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.outlier_ratio <= 1, "outlier_ratio", f"{self.outlier_ratio} is not 0 to 1")
        require(self.outlier_threshold >= 0, "outlier_threshold", f"{self.outlier_threshold} is negative")
        floats = self.outlier_data_type.is_float and self.outlier_data_type.native
        require(floats, "outlier_data_type", f"{self.outlier_data_type.name} is not a float type")
        ints = self.index_data_type.native and not self.index_data_type.is_float
        require(ints, "index_data_type", f"{self.index_data_type.name} is not an integer type")


@dataclass(frozen=True)
class TilingQuantization:
    """Tiles of `tile_shape` along `axes` (none: the flattened tensor); `elem_quant` is cycled over tiles.

    A tile extent of 0 is the tensor's own; axes count over [N, K]. The layout of one tile is the profile's.
    """

    tile_shape: tuple[int, ...]
    axes: tuple[int, ...]
    elem_quant: tuple[QuantizationProfile, ...]
    perm: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rank = len(self.axes) or 1
        require(len(self.tile_shape) == rank, "tile_shape", f"{len(self.tile_shape)} extents for {rank} axes")
        require(all(t >= 0 for t in self.tile_shape), "tile_shape", "an extent is negative")
        require(len(set(self.axes)) == len(self.axes), "axes", "an axis is named twice")
        require(all(a >= 0 for a in self.axes), "axes", "axes are not negative")
        require(bool(self.elem_quant), "elem_quant", "what the tiles hold is missing")
        order = not self.perm or sorted(self.perm) == list(range(len(self.perm)))
        require(order, "perm", f"{list(self.perm)} is not a permutation")


class RotationType(StrEnum):
    """HADAMARD needs no stored matrix."""

    HADAMARD = "HADAMARD"
    PLAIN = "PLAIN"


class Side(StrEnum):
    """Which dimension of W [N, K] is rotated or scaled."""

    K = "K"
    N = "N"


@dataclass(frozen=True)
class Rotation:
    """A rotation of one side. Extensions: `side`, `block_size` (0: the whole side), `signs` (a field of +-1).

    A Hadamard size is a power of two times a size with a tabulated matrix; dims of 0: the side's own extent.
    """

    matrix_type: RotationType
    dims: tuple[int, ...]
    matrix_index: int | None = None
    side: Side = Side.K
    block_size: int = 0
    signs: str = ""

    def __post_init__(self) -> None:
        require(len(self.dims) in (1, 2) and min(self.dims) >= 0, "dims", f"{list(self.dims)} is not a size")
        require(len(set(self.dims)) == 1, "dims", "a rotation is square")
        plain = self.matrix_type is RotationType.PLAIN
        require(plain == (self.matrix_index is not None), "matrix_index", "given for PLAIN, absent for HADAMARD")
        blocks = self.block_size >= 0 and (not self.block_size or self.dims[0] % self.block_size == 0)
        require(blocks, "block_size", f"{self.block_size} does not divide {self.dims[0]}")


@dataclass(frozen=True)
class Diagonal:
    """A diagonal scaling of one side (extension: SmoothQuant's is not a rotation)."""

    field: str
    side: Side = Side.K
    divide: bool = False

    def __post_init__(self) -> None:
        require(bool(self.field), "field", "a diagonal names the field of its factors")


KINDS = (
    "linear",
    "codebook",
    "floating_point",
    "sparse",
    "log",
    "function",
    "tiling",
    "cast",
    "structured_block",
)
"""The nine kinds; exactly one of these fields of a profile is set."""

_Kind = (
    LinearUniform
    | Codebook
    | FloatingPointUniform
    | SparseQuantization
    | LogUniform
    | FunctionUniform
    | TilingQuantization
    | CastUniform
    | StructuredBlockUniform
)


@dataclass(frozen=True)
class QuantizationProfile:
    """How a tensor is quantized: one kind, the decoded element type, notes, rotations around it.

    Extensions: `layout`, the physical block (of one tile; of `packed_count` values where nothing is tiled), with its
    `storage_order`; `partial`: the last block of a row (of the tensor, when flattened) may be cut short; or `tensors`,
    the layout of the whole. Diagonals. What is `pre_` was done before quantizing and is undone by the decoder; what is
    `post_` the decoder does.
    """

    linear: LinearUniform | None = None
    codebook: Codebook | None = None
    floating_point: FloatingPointUniform | None = None
    sparse: SparseQuantization | None = None
    log: LogUniform | None = None
    function: FunctionUniform | None = None
    tiling: TilingQuantization | None = None
    cast: CastUniform | None = None
    structured_block: StructuredBlockUniform | None = None
    data_type: DataType = DataType.FLOAT
    doc_string: str = ""
    metadata_props: tuple[tuple[str, str], ...] = ()
    layout: BlockLayout | None = None
    storage_order: StorageOrder = StorageOrder.INTERLEAVED
    partial: bool = False
    pre_rotation: Rotation | None = None
    post_rotation: Rotation | None = None
    pre_scaling: Diagonal | None = None
    post_scaling: Diagonal | None = None
    tensors: TensorLayout | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        require(len(given) == 1, "kind", f"exactly one of the nine kinds, not {given or 'none'}")
        require(
            self.data_type.is_float and self.data_type.native, "data_type", f"{self.data_type.name} is not a float type"
        )
        keys = [key for key, _ in self.metadata_props]
        require(len(set(keys)) == len(keys), "metadata_props", "a key stands twice")
        if self.layout is not None:
            self._check_layout(self.layout)
            self._check_names(self.layout)
        if self.tensors is not None:
            require(self.block is None, "tensors", "a layout of blocks or of whole tensors, one of the two")
            self._check_names(self.tensors)

    @property
    def kind(self) -> str:
        """Name of the kind that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def value(self) -> _Kind:
        """The kind's own record."""
        value: _Kind = getattr(self, self.kind)
        return value

    @property
    def block(self) -> BlockLayout | None:
        """The physical block, wherever it is declared."""
        return self.structured_block.block_layout if self.structured_block else self.layout

    @property
    def by_row(self) -> bool:
        """Whether blocks lie along the rows of [N, K] instead of along the flattened tensor."""
        if self.tiling is not None:
            return self.tiling.axes == (1,)
        if self.structured_block is not None:
            return self.structured_block.axis == 1
        return self.linear is not None and self.linear.axis >= 0

    @property
    def leaf(self) -> QuantizationProfile:
        """The innermost first profile: what one code means."""
        if self.tiling is not None:
            return self.tiling.elem_quant[0].leaf
        return self.sparse.base_quant.leaf if self.sparse else self

    @property
    def chain(self) -> list[str]:
        """Kinds from outside in: ["tiling", "tiling", "linear"]."""
        if self.tiling is not None:
            return ["tiling", *self.tiling.elem_quant[0].chain]
        return ["sparse", *self.sparse.base_quant.chain] if self.sparse else [self.kind]

    def _check_layout(self, layout: BlockLayout) -> None:
        require(self.structured_block is None, "layout", "a structured block has its own layout")
        if self.tiling is not None:
            extents = self.tiling.tile_shape
            size = math.prod(extents)
            fits = 0 in extents or size == layout.block_size
            require(fits, "layout.block_size", f"{layout.block_size} is not the tile's {size}")
            known = self.tiling.axes in ((), (1,))
            require(known, "tiling.axes", "a layout goes with tiles along K or along the flattened tensor")
        for i, f in enumerate(layout.fields):
            fits = f.per is not Per.COLUMN or (layout.block_size == 1 and self.by_row)
            require(fits, f"layout.fields[{i}].per", "a field per column goes with single values along rows")
        if self.storage_order is StorageOrder.INTERLEAVED:
            try:
                layout.check_interleaved()
            except ProfileError as error:
                raise ProfileError(f"layout.{error.path}", error.what) from None

    def _check_names(self, layout: BlockLayout | TensorLayout) -> None:
        leaf = self.leaf.value
        path = ".".join(self.chain)
        slots = dict(getattr(leaf, "parameters", {}))
        for slot, parameter in slots.items():
            for at, one in parameter.walk(f"{path}.{slot}") if parameter else ():
                require(layout.find(one.field) is not None, f"{at}.field", f"the layout has no {one.field!r}")
        for slot in ("codes", "signs"):
            name = getattr(leaf, slot, "")
            name = f"{name}[0]" if name and getattr(leaf, "stored", "") else name
            known = not name or layout.find(name) is not None
            require(known, f"{path}.{slot}", f"the layout has no {name!r}")
