"""Tables and lines as commands print them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpack.cli.output import human_bytes, print_json, print_table, say, unknown
from onnxpack.errors import ModelError, OnnxpackError, one_line, shortened


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "count"), [("a", 1), ("long name", 12345)], right=(1,))
    assert capsys.readouterr().out == "name       count\na              1\nlong name  12345\n"


def test_cells_stay_on_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "n"), [("a\nb\r\x1b[2J\u202e", 1), ("x" * 5000, 2)])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 120


def test_lines_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\nb")
    assert capsys.readouterr().out == "a\\nb\n"


@given(st.text())
def test_one_line_is_one_printable_line(text: str) -> None:
    assert one_line(text).isprintable()
    if text.isprintable():
        assert one_line(text) == text


@given(st.text(), st.integers(11, 200))
def test_shortened_is_short_and_keeps_both_ends(text: str, most: int) -> None:
    found = shortened(text, most)
    assert len(found) <= most
    assert found == text or (found[:4] == text[:4] and found[-4:] == text[-4:])


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_errors_are_one_printable_line(what: str, where: str, hint: str) -> None:
    line = ModelError(what, where=where, hint=hint).render()
    assert line.isprintable()
    assert str(ModelError(what)) == ModelError(what).render()


def test_every_error_has_an_exit_code_of_the_table() -> None:
    family = [OnnxpackError, *OnnxpackError.__subclasses__()]
    codes = {cls.__name__: cls.exit_code for cls in family if cls.__module__ == OnnxpackError.__module__}
    assert codes == {
        "OnnxpackError": 1,
        "UsageError": 2,
        "ModelError": 3,
        "PackError": 3,
        "KernelError": 3,
        "GateError": 4,
        "EnvironmentFault": 5,
    }


def test_json_is_ascii_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"é": [1, None]})
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == {"é": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        print_json({"x": float("nan")})


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 2**20, 2**30, 2**44)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "1.0 GiB",
        "16384.0 GiB",
    ]
    assert unknown(None) == "?"
    assert unknown("seq") == "seq"
    assert unknown(0) == "0"
