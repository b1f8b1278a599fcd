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
WIDTH = 100


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
    """The page of commands: the help of each, as a terminal shows it."""
    lines = ["# Command line", "", "Made by `python tools/make_docs.py` from the commands themselves.", ""]
    lines += _section("onnxpack", cli, None)
    for name in COMMANDS:
        command = importlib.import_module(f"onnxpack.cli.{name}").command
        lines += _section(f"onnxpack {name}", command, None)
        if isinstance(command, click.Group):
            for sub, inner in command.commands.items():
                lines += _section(f"onnxpack {name} {sub}", inner, None)
    return "\n".join(lines)


def _section(title: str, command: click.Command, parent: click.Context | None) -> list[str]:
    context = click.Context(command, parent, info_name=title, terminal_width=WIDTH, max_content_width=WIDTH)
    return [f"## {title}", "", "```", command.get_help(context), "```", ""]


PAGES = {"reasons.md": reasons, "cli.md": command_line}


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    main()
