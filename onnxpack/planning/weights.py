"""Which weights a plan stores, in which format."""

from __future__ import annotations

from collections.abc import Sequence

from onnxpack.errors import UsageError
from onnxpack.formats.base import Format, Orientation
from onnxpack.formats.registry import get
from onnxpack.formats.select import Selection
from onnxpack.graph.constants import structure
from onnxpack.graph.load import Model
from onnxpack.graph.sites import Site
from onnxpack.planning.records import OWN_CODES, PlannedWeight


def weights_of(bound: Sequence[Site]) -> dict[str, list[Site]]:
    """The distinct weights of bound sites by name: one root through equal views is one weight, wherever it is used.

    A weight is called after its root tensor; further weights made of the same root get "#2", "#3".
    """
    by_structure: dict[tuple[str, ...], list[Site]] = {}
    for site in bound:
        assert site.weight is not None
        parts = [site.weight] if site.group is None else list(site.group.weight.constants)
        key = (*map(structure, parts), f"{site.k}x{site.n}", str(site.transposed_b), str(site.group is None))
        by_structure.setdefault(key, []).append(site)
    named: dict[str, list[Site]] = {}
    for users in by_structure.values():
        assert users[0].weight is not None
        base = name = users[0].weight.root.name
        count = 1
        while name in named:
            count += 1
            name = f"{base}#{count}"
        named[name] = users
    return named


def plan_weights(model: Model, bound: Sequence[Site], choice: Selection) -> list[PlannedWeight]:
    """Every distinct weight of the bound sites. UsageError when no rule of `choice` is for one."""
    planned = []
    for name, users in weights_of(bound).items():
        k, n = users[0].k, users[0].n
        assert isinstance(k, int)
        assert isinstance(n, int)
        paths = [site.path for site in users]
        if users[0].group is not None:  # the graph's own codes are never quantized again
            planned.append(PlannedWeight(name, k, n, OWN_CODES, {}, paths))
            continue
        made = choice.of(name)
        obstacle = _obstacle(made, k, n, model.opset)
        note = None if obstacle is None else f"int8 instead of {made.name}: {obstacle}"
        made = made if obstacle is None else get("int8")
        planned.append(PlannedWeight(name, k, n, made.name, dict(made.params), paths, note))
    return planned


def _obstacle(made: Format, k: int, n: int, opset: int) -> str | None:
    """Why a format cannot hold a weight of this shape in a graph of this opset."""
    if made.min_opset > opset:
        return f"its decoder needs opset {made.min_opset}, the graph has {opset}"
    try:
        made.fields((k, n) if made.orientation is Orientation.KN else (n, k))
    except UsageError as error:
        return error.what
    return None
