"""The cost model: what one launch is predicted to take. All its constants are here, each with where it is from.

    launch = launch_us + bytes of A, B and C / bytes_per_us + products / (products_per_us * share of the cores)

Nothing here was measured by this project: the defaults are fitted by eye to the four whole-call times that are public
for designs of this kind on Strix Halo, and are within 25 % of each of them:

    M x K x N          published ms   predicted ms
    128x2048x8192      6.1 to 6.6     6.5
    128x1024x4096      1.59           2.0
    32x1024x6144       1.9 to 2.3     2.0
    32x3072x1024       0.94           1.0

`onnxpack plan --costs FILE` replaces any of them; measured times of single kernels go before every formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from onnxpack import records
from onnxpack.errors import UsageError
from onnxpack.kernels.target import NPU2, Target
from onnxpack.shapes import Gemm

SCHEMA = "onnxpack/costs/1.0"


@dataclass(frozen=True)
class Costs:
    """Constants of the model, in microseconds; the record of a `--costs` file.

    >>> [round(Costs().launch(Gemm.parse(s)) / 1e6, 2) for s in ("128x2048x8192", "128x1024x4096", "32x3072x1024")]
    [6.54, 1.97, 1.03]
    """

    schema: str = SCHEMA
    source: str = "defaults: fitted to published whole-call times on Strix Halo, not measured here"
    """Where the figures are from: a machine, a driver, a day."""
    launch_us: float = 150.0
    """Start and wait of one launch. Reported between 0.1 and 0.5 ms."""
    bytes_per_us: float = 5000.0
    """Bytes of A, B and C together: 5 GB/s, far below the memory's, since B comes strip by strip."""
    products_per_us: float = 1e6
    """Multiply-accumulates with every core at work: a twentieth of the array's peak."""
    host_bytes_per_us: float = 10_000.0
    """Summing int32 partial results on the host, where K is split: 10 GB/s, 12 bytes an element. An estimate."""
    kernel_us: float = 35.0
    """Price of one more distinct kernel in one pass: making its context takes 35 ms, spread over 1000 passes."""
    host_call_us: float | None = None
    """One product on the host beside its arithmetic. Without both host figures the NPU is always preferred."""
    host_products_per_us: float | None = None
    """Multiply-accumulates of the host."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Measured microseconds of one launch, by MxKxN."""

    def __post_init__(self) -> None:
        zero = {"launch_us", "kernel_us", "host_call_us"}
        for name, value in self.figures().items():
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in zero):
                raise UsageError(f"{name} is {value}", where="costs", hint="it must be a positive number")
        for shape in self.kernels:
            Gemm.parse(shape)

    def figures(self) -> dict[str, float]:
        """Every number of the record by name."""
        own = {name: getattr(self, name) for name in _FIGURES}
        return {name: value for name, value in (own | self.kernels).items() if value is not None}

    @classmethod
    def loads(cls, text: str | bytes) -> Costs:
        """Parse a `--costs` file. UsageError when it is not one.

        >>> Costs.loads('{"launch_us": 100, "source": "bench"}').launch_us
        100.0
        """
        try:
            costs = records.loads(text, cls)
        except records.RecordError as error:
            raise UsageError(f"not a record of costs: {error}", where="--costs") from None
        if costs.schema.rpartition(".")[0] != SCHEMA.rpartition(".")[0]:
            raise UsageError(f"schema {costs.schema!r} is not one this version reads ({SCHEMA})", where="--costs")
        return costs

    def launch(self, kernel: Gemm, target: Target = NPU2) -> int:
        """One launch of a kernel, in nanoseconds."""
        measured = self.kernels.get(str(kernel))
        if measured is not None:
            return round(1000 * measured)
        products = kernel.macs / (self.products_per_us * cores(kernel, target))
        return round(1000 * (self.launch_us + moved(kernel) / self.bytes_per_us + products))

    def summing(self, elements: int) -> int:
        """Adding one more partial result of so many elements, in nanoseconds."""
        return round(1000 * 12 * elements / self.host_bytes_per_us)

    def host(self, shape: Gemm, products: int = 1) -> int | None:
        """The same on the host, where `products` make up the columns, in nanoseconds; None when nothing is known."""
        if self.host_call_us is None or self.host_products_per_us is None:
            return None
        return round(1000 * (products * self.host_call_us + shape.macs / self.host_products_per_us))


_FIGURES = (
    "launch_us",
    "bytes_per_us",
    "products_per_us",
    "host_bytes_per_us",
    "kernel_us",
    "host_call_us",
    "host_products_per_us",
)


def moved(kernel: Gemm) -> int:
    """Bytes that one launch reads and writes: A and B in int8, C in int32."""
    return kernel.m * kernel.k + kernel.k * kernel.n + 4 * kernel.m * kernel.n


def cores(kernel: Gemm, target: Target) -> float:
    """Share of the array's cores that the sizes of a kernel can use: a core needs 16 rows and 16 columns of its own.

    >>> cores(Gemm(128, 1024, 4096), NPU2), cores(Gemm(16, 64, 160), NPU2)
    (1.0, 0.0625)
    """
    high, _, wide = target.mac_block
    rows = next((r for r in range(target.core_rows, 0, -1) if kernel.m % (2 * high * r) == 0), 1)
    columns = next((c for c in (8, 4, 2) if c <= target.columns and kernel.n % (2 * wide * c) == 0), 2)
    return rows * columns / (target.core_rows * target.columns)
