"""Opening a pack: what a hand, a disk or a stranger may have done to it ends in one PackError."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_maker import chain, normal

import onnxpack
from onnxpack.errors import PackError
from onnxpack.pack.read import Pack, dtype_of, open_pack

HUGE = 10**4000


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two weights of one size and one that is transposed, so that exchanges are possible; floats in a data file."""
    folder = tmp_path_factory.mktemp("packs") / "model.pack"
    proto = chain(normal(48, 64), normal(64, 48), normal(48, 64, seed=1))
    from model_maker import node, tensor

    proto.graph.node.append(node("Add", ["y", "bias"], ["z"]))
    proto.graph.initializer.append(tensor("bias", normal(64, 64)))
    proto.graph.output[0].name = "z"
    onnxpack.build(proto, folder, weights="int8")
    return folder


@pytest.fixture
def pack(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model.pack"))


def manifest_of(pack: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pack / "pack.json").read_text())
    return found


def edit(pack: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = manifest_of(pack)
    change(manifest)
    (pack / "pack.json").write_text(json.dumps(manifest))


def refused(pack: Path, check: Any = "headers") -> str:
    with pytest.raises(PackError) as caught:
        open_pack(pack, check)
    line = caught.value.render()
    assert line.isprintable()
    assert len(line) < 1400
    return line


def test_a_good_pack_opens(pack: Path) -> None:
    for check in ("headers", "full"):
        opened = open_pack(pack, check)  # type: ignore[arg-type]
        assert set(opened.tensors) == {"W0", "W1", "W2"}
        codes = opened.field(opened.tensors["W0"].fields["codes"])
        assert codes.shape == (48, 64)
        assert codes.dtype == np.int8
        assert not codes.flags.writeable


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another major version": (lambda m: m.update(schema="onnxpack/pack/2.0"), "update onnxpack"),
    "another schema": (lambda m: m.update(schema="somebody/pack/1.0"), "update onnxpack"),
    "no schema": (lambda m: m.pop("schema"), "not a manifest"),
    "schema of another type": (lambda m: m.update(schema=1), "not a manifest"),
    "a missing key": (lambda m: m.pop("tensors"), "not a manifest"),
    "a wrong type": (lambda m: m.update(tensors=[1]), r"$.tensors[0]"),
    "a wrong kind": (lambda m: m["sites"][0].update(kind="x"), r"$.sites[0].kind"),
    "a shape exchanged": (lambda m: m["tensors"][0].update(shape=[64, 48]), "is [48, 64], its weight"),
    "a site exchanged": (lambda m: m["sites"][0].update(k=64, n=48), "is [64, 48], its weight"),
    "a field exchanged": (lambda m: m["tensors"][0]["fields"]["codes"].update(nbytes=3071), "do not hold"),
    "a field's type": (lambda m: m["tensors"][0]["fields"]["codes"].update(dtype="float32"), "do not hold"),
    "no type": (lambda m: m["tensors"][0]["fields"]["codes"].update(dtype="(2,3)f4"), "not a number type"),
    "a negative shape": (lambda m: m["tensors"][0]["fields"]["codes"].update(shape=[-48, -64]), "negative"),
    "a huge shape": (lambda m: m["tensors"][0]["fields"]["codes"].update(shape=[HUGE, 2]), "do not hold"),
    "an offset beyond": (lambda m: m["tensors"][0]["fields"]["codes"].update(offset=10**9), "lie outside"),
    "a huge offset": (lambda m: m["tensors"][0]["fields"]["codes"].update(offset=2**63), "lie outside"),
    "a negative offset": (lambda m: m["tensors"][0]["fields"]["codes"].update(offset=-1), "lie outside"),
    "another file": (lambda m: m["tensors"][0]["fields"]["codes"].update(file="pack.json"), "not one of the pack's"),
    "a weight that is not there": (lambda m: m["sites"][0].update(weight="other"), "not in the pack"),
    "two weights of one name": (lambda m: m["tensors"].append(m["tensors"][0]), "one name"),
    "a file twice": (lambda m: m["files"].append(m["files"][0]), "twice"),
    "no graph": (lambda m: m.update(files=[f for f in m["files"] if f["path"] != "model.onnx"]), "lists no model.onnx"),
    "a size": (lambda m: m["files"][0].update(nbytes=m["files"][0]["nbytes"] + 1), "the manifest says"),
    "a negative size": (lambda m: m["files"][0].update(nbytes=-1), "the manifest says"),
    "a huge size": (lambda m: m["files"][0].update(nbytes=HUGE), "the manifest says"),
    "a fraction": (lambda m: m["files"][0].update(nbytes=1e300), "not a manifest"),
    **{
        f"file {name!r}": (lambda m, name=name: m["files"][0].update(path=name), "")
        for name in (
            "../model.onnx",
            "/etc/passwd",
            "a/../../b",
            "..\\b",
            "",
            ".",
            "missing",
            "x" * 5000,
            "a\0b",
            "\ud800x",
        )
    },
}


