"""The kinds of quantization profile that do not contain other profiles: what stored codes mean.

Field names are those of the source document; what real formats need beyond it is marked "extension". A kind is frozen
and valid: an inconsistent one cannot be made, and the error names the field.

>>> LinearUniform(DataType.INT4, bits=5)
Traceback (most recent call last):
...
onnxpack.formats.layout.ProfileError: bits: 5 is not 1 to 4, the width of INT4
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from onnxpack.formats.datatypes import DataType
from onnxpack.formats.layout import BlockField, BlockLayout, Role, StorageOrder, require
from onnxpack.formats.rules import RULES


class Rounding(StrEnum):
    """How codes are rounded. RNE: half to even; RHA: half away from zero; HALF_UP: floor(x + 0.5)."""

    RNE = "RNE"
    RHA = "RHA"
    HALF_UP = "HALF_UP"


@dataclass(frozen=True)
class Parameter:
    """A serialized scale, zero point or minimum (extension): (stored * factor - offset - minus) * parent + bias.

    `field` names a field or view of the layout. `levels` is a codebook for the stored number (of vectors, `vector`
    long); `least`, if not 0, replaces smaller numbers; `inverse`: 1 / stored is meant; `parent` is a coarser parameter
    that multiplies it, or that it is divided by (`divide`).
    """

    field: str
    offset: float = 0.0
    levels: tuple[float, ...] = ()
    parent: Parameter | None = None
    divide: bool = False
    bias: Parameter | None = None
    factor: float = 1.0
    minus: Parameter | None = None
    inverse: bool = False
    vector: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        require(bool(self.field), "field", "a parameter names a field")
        require(math.isfinite(self.offset), "offset", "not finite")
        require(math.isfinite(self.factor), "factor", "not finite")
        require(math.isfinite(self.least) and self.least >= 0, "least", f"{self.least} is negative or not finite")
        whole = self.vector >= 0 and len(self.levels) % max(1, self.vector) == 0
        require(whole, "vector", f"{len(self.levels)} levels are not vectors of {self.vector}")
        require(not (self.divide and self.parent is None), "divide", "nothing to divide by")

    def walk(self, path: str) -> Iterator[tuple[str, Parameter]]:
        """This parameter and those it refers to, with their paths."""
        yield path, self
        for name, other in (("parent", self.parent), ("bias", self.bias), ("minus", self.minus)):
            if other is not None:
                yield from other.walk(f"{path}.{name}")


def _one_scale(scale_float: float | None, scale_int: int | None, scale: Parameter | None) -> None:
    given = sum(x is not None for x in (scale_float, scale_int, scale))
    require(given <= 1, "scale", "at most one of scale_float, scale_int, scale")
    require(scale_float is None or math.isfinite(scale_float), "scale_float", "not finite")
    require(scale_int is None or -149 <= scale_int <= 127, "scale_int", f"{scale_int} is not -149 to 127")


_MOST_PACKED = 1 << 12  # bound of the numbers that packing is checked with


def _packing(count: int, nbytes: int, bits: int) -> None:
    require(0 <= count <= _MOST_PACKED, "packed_count", f"{count} is not 0 to {_MOST_PACKED}")
    require(0 <= nbytes <= _MOST_PACKED, "packed_bytes", f"{nbytes} is not 0 to {_MOST_PACKED}")
    require((count > 0) == (nbytes > 0), "packed_bytes", "packed_count and packed_bytes come together")
    require(count * bits <= 8 * nbytes, "packed_bytes", f"{count} values of {bits} bits do not fit {nbytes} bytes")


@dataclass(frozen=True)
class LinearUniform:
    """value = (code - zero_point) * scale - minimum; codes in [quant_min, quant_max].

    Extensions: `scale`, `zero`, `minimum` as serialized parameters; `zero_point` may be a real number; explicit
    code range and rounding; `codes` is the field or view that holds the codes.
    """

    storage_type: DataType
    bits: int
    symmetric: bool = False
    scale_float: float | None = None
    scale_int: int | None = None
    zero_point: float = 0
    axis: int = -1
    scale: Parameter | None = None
    zero: Parameter | None = None
    minimum: Parameter | None = None
    quant_min: int | None = None
    quant_max: int | None = None
    rounding: Rounding = Rounding.RNE
    codes: str = "values"

    def __post_init__(self) -> None:
        width = self.storage_type.bits
        require(width > 0, "storage_type", f"{self.storage_type.name} does not store codes")
        require(
            1 <= self.bits <= width, "bits", f"{self.bits} is not 1 to {width}, the width of {self.storage_type.name}"
        )
        require(self.axis in (-1, 0, 1), "axis", f"{self.axis} is not -1, 0 or 1")
        require(math.isfinite(self.zero_point), "zero_point", "not finite")
        constant = self.symmetric and self.zero_point != 0
        require(not constant, "zero_point", "a symmetric profile has zero point 0")
        require(not (self.symmetric and self.zero), "zero", "a symmetric profile has no zero point")
        _one_scale(self.scale_float, self.scale_int, self.scale)
        require(self.range[0] < self.range[1], "quant_min", f"{self.range[0]} is not below {self.range[1]}")

    @property
    def range(self) -> tuple[int, int]:
        """Lowest and highest code: as declared, else of the storage type."""
        signed = self.storage_type.signed
        low, high = (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1) if signed else (0, (1 << self.bits) - 1)
        return (low if self.quant_min is None else self.quant_min, high if self.quant_max is None else self.quant_max)

    @property
    def parameters(self) -> dict[str, Parameter | None]:
        """The serialized parameters by the name of their slot."""
        return {"scale": self.scale, "zero": self.zero, "minimum": self.minimum}


@dataclass(frozen=True)
class Codebook:
    """value = (sum over codebooks of entry[index] + shift) * scale; entries are vectors of `vector_size` values.

    `index_bits` 0 means base-N digits, whose order the layout's DigitPart states. Extensions: `scale` and `shift` as
    serialized parameters, `codes`; `stored`: entries are tensors of the weight, views stored[0], stored[1], ... with
    indices codes[0], codes[1], ...; `rule`: they follow from a closed form.
    """

    codebook_data: tuple[float, ...] = ()
    scale_float: float | None = None
    scale_int: int | None = None
    packed_count: int = 0
    packed_bytes: int = 0
    num_codebooks: int = 0
    codebook_size: int = 0
    vector_size: int = 0
    index_bits: int = 0
    scale: Parameter | None = None
    shift: Parameter | None = None
    codes: str = "indices"
    stored: str = ""
    rule: str = ""

    def __post_init__(self) -> None:
        counts = (self.num_codebooks, self.codebook_size, self.vector_size, self.index_bits)
        require(min(counts) >= 0, "num_codebooks", "counts are not negative")
        require(self.index_bits <= 32, "index_bits", f"{self.index_bits} is more than 32")
        require(all(map(math.isfinite, self.codebook_data)), "codebook_data", "not finite")
        require(not self.rule or self.rule in RULES, "rule", f"{self.rule!r} is not one of {', '.join(RULES)}")
        self._check_entries()
        size = self.size
        reach = 1 << self.index_bits
        require(
            not self.index_bits or size <= reach, "index_bits", f"{self.index_bits} bits do not reach {size} entries"
        )
        count, nbytes = self.packed_count, self.packed_bytes
        _packing(count, nbytes, self.index_bits)
        digits = self.index_bits or not count or size**count <= 256**nbytes
        require(bool(digits), "packed_count", f"{count} digits of base {size} do not fit {nbytes} bytes")
        _one_scale(self.scale_float, self.scale_int, self.scale)

    def _check_entries(self) -> None:
        books, size, have = max(1, self.num_codebooks), self.size, len(self.codebook_data)
        if self.stored or self.rule:
            alone = have == 0 and bool(self.stored) != bool(self.rule)
            require(alone, "codebook_data", "entries are listed, stored or made by a rule, one of the three")
            require(self.codebook_size > 0, "codebook_size", "entries that are not listed have a number")
            return
        fits = books * size * max(1, self.vector_size) == have > 0
        require(fits, "codebook_data", f"{have} values are not {books} x {size} x {self.vector_size or 1}")

    @property
    def size(self) -> int:
        """Entries per codebook."""
        return self.codebook_size or len(self.codebook_data) // (max(1, self.num_codebooks) * max(1, self.vector_size))

    @property
    def parameters(self) -> dict[str, Parameter | None]:
        """The serialized parameters by the name of their slot."""
        return {"scale": self.scale, "shift": self.shift}


@dataclass(frozen=True)
class FloatingPointUniform:
    """Small floats: subnormals included; top codes are infinity and NaN only where declared (see float_table).

    Extensions: `scale`; `saturate` is the overflow policy of encoders; `split_bits` the widths of bit planes from
    the most significant down (split_storage); `msb_first` the order inside packed bytes; `codes`.
    """

    sign_bits: int
    exponent_bits: int
    mantissa_bits: int
    exponent_bias: int
    has_inf: bool = False
    has_nan: bool = False
    split_storage: bool = False
    packed_count: int = 0
    packed_bytes: int = 0
    scale: Parameter | None = None
    saturate: bool = True
    split_bits: tuple[int, ...] = ()
    msb_first: bool = False
    codes: str = "codes"

    def __post_init__(self) -> None:
        require(self.sign_bits in (0, 1), "sign_bits", f"{self.sign_bits} is not 0 or 1")
        require(1 <= self.exponent_bits <= 8, "exponent_bits", f"{self.exponent_bits} is not 1 to 8")
        require(0 <= self.mantissa_bits <= 10, "mantissa_bits", f"{self.mantissa_bits} is not 0 to 10")
        require(self.bits <= 16, "mantissa_bits", f"{self.bits} bits are not a small float")
        require(-127 <= self.exponent_bias <= 127, "exponent_bias", f"{self.exponent_bias} is not -127 to 127")
        require(not self.has_inf or self.has_nan, "has_nan", "a format with infinities has NaNs")
        _packing(self.packed_count, self.packed_bytes, self.bits)
        split = not self.split_bits or (self.split_storage and sum(self.split_bits) == self.bits)
        require(split, "split_bits", f"planes {list(self.split_bits)} are not the {self.bits} bits of a code")

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def parameters(self) -> dict[str, Parameter | None]:
        """The serialized parameters by the name of their slot."""
        return {"scale": self.scale}


@dataclass(frozen=True)
class LogUniform:
    """value = sign * base ** (code + offset). Zero has no code.

    Extensions: `codes`, `signs` name the fields; without `signs` and with has_sign, the sign is the code's top bit.
    """

    bits: int
    base: float = 2.0
    offset: float = 0.0
    has_sign: bool = False
    codes: str = "codes"
    signs: str = ""

    def __post_init__(self) -> None:
        require(1 <= self.bits <= 8, "bits", f"{self.bits} is not 1 to 8")
        require(self.base > 1 and math.isfinite(self.base), "base", f"{self.base} is not above 1")
        require(math.isfinite(self.offset), "offset", "not finite")
        require(self.has_sign or not self.signs, "signs", "a sign plane without has_sign")
        require(self.bits > 1 or not self.has_sign or bool(self.signs), "bits", "one bit cannot hold sign and code")

    @property
    def code_bits(self) -> int:
        """Bits of the exponent code."""
        return self.bits - (1 if self.has_sign and not self.signs else 0)


@dataclass(frozen=True)
class FunctionUniform:
    """Codes whose meaning is an operator's: "domain::Name" of both directions is kept as metadata."""

    storage_type: DataType
    bits: int
    quantize_op: str = ""
    dequantize_op: str = ""
    block_layout: BlockLayout | None = None

    def __post_init__(self) -> None:
        require(self.storage_type.bits > 0, "storage_type", f"{self.storage_type.name} does not store codes")
        require(1 <= self.bits <= self.storage_type.bits, "bits", f"{self.bits} is not 1 to {self.storage_type.bits}")
        require(bool(self.dequantize_op), "dequantize_op", "a function profile names its operator")


