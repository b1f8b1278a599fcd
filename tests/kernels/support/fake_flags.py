"""The generations that the stand-in speaks, apart because its programs start faster without the rest."""

DECLARATIVE, TRANSITIONAL, CLASSIC, EARLY = "declarative", "transitional", "classic", "early"

_COMMON = ["--peano", "--tmpdir", "--full-elf-name", "--unified", "--help", "--version"]
FLAGS = {
    DECLARATIVE: [*_COMMON, "--get-full-elf", "--output-dir"],
    TRANSITIONAL: [*_COMMON, "--get-full-elf", "--no-xchesscc", "--no-xbridge", "--no-compile-host"],
    CLASSIC: [
        *_COMMON,
        "--generate-full-elf",
        "--dynamic-objFifos",
        "--no-xchesscc",
        "--no-xbridge",
        "--no-compile-host",
    ],
    EARLY: ["--peano", "--tmpdir", "--aie-generate-xclbin", "--help", "--version"],
}
VERSIONS = {DECLARATIVE: "1.5.0", TRANSITIONAL: "1.4.0", CLASSIC: "1.1.0", EARLY: "0.3.0"}