@pytest.mark.parametrize("case", CHANGES)
def test_hand_edited_manifests(pack: Path, case: str) -> None:
    change, message = CHANGES[case]
    edit(pack, change)
    assert message in refused(pack)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"\0" * 100,
        b"{" + b'"a":{' * 10_000,
        b"[" * 100_000,
        b'{"schema": NaN}',
        b'{"schema": 1e999}',
        b'{"schema": ' + b"9" * 100_000 + b"}",
        b'{"schema": "\\ud800"}',
        b'{"schema": "onnxpack/pack/1.0", "tensors": ' + b"[" * 50_000,
    ],
    ids=lambda t: repr(t[:12]),
)
def test_manifests_that_are_no_json(pack: Path, text: bytes) -> None:
    (pack / "pack.json").write_bytes(text)
    assert "not a manifest" in refused(pack)


def test_a_manifest_cut_short_anywhere(pack: Path) -> None:
    text = (pack / "pack.json").read_bytes()
    for length in range(0, len(text) - 2, 97):
        (pack / "pack.json").write_bytes(text[:length])
        refused(pack)


def test_not_a_number_is_no_number(pack: Path) -> None:
    text = (pack / "pack.json").read_text()
    for bad in ("NaN", "Infinity", "-Infinity"):
        (pack / "pack.json").write_text(text.replace('"opset": 21', f'"opset": {bad}', 1))
        assert "not a manifest" in refused(pack)


def test_keys_of_later_versions_are_ignored(pack: Path) -> None:
    edit(pack, lambda m: (m.update(schema="onnxpack/pack/1.9", new=[1]), m["sites"][0].update(new={"a": 1})))
    open_pack(pack)
    open_pack(pack, "full")


PLACES = {
    "missing": lambda p: shutil.rmtree(p),
    "a file": lambda p: (shutil.rmtree(p), p.write_text("x")),
    "empty": lambda p: (shutil.rmtree(p), p.mkdir()),
    "no manifest": lambda p: (p / "pack.json").unlink(),
    "manifest is a directory": lambda p: ((p / "pack.json").unlink(), (p / "pack.json").mkdir()),
    "no graph file": lambda p: (p / "model.onnx").unlink(),
    "no weights file": lambda p: (p / "weights.safetensors").unlink(),
    "weights cut short": lambda p: os.truncate(p / "weights.safetensors", 5000),
    "weights too long": lambda p: os.truncate(p / "weights.safetensors", 50_000),
    "data is a directory": lambda p: ((p / "model.data").unlink(), (p / "model.data").mkdir()),
    "a link out": lambda p: ((p / "model.data").rename(p.parent / "d"), (p / "model.data").symlink_to(p.parent / "d")),
    "a link inside": lambda p: ((p / "model.data").rename(p / "d"), (p / "model.data").symlink_to("d")),
    "a loop": lambda p: ((p / "model.data").unlink(), (p / "model.data").symlink_to("model.data")),
    "a pipe": lambda p: ((p / "model.data").unlink(), os.mkfifo(p / "model.data")),
}


