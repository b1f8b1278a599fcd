"""Read a model: file to protobuf to graph, with the weights left on disk."""

from __future__ import annotations

import hashlib
import logging
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import InlinePass, TopologicalSortPass

from onnxpack.errors import ModelError
from onnxpack.graph.check import check
from onnxpack.graph.external import Folder, Region
from onnxpack.graph.normalize import normalize
from onnxpack.graph.paths import make_paths_unique, name_nodes

_PROTOBUF_LIMIT = 2**31 - 1

# onnx_ir reports oddities of the graph on its logger; what matters is refused by `check`, with a better line.
logging.getLogger("onnx_ir").addHandler(logging.NullHandler())
logging.getLogger("onnx_ir").propagate = False


@dataclass(frozen=True)
class Model:
    """A loaded model. `graph` may be rewritten; the weights stay where they are until someone asks for them."""

    ir: ir.Model
    name: str
    """File name, without its directory."""
    path: Path | None
    graph_sha256: str
    regions: Mapping[str, Region]
    """External data by `check.external_key`."""

    @property
    def where(self) -> str:
        """What a message calls the model: its path, or its name when it came as an object."""
        return str(self.path or self.name)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Put the model in front of whatever a ModelError raised inside says."""
        try:
            yield
        except ModelError as error:
            where = self.where if error.where is None else f"{self.where}: {error.where}"
            raise ModelError(error.what, where=where, hint=error.hint) from None

    @property
    def opset(self) -> int:
        """ai.onnx opset of the graph; 0 when it uses none of its operators."""
        return self.ir.opset_imports.get("", 0)


def load(source: str | Path | onnx.ModelProto) -> Model:
    """Read a model from a path, or take one as an object.

    Checked, sorted, and with local functions inlined, so that one graph with its bodies is all there is to look at.
    ModelError is one line that says what is wrong, and where.
    """
    if isinstance(source, onnx.ModelProto):
        proto, name, path, folder = onnx.ModelProto(), "model.onnx", None, None
        proto.CopyFrom(source)
        digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
    else:
        path = Path(source)
        data = _read(path)
        name, folder = path.name, Folder.of(path)
        digest = hashlib.sha256(data).hexdigest()
        proto = _parse(data, path)
        del data
    try:
        regions = check(proto, folder)
        return Model(_to_ir(proto), name, path, digest, regions)
    except ModelError as error:
        where = str(path or "model")
        if error.where is not None:
            where += f": {error.where}"
        raise ModelError(error.what, where=where, hint=error.hint) from None


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError("is a directory", where=str(path), hint="name the .onnx file inside it")
        if not stat.S_ISREG(status.st_mode):  # a pipe could keep us waiting, a device give us bytes without end
            raise ModelError("is not a regular file", where=str(path), hint="save the model as a file")
        if status.st_size > _PROTOBUF_LIMIT:
            raise ModelError("is larger than 2 GiB, which no protobuf can be", where=str(path), hint=_EXTERNAL)
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelError("no such file", where=str(path)) from None
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except ValueError as error:  # no file system takes such a name
        raise ModelError(f"cannot be read: {error}", where=str(path)) from None
    if not data:
        raise ModelError("the file is empty", where=str(path))
    return data


_EXTERNAL = "save it with external data"

_LOOKS_LIKE = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself", "run `git lfs pull`"),
    (b"\x1f\x8b", "gzip data", "unpack it first"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"GGUF", "a GGUF file", "start from the ONNX export"),
    (b"{", "JSON text", None),
)


def _parse(data: bytes, path: Path) -> onnx.ModelProto:
    for magic, what, hint in _LOOKS_LIKE:
        if data.startswith(magic):
            raise ModelError(f"not an ONNX model: it is {what}", where=str(path), hint=hint)
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < len(data) + 2**20:
        raise ModelError("not an ONNX model: it is a safetensors file", where=str(path))
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
        return proto
    except DecodeError:
        text = data[:512].isascii() and all(byte >= 9 for byte in data[:512])
        what = "a text file" if text else "not a protobuf, or cut short"
        raise ModelError(f"not an ONNX model: it is {what}", where=str(path)) from None


def _to_ir(proto: onnx.ModelProto) -> ir.Model:
    normalize(proto)
    try:
        model = ir.serde.deserialize_model(proto)
    except (ir.serde.SerdeError, ValueError, KeyError, TypeError) as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise ModelError(f"the graph cannot be read: {cause[:200]}") from None
    name_nodes(model.graph)  # before inlining and sorting, so that numbers are those of the file
    if model.functions:
        _inline(model)
        make_paths_unique(model.graph)
    TopologicalSortPass()(model)
    return model


def _inline(model: ir.Model) -> None:
    """Inline local functions; their nodes keep the paths they had inside."""
    for (domain, name, _), function in model.functions.items():
        name_nodes(function, f"fn:{domain}.{name}/")
    try:
        InlinePass()(model)
    except (ValueError, RuntimeError, ir.passes.InvariantError) as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise ModelError(f"its local functions cannot be inlined: {cause[:200]}") from None
