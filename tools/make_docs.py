"""Write the pages of docs/ that are made from the code: reasons and command line.

python tools/make_docs.py            # writes docs/reasons.md and docs/cli.md; a test checks that they are current
"""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from onnxpack.cli.main import COMMANDS, cli
from onnxpack.reasons import Reason

DOCS = Path(__file__).resolve().parents[1] / "docs"


def reasons() -> str:
    """The page of reasons: code, meaning, cure."""
    lines = [
        "# Reasons",
        "",
        "Why a matrix product does not run on the NPU. Census, plan, manifest and runtime use these codes, no others.",
        "Made by `python tools/make_docs.py` from `onnxpack/reasons.py`.",
        "",
        "| code | meaning | what to do |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{reason.value}` | {reason.sentence} | {reason.cure} |" for reason in Reason]
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """The page of commands: arguments and options of each, with what their help says."""
    lines = ["# Command line", "", "Made by `python tools/make_docs.py` from the commands themselves.", ""]
    lines += _section("onnxpack", cli)
    for name in COMMANDS:
        command = importlib.import_module(f"onnxpack.cli.{name}").command
        lines += _section(f"onnxpack {name}", command)
        if isinstance(command, click.Group):
            for sub, inner in sorted(command.commands.items()):
                lines += _section(f"onnxpack {name} {sub}", inner)
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, command: click.Command) -> list[str]:
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    words = [f"[{a.name.upper()}]" if not a.required else a.name.upper() for a in arguments if a.name]
    usage = " ".join([title, *words, *(["[OPTIONS]"] if options else [])])
    lines = [f"## {title}", "", f"`{usage}`", "", " ".join((command.help or "").split()), ""]
    if options:
        lines += ["| option | meaning |", "| --- | --- |"]
        lines += [f"| {_spelling(option)} | {_meaning(option)} |" for option in options]
        lines.append("")
    return lines


def _spelling(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    value = "" if option.is_flag or option.count else f" {option.metavar or option.type.name.upper()}"
    return names + value.replace("|", "\\|")


def _meaning(option: click.Option) -> str:
    text = " ".join((option.help or "").split()).replace("|", "\\|")
    return f"{text} Default: {option.default}." if option.show_default else text


PAGES = {"reasons.md": reasons, "cli.md": command_line}


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    main()
