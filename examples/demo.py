"""The main job in one screen: census, build, run, compare with the float model, say what was saved.

python examples/demo.py [FOLDER]        # packs go to FOLDER (default build/demo)
"""

from __future__ import annotations

import sys
from pathlib import Path

from onnxpack.cli.main import run

HERE = Path(__file__).resolve().parent
MODEL = HERE / "trained_a" / "trained_a.onnx"
HELDOUT = HERE / "trained_a" / "heldout_64x257.npy"


def step(title: str, *command: str) -> None:
    """Print a command, run it, stop at the first that fails."""
    print(f"\n== {title}\n$ onnxpack {' '.join(command)}\n", flush=True)
    code = run(list(command))
    sys.stdout.flush()
    if code:
        raise SystemExit(code)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo")
    folder.mkdir(parents=True, exist_ok=True)
    small, exact = str(folder / "trained_a.pack"), str(folder / "trained_a_int8.pack")
    text = ("--model", str(MODEL), "--inputs", str(HELDOUT), "--next-token", "--windows", "24")
    step("What is in the model", "census", str(MODEL))
    step("Pack it: 4-bit weights on disk, int8 products", "build", str(MODEL), "-o", small, "--quiet", "--force")
    step("Run the pack", "run", small, "--random", "--dim", "seq=32")
    step("Compare with the float model on held-out text", "verify", small, *text, "--max-kl", "3e-3")
    step("The same with int8 on disk", "build", str(MODEL), "-o", exact, "--weights", "int8", "--quiet", "--force")
    step("Ten times closer", "verify", exact, *text, "--max-kl", "1.6e-4")
    step("How fast, beside the float model", "bench", small, "--model", str(MODEL), "--dim", "seq=128")


if __name__ == "__main__":
    main()
