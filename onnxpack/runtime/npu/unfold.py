"""A pack whose QDQ groups are not folded: the graph's own nodes run them, for comparison and for doubt."""

from __future__ import annotations

from dataclasses import replace

from onnxpack.pack.read import Pack
from onnxpack.reasons import Reason


def without_groups(pack: Pack) -> tuple[Pack, int]:
    """The same pack with every quantized site unbound, and how many there were. Nothing on disk changes."""
    sites = [
        site
        if site.qdq is None or site.weight is None
        else replace(site, weight=None, kernel=None, qdq=None, reason=Reason.SWITCHED_OFF.value)
        for site in pack.manifest.sites
    ]
    count = sum(old is not new for old, new in zip(pack.manifest.sites, sites, strict=True))
    return Pack(pack.path, replace(pack.manifest, sites=sites)), count
