"""`onnxpack formats`: the table of storage formats, or one of them drawn byte by byte."""

from __future__ import annotations

from typing import Any

import click


@click.command(short_help="List the weight formats, or draw one.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str | None, as_json: bool) -> None:
    """List the formats that weights can be stored in; with NAME, that format's layout, byte by byte.

    Bits per weight are those of a 4096 x 4096 matrix with default parameters, everything stored counted.
    """
    from onnxpack.cli.output import print_json
    from onnxpack.formats import describe

    if name is None:
        rows = describe.table()
        print_json(rows) if as_json else _print_rows(rows)
        return
    about = describe.details(name)
    print_json(about) if as_json else _print_details(about)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from onnxpack.cli.output import print_table

    headers = ["name", "row of the source table", "family", "bits/weight", "encode", "decode", "onnx decoder"]
    cells = [
        [
            r["name"],
            r["row"],
            r["family"],
            f"{r['bits_per_weight']:.6g}",
            *map(_yes, (r["encode"], r["decode"], r["onnx_decoder"])),
        ]
        for r in rows
    ]
    print_table(headers, cells, right=(3,))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _print_details(about: dict[str, Any]) -> None:
    from onnxpack.cli.output import human_bytes, print_table

    n, k = about["shape"]
    params = ", ".join(f"{key}={value}" for key, value in about["params"].items()) or "none"
    click.echo(f"{about['name']}: {about['row']} ({about['family']})")
    click.echo(about["description"])
    click.echo(f"parameters: {params}")
    click.echo(
        f"weights: {about['orientation']}; decoder from opset {about['min_opset']} on; encoder: {_yes(about['encode'])}"
    )
    click.echo(f"{n} x {k}: {human_bytes(about['bytes'])}, {about['bits_per_weight']:.6g} bits per weight")
    click.echo()
    rows = [[t["name"], t["dtype"], " x ".join(map(str, t["shape"])) or "scalar", t["bytes"]] for t in about["tensors"]]
    print_table(["tensor", "type", "shape", "bytes"], rows, right=(3,))
    if "block" in about:
        block = about["block"]
        click.echo(f"\nblock: {block['values']} values, {block['bytes']} bytes of codes and scales (bit 7 first):")
        for line in about["block"]["layout"]:
            click.echo(f"  {line}")
    for line in about.get("layout", []):
        click.echo(line)
    click.echo()
    click.echo(f"source: {about['source'] or 'this project'}")
    click.echo(f"the source document differs: {about['differs'] or 'no'}")
    if about["refusal"]:
        click.echo(f"not in packs: {about['refusal']}")
