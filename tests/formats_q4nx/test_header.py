"""Hostile headers: every one is a ModelError in one line, quickly, whatever it says."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpack.errors import ModelError, OnnxpackError
from onnxpack.formats.q4nx import describe, open_file
from onnxpack.formats.q4nx.header import HEADER_LIMIT, parse_header


def tensor(begin, end, dtype="I8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def file_of(tmp_path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "f.q4nx"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def outcome(call):
    """What a call gives, or the one line of its error; any other exception passes and fails the test."""
    try:
        return call()
    except OnnxpackError as error:
        line = str(error)
        if "\n" in line or len(line) > 1000:
            raise
        return line


BAD = {
    "beyond 2^63": {"w": tensor(0, 1, shape=[10]) | {"data_offsets": [2**63, 2**63 + 10]}},
    "sum overflows": {"w": tensor(0, 1) | {"data_offsets": [2**64 - 1, 2**64]}},
    "backwards": {"w": tensor(0, 1) | {"data_offsets": [10, 5]}},
    "beyond the file": {"w": tensor(0, 200)},
    "overlap": {"a": tensor(0, 10), "b": tensor(5, 15)},
    "same bytes twice": {"a": tensor(0, 10), "b": tensor(0, 10)},
    "float offsets": {"w": tensor(0, 1) | {"data_offsets": [0.0, 10.0]}},
    "bool offsets": {"w": tensor(0, 1) | {"data_offsets": [False, True]}},
    "three offsets": {"w": tensor(0, 1) | {"data_offsets": [0, 1, 2]}},
    "negative": {"w": tensor(0, 1) | {"data_offsets": [-1, 1]}},
    "negative shape": {"w": tensor(0, 10, shape=[-10])},
    "nested shape": {"w": tensor(0, 10, shape=[[10]])},
    "huge shape": {"w": tensor(0, 10, shape=[10**400])},
    "many dimensions": {"w": tensor(0, 1, shape=[1] * 17)},
    "dtype number": {"w": tensor(0, 10) | {"dtype": 3}},
    "list": [1, 2],
    "string": "x",
    "twice": b'{"w":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"w":{"shape":[0],"data_offsets":[1,1]}}',
    "twice inside": b'{"w":{"dtype":"I8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
    "not UTF-8": b'{"\xff":1}',
    "not JSON": b'{"w":',
    "NaN": b'{"w":NaN}',
    "long number": b'{"w":' + b"9" * 5000 + b"}",
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "empty": b"",
    "two documents": b"{}{}",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_headers(tmp_path, case):
    path = file_of(tmp_path, BAD[case], bytes(100))
    with pytest.raises(ModelError) as caught:
        open_file(path)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    assert len(line) < 1000


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 101, HEADER_LIMIT + 1])
def test_header_lengths(tmp_path, length):
    with pytest.raises(ModelError, match="does not fit"):
        open_file(file_of(tmp_path, b"{}", bytes(90), length=length))


def test_a_header_longer_than_any(tmp_path):
    path = file_of(tmp_path, b"{}", length=HEADER_LIMIT + 1)
    os.truncate(path, HEADER_LIMIT + 100)
    with pytest.raises(ModelError, match="longer than any"):
        open_file(path)


def test_places_that_are_no_files(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        open_file(tmp_path / "none")
    with pytest.raises(ModelError, match="not a file"):
        open_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="not a file"):
        open_file(tmp_path / "pipe")


def test_odd_but_honest_headers(tmp_path):
    header = {
        "flm_version": "1",
        "sizes": [1, 2],
        "config": {"dtype": "I8"},
        "data_offsets": tensor(0, 10),
        'a "quoted" name\\': tensor(20, 30),
        "": tensor(10, 20),
        "empty": tensor(15, 15),
        "\ud800": tensor(30, 30),
        "__metadata__": {"x": "y"},
    }
    file = open_file(file_of(tmp_path, header, bytes(range(100))))
    assert len(file.notes) == 3
    assert file.decode('a "quoted" name\\').tolist() == list(range(20, 30))
    assert file.decode("data_offsets").tolist() == list(range(10))
    assert file.header.metadata
    assert [row.readable for row in describe(file.path)] == [True] * 5


@pytest.mark.parametrize("shape", [[0, 2**62], [2**62, 0], [0, 0, 5120], [0, 5120], [2**60, 0, 5120]])
@pytest.mark.parametrize("dtype", ["I8", "F32", "Q4NX", "U8"])
def test_empty_tensors_of_absurd_shapes(tmp_path, shape, dtype):
    file = open_file(file_of(tmp_path, {"w": tensor(0, 0, dtype, shape)}))
    values = outcome(lambda: file.decode("w", convert=True))
    assert isinstance(values, str) or values.size == 0
    assert len(describe(file.path)) == 1


def test_a_hundred_thousand_tensors(tmp_path):
    path = file_of(tmp_path, {f"layer.{i}.weight": tensor(i, i + 1) for i in range(100_000)}, bytes(100_000))
    start = time.process_time()
    assert len(open_file(path).names) == 100_000
    assert time.process_time() - start < 5


def test_every_truncation_of_a_real_file(data, tmp_path):
    whole = (data / "alt_codecA_container.q4nx").read_bytes()
    path = tmp_path / "f.q4nx"
    for size in [*range(0, 600, 7), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            open_file(path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_mutated_headers_never_do_worse_than_an_error(tmp_path_factory, data):
    header = json.dumps({"a": tensor(0, 5120, shape=[1, 5120]), "b": tensor(5120, 5130), "v": 1}).encode()
    text = bytearray(header)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"9", b"[", b"-", b"0"])
        )
        if not text:
            break
    path = file_of(tmp_path_factory.mktemp("m"), bytes(text), bytes(5130))
    rows = outcome(lambda: describe(path))
    for row in rows if isinstance(rows, list) else []:
        if row.readable:
            outcome(lambda name=row.name: open_file(path).decode(name, (32, 256)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([("I8", 5120), ("I8", 2560), ("U8", 2560), ("I8", 8704), ("I8", 4736), ("Q4NX", 5120)]),
    st.integers(0, 2**32),
)
def test_random_tiles_never_decode_silently_to_non_numbers(tmp_path_factory, kind, seed):
    dtype, nbytes = kind
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, 2 * nbytes, np.uint8) * rng.integers(0, 2, dtype=np.uint8)
    shape = [1, 1, 2, nbytes] if dtype == "U8" else [32, 512] if dtype == "Q4NX" else [1, 2, nbytes]
    path = file_of(tmp_path_factory.mktemp("r"), {"w": tensor(0, 2 * nbytes, dtype, shape)}, raw.tobytes())
    file = open_file(path)
    values = outcome(lambda: file.decode("w"))
    assert isinstance(values, str) or np.isfinite(values).all()


def test_parse_header_counts_from_the_start_of_the_file():
    text = json.dumps({"w": tensor(3, 5)}).encode()
    assert parse_header(text, 8 + len(text) + 5, "x").entries["w"].offset == 8 + len(text) + 3
