"""Scalars and small tensors that the runtime adds to a graph, each once.

They are initializers of the main graph; bodies see them as they see every name around them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from onnxpack.runtime.graphs import Names


class Constants:
    """Names of constants in `model`; a constant is added when it is first asked for."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.names = Names(model)
        self._graph = model.graph
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def scalar(self, value: np.generic) -> str:
        """A tensor of rank 0."""
        return self.tensor(np.asarray(value), f"onnxpack/{value.dtype}_{value}")

    def tensor(self, value: npt.NDArray[np.generic], name: str) -> str:
        """Any small tensor; `name` is what it is called when it is new and the name is free."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._known:
            self._known[key] = self.names.fresh(name)
            self._graph.initializer.append(numpy_helper.from_array(value, self._known[key]))
        return self._known[key]
