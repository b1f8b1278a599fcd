"""What a model is fed: arrays from files, or made up from a seed, checked against the model's own inputs."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onnxpack.errors import UsageError
from onnxpack.types import Array

Feed = dict[str, Array]

_NUMPY = {"float": "float32", "double": "float64", "string": "str"}


@dataclass(frozen=True)
class InputSpec:
    """One input of a model."""

    name: str
    type: str
    """As onnxruntime writes it: ``tensor(float)``."""
    shape: tuple[int | str | None, ...]

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The numpy type; None where numpy has none (bfloat16, sequences, optionals)."""
        if not self.type.startswith("tensor("):
            return None
        element = self.type[len("tensor(") : -1]
        try:
            dtype = np.dtype(_NUMPY.get(element, element))
        except TypeError:
            return None
        return dtype if dtype.kind in "biufU" else None

    def __str__(self) -> str:
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name}: {self.type}[{dims}]"


class _Argument(Protocol):
    name: str
    type: str
    shape: Sequence[int | str | None]


class _Session(Protocol):
    def get_inputs(self) -> Sequence[_Argument]: ...


def input_specs(session: _Session) -> list[InputSpec]:
    """The inputs of a PackSession or an onnxruntime.InferenceSession."""
    return [InputSpec(value.name, value.type, tuple(value.shape)) for value in session.get_inputs()]


def read_arrays(path: str | Path) -> Array | Feed:
    """One array from an .npy file, or arrays by name from an .npz file. UsageError when it is neither.

    Pickled objects are refused: they could run code.
    """
    where = str(path)
    try:
        with Path(path).open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            with loaded:
                return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError:
        raise UsageError("no such file", where=where) from None
    except IsADirectoryError:
        raise UsageError("is a directory", where=where, hint="name a .npy or .npz file") from None
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, MemoryError, NotImplementedError) as error:
        cause = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        what = f"not an .npy or .npz file: {cause}"
        if "allow_pickle" in cause:  # what numpy says of anything that it does not know
            what = "holds Python objects, not numbers" if "Object arrays" in cause else "not an .npy or .npz file"
        raise UsageError(what, where=where, hint="write it with numpy.save or numpy.savez") from None
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=where) from None


def read_feed(paths: Sequence[str], specs: Sequence[InputSpec]) -> Feed:
    """One feed from files: ``x.npz`` (arrays by input name), ``x.npy`` (models with one input), ``NAME=x.npy``."""
    feed: Feed = {}
    for given in paths:
        name, _, rest = given.partition("=")
        named = bool(rest) and any(spec.name == name for spec in specs)
        made = _from_file(rest, specs, name) if named else _from_file(given, specs)
        if twice := sorted(feed.keys() & made.keys()):
            raise UsageError(f"input {twice[0]!r} is given twice", where=given)
        feed |= made
    return feed


def _from_file(path: str, specs: Sequence[InputSpec], name: str | None = None) -> Feed:
    found = read_arrays(path)
    if isinstance(found, dict):
        if name is not None:
            raise UsageError("an .npz file names its arrays itself", where=path, hint="drop the name before it")
        return found
    if name is None and len(specs) != 1:
        what = f"the model has {len(specs)} inputs, an .npy file holds one"
        raise UsageError(what, where=path, hint=f"say which with NAME={path}: {_names(specs)}")
    return {specs[0].name if name is None else name: found}


def read_feeds(source: str | Path, specs: Sequence[InputSpec]) -> list[Feed]:
    """Feeds from a file (one feed) or a directory.

    A directory holds .npz files, or .npy files of a model with one input, each a feed, in order of their names; or one
    feed as ``<input>.npy`` files.
    """
    path = Path(source)
    if not path.is_dir():
        return [read_feed([str(source)], specs)]
    files = sorted(file for file in path.iterdir() if file.suffix in (".npy", ".npz"))
    if not files:
        raise UsageError("holds no .npy or .npz file", where=str(source))
    by_name = {file.stem: file for file in files if file.suffix == ".npy"}
    if len(specs) > 1 and by_name.keys() >= {spec.name for spec in specs}:
        return [read_feed([f"{spec.name}={by_name[spec.name]}" for spec in specs], specs)]
    return [read_feed([str(file)], specs) for file in files]


