"""A pack beside its source model on the same inputs, at ORT_ENABLE_BASIC on both sides.

onnxruntime's own float operators differ between optimization levels, so both sides run at one level, at which the graph
is computed as it is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort

from onnxpack.errors import ModelError, UsageError
from onnxpack.runtime.session import PackSession, basic_options
from onnxpack.types import Array
from onnxpack.verify.inputs import Feed, InputSpec, first_rows, fitted, rows_apart
from onnxpack.verify.metrics import OutputFigures, OutputSums, cross_entropy
from onnxpack.verify.refusal import quiet, refused_as

LOGITS = "logits"
_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)")


@dataclass(frozen=True)
class Gates:
    """What the outputs must meet; null is not asked for."""

    max_kl: float | None = None
    min_top1: float | None = None
    max_rel_error: float | None = None
    max_rel_rms: float | None = None
    min_cosine: float | None = None
    min_equal: float | None = None
    """For outputs of whole numbers, truth values or texts."""

    def judge(self, name: str, figures: OutputFigures, *, logits: bool) -> tuple[int, list[str]]:
        """How many gates apply to the output called `name`, and what it does not meet.

        A figure that is not finite meets no gate.
        """
        applied, failed = 0, list[str]()
        for what, value, limit, upper in self._limits(figures, logits):
            if limit is None:
                continue
            applied += 1
            if value is None:
                failed.append(f"{name}: {what} is not finite")
            elif value > limit if upper else value < limit:
                failed.append(f"{name}: {what} {value:.4g} is {'above' if upper else 'below'} {limit:g}")
        return applied, failed

    def _limits(self, f: OutputFigures, logits: bool) -> list[tuple[str, float | None, float | None, bool]]:
        """Figure, limit, and whether the limit is an upper one."""
        if f.exact:
            return [("share of equal elements", f.equal, self.min_equal, False)]
        limits = [
            ("relative error", f.max_rel, self.max_rel_error, True),
            ("relative RMS error", f.rel_rms, self.max_rel_rms, True),
            ("cosine", f.cosine, self.min_cosine, False),
        ]
        if logits:
            limits += [("KL", f.kl, self.max_kl, True), ("top-1 agreement", f.top1, self.min_top1, False)]
        return limits


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean of -log p(next token), of both sides on the same tokens."""

    reference: float
    pack: float
    tokens: int


@dataclass(frozen=True)
class Comparison:
    """The outputs of a pack beside those of its source model."""

    outputs: dict[str, OutputFigures]
    runs: int
    gates: Gates
    perplexity: Perplexity | None
    failures: list[str]

    @property
    def passed(self) -> bool:
        """Whether every gate is met and something was really compared."""
        return not self.failures


@dataclass(frozen=True)
class Case:
    """One run: what is fed, and for language models the tokens that follow."""

    feed: Feed
    targets: Array | None = None


