"""Open onnxruntime sessions over rewritten model bytes whose weights lie in a pack's folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

from onnxpack.errors import PackError
from onnxpack.runtime.lower import Lowered
from onnxpack.runtime.options import session_options

PROVIDERS = ["CPUExecutionProvider"]

_PLAIN_LEVELS = (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
_log = logging.getLogger("onnxpack")


@dataclass(frozen=True)
class Opened:
    """A session, and what must live as long as it: onnxruntime does not keep numpy memory alive."""

    session: ort.InferenceSession
    owners: tuple[Any, ...]


@dataclass(frozen=True)
class Opener:
    """How the sessions of one PackSession are opened."""

    folder: Path
    options: ort.SessionOptions | None

    def __call__(self, model: bytes, lowered: Lowered | None = None) -> Opened:
        """A session over `model`; PackError with onnxruntime's own first line when it refuses.

        What it refuses at a higher optimization level is opened at ORT_ENABLE_BASIC, if it can be.
        """
        options = session_options(self.options, str(self.folder.absolute()))
        owners: list[Any] = []
        for name, array in ({} if lowered is None else lowered.arrays).items():
            value = ort.OrtValue.ortvalue_from_numpy(array)
            options.add_initializer(name, value)
            owners += [array, value]
        try:
            session = self._session(model, options)
        except PackError as error:
            # Some graphs are valid, but not after onnxruntime's own optimizer: opset 21 QDQ graphs in 1.32, for one.
            if options.graph_optimization_level in _PLAIN_LEVELS:
                raise
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
            session = self._session(model, options)
            _log.info("%s; opened at ORT_ENABLE_BASIC instead", error)
        return Opened(session, tuple(owners))

    def _session(self, model: bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        try:
            return ort.InferenceSession(model, options, providers=PROVIDERS, enable_fallback=0)
        except MemoryError:
            raise
        except Exception as error:  # onnxruntime's exceptions have no base class but this one
            if type(error).__module__.partition(".")[0] not in ("onnxruntime", "builtins"):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PackError(f"onnxruntime refuses the graph: {reason}", where=str(self.folder)) from error
