"""What is to be decided: every unit of every kind of family, and the partitions that they make up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxpack.kernels.target import Target
from onnxpack.planning import select
from onnxpack.planning.costs import Costs
from onnxpack.planning.families import Kind, partitions
from onnxpack.planning.tiling import Unit, cost_table
from onnxpack.shapes import Gemm


class Demand:
    """The units of all kinds, and the partitions they make up."""

    def __init__(self, kinds: Sequence[Kind], costs: Costs) -> None:
        self.kinds = kinds
        self.costs = costs
        self.partitions = [partitions(kind.widths) for kind in kinds]
        index: dict[Unit, int] = {}
        self.options = [
            [
                [index.setdefault(unit, len(index)) for part in partition for unit in units_of(kind, part)]
                for partition in choices
            ]
            for kind, choices in zip(kinds, self.partitions, strict=True)
        ]
        self.units = list(index)
        self.on_host = self._on_host()

    def _on_host(self) -> select.Costs:
        figures = [self.costs.host(unit.shape, unit.members) for unit in self.units]
        never = [select.NEVER * unit.members for unit in self.units]
        return np.array([n if f is None else f for f, n in zip(figures, never, strict=True)], np.int64)

    def on_kernels(self, kernels: Sequence[Gemm], target: Target) -> select.Costs:
        """[units, kernels]: nanoseconds, or CANNOT."""
        return cost_table(self.units, kernels, self.costs, target)


def units_of(kind: Kind, part: Sequence[int]) -> list[Unit]:
    """The units of one bin of a family, one for each number of rows."""
    n = sum(kind.widths[i] for i in part)
    return [Unit(Gemm(rows, kind.k, n), len(part)) for rows in kind.rows]
