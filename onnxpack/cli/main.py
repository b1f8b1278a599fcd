"""The table of commands, and what happens to their errors.

Adding a command is one module with a click command called `command`, and one line in `COMMANDS`.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from onnxpack.cli.output import note
from onnxpack.errors import OnnxpackError

COMMANDS: dict[str, str] = {
    "census": "List every matrix product of a model, by shape, with the reason for each that stays on the CPU.",
    "plan": "Decide which kernels run each product, in which launches, before anything is compiled.",
    "build": "Pack a model: int8 operands, plain graph, manifest, one directory.",
    "inspect": "Show what a pack holds.",
    "run": "Run a pack once: its outputs in short, and where its products ran.",
    "verify": "Compare a pack with its source model, product by product if asked, and its files with their digests.",
    "bench": "Time a pack beside the float model.",
    "formats": "List the weight formats, or draw one byte by byte.",
    "kernels": "List, build, inspect and check kernels: one NPU ELF for each shape.",
    "doctor": "Say what this machine has and lacks for building kernels and running them, and the next step.",
    "cache": "Look after the cache of compiled kernels.",
}
"""Name to one-line help; the module is onnxpack.cli.<name>. Help must not import the commands: it has to be fast."""

INTERRUPTED = 130


class _LazyGroup(click.Group):
    """Imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"onnxpack.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="onnxpack", message="onnxpack %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Compile plain ONNX models to int8 packs for AMD XDNA2 NPUs that run, with the same numbers, on any CPU."""


def run(argv: Sequence[str]) -> int:
    """Run one command; prints errors to stderr and returns the exit code of DESIGN's table."""
    arguments = [argument for argument in argv if argument != "--debug"]  # wherever it stands
    debug = len(arguments) < len(argv) or os.environ.get("ONNXPACK_DEBUG") == "1"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names hold characters that not every terminal has
    if "_ONNXPACK_COMPLETE" in os.environ:
        cli.main(prog_name="onnxpack")  # a shell asks how to complete a word
    try:
        with cli.make_context("onnxpack", arguments) as context:
            code = cli.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exception(error)
        line, code = _explain(error)
        note(f"onnxpack: {line}")
        return code


def _explain(error: BaseException) -> tuple[str, int]:
    """What to say about an error, in one line, and the exit code."""
    match error:
        case OnnxpackError():
            return error.render(), error.exit_code
        case click.UsageError():
            command = error.ctx.command_path if error.ctx else "onnxpack"
            return f"{error.format_message()} (see `{command} --help`)", error.exit_code
        case click.ClickException():
            return error.format_message(), 2
        case click.Abort() | KeyboardInterrupt():
            return "interrupted", INTERRUPTED
        case MemoryError():
            return f"not enough memory: {error}", 5
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{error.strerror or error}", 5
        case _:
            return f"bug: {type(error).__name__}: {error} (run again with --debug and report it)", 1
