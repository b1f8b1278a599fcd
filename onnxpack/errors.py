"""The errors a user can meet, each with the exit code of the command that meets it.

A message is one line that says what is wrong, where (file, node, tensor) and what to do.

>>> ModelError("no such thing", where="model.onnx", hint="check the path").render()
'model.onnx: no such thing (check the path)'
>>> GateError("coverage 50 % < 90 %").exit_code
4
"""

from __future__ import annotations

from typing import ClassVar


def one_line(text: str) -> str:
    """`text` with everything escaped that a terminal would act on, line breaks included.

    >>> one_line("a\\nb\\x1b[31m")
    'a\\\\nb\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int = 100) -> str:
    """Long text with its middle left out: a name may have thousands of characters.

    >>> shortened("abcdefghijklmnopqrstuvwxyz", 11), shortened("abc", 11)
    ('abcd...wxyz', 'abc')
    """
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


_LONGEST_PART = 400


class OnnxpackError(Exception):
    """Base of every error that onnxpack raises on purpose. Exit code 1: a bug or a broken promise."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def render(self) -> str:
        """One line: ``where: what (hint)``; control characters are escaped, so a hostile name stays one line."""
        line = shortened(self.what, _LONGEST_PART)
        if self.where is not None:
            line = f"{shortened(self.where, _LONGEST_PART)}: {line}"
        if self.hint is not None:
            line += f" ({shortened(self.hint, _LONGEST_PART)})"
        return one_line(line)

    def __str__(self) -> str:
        return self.render()


class UsageError(OnnxpackError):
    """The call itself is wrong: an argument, an existing target."""

    exit_code = 2


class ModelError(OnnxpackError):
    """The source model cannot be read, or cannot be packed as it is."""

    exit_code = 3


class PackError(OnnxpackError):
    """A pack is damaged, of another version, or does not fit what is asked of it."""

    exit_code = 3


class KernelError(OnnxpackError):
    """An ELF or a kernel record is not what it claims to be."""

    exit_code = 3


class GateError(OnnxpackError):
    """Everything ran, and a gate was not met (``--fail-under``, ``--max-kl``, a shape that failed)."""

    exit_code = 4


class EnvironmentFault(OnnxpackError):
    """The machine lacks something: space, permission, a toolchain, a device."""

    exit_code = 5
