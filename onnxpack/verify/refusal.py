"""What onnxruntime refuses, as one line of ours and not as several of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import onnxruntime as ort

from onnxpack.errors import OnnxpackError

_FATAL = 4


def quiet(options: ort.SessionOptions | None = None) -> ort.SessionOptions:
    """Options under which onnxruntime writes nothing to the terminal; what it refuses is in its exception anyway."""
    made = ort.SessionOptions() if options is None else options
    made.log_severity_level = _FATAL
    return made


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
