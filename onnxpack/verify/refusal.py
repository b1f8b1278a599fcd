"""What onnxruntime refuses, as one line of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onnxpack.errors import OnnxpackError


@contextmanager
def refused_as(make: Callable[[str], OnnxpackError]) -> Iterator[None]:
    """Turn onnxruntime's exceptions into `make(first line of its message)`; everything else passes.

    Its compiled exceptions share no base class, and its Python side raises RuntimeError and ValueError.
    """
    try:
        yield
    except OnnxpackError:
        raise
    except Exception as error:
        foreign = type(error).__module__.partition(".")[0] == "onnxruntime"
        if not foreign and not isinstance(error, RuntimeError | ValueError):
            raise
        raise make(str(error).splitlines()[0][:300] if str(error) else type(error).__name__) from error
