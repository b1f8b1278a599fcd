"""Make a pack again and compare it with what was recorded: the steps of pack.yml, on any machine.

    python examples/ci/regenerate.py model.onnx model.pack --record pack.lock.json --kernels kernels/
    python examples/ci/regenerate.py model.onnx model.pack --record pack.lock.json --elfs-out kernels/    # compiles
    python examples/ci/regenerate.py model.onnx model.pack --record pack.lock.json --update               # accepts

Exit 4 when a product with a weight has no kernel (--fail-under 0 for packs that are to run on the host), when the
content digest is not the recorded one, and when a kernel that was not compiled now (from a library or the cache) has
other bytes than recorded. A kernel that was compiled now always has: toolchains write times into their ELFs, so its
hash is recorded and not compared. The content digest holds the key of every kernel's inputs in its place.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import onnxpack
from onnxpack.errors import GateError, OnnxpackError, UsageError
from onnxpack.pack.manifest import Manifest
from onnxpack.pack.read import open_pack


def uncovered(manifest: Manifest, fail_under: float) -> list[str]:
    """Lines about products that have a weight and no kernel, when too few have one."""
    c = manifest.coverage
    share = 100 * c.covered / c.weight
    print(f"on a kernel: {c.covered} of {c.weight} products with a weight ({share:.1f} %)")
    if share >= fail_under:
        return []
    bare = [site for site in manifest.sites if site.kind == "weight" and site.kernel is None]
    shapes: dict[tuple[Any, ...], int] = {}
    for site in bare:
        shapes[site.k, site.n, site.reason] = shapes.get((site.k, site.n, site.reason), 0) + 1
    return [f"{count} products K={k} N={n} have no kernel: {why}" for (k, n, why), count in sorted(shapes.items())]


def changed_elfs(manifest: Manifest, fresh: set[str], recorded: dict[str, Any]) -> list[str]:
    """Lines about kernels made from the same inputs whose bytes differ, though nothing compiled them now."""
    lines = []
    for kernel in manifest.kernels:
        shape = f"{kernel.m}x{kernel.k}x{kernel.n}"
        known = recorded.get(shape, {})
        same = known.get("sha256") == kernel.sha256
        if kernel.key in fresh:
            print(f"kernel {shape}: compiled now, hash recorded")
        elif known.get("key") == kernel.key and not same:
            lines.append(f"kernel {shape}: other bytes than recorded, and it was not compiled now")
        else:
            print(f"kernel {shape}: {'as recorded' if same else 'not recorded yet'}")
    return lines


def read_record(path: Path) -> dict[str, Any]:
    """What was recorded; empty when nothing was."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"is no record: {error}", where=str(path), hint="make it again with --update") from None
    if not isinstance(found, dict) or not isinstance(found.get("kernels"), dict):
        raise UsageError("is no record", where=str(path), hint="make it again with --update")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("pack")
    parser.add_argument("--record", type=Path, required=True, help="what the pack is to be; committed beside the model")
    parser.add_argument("--update", action="store_true", help="write the record instead of comparing with it")
    parser.add_argument("--weights", default="q4nx", help="format of the weights")
    parser.add_argument("--kernels", metavar="DIR|LIST", help="kernels that exist")
    parser.add_argument("--elfs-out", metavar="DIR", help="compile the kernels that are missing, into DIR")
    parser.add_argument("--elf-cache", metavar="DIR", help="the cache of compiled kernels, kept between runs")
    parser.add_argument("--rows", type=int, nargs="+", default=[128])
    parser.add_argument("--fail-under", type=float, default=100.0, metavar="PCT", help="products that need a kernel")
    arguments = parser.parse_args()
    recorded = read_record(arguments.record)
    if not recorded and not arguments.update:
        raise UsageError("no such record", where=str(arguments.record), hint="make it with --update, and commit it")
    report = onnxpack.build(
        arguments.model,
        arguments.pack,
        arguments.weights,
        kernels=arguments.kernels,
        elfs_out=arguments.elfs_out,
        elf_cache=None if arguments.elf_cache is None else Path(arguments.elf_cache).absolute(),
        rows=arguments.rows,
        force=True,
    )
    for kernel in report.kernels:
        if kernel["reason"]:
            print(f"kernel {kernel['shape']}: {kernel['status']}: {kernel['reason']}")
    manifest = open_pack(arguments.pack, "full").manifest
    print(f"content digest: {manifest.content_digest}")
    fresh = {kernel["key"] for kernel in report.kernels if kernel["status"] == "built"}
    if bare := uncovered(manifest, arguments.fail_under):
        hint = "compile them with --elfs-out, or ask for less with --fail-under"
        raise GateError("; ".join(bare), where=arguments.pack, hint=hint)
    problems = []
    if not arguments.update:
        problems += changed_elfs(manifest, fresh, recorded["kernels"])
        if manifest.content_digest != recorded.get("content_digest"):
            problems.append(f"the content digest differs: {recorded.get('content_digest')} was recorded")
    if problems:
        raise GateError("; ".join(problems), where=arguments.pack, hint="if that is wanted, record it with --update")
    # New ELF hashes may stand in the record from now on: nothing else in it can differ here.
    record = {
        "content_digest": manifest.content_digest,
        "kernels": {f"{k.m}x{k.k}x{k.n}": {"key": k.key, "sha256": k.sha256} for k in manifest.kernels},
    }
    arguments.record.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    print("as recorded" if not arguments.update else f"recorded in {arguments.record}")


if __name__ == "__main__":
    try:
        main()
    except OnnxpackError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
