"""The figures in the page about designs are the design's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onnxpack.kernels import designs
from onnxpack.kernels.target import NPU2

PAGE = Path(__file__).resolve().parents[2] / "docs" / "designs.md"
ROW = re.compile(r"\| (\d+) x (\d+) \| (\d+), (\d+), (\d+) \| (\d) x (\d) \| ([\d,]+) \| ([\d,]+) \|")
ROWS = ROW.findall(PAGE.read_text()) if PAGE.exists() else []


def test_the_page_has_its_table() -> None:
    assert len(ROWS) == 7


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}x{row[1]}")
def test_a_row_of_the_table(row: tuple[str, ...]) -> None:
    k, n, *rest = (int(cell.replace(",", "")) for cell in row)
    design = designs.load("gemm_i8")
    shape = design.Shape(128, k, n)
    p = design.choose(shape, NPU2)
    found = [p.m, p.k, p.n, p.rows, p.cols, design.core_bytes(p), design.instruction_bytes(shape, p)]
    assert found == rest