@dataclass(frozen=True)
class CastUniform:
    """Values of another element type, nothing else."""

    storage_type: DataType

    def __post_init__(self) -> None:
        require(self.storage_type.native, "storage_type", f"{self.storage_type.name} cannot be cast to and from")


@dataclass(frozen=True)
class FieldWeight:
    """One term of an index formula."""

    field: Role
    multiplier: int


@dataclass(frozen=True)
class Scatter:
    """Entry lane p of group g lands at chunk * group_size + g % (group_size / vector_size) + stride * p."""

    group_size: int
    vector_size: int
    stride: int

    def __post_init__(self) -> None:
        require(min(self.group_size, self.vector_size, self.stride) >= 1, "group_size", "positive numbers")
        fits = self.stride * self.vector_size == self.group_size
        require(fits, "stride", "stride times vector_size is not group_size: elements would overlap or be left out")


@dataclass(frozen=True)
class StructuredBlockUniform:
    """Named fields at known offsets; values directly, or a codebook indexed by a sum of fields times multipliers."""

    block_layout: BlockLayout
    codebook_data: tuple[float, ...] = ()
    codebook_vector_size: int = 0
    index_formula: tuple[FieldWeight, ...] = ()
    scatter: Scatter | None = None
    storage_order: StorageOrder = StorageOrder.INTERLEAVED
    axis: int | None = None

    def __post_init__(self) -> None:
        book = bool(self.codebook_data)
        require(book == bool(self.index_formula), "index_formula", "a codebook and its formula come together")
        require(not book or self.codebook_vector_size > 0, "codebook_vector_size", "positive with a codebook")
        whole = not book or len(self.codebook_data) % max(1, self.codebook_vector_size) == 0
        require(whole, "codebook_data", "not a whole number of entries")
        require(self.axis in (None, 1), "axis", f"{self.axis} is not absent or 1")
        for i, term in enumerate(self.index_formula):
            require(
                self.by_role(term.field) is not None, f"index_formula[{i}].field", f"no field has role {term.field}"
            )
            require(term.multiplier >= 1, f"index_formula[{i}].multiplier", "not positive")
        if book:
            self._check_index()
        if self.storage_order is StorageOrder.INTERLEAVED:
            self.block_layout.check_interleaved()

    def _check_index(self) -> None:
        fields = [(term, self.by_role(term.field)) for term in self.index_formula]
        highest = sum(term.multiplier * ((1 << f.bit_width) - 1) for term, f in fields if f)
        entries = len(self.codebook_data) // self.codebook_vector_size
        require(highest < entries, "index_formula", f"reaches entry {highest} of {entries}")
        counts = {f.count for _, f in fields if f}
        size = self.block_layout.block_size
        fits = counts == {size // self.codebook_vector_size}
        require(fits, "index_formula", f"fields of {sorted(counts)} codes do not make {size} values")

    def by_role(self, role: Role) -> BlockField | None:
        """The field with that role."""
        return next((f for f in self.block_layout.fields if f.role is role), None)
