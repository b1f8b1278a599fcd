"""Environment variables that change how a pack runs. Read once, when a pack is loaded.

>>> Switches.read({"ONNXPACK_NPU_MIN_ROWS": "32", "ONNXPACK_QDQ": "0"})  # doctest: +ELLIPSIS
Switches(npu=True, strict=False, qdq=False, trace=False, min_rows=32, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxpack.errors import UsageError

NPU = "ONNXPACK_NPU"
STRICT = "ONNXPACK_STRICT"
QDQ = "ONNXPACK_QDQ"
TRACE = "ONNXPACK_TRACE"
MIN_ROWS = "ONNXPACK_NPU_MIN_ROWS"
CONTEXTS = "ONNXPACK_NPU_CONTEXTS"
OPERANDS = "ONNXPACK_NPU_OPERANDS"
TIMEOUT = "ONNXPACK_NPU_TIMEOUT_MS"
LOCK = "ONNXPACK_NPU_LOCK"

CONTEXT_CAP = 16
"""Hardware contexts of one device, for all processes."""

_LARGEST = 2**31 - 1
_BOOLEANS = {"": None, "0": False, "off": False, "no": False, "false": False}
_BOOLEANS |= {"1": True, "on": True, "yes": True, "true": True}


@dataclass(frozen=True)
class Switches:
    """What the environment asks for."""

    npu: bool = True
    """False: every site runs on the host, whatever `load` was asked for."""
    strict: bool = False
    """True: a call that cannot run on the device raises."""
    qdq: bool = True
    """False: QDQ groups are not folded; the graph's own nodes run them."""
    trace: bool = False
    """True: one line per decision on stderr."""
    min_rows: int | None = None
    """Calls with fewer rows run on the host; None: as the pack says."""
    contexts: int = 8
    """Hardware contexts held at once."""
    operand_bytes: int = 4 << 30
    """Device buffers of operands kept between calls; beyond, the least recently used is given up."""
    timeout_ms: int = 5000
    """How long one launch may take."""
    lock: str | None = None
    """Lock file of the device; None: one in the system's folder for temporary files."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Switches:
        """UsageError, naming the variable, for a value that is none."""
        return cls(
            npu=_boolean(environment, NPU, True),
            strict=_boolean(environment, STRICT, False),
            qdq=_boolean(environment, QDQ, True),
            trace=_boolean(environment, TRACE, False),
            min_rows=_number(environment, MIN_ROWS, 0, _LARGEST),
            contexts=_number(environment, CONTEXTS, 1, CONTEXT_CAP) or cls.contexts,
            operand_bytes=_mebibytes(environment, cls.operand_bytes),
            # 0 would wait for ever.
            timeout_ms=_number(environment, TIMEOUT, 1, _LARGEST) or cls.timeout_ms,
            lock=environment.get(LOCK) or None,
        )


def _boolean(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = environment.get(name, "").strip().lower()
    if text not in _BOOLEANS:
        raise UsageError(f"{text!r} is neither 0 nor 1", where=name)
    found = _BOOLEANS[text]
    return default if found is None else found


def _number(environment: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 12 or not low <= int(text) <= high:
        raise UsageError(f"{text[:20]!r} is not a number from {low} to {high}", where=name)
    return int(text)


def _mebibytes(environment: Mapping[str, str], default: int) -> int:
    found = _number(environment, OPERANDS, 0, 1 << 24)
    return default if found is None else found << 20
