"""Element types: their width, how numpy holds them, and what the small floats mean.

>>> DataType.INT4.bits, DataType.FLOAT16.bits, DataType.FLOAT8E8M0.storage
(4, 16, dtype('uint8'))
>>> float_table(1, 2, 1, 1).tolist()[:8]
[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


class DataType(IntEnum):
    """ONNX's element types by their numbers in TensorProto.DataType; UNDEFINED means raw unsigned bits."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E5M2 = 19
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28

    @property
    def bits(self) -> int:
        """Width of one element; 0 for types without one."""
        return _BITS[self]

    @property
    def signed(self) -> bool:
        """Whether it is a two's complement integer."""
        return self.name.startswith("INT")

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers of some width."""
        return "FLOAT" in self.name or self is DataType.DOUBLE

    @property
    def storage(self) -> np.dtype[Any]:
        """The numpy type that stored arrays of it have: its own where numpy counts bytes as we do, else bytes."""
        dtype: np.dtype[Any] = np.dtype(_STORAGE.get(self, np.uint8))
        return dtype

    @property
    def native(self) -> bool:
        """Whether one element of `storage` is one element of the type, with the value numpy gives it."""
        return self in _STORAGE


_BITS = {
    DataType.UNDEFINED: 0,
    DataType.STRING: 0,
    **dict.fromkeys((DataType.UINT2, DataType.INT2), 2),
    **dict.fromkeys((DataType.UINT4, DataType.INT4, DataType.FLOAT4E2M1), 4),
    **dict.fromkeys((DataType.FLOAT6E2M3, DataType.FLOAT6E3M2), 6),
    **dict.fromkeys((DataType.UINT8, DataType.INT8, DataType.BOOL), 8),
    **dict.fromkeys((DataType.FLOAT8E4M3FN, DataType.FLOAT8E5M2, DataType.FLOAT8E8M0), 8),
    **dict.fromkeys((DataType.UINT16, DataType.INT16, DataType.FLOAT16, DataType.BFLOAT16), 16),
    **dict.fromkeys((DataType.FLOAT, DataType.INT32, DataType.UINT32), 32),
    **dict.fromkeys((DataType.INT64, DataType.UINT64, DataType.DOUBLE), 64),
}

_STORAGE: dict[DataType, Any] = {
    DataType.UINT8: np.uint8,
    DataType.INT8: np.int8,
    DataType.UINT16: np.uint16,
    DataType.INT16: np.int16,
    DataType.INT32: np.int32,
    DataType.UINT32: np.uint32,
    DataType.INT64: np.int64,
    DataType.UINT64: np.uint64,
    DataType.FLOAT16: np.float16,
    DataType.BFLOAT16: ml_dtypes.bfloat16,
    DataType.FLOAT: np.float32,
    DataType.DOUBLE: np.float64,
}

FLOAT_NAMES = {"float16": DataType.FLOAT16, "bfloat16": DataType.BFLOAT16, "float32": DataType.FLOAT}
"""What a parameter `scale_dtype` may say."""


@functools.cache
def float_table(
    sign: int, exponent: int, mantissa: int, bias: int, has_inf: bool = False, has_nan: bool = False
) -> F32:
    """float32 value of every code of a small float, subnormals included.

    With `has_inf` the top exponent is IEEE's (infinity, NaN); with `has_nan` alone only the all-ones code is NaN;
    with neither every code is a number.

    >>> float_table(1, 4, 3, 7, has_nan=True)[[0x7E, 0x7F, 0x01]].tolist()
    [448.0, nan, 0.001953125]
    """
    codes = np.arange(1 << (sign + exponent + mantissa))
    m = codes & ((1 << mantissa) - 1)
    e = (codes >> mantissa) & ((1 << exponent) - 1)
    fraction = np.where(e == 0, m, m + (1 << mantissa)).astype(np.float64)
    values = np.ldexp(fraction, np.maximum(e, 1) - bias - mantissa)
    top = e == (1 << exponent) - 1
    if has_inf:
        values[top] = np.where(m[top] == 0, np.inf, np.nan)
    elif has_nan:
        values[top & (m == (1 << mantissa) - 1)] = np.nan
    if sign:
        values = np.where(codes >> (exponent + mantissa), -values, values)
    table: F32 = np.asarray(values, np.float32)
    table.setflags(write=False)
    return table


@functools.cache
def scale_table(data_type: DataType) -> F32 | None:
    """float32 value of each byte of an 8-bit float type that numpy does not know; None for other types."""
    if data_type is DataType.FLOAT8E8M0:
        table: F32 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
        table.setflags(write=False)
        return table
    if data_type is DataType.FLOAT8E4M3FN:
        return float_table(1, 4, 3, 7, has_nan=True)
    if data_type is DataType.FLOAT8E5M2:
        return float_table(1, 5, 2, 15, has_inf=True)
    return None
