"""Layouts of whole tensors: what checkpoints store, where a block layout's rows of blocks do not reach.

A weight is a set of stored tensors whose dimensions follow from N and K; a view reads codes or numbers out of one of
them, by named axes (`arrange`) and bits in units of bytes. For example GPTQ's codes, eight nibbles along K in each
int32 of [K / 8, N]:

>>> view = TensorView("codes", "qweight", "kw n b | kw n b | kw n i | n (kw i)", (("n", "N"), ("b", "4")),
...                   (BitPart("qweight", 0, 4, (8,), (4,)),))
>>> field = TensorField(Role.VALUES, "qweight", DataType.INT32, ("K/8", "N"))
>>> layout = TensorLayout(("N", "K"), (field,), (view,))
>>> layout.at({"N": 4, "K": 64}).dims(field.dims)
(8, 4)
>>> layout.at({"N": 4, "K": 63}).dims(field.dims)
Traceback (most recent call last):
...
onnxpack.formats.layout.ProfileError: K: 63 is not a multiple of 8
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnxpack.formats import arrange
from onnxpack.formats.datatypes import DataType
from onnxpack.formats.layout import BitPart, BitView, DigitPart, Role, require

Size = str
"""A dimension: N, K, an integer, or a product; "/" divides exactly, "|" rounds up, "+" adds, from left to right."""

_SIZE = re.compile(r"[NK]|\d+|[*/|+]")


def size_of(text: Size, symbols: Mapping[str, int]) -> int:
    """A dimension as a number. ProfileError where a division leaves a rest.

    >>> size_of("K*3/32", {"K": 128}), size_of("N*K|5", {"N": 3, "K": 4})
    (12, 3)
    """
    tokens = _SIZE.findall(text)
    require("".join(tokens) == text and len(tokens) % 2 == 1, "dims", f"{text!r} is not a product of N, K and numbers")
    total, seen = 1, ""
    for operator, operand in zip(["*", *tokens[1::2]], tokens[::2], strict=True):
        known = operand.isdigit() or operand in "NK"
        require(known and operator in "*/|+", "dims", f"{text!r} is not a product of N, K and numbers")
        value = int(operand) if operand.isdigit() else symbols[operand]
        if operator == "*":
            total *= value
        elif operator == "+":
            total += value
        else:
            require(value > 0, "dims", f"{text!r} divides by 0")
            require(operator == "|" or total % value == 0, seen, f"{total} is not a multiple of {value}")
            total = -(-total // value)
        seen += operand if not seen else operator + operand
    return total


@dataclass(frozen=True)
class TensorField:
    """One stored tensor: its name, element type, dimensions. No dimensions: a scalar."""

    role: Role
    name: str
    data_type: DataType
    dims: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.name), "name", "a field needs a name")
        require(self.data_type.native, "data_type", f"{self.data_type.name} is not an element type of stored tensors")
        for text in self.dims:
            _parse(text)


def _parse(text: Size) -> None:
    size_of(text.replace("/", "|"), {"N": 1, "K": 1})


@dataclass(frozen=True)
class TensorView:
    """Codes or numbers of a field in the frame of the layout.

    `axes` of codes: stored | units | codes | frame. Stored axes end with the bytes of an element; units end with the
    bytes that `parts` (or `digit_parts`) take codes from; codes replace these bytes. `axes` of numbers (no parts):
    stored | frame. `sizes` are what cannot be inferred; the view begins with element `start` of the field.
    `read_as`: numbers of another type over the same bytes, or, with parts, bytes that make up such numbers.
    `cut`: the stored axis that goes with the frame's first one, a step for `per` of its steps. `index`: a field of
    indices that the last axis is gathered by; `repeat`: how often each of its elements stands. `dims`: the shape in the
    frame; `apart`: it has nothing to do with the frame (a table, a vector of factors). `levels`: the numbers that its
    codes stand for.
    `shuffle`: the bytes of a unit in the order in which parts count their bits (such a view is read only).
    """

    name: str
    field: str
    axes: str
    sizes: tuple[tuple[str, Size], ...] = ()
    parts: tuple[BitPart, ...] = ()
    digit_parts: tuple[DigitPart, ...] = ()
    start: Size = "0"
    read_as: DataType = DataType.UNDEFINED
    cut: str = ""
    per: int = 1
    index: str = ""
    repeat: tuple[int, ...] = ()
    dims: tuple[Size, ...] = ()
    apart: bool = False
    levels: tuple[float, ...] = ()
    shuffle: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wanted = 4 if self.coded else 2
        require(len(self.stages) == wanted, "axes", f"{self.axes!r} has {len(self.stages)} stages, not {wanted}")
        arrange.check(f"{self.stages[0]} -> {self.stages[1]}")
        if self.coded:
            arrange.check(f"{self.stages[2]} -> {self.stages[3]}")
            lead = arrange.axes(self.stages[1])[:-1]
            kept = all(len(axis) == 1 for axis in lead) and arrange.axes(self.stages[2])[: len(lead)] == lead
            require(kept, "axes", f"codes of {self.axes!r} do not begin with the axes of its units")
            BitView(self.name, self.parts, self.digit_parts)
        known = arrange.names(self.stages[0])
        require(not self.cut or self.cut in known, "cut", f"{self.axes!r} has no stored axis {self.cut!r}")
        require(self.per >= 1, "per", f"{self.per} is not positive")
        full = not self.levels or (self.coded and len(self.levels) == 1 << self.bits.bits)
        require(full, "levels", f"{len(self.levels)} levels for the codes of {self.name}")
        inferred = [n for n in known if n not in dict(self.sizes)]
        require(len(inferred) <= 1, "sizes", f"{', '.join(inferred)}: at most one axis can be inferred")
        for text in (self.start, *(s for _, s in self.sizes), *self.dims):
            _parse(text)

    @property
    def coded(self) -> bool:
        """Whether it is made of bits, not of whole elements."""
        return bool(self.parts or self.digit_parts)

    @property
    def stages(self) -> list[str]:
        """The parts of `axes`."""
        return [stage.strip() for stage in self.axes.split("|")]

    @property
    def bits(self) -> BitView:
        """The bits of one unit."""
        return BitView(self.name, self.parts, self.digit_parts)

    @property
    def code_bits(self) -> int:
        """Width of a code."""
        return self.bits.bits


@dataclass(frozen=True)
class SumView:
    """Codes put together from views: sum of each times its multiplier (bit planes)."""

    name: str
    terms: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        require(len(self.terms) > 1, "terms", "a sum has several terms")


@dataclass(frozen=True)
class JoinView:
    """Codes of whole rows joined, each run raised by its offset (runs of different width around one zero)."""

    name: str
    runs: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        require(bool(self.runs), "runs", "nothing to join")


AnyView = TensorView | SumView | JoinView


@dataclass(frozen=True)
class Outliers:
    """Entries in compressed rows that are added to (or replace) the dense values: row offsets, columns, values."""

    offsets: str
    columns: str
    values: str


@dataclass(frozen=True)
class TensorLayout:
    """Stored tensors, views into them, and the `frame`: the shape that the flattened weight [N, K] takes for decoding.

    `order` names a field of indices: column k of the weight is decoded column order[k].
    """

    frame: tuple[Size, ...]
    fields: tuple[TensorField, ...]
    views: tuple[AnyView, ...]
    order: str = ""
    outliers: Outliers | None = None

    def __post_init__(self) -> None:
        known = [f.name for f in self.fields]
        require(len(set(known)) == len(known) > 0, "fields", "two fields have one name")
        views = [v.name for v in self.views]
        require(len(set(views)) == len(views), "views", "two views have one name")
        for i, view in enumerate(self.views):
            self._check(view, f"views[{i}]", known, views)
        for text in self.frame:
            _parse(text)
        require(not self.order or self.order in known, "order", f"no field is called {self.order!r}")

    def _check(self, view: AnyView, path: str, fields: list[str], views: list[str]) -> None:
        if isinstance(view, TensorView):
            require(view.field in fields, f"{path}.field", f"no field is called {view.field!r}")
            require(not view.index or view.index in fields, f"{path}.index", f"no field is called {view.index!r}")
            sources = {p.field for p in view.parts} | {p.field for p in view.digit_parts}
            require(sources <= {view.field}, f"{path}.parts", f"a part is not of {view.field}")
            return
        for name, _ in view.terms if isinstance(view, SumView) else view.runs:
            require(name in views, path, f"no view is called {name!r}")

    def find(self, name: str) -> AnyView | None:
        """The view of that name."""
        return next((view for view in self.views if view.name == name), None)

    def stored(self, name: str) -> TensorField:
        """The field of that name."""
        return next(f for f in self.fields if f.name == name)

    def at(self, symbols: Mapping[str, int]) -> Sizes:
        """The layout's dimensions for a shape."""
        return Sizes(dict(symbols))


@dataclass(frozen=True)
class Sizes:
    """What N and K are."""

    symbols: Mapping[str, int]

    def dims(self, texts: tuple[Size, ...]) -> tuple[int, ...]:
        """Dimensions as numbers."""
        return tuple(size_of(text, self.symbols) for text in texts)

    def one(self, text: Size) -> int:
        """One dimension as a number."""
        return size_of(text, self.symbols)

    def extents(self, view: TensorView, total: int) -> dict[str, int]:
        """The length of every stored axis of a view of `total` elements (bytes, of codes): one may be inferred."""
        stored = arrange.names(view.stages[0])
        known = {name: self.one(text) for name, text in view.sizes}
        total -= self.one(view.start)
        missing = [name for name in stored if name not in known]
        have = math.prod(known[name] for name in stored if name in known)
        if missing:
            require(have > 0 and total % have == 0, view.name, f"{total} elements are not a multiple of {have}")
            known[missing[0]] = total // have
        else:
            require(have <= total, view.name, f"{have} elements of {total}")
        return known
