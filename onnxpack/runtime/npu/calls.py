"""Claimed calls, run: codes to the device block by block, accumulators back into results; or the host does it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from onnxpack.errors import EnvironmentFault, KernelError, OnnxpackError
from onnxpack.planning.records import Program, blocks
from onnxpack.quant.qdq import to_signed
from onnxpack.reasons import Reason
from onnxpack.runtime.npu.arithmetic import Codes, FloatFinish, GroupFinish, Scratch, quantize
from onnxpack.runtime.npu.claims import Claimed, ClaimedCall
from onnxpack.runtime.npu.device import Device
from onnxpack.runtime.npu.faults import DeviceFault, Fault, Tally
from onnxpack.runtime.npu.slot import KernelFile
from onnxpack.runtime.operands import Operand
from onnxpack.runtime.trace import Where
from onnxpack.shapes import Gemm
from onnxpack.types import I8, I32, Array

_serials = itertools.count(1)
"""Of codes, over all sessions of the process: a device that holds codes knows them by it."""

HostProduct = Callable[[Claimed, Array, Array | None], Array]
"""The host lowering of one product: input and bias to result."""


_KEPT = 64


class _Place:
    """Where a call is."""

    kernel: KernelFile | None = None


class Outcome(NamedTuple):
    """Where rows of a call ran. One call has two when some of its rows are the host's by plan."""

    call: Call
    where: Where
    rows: int
    event: str
    reason: str | None


class _Part(NamedTuple):
    """Columns of one site in a launch: `of_site` of its N, `of_c` of the kernel's."""

    member: int
    of_site: slice
    of_c: slice


class _Launch(NamedTuple):
    k: slice
    image: tuple[Any, ...]
    fill: Callable[[I8], None]


class _Piece(NamedTuple):
    """A piece of C: launches that are summed, and whose columns they are."""

    low: int
    high: int
    """Rows of the program."""
    width: int
    parts: tuple[_Part, ...]
    launches: tuple[_Launch, ...]


class _Compiled(NamedTuple):
    """A program with everything looked up that does not depend on a call. No kernel: the host."""

    kernel: KernelFile | None
    pieces: tuple[_Piece, ...]


_Block = tuple[int, int, _Compiled]
"""First row, rows, and how they run."""


@dataclass(frozen=True)
class Member:
    """A site of a call, ready."""

    claimed: Claimed
    weight: Operand
    finish: FloatFinish | GroupFinish
    dtype: np.dtype[Any]
    """Of the result."""
    row_bytes: int
    """Bytes of one row of it."""


