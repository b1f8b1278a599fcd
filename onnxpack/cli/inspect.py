"""`onnxpack inspect`: what a pack holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxpack.errors import UsageError

if TYPE_CHECKING:
    from onnxpack.pack.manifest import TensorRecord
    from onnxpack.pack.read import Pack


@click.command("inspect")
@click.argument("pack", type=click.Path())
@click.option("--tensor", metavar="NAME", help="Show one packed weight.")
@click.option("--changes", is_flag=True, help="List every node that packing added, removed or rewrote.")
@click.option("--sites", is_flag=True, help="List every matrix product and where it runs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(pack: str, tensor: str | None, changes: bool, sites: bool, as_json: bool) -> None:
    """Show what PACK holds: source, files, weights, sites, digests. PACK may also be a Q4NX file of any origin."""
    from pathlib import Path

    from onnxpack import records
    from onnxpack.cli.output import print_json
    from onnxpack.pack.read import open_pack

    if Path(pack).is_file():
        _inspect_q4nx(pack, tensor, as_json)
        return
    opened = open_pack(pack)
    if tensor is not None:
        record = _find(opened, tensor)
        if as_json:
            print_json(records.to_dict(record))
        else:
            _print_tensor(opened, record)
    elif as_json:
        chosen: Any = opened.manifest.changes if changes else opened.manifest.sites if sites else opened.manifest
        print_json(records.to_dict(chosen))
    elif changes:
        _print_changes(opened)
    elif sites:
        _print_sites(opened)
    else:
        _print_pack(opened)


def _inspect_q4nx(path: str, tensor: str | None, as_json: bool) -> None:
    """What a Q4NX file holds: which tensors are tiles of which kind, which can be decoded, and why others cannot."""
    from onnxpack import records
    from onnxpack.cli.output import print_json, print_table
    from onnxpack.formats.q4nx import describe

    rows = [row for row in describe(path) if tensor in (None, row.name)]
    if not rows and tensor is not None:
        raise UsageError(f"no tensor is called {tensor!r}", where=path, hint=f"`onnxpack inspect {path}` lists them")
    if as_json:
        print_json(records.to_dict(rows))
        return
    cells = [
        (r.name, r.dtype, "x".join(map(str, r.shape)), r.kind, "-" if r.tiles is None else r.tiles, r.note)
        for r in rows
    ]
    print_table(("tensor", "type", "shape", "kind", "tiles", "note"), cells, right=(4,))
    click.echo(f"\n{len(rows)} tensors, {sum(row.readable for row in rows)} can be read")


def _find(pack: Pack, name: str) -> TensorRecord:
    try:
        return pack.tensors[name]
    except KeyError:
        from difflib import get_close_matches

        near = get_close_matches(name, pack.tensors, 3)
        hint = f"did you mean {', '.join(near)}?" if near else f"`onnxpack inspect {pack.path}` lists them"
        raise UsageError(f"no packed weight is called {name!r}", where=str(pack.path), hint=hint) from None


def _print_pack(pack: Pack) -> None:
    from onnxpack.cli.output import human_bytes, print_table, say

    m = pack.manifest
    say(f"{m.schema}, made by {m.producer} from {m.source.name}, opset {m.opset}, for target {m.target}")
    click.echo()
    weights = [
        (
            t.name,
            "x".join(map(str, t.shape)),
            t.format,
            human_bytes(t.source_nbytes),
            human_bytes(sum(f.nbytes for f in t.fields.values())),
            *(f"{value:g}" for value in list(t.error.values())[:1]),
        )
        for t in m.tensors
    ]
    print_table(("weight", "K x N", "format", "before", "after", "relative rms"), weights, right=(3, 4, 5))
    click.echo()
    print_table(("file", "bytes", "sha256"), [(f.path, f.nbytes, f.sha256[:16]) for f in m.files], right=(1,))
    c = m.coverage
    click.echo(f"\n{c.sites} products, {c.weight} with a weight, {c.bound} bound to int8, {c.covered} on a kernel")
    for domain, operators in m.domains.items():
        say(f"operators of domain {domain} (from the source): {', '.join(operators)}")
    say(f"content digest: {m.content_digest}")
    say(f"files digest:   {m.files_digest}")


def _print_tensor(pack: Pack, record: TensorRecord) -> None:
    from onnxpack.cli.output import print_table, say

    shape = "x".join(map(str, record.shape))
    say(f"{record.name}: {shape} in format {record.format}, from {record.source} ({record.source_nbytes} bytes)")
    for name, value in record.error.items():
        say(f"{name.replace('_', ' ')} against the source: {value:g}")
    rows = [
        (name, f.dtype, "x".join(map(str, f.shape)), f.file, f.offset, f.nbytes, f.sha256[:16])
        for name, f in record.fields.items()
    ]
    print_table(("field", "type", "shape", "file", "offset", "bytes", "sha256"), rows, right=(4, 5))
    users = [site.path for site in pack.manifest.sites if site.weight == record.name]
    say(f"used by {', '.join(users)}")


def _print_changes(pack: Pack) -> None:
    from onnxpack.cli.output import print_table

    print_table(("change", "operator", "node", "why"), [(c.action, c.op, c.node, c.why) for c in pack.manifest.changes])


def _print_sites(pack: Pack) -> None:
    from onnxpack.cli.output import print_table, unknown

    rows = [
        (
            s.path,
            s.op,
            f"{unknown(s.m)} x {unknown(s.k)} x {unknown(s.n)}",
            s.weight or "-",
            s.kernel or "-",
            s.reason or "",
        )
        for s in pack.manifest.sites
    ]
    print_table(("site", "operator", "M x K x N", "weight", "kernel", "reason"), rows)
