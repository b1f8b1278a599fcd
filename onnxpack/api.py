"""The public functions. Each imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import onnx

    from onnxpack.census import Census
    from onnxpack.kernels.generate import Progress
    from onnxpack.kernels.supply import Supply
    from onnxpack.pack.weights import Stored
    from onnxpack.pipeline import BuildReport
    from onnxpack.plan import Plan
    from onnxpack.runtime.session import PackSession
    from onnxpack.shapes import Gemm

    ModelSource = str | Path | onnx.ModelProto

DEFAULT_WEIGHTS = "q4nx"


def census(model: ModelSource, kernels: str | Path | None = None) -> Census:
    """List every matrix product of a model, with a reason for each that will not run on the NPU.

    `model`: path of an ONNX file, or a ModelProto. `kernels`: a directory of ELFs, or ``MxKxN[=path],...``.
    Weights are not read. Raises ModelError, UsageError, KernelError.
    """
    from onnxpack.census import take_census
    from onnxpack.graph.load import load as load_model

    return take_census(load_model(model), _shapes(kernels))


def plan(
    model: ModelSource,
    kernels: str | Path | None = None,
    rows: Sequence[int] = (128,),
    budget: int = 8,
    weights: str = DEFAULT_WEIGHTS,
    *,
    min_rows: int = 16,
    costs: str | Path | None = None,
) -> Plan:
    """Decide how each site runs, launch by launch, and how each weight is stored. Weights are not read.

    `kernels`: nothing but these; None: whatever the design can be built for. `rows`: the numbers of rows to plan
    for, where the graph does not state them; calls with fewer than `min_rows` stay on the host. `budget`: distinct
    kernels at most. `costs`: a file of measured figures. Raises ModelError, UsageError, KernelError.
    """
    from onnxpack.formats.select import Selection
    from onnxpack.graph.load import load as load_model
    from onnxpack.plan import make_plan
    from onnxpack.planning.costs import Costs

    figures = None if costs is None else Costs.loads(_read(costs, "--costs"))
    choice, shapes = Selection.parse(weights), None if kernels is None else _shapes(kernels)
    return make_plan(load_model(model), choice, shapes, rows, budget=budget, min_rows=min_rows, costs=figures)


def build(
    model: ModelSource,
    out: str | Path,
    weights: str = DEFAULT_WEIGHTS,
    plan: Plan | str | Path | None = None,
    kernels: str | Path | None = None,
    elfs_out: str | Path | None = None,
    force: bool = False,
    *,
    rows: Sequence[int] = (128,),
    budget: int = 8,
    elf_cache: str | Path | None = None,
    jobs: int | None = None,
    min_cosine: float = 0.99,
    on_kernel: Callable[[Progress], None] | None = None,
    on_weight: Callable[[Stored], None] | None = None,
) -> BuildReport:
    """Pack a model into the directory `out`, which appears whole or not at all.

    `weights`: a format, or ``pattern=format,...`` over weight names. `plan`: execute exactly this plan, or the one in
    this file, instead of making one; its formats replace `weights`. `force`: replace an existing pack. `on_weight` is
    called from worker threads as each weight is done.
    `kernels`: bind these, a directory of ELFs or ``MxKxN=path,...``. `elfs_out`: compile what the plan wants and they
    lack, and put new ELFs there; `rows`, `budget`: as in `plan`; `elf_cache`, `jobs`: cache and compiles at once. A
    shape that cannot be had is in the report, and its products run on the host.
    `min_cosine`: a weight that decodes to less than this against its source raises GateError.
    Raises UsageError (target exists), ModelError, EnvironmentFault (space, permission); then `out` is as it was.
    """
    from onnxpack.formats.select import Selection
    from onnxpack.graph.load import load as load_model
    from onnxpack.pipeline import run_build
    from onnxpack.plan import Plan, make_plan

    choice, supply = Selection.parse(weights), _supply(kernels, elfs_out, elf_cache, jobs, on_kernel)
    given = plan if plan is None or isinstance(plan, Plan) else Plan.loads(_read(plan, "--plan"))
    loaded = model if isinstance(model, str | Path) else load_model(model)
    return run_build(
        loaded,
        out,
        lambda loaded, sites: (
            given
            or make_plan(loaded, choice, None if supply is None else supply.shapes, rows, sites=sites, budget=budget)
        ),
        supply=supply,
        force=force,
        min_cosine=min_cosine,
        on_weight=on_weight,
    )


def load(
    path: str | Path,
    device: Literal["auto", "host", "reference", "npu"] = "auto",
    session_options: Any = None,
    strict: bool = False,
    check: Literal["headers", "full"] = "headers",
) -> PackSession:
    """Open a pack as a session with the methods of onnxruntime.InferenceSession.

    `check`: "headers" compares manifest, sizes and headers; "full" every digest. `strict`: raise instead of falling
    back to the host. Raises PackError, EnvironmentFault (device "npu" without one).
    """
    from onnxpack.runtime.session import load as load_pack

    return load_pack(path, device, session_options, strict, check)


_READ_LIMIT = 256 << 20


def _read(path: str | Path, option: str) -> bytes:
    """A file that an option names. UsageError when it cannot be read."""
    from onnxpack.errors import UsageError

    try:
        with Path(path).open("rb") as file:
            text = file.read(_READ_LIMIT + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {getattr(error, 'strerror', error)}", where=f"{option} {path}") from None
    if len(text) > _READ_LIMIT:
        raise UsageError(f"larger than {_READ_LIMIT} bytes", where=f"{option} {path}")
    return text


def _supply(
    kernels: str | Path | None,
    elfs_out: str | Path | None,
    cache: str | Path | None,
    jobs: int | None,
    on_kernel: Callable[[Progress], None] | None,
) -> Supply | None:
    """Where kernels come from; None when none are to be bound."""
    if kernels is None and elfs_out is None:
        return None
    from onnxpack.kernels.library import Library, parse_kernels
    from onnxpack.kernels.supply import Supply

    library = Library() if kernels is None else parse_kernels(str(kernels))
    out = None if elfs_out is None else Path(elfs_out)
    return Supply(library, out is not None, out, None if cache is None else Path(cache), jobs, on_kernel)


def _shapes(kernels: str | Path | None) -> frozenset[Gemm]:
    if kernels is None:
        return frozenset()
    from onnxpack.kernels.library import parse_kernels

    return parse_kernels(str(kernels)).shapes
