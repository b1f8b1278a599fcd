"""Stand-in for mlir-aie's Python package: enough of it to run a design program and print what it declared."""
