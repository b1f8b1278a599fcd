"""From an opened pack to a graph whose bound sites are bare products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import onnx
from google.protobuf.message import DecodeError

from onnxpack.errors import PackError
from onnxpack.pack.read import MANIFEST, Pack
from onnxpack.runtime.constants import Constants
from onnxpack.runtime.isolate import isolate
from onnxpack.runtime.lower import Lowered, lower
from onnxpack.runtime.made import Arrays, make_operands
from onnxpack.runtime.operands import Operand, is_stored, operand
from onnxpack.runtime.probe import needs_precision


@dataclass(frozen=True)
class Weights:
    """Operands of a pack, each made once."""

    pack: Pack

    @cached_property
    def _known(self) -> dict[str, Operand]:
        return {}

    @cached_property
    def _made(self) -> Arrays:
        """Operands of everything that sites read and that is not stored as int8 codes: all made at once, in threads."""
        read = dict.fromkeys(site.weight for site in self.pack.manifest.sites if site.weight is not None)
        return make_operands(self.pack, [name for name in read if not is_stored(self.pack, name)])

    def __call__(self, name: str) -> Operand:
        """The operand of the weight called `name`."""
        if name not in self._known:
            self._known[name] = operand(self.pack, name, lambda: self._made)
        return self._known[name]


def read_graph(pack: Pack) -> onnx.ModelProto:
    """model.onnx, with its weights left in their files. PackError when it is not a model."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(pack.graph_file.read_bytes())
    except (DecodeError, OSError) as error:
        raise PackError(f"cannot be read: {error}", where=str(pack.graph_file), hint="build the pack again") from None
    return model


def isolated_graph(pack: Pack) -> tuple[onnx.ModelProto, Constants]:
    """model.onnx with every bound site as a bare product."""
    model = read_graph(pack)
    constants = Constants(model)
    isolate(model, pack.manifest.sites, constants, str(pack.graph_file))
    return model, constants


def lower_graph(model: onnx.ModelProto, weights: Weights, constants: Constants | None = None) -> Lowered:
    """The host lowering of every bare product in `model`, in place; see lower.lower.

    EnvironmentFault when this CPU cannot do integer products exactly.
    """
    return lower(model, constants or Constants(model), weights, MANIFEST, needs_precision)