def float_session(model: str | Path, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    """The source model in onnxruntime on the CPU, at ORT_ENABLE_BASIC by default. ModelError when it does not load."""
    if not Path(model).is_file():
        raise ModelError("no such file", where=str(model))
    with refused_as(lambda why: ModelError(f"onnxruntime refuses it: {why}", where=str(model))):
        return ort.InferenceSession(str(model), options or quiet(basic_options()), providers=["CPUExecutionProvider"])


def cases(feeds: Iterable[Feed], specs: Sequence[InputSpec], *, windows: int | None, next_token: bool) -> list[Case]:
    """The runs that feeds stand for: rows one by one where the model takes one, tokens shifted for `next_token`.

    `windows`: only the first rows of each feed.
    """
    made = []
    for feed in feeds:
        part = first_rows(feed, windows) if windows is not None else feed
        for case in _shifted(part, specs) if next_token else [Case(part)]:
            made += [Case(fitted(row, specs), case.targets) for row in rows_apart(case.feed, specs)]
    return made


def _shifted(feed: Feed, specs: Sequence[InputSpec]) -> list[Case]:
    """Row by row: feed everything up to the last token, ask for everything from the second on."""
    name = token_input(specs)
    if name not in feed or feed[name].ndim != 2 or feed[name].dtype.kind not in "iu" or feed[name].shape[1] < 2:
        raise UsageError("is not [rows, at least 2] tokens", where=f"input {name}")
    ids = feed[name]
    shifted = {key: a[:, :-1] if a.shape == ids.shape else a for key, a in feed.items()}
    along = {key for key, a in shifted.items() if a.ndim and len(a) == len(ids)}
    return [
        Case({key: a[i : i + 1] if key in along else a for key, a in shifted.items()}, ids[i : i + 1, 1:])
        for i in range(len(ids))
    ]


def token_input(specs: Sequence[InputSpec]) -> str:
    """The input that takes token ids: ``input_ids``, or the only one of whole numbers and rank 2."""
    found = [s.name for s in specs if s.dtype is not None and s.dtype.kind in "iu" and len(s.shape) == 2]
    if "input_ids" in found:
        return "input_ids"
    if len(found) != 1:
        raise UsageError(
            "cannot tell which input takes the tokens", hint=f"the model takes {', '.join(map(str, specs))}"
        )
    return found[0]


def logits_outputs(session: Any, named: Sequence[str] = ()) -> list[str]:
    """Outputs that are logits: those named, or a float output of rank >= 2 called logits."""
    outputs = {value.name: value for value in session.get_outputs()}
    for name in named:
        if name not in outputs:
            raise UsageError(f"no output is called {name!r}", hint=f"there are {', '.join(outputs)}")
        if outputs[name].type not in _FLOATS or len(outputs[name].shape) < 2:
            raise UsageError(f"is {outputs[name].type}{outputs[name].shape}, not logits", where=f"output {name}")
    if named:
        return list(named)
    return [
        name for name, value in outputs.items() if name == LOGITS and value.type in _FLOATS and len(value.shape) >= 2
    ]


def compare(
    reference: ort.InferenceSession,
    pack: PackSession,
    runs: Sequence[Case],
    gates: Gates,
    logits: Sequence[str] = (),
) -> Comparison:
    """Run both sides on every case and judge. Never passes without having compared something that could differ."""
    tally = _Tally(reference, pack, logits_outputs(reference, logits))
    if not tally.logits and (gates.max_kl is not None or gates.min_top1 is not None):
        hint = f"name one with --logits: {', '.join(tally.names)}"
        raise UsageError("KL and top-1 need logits, and no output is called logits", hint=hint)
    for case in runs:
        tally.run(case)
    return tally.comparison(gates)


@dataclass
class _Tally:
    reference: ort.InferenceSession
    pack: PackSession
    logits: list[str]
    names: list[str] = field(init=False)
    sums: dict[str, OutputSums] = field(init=False)
    runs: int = 0
    tokens: int = 0
    nll: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.names = [value.name for value in self.reference.get_outputs()]
        there = {value.name for value in self.pack.get_outputs()}
        if missing := [name for name in self.names if name not in there]:
            raise UsageError(f"the pack has no output {missing[0]!r}", hint="it was made from another model")
        self.sums = {name: OutputSums(name in self.logits) for name in self.names}

    def run(self, case: Case) -> None:
        wanted = _run(self.reference, self.names, case.feed, "the model")
        found = _run(self.pack, self.names, case.feed, "the pack")
        self.runs += 1
        for name, r, f in zip(self.names, wanted, found, strict=True):
            self.sums[name].add(r, f)
        if case.targets is not None:
            self._next_token(case.targets, wanted, found)

    def _next_token(self, targets: Array, wanted: list[Any], found: list[Any]) -> None:
        if len(self.logits) != 1:
            raise UsageError("perplexity needs one output of logits", hint="name it with --logits")
        sums, index = [], self.names.index(self.logits[0])
        for logits in (wanted[index], found[index]):
            if logits.shape[:-1] != targets.shape or int(targets.max()) >= logits.shape[-1] or int(targets.min()) < 0:
                raise UsageError(
                    f"logits {list(logits.shape)} do not fit tokens {list(targets.shape)} up to {targets.max()}",
                    where=f"output {self.logits[0]}",
                )
            sums.append(float(cross_entropy(logits, targets).sum()))
        self.nll = (self.nll[0] + sums[0], self.nll[1] + sums[1])
        self.tokens += targets.size

    def comparison(self, gates: Gates) -> Comparison:
        outputs = {name: sums.figures() for name, sums in self.sums.items()}
        failures = [f"{name} {problem}" for name, figures in outputs.items() for problem in figures.problems]
        judged = 0
        for name, figures in outputs.items():
            if not figures.elements or (figures.max_abs is None and not figures.exact):
                continue
            applied, failed = gates.judge(name, figures, logits=name in self.logits)
            failures += failed
            judged += applied if figures.vacuous is None else 0
        if not judged and not failures:
            why = "; ".join(f"{name}: {figures.vacuous or 'no gate'}" for name, figures in outputs.items())
            failures.append(f"this comparison proves nothing ({why or 'the model has no outputs'})")
        return Comparison(outputs, self.runs, gates, self._perplexity(), failures)

    def _perplexity(self) -> Perplexity | None:
        if not self.tokens:
            return None
        reference, pack = (math.exp(min(700.0, nll / self.tokens)) for nll in self.nll)
        return Perplexity(reference, pack, self.tokens)


def _run(session: Any, names: Sequence[str], feed: Feed, who: str) -> list[Any]:
    with refused_as(lambda why: UsageError(f"{who} does not run on these inputs: {why}")):
        return list(session.run(list(names), feed))
