"""Open a Q4NX file that somebody else wrote: see what is in it, decode what can be believed, refuse the rest by name.

Nothing in such a file gives the logical shape of a tensor; whoever decodes one has to know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxpack.errors import ModelError, UsageError
from onnxpack.formats.q4nx import variants
from onnxpack.formats.q4nx.header import Entry, Header, read_header
from onnxpack.formats.q4nx.kinds import PLAIN, Judgement, Kind, judge, tile_nbytes
from onnxpack.formats.q4nx.tile import ROWS, TILE, TILE_128

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_CHUNK_BYTES = 4 << 20  # of tiles that are decoded together
_COLUMNS = {Kind.UNSIGNED_128: 128, Kind.SIGNED_128: 128, Kind.INT8_SLOT: 128, Kind.MXFP4: 128}


@dataclass(frozen=True)
class Row:
    """One line about a tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    tiles: int | None
    readable: bool
    """Whether `decode` gives its values without being told more than the logical shape."""
    note: str


@dataclass(frozen=True)
class Q4nxFile:
    """An opened file. Holds nothing open: bytes are mapped when they are asked for."""

    path: Path
    header: Header

    @cached_property
    def _judgements(self) -> dict[str, Judgement]:
        return {}

    @property
    def names(self) -> list[str]:
        """Tensors in file order."""
        return list(self.header.entries)

    @property
    def notes(self) -> list[str]:
        """What the header holds that is not a tensor."""
        return self.header.notes

    def raw(self, name: str) -> U8:
        """The bytes of a tensor, mapped read-only."""
        entry = self._entry(name)
        if not entry.nbytes:
            return np.empty(0, np.uint8)
        try:
            return np.memmap(self.path, np.uint8, "r", entry.offset, (entry.nbytes,))
        except (OSError, ValueError) as error:  # it was whole when the header was read
            raise ModelError(f"cannot be mapped: {error}", where=self._where(name)) from None

    def judge(self, name: str) -> Judgement:
        """What the tensor is, and why its values are not to be believed if so. Reads all of it, once."""
        if name not in self._judgements:
            self._judgements[name] = judge(self._entry(name), self.raw(name))
        return self._judgements[name]

    def decode(
        self, name: str, shape: tuple[int, ...] | None = None, *, convert: bool = False, order: str | None = None
    ) -> npt.NDArray[Any]:
        """Values of a tensor: float32 [rows, columns] of `shape` (rows are output features), MXFP4 with experts first;
        plain tensors as they are stored.

        `shape` may be left out where the header has it, or where tiles stand in a grid: then padding is included.
        `convert` allows the old codec A; `order` (one of INT8_ORDERS) says how the codes of an 8704-byte tile lie.
        ModelError for what is damaged, ambiguous or not known; UsageError for a shape that does not fit.
        """
        entry, found = self._entry(name), self.judge(name)
        if found.kind is Kind.PLAIN:
            return self._plain(entry)
        told = (found.kind is Kind.ZERO_POINT and convert) or (found.kind is Kind.INT8_WIDE and order is not None)
        if found.refusal and not told:
            raise ModelError(found.refusal, where=self._where(name))
        if order is not None and order not in variants.INT8_ORDERS:
            raise UsageError(f"order {order!r} is not one of {', '.join(variants.INT8_ORDERS)}")
        wanted = shape if shape is not None else _shape_of(entry, found.kind)
        if wanted is None:
            raise UsageError("the file does not say this tensor's shape: give it", where=self._where(name))
        return self._matrix(entry, found.kind, tuple(wanted), order)

    def _matrix(self, entry: Entry, kind: Kind, shape: tuple[int, ...], order: str | None) -> F32:
        where, lead = self._where(entry.name), 1 if kind is Kind.MXFP4 else 0
        if len(shape) != 2 + lead or any(d < 0 for d in shape):
            raise UsageError(f"{list(shape)} is not the shape of a matrix in {kind} tiles", where=where)
        nbytes = TILE.nbytes if kind is Kind.ZERO_POINT else entry.shape[-1]
        rows, cols = shape[lead:]
        grid = -(-rows // ROWS), -(-cols // _COLUMNS.get(kind, TILE.cols))
        stacks = shape[0] if lead else 1
        if stacks * grid[0] * grid[1] * nbytes != entry.nbytes or not _grid_fits(entry, kind, (*shape[:lead], *grid)):
            what = f"shape {list(shape)} needs {stacks * grid[0] * grid[1]} tiles, {list(entry.shape)} is stored"
            raise UsageError(what, where=where)
        if not entry.nbytes:
            raise ModelError("the tensor is empty", where=where)
        tiles = self.raw(entry.name).reshape(stacks, *grid, nbytes)
        out = np.empty((stacks, rows, cols), np.float32)
        step = max(1, _CHUNK_BYTES // (grid[1] * nbytes))
        for stack, row in product(range(stacks), range(0, grid[0], step)):
            with np.errstate(over="ignore", invalid="ignore"):
                values = _decode(kind, np.asarray(tiles[stack, row : row + step]), order)
            if not np.isfinite(values).all():
                raise ModelError("a value is not finite: damaged, or not what its size says", where=where)
            part = out[stack, row * ROWS : (row + step) * ROWS]
            if values[len(part) :].any() or values[:, cols:].any():
                raise ModelError(f"what pads the shape {list(shape)} is not zero: it is another shape", where=where)
            part[...] = values[: len(part), :cols]
        return out if lead else out[0]

    def _plain(self, entry: Entry) -> npt.NDArray[Any]:
        try:
            return self.raw(entry.name).view(PLAIN[entry.dtype]).reshape(entry.shape)
        except ValueError as error:  # an empty tensor of absurd dimensions
            raise ModelError(f"shape {list(entry.shape)}: {error}", where=self._where(entry.name)) from None

    def _entry(self, name: str) -> Entry:
        try:
            return self.header.entries[name]
        except KeyError:
            raise UsageError(f"no tensor is called {name!r}", where=str(self.path)) from None

    def _where(self, name: str) -> str:
        return f"{self.path}: tensor {name!r}"


def open_file(path: str | Path) -> Q4nxFile:
    """Read and check the header. ModelError when it is not one that can be trusted."""
    return Q4nxFile(Path(path), read_header(Path(path)))


def describe(path: str | Path) -> list[Row]:
    """One row per tensor, in file order; every tile is looked at. What is refused is said in the note, not raised."""
    file = open_file(path)
    return [_row(file, entry) for entry in file.header.entries.values()]


def _row(file: Q4nxFile, entry: Entry) -> Row:
    found = file.judge(entry.name)
    if found.kind is Kind.ZERO_POINT:
        tiles: int | None = entry.nbytes // TILE.nbytes
    else:
        nbytes = tile_nbytes(entry)
        tiles = entry.nbytes // nbytes if nbytes else None
    notes = [f"refused: {found.refusal}"] if found.refusal else found.notes
    return Row(
        entry.name, entry.dtype, entry.shape, entry.nbytes, found.kind, tiles, not found.refusal, "; ".join(notes)
    )


def _shape_of(entry: Entry, kind: Kind) -> tuple[int, ...] | None:
    """The logical shape where the header has it, the padded one where tiles stand in a grid, else None."""
    if kind is Kind.ZERO_POINT:
        return entry.shape
    if kind is Kind.MXFP4 or len(entry.shape) == 3:
        *lead, rows, cols = entry.shape[:-1]
        return (*lead, rows * ROWS, cols * _COLUMNS.get(kind, TILE.cols))
    return None


def _grid_fits(entry: Entry, kind: Kind, grid: tuple[int, ...]) -> bool:
    """Whether tiles that stand in a grid stand in this one; a flat list of tiles fits any."""
    return kind is Kind.ZERO_POINT or len(entry.shape) == 2 or entry.shape[:-1] == grid


def _decode(kind: Kind, tiles: U8, order: str | None) -> F32:
    match kind:
        case Kind.UNSIGNED:
            return variants.unsigned(tiles, TILE)
        case Kind.SIGNED:
            return variants.signed(tiles, TILE)
        case Kind.UNSIGNED_128:
            return variants.unsigned(tiles, TILE_128)
        case Kind.SIGNED_128:
            return variants.signed(tiles, TILE_128)
        case Kind.ZERO_POINT:
            return variants.zero_point(tiles, TILE)
        case Kind.INT8_SLOT:
            return variants.int8_slot(tiles)
        case Kind.INT8_WIDE:
            assert order is not None
            return variants.int8_wide(tiles, order)
        case Kind.TWO_LEVEL:
            return variants.two_level(tiles)
        case Kind.MXFP4:
            return variants.mxfp4(tiles)
        case _:
            raise AssertionError(kind)
