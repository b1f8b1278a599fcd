"""The numbers of stored tensors: inline bytes, or a read-only map of external ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxpack.errors import ModelError
from onnxpack.graph.external import Region
from onnxpack.types import Array

_HASH_PIECE = 8 << 20


class TensorStore:
    """Gives arrays for the tensors of one model. Maps files; reads nothing before the array is used."""

    def __init__(self, regions: Mapping[str, Region]) -> None:
        self._regions = regions

    def region(self, tensor: ir.TensorProtocol) -> Region | None:
        """Where an external tensor lies; None for one that is inline."""
        if not isinstance(tensor, ir.ExternalTensor):
            return None
        offset = "0" if tensor.offset is None else str(tensor.offset)
        length = "" if tensor.length is None else str(tensor.length)
        for key in ("\0".join((str(tensor.location), o, n)) for o in (offset,) for n in (length, "")):
            if key in self._regions:
                return self._regions[key]
        raise ModelError("external data was not checked when the model was read", where=f"tensor {tensor.name}")

    def array(self, tensor: ir.TensorProtocol) -> Array:
        """The tensor as an array of its own type, in its own shape."""
        region = self.region(tensor)
        if region is None:
            return tensor.numpy()
        shape = shape_of(tensor)
        if tensor.dtype.bitwidth < 8:
            packed = _map(region, np.dtype(np.uint8), (region.nbytes,))
            return _unpack(packed, tensor.dtype, shape)
        return _map(region, tensor.dtype.numpy(), shape)

    def raw(self, tensor: ir.TensorProtocol) -> Array:
        """The bytes of a tensor as they are stored (little endian), uint8 [nbytes]."""
        region = self.region(tensor)
        if region is None:
            return np.frombuffer(tensor.tobytes(), np.uint8)
        return _map(region, np.dtype(np.uint8), (region.nbytes,))

    def digest(self, tensor: ir.TensorProtocol) -> str:
        """sha256 of the stored bytes of an external tensor, read a piece at a time."""
        region = self.region(tensor)
        assert region is not None
        state = hashlib.sha256()
        data = self.raw(tensor)
        for start in range(0, region.nbytes, _HASH_PIECE):
            state.update(data[start : start + _HASH_PIECE].data)
        return state.hexdigest()


def shape_of(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """The shape of a stored tensor, which has no symbols."""
    return tuple(int(d) for d in tensor.shape if isinstance(d, int))


def _map(region: Region, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
    if not region.nbytes:
        return np.empty(shape, dtype)
    try:
        return np.memmap(region.file, dtype, "r", region.offset, shape)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be mapped: {error}", where=region.file) from None


def _unpack(packed: Array, dtype: ir.DataType, shape: tuple[int, ...]) -> Array:
    """Elements of 4 or 2 bits, lowest bits first, as ONNX stores them."""
    width = dtype.bitwidth
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    codes = (packed[:, None] >> shifts) & np.uint8(2**width - 1)
    count = int(np.prod(shape, dtype=np.int64))
    narrow = codes.reshape(-1)[:count].reshape(shape)
    # ml_dtypes' small types keep their code in the low bits of a byte, which is what `narrow` has.
    return narrow.view(dtype.numpy())
