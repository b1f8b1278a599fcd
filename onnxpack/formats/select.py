"""Which weight is stored in which format: ``int8``, or ``lm_head*=int8,*=q4nx``, first match wins.

A format may carry parameters: ``matmulnbits:bits=4:block_size=32``.

>>> choice = Selection.parse("lm_head=int8,*=int8")
>>> choice.of("lm_head").name
'int8'
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from onnxpack.errors import UsageError
from onnxpack.formats.base import Format
from onnxpack.formats.registry import get


@dataclass(frozen=True)
class Selection:
    """Patterns over weight names, in order, each with its format."""

    rules: tuple[tuple[str, Format], ...]

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read the argument of ``--weights``. UsageError for an unknown format or a malformed rule."""
        rules = []
        for part in text.split(","):
            head, equals, tail = part.strip().partition("=")
            # "name:key=value" has its "=" after a colon, "pattern=format" before any
            pattern, spec = (head, tail) if equals and ":" not in head else ("*", part.strip())
            rules.append((pattern, _format(spec)))
        return cls(tuple(rules))

    def of(self, weight: str) -> Format:
        """The format for a weight. UsageError when no pattern matches."""
        for pattern, made in self.rules:
            if fnmatchcase(weight, pattern):
                return made
        raise UsageError(f"no pattern of --weights matches {weight!r}", hint="end the list with '*=int8'")


def _format(spec: str) -> Format:
    name, *pairs = re.split(r"(?<!:):(?!:)", spec)  # "domain::Name" is one word
    params: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{pair!r} is not key=value", where=f"--weights {spec}")
        try:
            params[key] = json.loads(value)
        except ValueError:
            params[key] = value
    made = get(name, **params)
    refusal = made.refusal or ("" if made.encodes else "it can be read, not written")
    if refusal:
        what = f"a pack cannot hold weights in format {name}: {refusal}"
        raise UsageError(what, where="--weights", hint="`onnxpack formats`")
    return made
