"""Shapes of matrix products: C[M,N] = A[M,K] @ B[K,N]."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onnxpack.errors import UsageError


@dataclass(frozen=True, order=True)
class Gemm:
    """One (M, K, N).

    >>> str(Gemm(16, 1024, 2048))
    '16x1024x2048'
    >>> Gemm.parse("16x1024x2048").kn
    (1024, 2048)
    """

    m: int
    k: int
    n: int

    @property
    def kn(self) -> tuple[int, int]:
        """The part that comes from the weight."""
        return self.k, self.n

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one launch."""
        return self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"

    @classmethod
    def parse(cls, text: str) -> Gemm:
        """Read ``MxKxN``; UsageError otherwise."""
        found = re.fullmatch(r"([1-9]\d{0,9})x([1-9]\d{0,9})x([1-9]\d{0,9})", text.strip())
        if found is None:
            raise UsageError(f"{text!r} is not a shape", hint="write MxKxN, for example 16x1024x2048")
        return cls(*map(int, found.groups()))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that holds `value`.

    >>> round_up(1000, 64), round_up(1024, 64), round_up(0, 8)
    (1024, 1024, 0)
    """
    return -(-value // multiple) * multiple
