"""What the programs of the stand-in toolchain do. Standard library only; `settings.json` in their folder steers them.

mode: "" (write a whole ELF), "fail", "nothing" (exit 0, no file), "empty", "garbage", "core", "instructions", "cut",
"count" (another number of transfers), "rewrite" (change the design's text), "children" (leave a grandchild and sleep).
only: apply the mode only to designs whose text contains this. sleep: seconds before writing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from fake_flags import FLAGS, VERSIONS


def _settings(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "settings.json")) as file:
        return json.load(file)


def _log(folder: str, line: str) -> None:
    with open(os.path.join(folder, "calls.log"), "a") as log:
        log.write(line + "\n")


def aiecc(folder: str, argv: list[str]) -> int:
    settings = _settings(folder)
    flags = FLAGS[settings["generation"]]
    if "--help" in argv:
        print("OVERVIEW: aiecc\n\nOPTIONS:\n" + "\n".join(f"  {flag}  - ..." for flag in flags))
        return 0
    if "--version" in argv:
        print(f"aiecc {VERSIONS[settings['generation']]} (fake)")
        return 0
    unknown = [arg for arg in argv if arg.startswith("-") and arg.partition("=")[0] not in flags]
    if unknown and settings["generation"] in ("declarative", "transitional"):
        print(f"aiecc: Unknown command line argument '{unknown[0]}'.", file=sys.stderr)
        return 1
    import re
    from pathlib import Path

    source = next(Path(arg) for arg in argv if arg.endswith(".mlir"))
    target = next((Path(arg.partition("=")[2]) for arg in argv if arg.startswith("--full-elf-name=")), None)
    _log(folder, f"aiecc {os.getpid()}")
    text = source.read_text()
    objects = sorted(set(re.findall(r'link_with = "([^"]+)"', text)))
    for name in objects:
        if not Path(name).is_file():
            print(f"Error: could not copy {name}: No such file or directory", file=sys.stderr)
            return 1
    mode = settings.get("mode", "") if settings.get("only", "") in text else ""
    return _write(mode, settings, text, objects, source, target, argv)


def _write(mode, settings, text, objects, source, target, argv) -> int:
    import subprocess
    import time

    selected = "--get-full-elf" in argv or "--generate-full-elf" in argv
    if mode == "children":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    time.sleep(settings.get("sleep", 0))
    if mode == "fail":
        print("design.mlir:12:3: error: 'aie.tile' op allocated buffers exceeded available memory", file=sys.stderr)
        return 1
    if mode == "nothing" or not selected or target is None:
        return 0
    if mode == "rewrite":
        source.write_text(text + "// changed\n")
    data = _elf(mode, text, objects)
    target.write_bytes(data)
    return 0


def _elf(mode: str, text: str, objects: list[str]) -> bytes:
    import hashlib
    import re
    from pathlib import Path

    import npu_elf_writer as writer

    if mode in ("empty", "garbage", "core", "instructions"):
        return {
            "empty": b"",
            "garbage": os.urandom(2000),
            "core": core_object(b""),
            "instructions": writer.instruction_elf().to_bytes(),
        }[mode]
    moves = []
    for line in text.splitlines():
        start = re.search(r"dma_start_task @\w+ arg(\d) (\d+) \[(\d+), (\d+), (\d+), (\d+)\]", line)
        if start:
            argument, first, *sizes = map(int, start.groups())
            width = 4 if argument == 2 else 1
            moves.append((argument, first * width, sizes[0] * sizes[1] * sizes[2] * sizes[3] * width))
    if mode == "count":
        moves.append((1, 0, 64))
    inputs = hashlib.sha256(text.encode() + b"".join(Path(name).read_bytes() for name in objects)).digest()
    pdi = inputs + os.urandom(16)  # like the real one: not the same twice
    data = writer.full_elf(moves=moves, pdi=pdi).to_bytes()
    return data[:-40] if mode == "cut" else data


def clang(folder: str, argv: list[str]) -> int:
    if "--version" in argv:
        print("clang version 21.0.0 (fake peano)")
        return 0
    from pathlib import Path

    source = Path(argv[-1] if "-M" in argv else next(arg for arg in argv if arg.endswith(".cc")))
    includes = [Path(arg[2:]) for arg in argv if arg.startswith("-I")]
    files = _closure(source, [source.parent, *includes])
    if "-M" in argv:
        print("mm.o: " + " \\\n  ".join(str(path).replace(" ", "\\ ") for path in files))
        return 0
    _log(folder, f"clang {os.getpid()}")
    if _settings(folder).get("clang") == "fail":
        print("mm.cc:3:1: error: unknown type name 'int8'", file=sys.stderr)
        return 1
    output = Path(argv[argv.index("-o") + 1])
    defines = [arg for arg in argv if arg.startswith("-D")]
    output.write_bytes(core_object(repr(defines).encode() + b"".join(path.read_bytes() for path in files)))
    return 0


def _closure(source: Any, places: list[Any]) -> list[Any]:
    import re

    found, todo = [], [source]
    while todo:
        path = todo.pop(0)
        found.append(path)
        for name in re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text()):
            header = next((place / name for place in places if (place / name).is_file()), None)
            if header is not None and header not in found:
                todo.append(header)
    return found


def core_object(content: bytes) -> bytes:
    """An ELF of machine 264, as Peano makes them."""
    import struct

    import npu_elf_writer as writer

    data = bytearray(writer.Elf([writer.Section(".shstrtab", 3), writer.Section(".text", 1, content)]).to_bytes())
    struct.pack_into("<BB", data, 7, 0, 0)
    struct.pack_into("<HH", data, 16, 1, 264)
    return bytes(data)


def asm(folder: str, argv: list[str]) -> int:
    print("aiebu-asm 2.21.75 (fake)")
    return 0
