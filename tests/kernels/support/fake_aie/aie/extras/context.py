"""Stand-in for the module context."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from aie.dialects.aie import LINES


class _Module:
    operation = SimpleNamespace(verify=lambda: True)

    def __str__(self):
        return "module {\n" + "\n".join(LINES) + "\n}"


@contextmanager
def mlir_mod_ctx():
    yield SimpleNamespace(module=_Module())
