"""`onnxpack cache`: look after the cache of compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from onnxpack.kernels.cache import Cache

_folder = click.option("--elf-cache", type=click.Path(), metavar="DIR", help="The cache instead of the user's.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("cache")
def command() -> None:
    """The cache of compiled kernels: shared by all models, filled by builds."""


def _open(folder: str | None) -> Cache:
    from onnxpack.kernels.cache import Cache

    return Cache(Path(folder) if folder else None)


@command.command("path")
@_folder
def path_command(elf_cache: str | None) -> None:
    """Print where it is. The variable ONNXPACK_CACHE moves it."""
    click.echo(_open(elf_cache).folder)


@command.command("list")
@_folder
@_json
def list_command(elf_cache: str | None, as_json: bool) -> None:
    """List its kernels."""
    from onnxpack.cli.output import human_bytes, print_json, print_table

    cache = _open(elf_cache)
    entries = [(entry, entry.record()) for entry in cache.entries()]
    if as_json:
        found = [
            {"key": e.key, "shape": str(r.gemm) if r else None, "design": r.design if r else None, "nbytes": e.nbytes}
            for e, r in entries
        ]
        print_json({"path": str(cache.folder), "entries": found, "nbytes": sum(e.nbytes for e, _ in entries)})
        return
    rows = [(e.key[:12], r.gemm if r else "damaged", r.design if r else "-", human_bytes(e.nbytes)) for e, r in entries]
    print_table(("key", "shape", "design", "bytes"), rows, right=(3,))
    click.echo(f"{len(entries)} kernels, {human_bytes(sum(e.nbytes for e, _ in entries))}")


@command.command("prune")
@click.option("--max-mib", type=click.FloatRange(0), metavar="N", help="Keep at most this much: the last used stay.")
@click.option("--days", type=click.FloatRange(0), metavar="N", help="Remove what was not used for so long.")
@_folder
@_json
def prune_command(max_mib: float | None, days: float | None, elf_cache: str | None, as_json: bool) -> None:
    """Remove damaged kernels and what killed builds left, and more if asked."""
    from onnxpack.cli.output import human_bytes, print_json

    removed = _open(elf_cache).prune(None if max_mib is None else int(max_mib * 2**20), days)
    nbytes = sum(entry.nbytes for entry in removed)
    if as_json:
        print_json({"removed": [entry.key for entry in removed], "nbytes": nbytes})
    else:
        click.echo(f"removed {len(removed)} kernels, {human_bytes(nbytes)}")


@command.command("verify")
@_folder
@_json
def verify_command(elf_cache: str | None, as_json: bool) -> None:
    """Read every kernel and compare it with its record. Exit 3 when one is damaged."""
    from onnxpack.cli.output import print_json
    from onnxpack.errors import KernelError

    cache = _open(elf_cache)
    total, bad = len(cache.entries()), cache.verify()
    if as_json:
        print_json({"entries": total, "damaged": [{"key": key, "problem": problem} for key, problem in bad]})
    else:
        for key, problem in bad:
            click.echo(f"{key[:12]}: {problem}")
        click.echo(f"{total - len(bad)} of {total} kernels are whole")
    if bad:
        raise KernelError(f"{len(bad)} kernels are damaged", where=str(cache.folder), hint="run `onnxpack cache prune`")
