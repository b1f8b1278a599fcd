"""The feed of a command that runs a pack: from files, or made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnxpack.errors import UsageError
from onnxpack.pack.read import open_pack
from onnxpack.runtime.prepare import read_graph
from onnxpack.runtime.session import PackSession
from onnxpack.verify.inputs import Feed, fitted, input_specs, read_feed
from onnxpack.verify.synthetic import random_feed, table_lengths


def session_feed(
    pack: str | Path,
    session: PackSession,
    files: Sequence[str],
    *,
    random: bool,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
) -> Feed:
    """What `session`, opened from `pack`, is fed. UsageError unless it is files or random inputs that fit."""
    specs = input_specs(session)
    if files and (random or sizes):
        raise UsageError("inputs come from files or are made up, not both", hint="drop --random and --dim, or --input")
    if files:
        optional = [value.name for value in session.get_overridable_initializers()]
        return fitted(read_feed(files, specs), specs, optional)
    if specs and not random:
        takes = ", ".join(map(str, specs))
        raise UsageError(f"no inputs; the pack takes {takes}", where=str(pack), hint="give --input or --random")
    return random_feed(specs, seed, sizes, table_lengths(read_graph(open_pack(pack))))
