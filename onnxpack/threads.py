"""Work over many tensors in threads: numpy and hashing let go of the interpreter.

>>> in_threads([lambda: 1, lambda: 2], [10, 20])
[1, 2]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from onnxpack.errors import OnnxpackError

T = TypeVar("T")


def in_threads(tasks: Sequence[Callable[[], T]], sizes: Sequence[int]) -> list[T]:
    """Results of all tasks, in their order; the largest start first, so that none is left over at the end.

    The first failing task, in the order given, raises; those that have not started are dropped.
    """
    futures: dict[int, Future[T]] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        try:
            for index in sorted(range(len(tasks)), key=lambda i: (-sizes[i], i)):
                futures[index] = pool.submit(tasks[index])
            return [futures[index].result() for index in range(len(tasks))]
        except (OnnxpackError, OSError, MemoryError, KeyboardInterrupt):
            pool.shutdown(wait=True, cancel_futures=True)
            raise