@dataclass
class Session:
    """What the calls of one session share."""

    owner: object
    device: Device
    kernels: Mapping[Gemm, KernelFile]
    host: HostProduct
    min_rows: int
    strict: bool
    tally: Tally = field(default_factory=Tally)
    scratch: Scratch = field(default_factory=Scratch)
    images: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Numbers of operand images by what they hold: sites with the same weight share one."""
    events: Callable[[str], None] | None = None
    """Where trace lines go, if anywhere."""


class Call:
    """A claimed call. `run` is what happens on each run of the graph."""

    def __init__(self, claimed: ClaimedCall, weights: Callable[[str], Operand], session: Session) -> None:
        self.claimed, self.session = claimed, session
        self.members = tuple(_member(member, weights(member.product.weight)) for member in claimed.members)
        self.is_group = claimed.members[0].product.group is not None
        record = claimed.members[0].product.group
        self.x_dtype = np.dtype(np.float32 if record is None else record.x_dtype)
        self.by_row = record is not None and len(record.x_scale) > 1
        self._compiled: dict[int, _Compiled] = {}
        self._blocks: dict[int, tuple[_Block, ...]] = {}
        self._floats = tuple(m.finish for m in self.members)
        self._done: dict[int, list[Outcome]] = {}
        """By rows: what is said when all went well."""
        self._told_sums = False
        self._word = "qdq" if self.is_group else "float matmul"

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(
        self, x: Array, codes: Callable[[], Codes], biases: Sequence[Array | None], out: Sequence[Array]
    ) -> list[Outcome]:
        """Results of all members into `out` [rows, N]. x is [..., K]; `codes` makes them, once for all who read x."""
        session, rows = self.session, len(out[0])
        if rows < session.min_rows or not rows:
            self._on_host(x, slice(0, rows), biases, out)
            return [self._outcome("host", rows, "host_rows", Reason.BELOW_ROW_THRESHOLD.value)]
        at = _Place()
        try:
            made = codes()
            finishes = self._finishes(x, made, biases) if self.is_group else self._floats
            session.device.begin()
            try:
                host = self._on_device(rows, made, finishes, out, at)
            finally:
                session.device.end()
        except DeviceFault as fault:
            return self._fall_back(fault, at.kernel, x, biases, out)
        except ValueError as error:
            raise InvalidArgument(f"node {self.members[0].claimed.product.node}: {error}") from None
        if not host:
            done = self._done.get(rows)
            if done is None or session.events is not None:
                if len(self._done) >= _KEPT:
                    self._done.clear()
                done = self._done[rows] = [self._outcome("npu", rows, "", None)]
                return done
            session.tally.on_device += len(self.members)
            return done
        outcomes = [self._outcome("npu", rows - sum(part.stop - part.start for part in host), "", None)]
        for part in host:
            self._on_host(x, part, biases, out)
            outcomes.append(self._outcome("host", part.stop - part.start, "host_rows", Reason.HOST_IS_FASTER.value))
        return [outcome for outcome in outcomes if outcome.rows]

    def _finishes(self, x: Array, codes: Codes, biases: Sequence[Array | None]) -> Sequence[Any]:
        made = []
        for member, bias in zip(self.members, biases, strict=True):
            finish = member.finish
            assert isinstance(finish, GroupFinish)
            if finish.needs_column_sums and self.session.events is not None and not self._told_sums:
                k, n = member.weight.codes.shape
                self.session.events(f"qdq_colsum k={k} n={n} sites={member.claimed.site.path}")
            made.append(finish.bind(x, codes, bias))
        self._told_sums = True
        return made

    def _on_device(
        self, rows: int, codes: Codes, finishes: Sequence[Any], out: Sequence[Array], at: _Place
    ) -> list[slice]:
        """Run what is the device's; the rows that are the host's come back. `at` says where it is, for who catches."""
        host, product = list[slice](), self.session.device.product
        launches, tally = 0, self.session.tally
        for first, count, program in self._blocks.get(rows) or self._split(rows):
            kernel = at.kernel = program.kernel
            if kernel is None:
                host.append(slice(first, first + count))
                continue
            for low, high, width, parts, (launch, *more) in program.pieces:
                if low >= count:
                    continue
                high = min(high, count)
                part = slice(first + low, first + high)
                token = (codes.serial, part.start, high, launch.k.start)
                acc = product(kernel, token, codes.codes[part, launch.k], launch.image, launch.fill, tally)
                acc = acc[: high - low, :width]
                if more:
                    acc = self._sum(acc, kernel, more, part, codes)
                launches += 1 + len(more)
                for index, of_site, of_c in parts:
                    finishes[index].write(acc[:, of_c], part, of_site, codes, out[index])
        tally.launches += launches
        return host

    def _sum(self, acc: I32, kernel: KernelFile, launches: Sequence[_Launch], rows: slice, codes: Codes) -> I32:
        """The accumulators of a piece whose K is split: `acc` of the first launch, plus those of the others."""
        session = self.session
        total: I32 = session.scratch.take("sum", acc.shape, np.int32)
        total[...] = acc
        for launch in launches:
            token, part = (codes.serial, rows.start, rows.stop, launch.k.start), codes.codes[rows, launch.k]
            c = session.device.product(kernel, token, part, launch.image, launch.fill, session.tally)
            np.add(total, c[: acc.shape[0], : acc.shape[1]], out=total)
        return total

    def _split(self, rows: int) -> tuple[_Block, ...]:
        smallest = self.claimed.programs[0]
        if rows <= smallest.rows:
            return ((0, rows, self._compiled.get(smallest.rows) or self._compile(smallest)),)
        if len(self._blocks) >= _KEPT:
            self._blocks.clear()
        found = blocks(self.claimed.programs, rows)
        self._blocks[rows] = tuple((first, count, self._compile(program)) for first, count, program in found)
        return self._blocks[rows]

    # --- the host's part ----------------------------------------------------------------------------------------------

    def _on_host(self, x: Array, rows: slice, biases: Sequence[Array | None], out: Sequence[Array]) -> None:
        for member, bias, y in zip(self.members, biases, out, strict=True):
            whole = rows == slice(0, len(y))
            if whole or self.by_row:  # scales per row count the rows of the whole
                found = self.session.host(member.claimed, x, bias).reshape(-1, y.shape[1])
                y[rows] = found if whole else found[rows]
            else:
                part = x.reshape(-1, x.shape[-1])[rows]
                y[rows] = self.session.host(member.claimed, part, bias).reshape(-1, y.shape[1])

    def _fall_back(
        self,
        fault: DeviceFault,
        kernel: KernelFile | None,
        x: Array,
        biases: Sequence[Array | None],
        out: Sequence[Array],
    ) -> list[Outcome]:
        shape = Gemm(1, self.claimed.k, self.claimed.n) if kernel is None else kernel.gemm
        self.session.tally.fault(shape, fault, quiet=self.session.strict)
        if self.session.strict:
            raise self._error(fault) from None
        rows = len(out[0])
        self._on_host(x, slice(0, rows), biases, out)
        return [self._outcome("host", rows, "fallback", fault.fault.value)]

    def _error(self, fault: DeviceFault) -> OnnxpackError:
        where = f"site {self.members[0].claimed.site.path}"
        kind = KernelError if fault.fault in (Fault.CANARY, Fault.KERNEL) else EnvironmentFault
        return kind(str(fault), where=where, hint="without strict this call runs on the host")

    def _outcome(self, where: Where, rows: int, event: str, reason: str | None) -> Outcome:
        name = f"npu_{'qdq' if self.is_group else 'float'}_{event}" if event else self._word
        if not event:
            self.session.tally.on_device += len(self.members)
        else:
            self.session.tally.counts[event] += len(self.members)
        if self.session.events is not None:
            k, n, sites = self.claimed.k, self.claimed.n, ",".join(m.claimed.site.path for m in self.members)
            more = f" min={self.session.min_rows}" if event == "host_rows" else f" why={reason}" if reason else ""
            self.session.events(f"{name} m={rows} k={k} n={n}{more} sites={sites}")
        return Outcome(self, where, rows, name, reason)

    # --- what does not depend on a run --------------------------------------------------------------------------------

    def _compile(self, program: Program) -> _Compiled:
        found = self._compiled.get(program.rows)
        if found is None:
            found = _Compiled(None, ())
            if program.kernel is not None:
                kernel = self.session.kernels[Gemm.parse(program.kernel)]
                found = _Compiled(kernel, tuple(self._pieces(program, kernel)))
            self._compiled[program.rows] = found
        return found

    def _pieces(self, program: Program, kernel: KernelFile) -> Iterator[_Piece]:
        ranges: dict[tuple[tuple[int, int], tuple[int, int]], list[tuple[int, int]]] = {}
        for launch in program.launches:
            ranges.setdefault((launch.rows, launch.columns), []).append(launch.k)
        for (rows, columns), ks in ranges.items():
            parts = tuple(self._parts(columns))
            launches = tuple(self._launch(kernel, k, parts) for k in sorted(ks))
            yield _Piece(*rows, columns[1] - columns[0], parts, launches)

    def _parts(self, columns: tuple[int, int]) -> Iterator[_Part]:
        for index, member in enumerate(self.members):
            begin, end = member.claimed.column, member.claimed.column + member.claimed.n
            low, high = max(columns[0], begin), min(columns[1], end)
            if low < high:
                yield _Part(index, slice(low - begin, high - begin), slice(low - columns[0], high - columns[0]))

    def _launch(self, kernel: KernelFile, k: tuple[int, int], parts: tuple[_Part, ...]) -> _Launch:
        session, rows = self.session, slice(*k)
        holds = tuple(
            (self.members[part.member].claimed.product.weight, part.of_site.start, part.of_site.stop, part.of_c.start)
            for part in parts
        )
        number = session.images.setdefault((kernel.key, k, holds), len(session.images))
        sources = [(self.members[part.member].weight.codes, part.of_site, part.of_c) for part in parts]

        def fill(view: I8) -> None:
            view[k[1] - k[0] :] = 0
            view[: k[1] - k[0], parts[-1].of_c.stop :] = 0
            for codes, of_site, of_c in sources:
                view[: k[1] - k[0], of_c] = codes[rows, of_site]

        return _Launch(rows, (session.owner, number), fill)


def _member(claimed: Claimed, weight: Operand) -> Member:
    record = claimed.product.group
    y = None if record is None else record.requantize
    dtype = np.dtype(np.float32 if y is None else y.dtype)
    finish = FloatFinish(weight) if record is None else GroupFinish(record, weight)
    return Member(claimed, weight, finish, dtype, claimed.n * dtype.itemsize)


class CodesOnce:
    """The codes of one value, made when the first call wants them."""

    def __init__(self, x: Array, k: int, scratch: Scratch) -> None:
        self._x, self._k, self._scratch = x, k, scratch
        self._made: Codes | None = None

    def __call__(self) -> Codes:
        """Codes [rows, K]. They are valid until codes of another value are made with the same scratch memory."""
        if self._made is None:
            flat = self._x.reshape(-1, self._k)
            codes, scale = quantize(flat, self._scratch) if flat.dtype == np.float32 else (to_signed(flat), None)
            self._made = Codes(codes, scale, next(_serials))
        return self._made