def fitted(feed: Mapping[str, Array], specs: Sequence[InputSpec], optional: Sequence[str] = ()) -> Feed:
    """The feed as the model takes it. Whole numbers change their width when every value survives it; nothing else is
    converted. UsageError names the input that does not fit. `optional`: initializers that a feed may replace.

    >>> spec = InputSpec("ids", "tensor(int64)", (1, "seq"))
    >>> fitted({"ids": np.array([[1, 2]], np.uint8)}, [spec])["ids"].dtype.name
    'int64'
    """
    known = {spec.name: spec for spec in specs}
    if missing := [name for name in known if name not in feed]:
        raise UsageError(f"input {missing[0]!r} is missing", hint=f"the model takes {_names(specs)}")
    made: Feed = {}
    for name, array in feed.items():
        if name in known:
            made[name] = _fit(known[name], array)
        elif name in optional:
            made[name] = array
        else:
            raise UsageError(f"the model has no input {name!r}", hint=f"it takes {_names(specs)}")
    return made


def _fit(spec: InputSpec, array: Array) -> Array:
    where, wanted = f"input {spec.name}", spec.dtype
    if wanted is None:
        raise UsageError(f"{spec.type} cannot be fed from a file", where=where)
    if array.dtype == wanted or (wanted.kind == "U" and array.dtype.kind in "UO"):
        converted = array
    elif array.dtype.kind in "iu" and wanted.kind in "iu":
        converted = array.astype(wanted)
        if not np.array_equal(converted, array):
            raise UsageError(f"{array.dtype.name} values do not fit into {wanted.name}", where=where)
    else:
        raise UsageError(f"is {array.dtype.name}, the model takes {wanted.name}", where=where, hint="convert it first")
    if len(spec.shape) != array.ndim or any(
        isinstance(dim, int) and dim != size for dim, size in zip(spec.shape, array.shape, strict=True)
    ):
        raise UsageError(f"has shape {list(array.shape)}, the model takes {spec}", where=where)
    return converted


def rows_apart(feed: Feed, specs: Sequence[InputSpec]) -> list[Feed]:
    """The feed row by row, where the model takes one row at a time and the arrays hold several.

    >>> spec = InputSpec("ids", "tensor(int64)", (1, "seq"))
    >>> [f["ids"].tolist() for f in rows_apart({"ids": np.array([[1], [2]])}, [spec])]
    [[[1]], [[2]]]
    """
    single = {spec.name for spec in specs if spec.shape[:1] == (1,)}
    stacked = {name: a for name, a in feed.items() if name in single and a.ndim and a.shape[0] != 1}
    if not stacked:
        return [feed]
    counts = sorted({len(array) for array in stacked.values()})
    if len(counts) > 1:
        raise UsageError(f"inputs have {' and '.join(map(str, counts))} rows", where=", ".join(sorted(stacked)))
    if not counts[0]:
        raise UsageError("has no rows", where=f"input {min(stacked)}")
    return [{**feed, **{name: a[i : i + 1] for name, a in stacked.items()}} for i in range(counts[0])]


def first_rows(feed: Feed, count: int) -> Feed:
    """Only the first `count` rows of every array; they must all have the same number of rows."""
    lengths = {len(array) if array.ndim else 0 for array in feed.values()}
    if len(lengths) > 1:
        raise UsageError("the inputs differ in their number of rows, so the first ones cannot be taken")
    return {name: array[:count] for name, array in feed.items()}


def _names(specs: Sequence[InputSpec]) -> str:
    return ", ".join(str(spec) for spec in specs) or "no inputs"


def describe(feed: Mapping[str, Array]) -> Iterator[str]:
    """A line for each array of a feed.

    >>> list(describe({"x": np.zeros((2, 3), np.float32)}))
    ['x: float32[2, 3], 0 to 0']
    """
    for name, array in feed.items():
        extent = ""
        if array.size and array.dtype.kind in "biuf":
            extent = f", {array.min():g} to {array.max():g}"
        yield f"{name}: {array.dtype.name}{list(array.shape)}{extent}"
