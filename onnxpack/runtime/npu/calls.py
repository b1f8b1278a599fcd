"""Claimed calls, run: codes to the device block by block, accumulators back into results; or the host does it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
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


class Outcome(NamedTuple):
    """Where rows of a call ran. One call has two when some of its rows are the host's by plan."""

    call: Call
    where: Where
    rows: int
    event: str
    reason: str | None


@dataclass(frozen=True)
class _Part:
    """Columns of one site in a launch: `of_site` of its N, `of_c` of the kernel's."""

    member: int
    of_site: slice
    of_c: slice


@dataclass(frozen=True)
class _Launch:
    k: slice
    image: tuple[Any, ...]
    fill: Callable[[I8], None]


@dataclass(frozen=True)
class _Piece:
    """A piece of C: launches that are summed, and whose columns they are."""

    rows: tuple[int, int]
    width: int
    parts: tuple[_Part, ...]
    launches: tuple[_Launch, ...]


@dataclass
class _Compiled:
    """A program with everything looked up that does not depend on a call."""

    kernel: KernelFile
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True)
class Member:
    """A site of a call, ready."""

    claimed: Claimed
    weight: Operand
    finish: FloatFinish | GroupFinish
    dtype: np.dtype[Any]
    """Of the result."""


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
        self._programs = claimed.programs
        self._compiled: dict[int, _Compiled] = {}
        self._blocks: dict[int, tuple[tuple[int, int, Program], ...]] = {}
        self.by_row = record is not None and len(record.x_scale) > 1

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(self, x: Array, codes: Callable[[], Codes], biases: list[Array | None], out: list[Array]) -> list[Outcome]:
        """Results of all members into `out` [rows, N]. x is [..., K]; `codes` makes them, once for all who read x."""
        session, rows = self.session, len(out[0])
        if rows < max(session.min_rows, 1):
            self._on_host(x, slice(0, rows), biases, out)
            return [self._outcome("host", rows, "host_rows", Reason.BELOW_ROW_THRESHOLD.value)]
        host, shape = list[slice](), None
        try:
            made = codes()
            bound = [m.finish.bind(x, made, bias) for m, bias in zip(self.members, biases, strict=True)]
            with session.device.held():
                for start, count, program in self._split(rows):
                    if program.kernel is None:
                        host.append(slice(start, start + count))
                        continue
                    compiled = self._compile(program)
                    shape = compiled.kernel.gemm
                    self._program(compiled, start, count, made, bound, out)
        except DeviceFault as fault:
            return self._fall_back(fault, shape, x, biases, out)
        except ValueError as error:
            raise InvalidArgument(f"node {self.members[0].claimed.product.node}: {error}") from None
        outcomes = [self._outcome("npu", rows - sum(part.stop - part.start for part in host), "", None)]
        for part in host:
            self._on_host(x, part, biases, out)
            outcomes.append(self._outcome("host", part.stop - part.start, "host_rows", Reason.HOST_IS_FASTER.value))
        return outcomes

    def _split(self, rows: int) -> tuple[tuple[int, int, Program], ...]:
        found = self._blocks.get(rows)
        if found is None:
            if len(self._blocks) >= 64:
                self._blocks.clear()
            found = self._blocks[rows] = tuple(blocks(self._programs, rows))
        return found

    def _program(
        self, program: _Compiled, first: int, count: int, codes: Codes, finishes: list[Any], out: list[Array]
    ) -> None:
        for piece in program.pieces:
            low, high = piece.rows[0], min(piece.rows[1], count)
            if low >= high:
                continue
            rows = slice(first + low, first + high)
            acc = self._sum(program.kernel, piece, rows, codes)
            for part in piece.parts:
                finishes[part.member].write(acc[:, part.of_c], rows, part.of_site, codes, out[part.member])

    def _sum(self, kernel: KernelFile, piece: _Piece, rows: slice, codes: Codes) -> I32:
        """The accumulators of a piece; they lie in the kernel's C where one launch is enough."""
        session, count = self.session, rows.stop - rows.start
        total: I32 | None = None
        for launch in piece.launches:
            token = (codes.serial, rows.start, rows.stop, launch.k.start, launch.k.stop)
            part = codes.codes[rows, launch.k]
            c = session.device.product(kernel, token, part, launch.image, launch.fill, session.tally)
            session.tally.counts["launches"] += 1
            found = c[:count, : piece.width]
            if len(piece.launches) == 1:
                return found
            if total is None:
                total = session.scratch.take("sum", found.shape, np.int32)
                total[...] = found
            else:
                np.add(total, found, out=total)
        assert total is not None
        return total

    # --- the host's part ----------------------------------------------------------------------------------------------

    def _on_host(self, x: Array, rows: slice, biases: list[Array | None], out: list[Array]) -> None:
        for member, bias, y in zip(self.members, biases, out, strict=True):
            whole = rows == slice(0, len(y))
            if whole or self.by_row:  # scales per row count the rows of the whole
                found = self.session.host(member.claimed, x, bias).reshape(-1, y.shape[1])
                y[rows] = found if whole else found[rows]
            else:
                part = x.reshape(-1, x.shape[-1])[rows]
                y[rows] = self.session.host(member.claimed, part, bias).reshape(-1, y.shape[1])

    def _fall_back(
        self, fault: DeviceFault, shape: Gemm | None, x: Array, biases: list[Array | None], out: list[Array]
    ) -> list[Outcome]:
        tally, claimed = self.session.tally, self.claimed
        tally.fault(shape or Gemm(1, claimed.k, claimed.n), fault, quiet=self.session.strict)
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
        kind = "qdq" if self.is_group else "float"
        name = f"npu_{kind}_{event}" if event else ("qdq" if self.is_group else "float matmul")
        self.session.tally.counts[event or "npu"] += len(self.members)
        if self.session.events is not None:
            k, n, sites = self.claimed.k, self.claimed.n, ",".join(m.claimed.site.path for m in self.members)
            more = f" min={self.session.min_rows}" if event == "host_rows" else f" why={reason}" if reason else ""
            self.session.events(f"{name} m={rows} k={k} n={n}{more} sites={sites}")
        return Outcome(self, where, rows, name, reason)

    # --- what does not depend on a run --------------------------------------------------------------------------------

    def _compile(self, program: Program) -> _Compiled:
        assert program.kernel is not None
        found = self._compiled.get(program.rows)
        if found is None:
            kernel = self.session.kernels[Gemm.parse(program.kernel)]
            found = self._compiled[program.rows] = _Compiled(kernel, tuple(self._pieces(program, kernel)))
        return found

    def _pieces(self, program: Program, kernel: KernelFile) -> Iterator[_Piece]:
        ranges: dict[tuple[tuple[int, int], tuple[int, int]], list[tuple[int, int]]] = {}
        for launch in program.launches:
            ranges.setdefault((launch.rows, launch.columns), []).append(launch.k)
        for (rows, columns), ks in ranges.items():
            parts = tuple(self._parts(columns))
            launches = tuple(self._launch(kernel, k, parts) for k in sorted(ks))
            yield _Piece(rows, columns[1] - columns[0], parts, launches)

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
    if record is None:
        return Member(claimed, weight, FloatFinish(weight), np.dtype(np.float32))
    dtype = np.dtype(np.float32 if record.requantize is None else record.requantize.dtype)
    return Member(claimed, weight, GroupFinish(record, weight), dtype)


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
