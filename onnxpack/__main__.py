"""`python -m onnxpack` and the `onnxpack` script."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    from onnxpack.cli.main import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
