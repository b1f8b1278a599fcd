"""The host device: the whole graph, lowered to integer operators, as one onnxruntime session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime as ort

from onnxpack.pack.read import Pack
from onnxpack.runtime.groups import facts
from onnxpack.runtime.lower import Lowered
from onnxpack.runtime.opening import Opener
from onnxpack.runtime.prepare import Weights, isolated_graph, lower_graph
from onnxpack.runtime.product import main_products
from onnxpack.runtime.trace import Placed, SymbolRows, runs_as_product


def host_model(pack: Pack) -> tuple[bytes, Lowered]:
    """The whole graph, lowered, as bytes that hold no packed weight, and what its session must be given."""
    model, constants = isolated_graph(pack)
    lowered = lower_graph(model, Weights(pack), constants)
    return model.SerializeToString(), lowered


class HostEngine:
    """Runs a pack on the host device."""

    def __init__(self, pack: Pack, opener: Opener, weights: Weights | None = None) -> None:
        model, constants = isolated_graph(pack)
        main = {product.node for product in main_products(model)}
        lowered = lower_graph(model, weights or Weights(pack), constants)
        self._opened = opener(model.SerializeToString(), lowered)
        bound = [(site, facts(site, pack)) for site in pack.manifest.sites if runs_as_product(site)]
        self.placed = [Placed(site, "host", site.node in main, what) for site, what in bound]
        named = {
            value.name: [(axis, dim) for axis, dim in enumerate(value.shape) if isinstance(dim, str)]
            for value in self.signature.get_inputs()
        }
        self._named = [(name, dims) for name, dims in named.items() if dims]

    @property
    def signature(self) -> ort.InferenceSession:
        """A session with the inputs, outputs and metadata of the pack's graph."""
        return self._opened.session

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], run_options: ort.RunOptions | None
    ) -> tuple[list[Any], SymbolRows]:
        """The outputs, and the row counts that the fed shapes tell."""
        results = self._opened.session.run(output_names, feeds, run_options)
        return results, SymbolRows(self.symbols(feeds))

    def symbols(self, feeds: Mapping[str, Any]) -> dict[str, int]:
        """The named dimensions of the graph's inputs, as these feeds have them."""
        bound: dict[str, int] = {}
        for name, dims in self._named:  # only these: a call may take no longer than 20 microseconds
            shape = getattr(feeds.get(name), "shape", ())
            shape = shape() if callable(shape) else shape
            for axis, dim in dims:
                if axis < len(shape):
                    bound[dim] = int(shape[axis])
        return bound

    def end_profiling(self) -> str:
        """Name of the profile file, as in onnxruntime."""
        return str(self._opened.session.end_profiling())
