"""Which sites a pack's kernels run, and launch by launch how: the plan's groups, as far as they can be executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxpack.errors import PackError
from onnxpack.kernels.library import Canary
from onnxpack.pack.manifest import KernelRecord, Manifest, SiteRecord
from onnxpack.pack.read import Pack
from onnxpack.planning.records import Call, Execution, Launch, Member, PlanGroup, Program
from onnxpack.runtime.npu.slot import KernelFile
from onnxpack.runtime.product import Product
from onnxpack.shapes import Gemm

MIN_ROWS = 16
"""Calls with fewer rows run on the host, where the pack does not say otherwise."""


@dataclass(frozen=True)
class Claimed:
    """One site of a call, and its product in the graph."""

    site: SiteRecord
    product: Product
    column: int
    """Where its columns begin among the joined ones."""
    n: int


@dataclass(frozen=True)
class ClaimedCall:
    """Sites that run together, and the programs for the kernels that the pack has, by rows."""

    k: int
    n: int
    members: tuple[Claimed, ...]
    programs: tuple[Program, ...]

    @property
    def first_kernel(self) -> Gemm | None:
        """The kernel of the first program that has one."""
        return next((Gemm.parse(program.kernel) for program in self.programs if program.kernel is not None), None)

    @property
    def a(self) -> str:
        """The value that all of them read."""
        return self.members[0].product.a


def kernel_files(pack: Pack) -> dict[Gemm, KernelFile]:
    """The kernels of a pack by shape. PackError for a file that the manifest does not list, and for a bad canary."""
    listed = {record.path for record in pack.manifest.files}
    found: dict[Gemm, KernelFile] = {}
    for record in pack.manifest.kernels:
        if record.file not in listed:
            raise PackError(
                f"kernel file {record.file!r} is not one of the pack's", where=str(pack.path), hint=_REBUILD
            )
        gemm = Gemm(record.m, record.k, record.n)
        found.setdefault(gemm, KernelFile(gemm, pack.path / record.file, record.sha256, _canary(record, pack)))
    return found


_REBUILD = "build the pack again"


def _canary(record: KernelRecord, pack: Pack) -> Canary | None:
    if record.canary is None:
        return None
    seed, sha256 = record.canary.get("seed"), record.canary.get("sha256")
    if not isinstance(seed, int) or isinstance(seed, bool) or not isinstance(sha256, str):
        raise PackError(f"the canary of kernel {record.key[:12]} is not one", where=str(pack.path), hint=_REBUILD)
    return Canary(seed, sha256)


def execution_of(manifest: Manifest) -> Execution:
    """The plan in the manifest; where there is none, exact kernels: each bound site on those of its (K, N)."""
    if manifest.plan is not None:
        return manifest.plan
    bound = [site for site in manifest.sites if site.weight is not None and site.kernel is not None]
    return exact_execution(bound, [Gemm(kernel.m, kernel.k, kernel.n) for kernel in manifest.kernels])


def exact_execution(sites: Iterable[SiteRecord], kernels: Iterable[Gemm]) -> Execution:
    """Every site by itself, on kernels of exactly its (K, N): rows in blocks of M, the last one padded.

    >>> site = SiteRecord("s", "s", "MatMul", "weight", "t", 8, 32, "float32", "w", "key")
    >>> [(p.rows, p.kernel) for p in exact_execution([site], [Gemm(64, 8, 32), Gemm(16, 8, 32)]).groups[0].programs]
    [(16, '16x8x32'), (64, '64x8x32')]
    """
    known = sorted(kernels)
    groups = []
    for site in sites:
        k, n = site.k, site.n
        fitting = [kernel for kernel in known if kernel.kn == (k, n)]
        if not isinstance(k, int) or not isinstance(n, int) or not fitting:
            continue
        programs = [Program(g.m, str(g), [Launch((0, g.m), (0, k), (0, n))]) for g in fitting]
        call = Call([Member(site.path, 0, n)])
        groups.append(PlanGroup(k, n, [site.path], [str(g) for g in fitting], 1, 0.0, 0, 0, [call], programs))
    return Execution([], MIN_ROWS, groups)


def claim(
    execution: Execution, sites: Sequence[SiteRecord], products: Iterable[Product], kernels: Mapping[Gemm, KernelFile]
) -> list[ClaimedCall]:
    """The calls that can run: bound sites in the main graph, with a kernel that the pack has.

    PackError when a call joins sites that read different values: its plan is of another graph.
    """
    by_path, by_node = {site.path: site for site in sites}, {product.node: product for product in products}
    made = []
    for group in execution.groups:
        programs = tuple(p for p in group.programs if p.kernel is None or Gemm.parse(p.kernel) in kernels)
        if all(program.kernel is None for program in programs):
            continue
        for call in group.calls:
            members = []
            for member in call.members:
                site = by_path.get(member.site)
                if site is not None and site.weight is not None and site.node in by_node:
                    members.append(Claimed(site, by_node[site.node], member.column, member.n))
            if len(members) == len(call.members):
                made.append(ClaimedCall(group.k, group.n, tuple(members), programs))
                _check_inputs(made[-1])
    return made


def _check_inputs(call: ClaimedCall) -> None:
    if len({(member.product.a, member.product.group is None) for member in call.members}) > 1:
        paths = ", ".join(member.site.path for member in call.members)
        raise PackError(f"its plan joins {paths}, which read different values", hint=_REBUILD)
