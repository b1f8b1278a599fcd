"""`onnxpack verify` as one function: files, outputs, single products."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnxruntime as ort

from onnxpack import records
from onnxpack.errors import UsageError
from onnxpack.pack.read import Pack, file_sha256, open_pack
from onnxpack.runtime.prepare import read_graph
from onnxpack.runtime.session import basic_options, load
from onnxpack.verify.accuracy import Case, Comparison, Gates, cases, compare, float_session
from onnxpack.verify.inputs import Feed, input_specs, read_feeds
from onnxpack.verify.refusal import quiet
from onnxpack.verify.sites import MAX_SITE_ERROR, SiteError, failures, site_errors
from onnxpack.verify.synthetic import random_feed, table_lengths

DEFAULT_RANDOM = 3
Device = Literal["auto", "host", "reference", "npu"]


@dataclass(frozen=True)
class Inputs:
    """What both sides are fed: files, or `random` feeds from `seed` and the next ones."""

    source: str | None = None
    random: int | None = None
    seed: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    windows: int | None = None
    next_token: bool = False


@dataclass(frozen=True)
class Verification:
    """What verifying a pack gave."""

    pack: str
    model: str | None
    from_this_model: bool | None
    """Whether the pack was made from this very file."""
    files: int | None
    """Files whose digests agree; null when they were not asked for."""
    inputs: list[str]
    comparison: Comparison | None
    sites: list[SiteError] | None
    failures: list[str]

    @property
    def passed(self) -> bool:
        """Whether everything that was asked for holds."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """What `verify --json` prints. Figures that are not finite are null."""
        c = self.comparison
        made: dict[str, Any] = {
            "pack": self.pack,
            "model": self.model,
            "from_this_model": self.from_this_model,
            "files": self.files,
            "runs": 0 if c is None else c.runs,
            "outputs": {} if c is None else records.to_dict(c.outputs),
            "perplexity": None if c is None else records.to_dict(c.perplexity),
            "gates": None if c is None else records.to_dict(c.gates),
            "sites": None if self.sites is None else [_site(error) for error in self.sites],
            "failures": self.failures,
            "passed": self.passed,
        }
        return made


def _site(error: SiteError) -> dict[str, Any]:
    return {
        "path": error.path,
        "weight": error.weight,
        "weight_rms": _finite(error.weight_rms),
        "recorded_rms": error.recorded_rms,
        "rows": error.rows,
        "max_abs": _finite(error.max_abs) if error.compared else None,
        "max_rel": _finite(error.max_rel),
        "rel_rms": _finite(error.rel_rms),
        "unmeasured": error.unmeasured,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def verify(
    path: str | Path,
    model: str | Path | None = None,
    *,
    inputs: Inputs | None = None,
    device: Device = "auto",
    logits: Sequence[str] = (),
    gates: Gates | None = None,
    sites: bool = False,
    max_site_error: float = MAX_SITE_ERROR,
    files: bool = False,
) -> Verification:
    """Compare a pack with its source model, each of its products with the source's, its files with their digests.

    Outputs are compared when there is a `model`. What is not met stands in `failures`; what cannot be asked at all
    raises: UsageError for inputs that do not fit, ModelError, PackError (a digest that differs among them).
    """
    if model is None and (sites or not files):
        raise UsageError("nothing to compare with", where=str(path), hint=_MODEL_OR_FILES)
    pack = open_pack(path, "full" if files else "headers")
    checked = len(pack.manifest.files) if files else None
    if model is None:
        return Verification(str(path), None, None, checked, [], None, None, [])
    reference = float_session(model)
    runs, described = _runs(pack, reference, inputs or Inputs())
    session = load(path, device, session_options=quiet(basic_options()))
    comparison = compare(reference, session, runs, gates or default_gates(pack), logits)
    del reference, session  # the products are compared on arrays; two models need not stay in memory for it
    errors = site_errors(pack, model, [case.feed for case in runs]) if sites else None
    failed = [*comparison.failures, *([] if errors is None else failures(errors, max_site_error))]
    same = file_sha256(Path(model)) == pack.manifest.source.graph_sha256
    return Verification(str(path), str(model), same, checked, described, comparison, errors, failed)


_MODEL_OR_FILES = "give --model, the file the pack was made from; --files alone checks the digests"


def default_gates(pack: Pack) -> Gates:
    """What outputs are held to when nothing is asked for.

    A relative RMS error of 0.1, and four times what storing cost the weight that lost most: 0.13 for a pack of int8,
    about 0.4 for one of 4 bits. Sound packs lie at a third of that; a pack with a wrong weight, or of zeros, above.
    """
    loss = max((tensor.error.get("relative_rms", 0.0) for tensor in pack.manifest.tensors), default=0.0)
    return Gates(max_rel_rms=round(0.1 + 4 * loss, 4), min_equal=0.98)


def _runs(pack: Pack, reference: ort.InferenceSession, inputs: Inputs) -> tuple[list[Case], list[str]]:
    """The runs, and what a person should know about where they come from."""
    specs = input_specs(reference)
    if inputs.source is not None and inputs.random is not None:
        raise UsageError("inputs come from files or from a seed, not from both")
    if inputs.source is not None and inputs.sizes:
        raise UsageError("--dim sizes random inputs; those from files have their own sizes")
    if inputs.source is not None:
        feeds: list[Feed] = read_feeds(inputs.source, specs)
        described = [f"inputs from {inputs.source}"]
    else:
        lengths = table_lengths(read_graph(pack))
        count = DEFAULT_RANDOM if inputs.random is None else inputs.random
        feeds = [random_feed(specs, inputs.seed + i, inputs.sizes, lengths) for i in range(count)]
        described = [f"{count} random inputs from seed {inputs.seed}"]
    made = cases(feeds, specs, windows=inputs.windows, next_token=inputs.next_token)
    if not made:
        raise UsageError("there is not one input to run")
    shapes = sorted({f"{n} {a.dtype.name}{list(a.shape)}" for case in made for n, a in case.feed.items()})
    return made, [*described, f"{len(made)} runs: {', '.join(shapes[:8])}"]
