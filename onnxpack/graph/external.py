"""External data: where a tensor's bytes are, checked before any file is opened.

A model file may come from anybody. A location may name only a regular file under the folder of the model as the person
addressed it, or in the folder where the model file itself really lies (hub snapshots link model and data into one blob
folder); its bytes must be exactly those that the tensor needs, and may not partly overlap another tensor's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnxpack.errors import ModelError

_OFFSET_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Region:
    """Bytes of a file that hold one tensor."""

    file: str
    offset: int
    nbytes: int
    inode: tuple[int, int] = (0, 0)
    """Device and number: what tells files apart that may be addressed by several names."""


@dataclass(frozen=True)
class Folder:
    """Where a model's external data may lie: `base` as addressed, and the real directories that count as its own."""

    base: str
    allowed: tuple[str, ...]

    @classmethod
    def of(cls, model_file: Path) -> Folder:
        """The folder of a model file."""
        base = os.path.join(Path.cwd(), os.path.dirname(model_file))  # as addressed: links are not followed yet
        real_model = os.path.realpath(model_file)
        return cls(base, tuple(dict.fromkeys((os.path.realpath(base), os.path.dirname(real_model)))))


def locate(entries: Iterable[tuple[str, str]], nbytes: int, folder: Folder, tensor: str) -> Region:
    """The region that external-data `entries` (key, value pairs) name for a tensor of `nbytes`.

    ModelError names the tensor and the location; the file is looked at (stat), never opened.
    """
    keys = _keys(entries, tensor)
    location = keys.get("location", "")
    where = f"tensor {tensor}"
    file = _contained(location, folder, where)
    offset = _number(keys.get("offset", "0"), "offset", location, where)
    length = _number(keys["length"], "length", location, where) if "length" in keys else nbytes
    if length != nbytes:
        raise ModelError(
            f"external data {location!r}: length {length}, but the tensor's shape and type need {nbytes}", where=where
        )
    status = os.stat(file)
    size = status.st_size
    if offset + nbytes > size:
        raise ModelError(
            f"external data {location!r}: bytes {offset} to {offset + nbytes} lie beyond the file's {size}",
            where=where,
            hint="the file is truncated or belongs to another model",
        )
    return Region(file, offset, nbytes, (status.st_dev, status.st_ino))


def _keys(entries: Iterable[tuple[str, str]], tensor: str) -> Mapping[str, str]:
    keys: dict[str, str] = {}
    for key, value in entries:
        if key in keys:  # readers disagree which one counts, so a check of one can be bypassed by the other
            raise ModelError(f"external data names its {key} twice", where=f"tensor {tensor}")
        keys[key] = value
    return keys


def _contained(location: str, folder: Folder, where: str) -> str:
    parts = location.replace("\\", "/").split("/")
    absolute = location.startswith(("/", "\\")) or (len(location) > 1 and location[1] == ":")
    if not location or absolute or ".." in parts or "\0" in location:
        what = "is empty" if not location else "leads out of the model's folder"
        raise ModelError(f"external data location {location!r} {what}", where=where, hint="save the model again")
    file = os.path.join(folder.base, location)
    real = os.path.realpath(file)
    if not any(real.startswith(os.path.join(root, "")) for root in folder.allowed):
        raise ModelError(f"external data location {location!r} is a link out of the model's folder", where=where)
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        raise ModelError(
            f"external data {location!r}: {error.strerror}", where=where, hint="keep it beside the model"
        ) from None
    if not stat.S_ISREG(mode):
        raise ModelError(f"external data {location!r} is not a regular file", where=where)
    return file


def _number(text: str, key: str, location: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or int(text) > _OFFSET_LIMIT:
        raise ModelError(f"external data {location!r}: {key} {text[:40]!r} is not a byte count", where=where)
    return int(text)


def refuse_overlaps(regions: Iterable[tuple[str, Region]]) -> None:
    """Two tensors may name the very same bytes, never bytes that partly overlap. ModelError names both."""
    last: tuple[str, Region] | None = None
    for name, region in sorted(regions, key=lambda item: (item[1].inode, item[1].offset, item[1].nbytes)):
        if not region.nbytes:
            continue
        if last is not None:
            before = last[1]
            overlaps = region.inode == before.inode and region.offset < before.offset + before.nbytes
            if overlaps and (region.offset, region.nbytes) != (before.offset, before.nbytes):
                location = os.path.basename(region.file)
                raise ModelError(
                    f"its external data in {location!r} overlaps that of {last[0]}", where=f"tensor {name}"
                )
        last = (name, region)
