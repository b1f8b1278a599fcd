"""External data: layouts that people have, and locations that nobody may have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_maker import empty_branches, external, model, node, normal, save, session, tensor, tree, value

import onnxpack
from onnxpack.errors import ModelError
from onnxpack.graph.external import Folder, Region, locate, refuse_overlaps

W = normal(48, 80)
NBYTES = W.nbytes


def one(location: str | bytes = "w.bin", **entries: int | str | None) -> onnx.ModelProto:
    return model([node("MatMul", ["x", "W"], ["y"])], [external("W", location, [48, 80], **entries)])


def two(a: onnx.TensorProto, b: onnx.TensorProto) -> onnx.ModelProto:
    return model([node("MatMul", ["x", "A"], ["h"]), node("MatMul", ["x", "B"], ["y"])], [a, b], outputs=["y", "h"])


def refuses(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        onnxpack.census(path)
    return caught.value.render()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "w.bin").write_bytes(W.tobytes() * 2)
    return tmp_path


def built(path: Path, out: Path) -> dict[str, bytes]:
    onnxpack.build(path, out, weights="int8")
    return tree(out)


def test_hub_snapshots_link_model_and_data_into_one_blob_folder(tmp_path: Path) -> None:
    """models--x/snapshots/1/onnx/model.onnx -> ../../../blobs/a, its data likewise."""
    hub = tmp_path / "hub"
    snapshot, blobs = hub / "snapshots" / "1" / "onnx", hub / "blobs"
    snapshot.mkdir(parents=True)
    save(blobs / "a", one("model.onnx_data"))
    (blobs / "b").write_bytes(W.tobytes())
    (snapshot / "model.onnx").symlink_to(Path("../../../blobs/a"))
    (snapshot / "model.onnx_data").symlink_to(Path("../../../blobs/b"))
    assert len(onnxpack.census(snapshot / "model.onnx").sites) == 1

    plain = tmp_path / "plain"
    save(plain / "model.onnx", one("model.onnx_data"))
    (plain / "model.onnx_data").write_bytes(W.tobytes())
    through_links = built(snapshot / "model.onnx", tmp_path / "a.pack")
    assert through_links == built(plain / "model.onnx", tmp_path / "b.pack")


def test_a_linked_folder_and_links_inside_it(folder: Path, tmp_path: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "w.bin").symlink_to(folder / "w.bin")
    save(folder / "m.onnx", one("deep/w.bin"))
    (tmp_path / "alias").symlink_to(folder)
    assert len(onnxpack.census(folder / "m.onnx").sites) == 1
    assert len(onnxpack.census(tmp_path / "alias" / "m.onnx").sites) == 1


def test_hard_links_are_files_like_others(folder: Path) -> None:
    os.link(folder / "w.bin", folder / "hard.bin")
    assert len(onnxpack.census(save(folder / "m.onnx", one("hard.bin"))).sites) == 1


@pytest.mark.parametrize("how", ["file", "folder", "chain", "blob of another model"])
def test_links_that_lead_out(tmp_path: Path, how: str) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    home.mkdir()
    outside.mkdir()
    (outside / "secret.bin").write_bytes(W.tobytes())
    location = "link.bin"
    if how == "file":
        (home / "link.bin").symlink_to(outside / "secret.bin")
    elif how == "folder":
        (home / "sub").symlink_to(outside)
        location = "sub/secret.bin"
    elif how == "chain":
        (home / "one").symlink_to(home / "two")
        (home / "two").symlink_to(outside / "secret.bin")
        location = "one"
    else:
        (tmp_path / "blobs").mkdir()
        save(tmp_path / "blobs" / "a", one(location))
        (home / "m.onnx").symlink_to(tmp_path / "blobs" / "a")
        (home / "link.bin").symlink_to(outside / "secret.bin")
    if how != "blob of another model":
        save(home / "m.onnx", one(location))
    line = refuses(home / "m.onnx")
    assert location in line
    assert "tensor W" in line


def test_a_folder_whose_name_begins_like_ours_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "model-evil").mkdir()
    (tmp_path / "model-evil" / "w.bin").write_bytes(W.tobytes())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.bin").symlink_to(tmp_path / "model-evil" / "w.bin")
    assert "link out of the model's folder" in refuses(save(tmp_path / "model" / "m.onnx", one()))


BAD_LOCATIONS = [
    "",
    "..",
    "../w.bin",
    "a/../../w.bin",
    "./..//w.bin",
    "a/..",
    "/etc/passwd",
    "//etc/passwd",
    "..\\w.bin",
    "a\\..\\..\\w.bin",
    "\\\\server\\share",
    "C:\\w.bin",
    "C:w.bin",
    "c:/w.bin",
    "w.bin\0.txt",
]


@pytest.mark.parametrize("location", BAD_LOCATIONS)
def test_locations_that_lead_out(folder: Path, location: str) -> None:
    home = folder / "home"
    line = refuses(save(home / "m.onnx", one(location)))
    assert "leads out of the model's folder" in line or "is empty" in line
    assert "tensor W" in line


@pytest.mark.parametrize(
    "location", [".", "./", "sub", "no.bin", "no/w.bin", "w.bin/x", "https://example.com/w.bin", "w" * 5000, "~/w.bin"]
)
def test_locations_that_are_no_file(folder: Path, location: str) -> None:
    (folder / "sub").mkdir()
    line = refuses(save(folder / "m.onnx", one(location)))
    assert line.isprintable()


def test_special_files_are_not_opened(folder: Path) -> None:
    os.mkfifo(folder / "pipe")  # opening it would wait for ever
    assert "is not a regular file" in refuses(save(folder / "m.onnx", one("pipe")))
    (folder / "dev").symlink_to("/dev/zero")
    assert "link out" in refuses(save(folder / "m.onnx", one("dev")))


@pytest.mark.parametrize(
    "entries",
    [
        {"offset": -8},
        {"offset": "abc"},
        {"offset": "0x10"},
        {"offset": "1e3"},
        {"offset": "٣"},
        {"offset": " 0"},
        {"offset": "+0"},
        {"offset": 2**63},
        {"offset": 10**30},
        {"offset": 2 * NBYTES},
        {"offset": NBYTES + 1},
        {"length": NBYTES - 4},
        {"length": NBYTES + 4},
        {"length": 0},
        {"length": -1},
        {"offset": 2**63 - 1, "length": NBYTES},
        {"offset": ""},
    ],
    ids=str,
)
def test_offsets_and_lengths_that_do_not_fit(folder: Path, entries: dict[str, int | str]) -> None:
    line = refuses(save(folder / "m.onnx", one(**entries)))
    assert "tensor W: external data 'w.bin'" in line


@pytest.mark.parametrize(
    "entries", [{}, {"offset": None}, {"offset": "0040"}, {"offset": NBYTES, "length": f"0{NBYTES}"}], ids=str
)
def test_offsets_that_fit_are_read_and_packed(folder: Path, tmp_path: Path, entries: dict[str, int | str]) -> None:
    path = save(folder / "m.onnx", one(**entries))
    assert len(onnxpack.census(path).sites) == 1
    onnxpack.build(path, tmp_path / "out.pack", weights="int8")


def test_a_key_given_twice(folder: Path) -> None:
    made = one()
    made.graph.initializer[0].external_data.add(key="location", value="../w.bin")
    assert "names its location twice" in refuses(save(folder / "m.onnx", made))


@pytest.mark.parametrize("alias", ["w.bin", "./w.bin", ".//w.bin", "hard.bin", "soft.bin"])
def test_partial_overlaps_under_any_name(folder: Path, alias: str) -> None:
    os.link(folder / "w.bin", folder / "hard.bin")
    (folder / "soft.bin").symlink_to("w.bin")
    whole = external("A", "w.bin", [48, 80], 0, NBYTES)
    for shape, offset in (([48, 80], 320), ([48, 40], 0), ([48, 40], 100), ([48, 40], NBYTES // 2)):
        path = save(folder / "m.onnx", two(whole, external("B", alias, shape, offset)))
        line = refuses(path)
        assert "overlaps" in line
        assert "A" in line
    for offset in (0, NBYTES):  # the very same bytes, and bytes beside them
        path = save(folder / "m.onnx", two(whole, external("B", alias, [48, 80], offset)))
        assert len(onnxpack.census(path).sites) == 2


def test_empty_tensors_overlap_nothing() -> None:
    refuse_overlaps([("a", Region("f", 0, 10)), ("b", Region("f", 5, 0)), ("c", Region("f", 10, 4))])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 6)), max_size=6))
def test_overlaps_against_counting_bytes(spans: list[tuple[int, int, int]]) -> None:
    regions = [(str(i), Region(f"f{file}", start, n, (0, file))) for i, (file, start, n) in enumerate(spans)]
    held = [{(file, start + i) for i in range(n)} for file, start, n in spans]
    partial = any(a & b and a != b for i, a in enumerate(held) for b in held[:i])
    if partial:
        with pytest.raises(ModelError, match="overlaps"):
            refuse_overlaps(regions)
    else:
        refuse_overlaps(regions)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(location=st.text(alphabet="ab./\\:~\0 é", max_size=12))
def test_no_location_escapes(tmp_path_factory: pytest.TempPathFactory, location: str) -> None:
    root = tmp_path_factory.mktemp("loc")
    home = root / "a"
    (home / "a").mkdir(parents=True)
    for file in (root / "b", home / "b", home / "a" / "b"):
        file.write_bytes(bytes(4))
    folder = Folder.of(home / "m.onnx")
    try:
        region = locate([("location", location)], 4, folder, "W")
    except ModelError:
        pass
    else:
        assert Path(os.path.realpath(region.file)).is_relative_to(home)


@pytest.mark.parametrize(
    "spelling", ["m.onnx", "./m.onnx", "../here/m.onnx", ".//../here/./m.onnx", "absolute", "accents"]
)
def test_the_same_pack_whatever_the_spelling(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "w.bin").write_bytes(W.tobytes())
        return save(folder / "m.onnx", one())

    here = place(tmp_path / "here")
    monkeypatch.chdir(here.parent)
    path: str | Path = spelling
    if spelling == "absolute":
        path = here
    elif spelling == "accents":
        path = place(tmp_path / "dossier é ✓ 1")
    found = built(Path(path), tmp_path / "out.pack")
    reference = place(tmp_path / "reference")
    assert found == built(reference, tmp_path / "reference.pack")
    assert str(tmp_path).encode() not in b"".join(found.values())


def test_a_model_given_as_an_object_has_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="a model given as an object cannot have external data"):
        onnxpack.census(one(str(folder / "w.bin")))


def test_data_without_bytes_needs_no_file_in_the_pack(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"")
    nodes = [node("MatMul", ["x", "W"], ["h"]), node("Concat", ["h", "Z"], ["y"], axis=0)]
    path = save(tmp_path / "m.onnx", model(nodes, [tensor("W", W), external("Z", "w.bin", [0, 80], 0, 0)]))
    files = built(path, tmp_path / "out.pack")
    assert "model.data" not in files
    shutil.rmtree(tmp_path / "out.pack")
    onnxpack.build(path, tmp_path / "out.pack", weights="int8")
    assert session(tmp_path / "out.pack" / "model.onnx").run(None, {"x": np.ones((2, 48), np.float32)})[0].shape == (
        2,
        80,
    )


def test_external_tensors_in_attributes_and_bodies(tmp_path: Path) -> None:
    """Constants of any size, and bodies without nodes, keep their numbers when the source is gone."""
    numbers = np.arange(48 * 80, dtype=np.float32)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "w.bin").write_bytes(numbers.tobytes() + numbers[4:8].tobytes())
    nodes = [
        node("Constant", [], ["small"], value=external("s", "w.bin", [4], NBYTES, 16)),
        node("Constant", [], ["large"], value=external("l", "w.bin", [48, 80], 0, NBYTES)),
        empty_branches("c", "chosen", external("big", "w.bin", [48, 80], 0, NBYTES), tensor("other", W)),
        node("MatMul", ["x", "W"], ["y"]),
        node("Identity", ["small"], ["a"]),
        node("Identity", ["large"], ["b"]),
    ]
    proto = model(
        nodes,
        [tensor("W", W)],
        [value("x", ["M", 48]), value("c", [], onnx.TensorProto.BOOL)],
        ["y", "a", "b", "chosen"],
    )
    path = save(tmp_path / "src" / "m.onnx", proto)
    onnxpack.build(path, tmp_path / "out.pack", weights="int8")
    shutil.rmtree(tmp_path / "src")
    opened = session(tmp_path / "out.pack" / "model.onnx")
    feed = {"x": np.ones((1, 48), np.float32), "c": np.array(True)}
    _, a, b, chosen = opened.run(None, feed)
    assert np.array_equal(a, numbers[4:8])
    assert np.array_equal(b.reshape(-1), numbers)
    assert np.array_equal(chosen.reshape(-1), numbers)