@pytest.mark.parametrize("case", PLACES)
def test_damaged_directories(pack: Path, case: str) -> None:
    PLACES[case](pack)  # type: ignore[no-untyped-call]
    assert str(pack) in refused(pack)


def test_names_that_no_file_system_takes() -> None:
    for name in ("a\0b", "x" * 5000, "\ud800"):
        refused(Path(name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(pack: Path) -> None:
    (pack / "pack.json").chmod(0)
    assert "cannot be read" in refused(pack)


def test_listing_the_parents_is_not_needed(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "not allowed")

    for name in ("realpath", "listdir", "scandir"):
        monkeypatch.setattr(os.path if name == "realpath" else os, name, forbidden)
    monkeypatch.setattr(Path, "resolve", forbidden)
    assert isinstance(open_pack(pack), Pack)


# -- the full check ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.onnx", "model.data", "weights.safetensors"])
def test_one_changed_bit_is_found(pack: Path, file: str) -> None:
    data = bytearray((pack / file).read_bytes())
    data[len(data) * 2 // 3] ^= 1
    (pack / file).write_bytes(bytes(data))
    open_pack(pack)
    assert "digest differs" in refused(pack, "full")


def test_two_weights_of_one_size_exchanged(pack: Path) -> None:
    """All sizes and shapes fit; only the digests know."""

    def exchange(m: dict[str, Any]) -> None:
        first, second = (m["tensors"][i]["fields"]["codes"] for i in (0, 2))
        first["offset"], second["offset"] = second["offset"], first["offset"]

    edit(pack, exchange)
    open_pack(pack)
    assert "digest differs" in refused(pack, "full")


def test_an_exchange_that_keeps_the_digests_of_fields(pack: Path) -> None:
    def exchange(m: dict[str, Any]) -> None:
        m["tensors"][0]["fields"], m["tensors"][2]["fields"] = m["tensors"][2]["fields"], m["tensors"][0]["fields"]

    edit(pack, exchange)
    assert "has been changed" in refused(pack, "full")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(content_digest="0" * 64),
        lambda m: m.update(files_digest="0" * 64),
        lambda m: m["sites"][0].update(reason="below-row-threshold"),
        lambda m: m["tensors"][0].update(name="other") or m["sites"][0].update(weight="other"),
        lambda m: m["sites"][0].update(dtype="float16"),
    ],
)
def test_a_manifest_that_no_longer_fits_its_own_digest(pack: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(pack, change)
    open_pack(pack)
    assert "has been changed" in refused(pack, "full")


# -- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "O",
        "S4",
        "U4",
        "M8",
        "f4,f4",
        "(2,3)f4",
        ">f4",
        "V8",
        "{",
        "(((",
        "finfo",
        "__doc__",
        "\0",
        "1" * 5000 + "f4",
        "x" * 10**6,
        "complex64",
        "longdouble",
    ],
    ids=lambda n: n[:8],
)
def test_types_that_are_none(name: str) -> None:
    with pytest.raises(PackError) as caught:
        dtype_of(name, "here")
    assert len(caught.value.render()) < 200


@pytest.mark.parametrize(
    "name", ["int8", "uint8", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "int64", "bool"]
)
def test_types_that_are_stored(name: str) -> None:
    assert dtype_of(name, "here").name == name


# -- chance --------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_mutated_manifests(original: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any value of the manifest replaced by any other: a pack or one PackError, never anything else."""
    folder = tmp_path_factory.getbasetemp() / "mutated.pack"
    if not folder.exists():
        shutil.copytree(original, folder)
    manifest = manifest_of(original)
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = manifest
        while True:
            keys: list[Any] = sorted(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and data.draw(st.booleans()):
                at = at[key]
                continue
            at[key] = data.draw(_values)
            break
    (folder / "pack.json").write_text(json.dumps(manifest))
    for check in ("headers", "full"):
        try:
            open_pack(folder, check)  # type: ignore[arg-type]
        except PackError as error:
            assert error.render().isprintable()  # noqa: PT017


_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["..", "/", "model.onnx", "weights.safetensors", "int8", "float64", "codes", "W0"]),
    st.lists(st.integers(-2, 100), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
