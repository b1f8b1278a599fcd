"""`onnxpack formats`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from onnxpack.cli.formats import command
from onnxpack.errors import UsageError
from onnxpack.formats import get, names
from onnxpack.formats.describe import drawing

DOC = Path(__file__).parents[2] / "docs" / "formats.md"


def run(*args: str) -> str:
    result = CliRunner().invoke(command, list(args))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_table_as_json() -> None:
    rows = json.loads(run("--json"))
    assert [row["name"] for row in rows] == names()
    keys = {"name", "row", "family", "bits_per_weight", "encode", "decode", "onnx_decoder"}
    assert all(set(row) == keys for row in rows)


def test_the_table_for_people() -> None:
    lines = run().splitlines()
    assert len(lines) == len(names()) + 1
    assert any(re.match(r"q4_k +Q4_K +tiling\+tiling\+linear +4\.5 +yes +yes +yes", line) for line in lines)


@pytest.mark.parametrize("name", names())
def test_one_format(name: str) -> None:
    text, about = run(name), json.loads(run(name, "--json"))
    assert about["name"] == name
    assert about["source"] in text
    assert sum(t["bytes"] for t in about["tensors"]) == about["bytes"]
    lines = about.get("layout", about.get("block", {}).get("layout", []))
    assert lines or name in ("int8", "q4nx")
    for line in lines:
        assert line in text


def test_tensors_are_drawn_in_full() -> None:
    assert json.loads(run("int4_awq", "--json"))["layout"] == [
        "codes: qweight INT32 [K, N/8] as k nw b; for each nw k",
        "  bytes 0-1: codes[2-6] codes[0-4]",
        "  bytes 2-3: codes[3-7] codes[1-5]",
        "  codes: nw k i -> (nw i) k",
        "zeros: qzeros INT32 [K/128, N/8] as g nw b; for each g nw",
        "  bytes 0-1: zeros[2-6] zeros[0-4]",
        "  bytes 2-3: zeros[3-7] zeros[1-5]",
        "  zeros: g nw i -> (nw i) g",
        "scales: scales FLOAT16 [K/128, N] as g n -> n g",
    ]


@pytest.mark.parametrize("name", [n for n in names() if get(n).profile is not None and get(n).profile.block])
def test_every_byte_of_a_block_is_drawn_once(name: str) -> None:
    layout = get(name).profile.block
    drawn: dict[str, list[int]] = {}
    for line in drawing(layout):
        found = re.match(r"bytes? (\d+)(?:-(\d+))?: (\S+) = ", line)
        assert found
        first, last = int(found[1]), int(found[2] or found[1])
        drawn.setdefault(found[3], []).extend(range(first, last + 1))
    for f in layout.fields:
        assert drawn[f.name] == list(range(f.bit_offset // 8, f.bit_offset // 8 + f.nbytes))


def test_a_drawing_in_full() -> None:
    assert drawing(get("q5_k").profile.block) == [
        "bytes 0-1: d = FLOAT16",
        "bytes 2-3: dmin = FLOAT16",
        "bytes 4-7: sc = scales[4-7].5-4 scales[0-3]",
        "bytes 8-11: sc = mins[4-7].5-4 mins[0-3]",
        "bytes 12-15: sc = mins[4-7].3-0 scales[4-7].3-0",
        "bytes 16-47: qh = codes[224-255].4 codes[192-223].4 codes[160-191].4 codes[128-159].4 "
        "codes[96-127].4 codes[64-95].4 codes[32-63].4 codes[0-31].4",
        "bytes 48-79: qs = codes[32-63].3-0 codes[0-31].3-0",
        "bytes 80-111: qs = codes[96-127].3-0 codes[64-95].3-0",
        "bytes 112-143: qs = codes[160-191].3-0 codes[128-159].3-0",
        "bytes 144-175: qs = codes[224-255].3-0 codes[192-223].3-0",
    ]


def test_an_unknown_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no format is called"):
        run("nope")


def test_the_document_names_every_format() -> None:
    text = DOC.read_text(encoding="utf-8")
    missing: list[Any] = [name for name in names() if f"`{name}`" not in text]
    assert not missing


def test_the_examples_of_the_document_run() -> None:
    import doctest

    failed, ran = doctest.testfile(str(DOC), module_relative=False, encoding="utf-8")
    assert (failed, ran > 5) == (0, True)
