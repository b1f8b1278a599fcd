"""The int8 GEMM: what it accepts, what it needs, and that the program as written multiplies matrices."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from onnxpack.kernels import audit, designs, recording
from onnxpack.kernels.recording import DesignError
from onnxpack.kernels.replay import replay
from onnxpack.kernels.target import NPU1, NPU2

DESIGN = designs.load("gemm_i8")
QWEN3 = [(1024, 2048), (1024, 1024), (2048, 1024), (1024, 3072), (3072, 1024), (1024, 4096), (1024, 6144)]
"""(K, N) of Qwen3-0.6B's layers: single projections, then q/k/v and gate/up joined."""


def record(shape: Any, parameters: Any, change: Any = None) -> recording.Recording:
    """The recording of a design; `change(api)` may tamper with the API that it runs on."""

    def program(api: Any) -> None:
        if change is not None:
            change(api)
        DESIGN.build(shape, parameters, "npu2", api)

    return recording.record(program)


def operands(shape: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    """Position-coded A, random B of the full int8 range, and their exact product."""
    row, col = np.indices((shape.M, shape.K))
    a = ((row * 131 + col * 17 + seed) % 251 - 125).astype(np.int8)
    b = np.random.default_rng(seed).integers(-128, 128, (shape.K, shape.N)).astype(np.int8)
    return a, b, (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)


def run(shape: Any, parameters: Any, change: Any = None, launches: int = 1, seed: int | None = None) -> None:
    """Replay and demand the exact product."""
    a, b, expected = operands(shape)
    c = replay(record(shape, parameters, change), NPU2, a.reshape(-1), b.reshape(-1), launches, seed)
    np.testing.assert_array_equal(c.reshape(shape.M, shape.N), expected)


@pytest.mark.parametrize("kn", QWEN3, ids=str)
@pytest.mark.parametrize("rows", [16, 32, 128])
def test_every_layer_of_qwen3_multiplies(rows: int, kn: tuple[int, int]) -> None:
    shape = DESIGN.Shape(rows, *kn)
    parameters = DESIGN.choose(shape, NPU2)
    run(shape, parameters)
    assert audit.audit(record(shape, parameters), NPU2) == []


legal = st.builds(
    lambda m, k, n, rows, cols, batch, depth, times: (
        DESIGN.Parameters(16 * m, 8 * k, 16 * n, rows, cols, batch, depth),
        times,
    ),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(2, 8),
    st.integers(1, 4),
    st.integers(1, 2),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)),
)


@given(legal, st.integers(0, 1000))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_any_legal_tiling_multiplies_in_any_order_of_events(case: Any, seed: int) -> None:
    p, (down, along, across) = case
    shape = DESIGN.Shape(p.m * p.rows * down, p.k * along, p.n * p.cols * across)
    assume(not DESIGN.check_design(shape, p, NPU2))
    assume(shape.M * shape.K * shape.N < 10**8)
    run(shape, p, launches=2, seed=seed)


@given(legal)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_the_planning_half_predicts_what_the_program_declares(case: Any) -> None:
    p, (down, along, across) = case
    shape = DESIGN.Shape(p.m * p.rows * down, p.k * along, p.n * p.cols * across)
    assume(not DESIGN.check_design(shape, p, NPU2))
    recorded = record(shape, p)
    assert audit.audit(recorded, NPU2) == []
    used = audit.usage(recorded)
    assert max(u.nbytes for tile, u in used.items() if tile.row > 1) == DESIGN.core_bytes(p)
    assert max(u.nbytes for tile, u in used.items() if tile.row == 1) == DESIGN.memory_tile_bytes(p)
    starts = [c for c in recorded.commands if isinstance(c, recording.Start)]
    counts = {name: sum(c.argument == i for c in starts) for i, name in enumerate(DESIGN.ARGUMENTS)}
    assert counts == DESIGN.descriptors(shape, p)


BASE = DESIGN.Parameters(32, 64, 128, 4, 8)


@pytest.mark.parametrize(
    ("shape", "change", "limit"),
    [
        ((128, 1024, 2048), {}, None),
        ((128, 1024, 2048), {"cols": 1, "rows": 1}, "columns"),
        ((128, 1024, 2304), {"cols": 9}, "columns"),
        ((128, 1024, 2048), {"rows": 4, "cols": 2}, "rows"),
        ((128, 1024, 2048), {"batch": 4}, None),
        ((128, 1024, 2048), {"batch": 5}, "task-queue"),
        ((128, 1024, 2048), {"m": 8}, "micro-tile"),
        ((128, 1024, 2048), {"k": 128, "c_depth": 1, "stack": 4084}, None),
        ((128, 1024, 2048), {"k": 128, "c_depth": 1, "stack": 8180}, None),
        ((128, 1024, 2048), {"k": 128, "c_depth": 1, "stack": 8181}, "core-memory"),
        ((128, 1024, 2048), {"k": 128, "c_depth": 2}, "core-memory"),
        ((120, 1024, 2048), {}, "divisible"),
        ((128, 1000, 2048), {}, "divisible"),
        ((128, 1024, 1000), {}, "divisible"),
        ((0, 1024, 2048), {}, "positive"),
        ((128, 131_072, 1024), {}, "accumulator"),
        ((32, 64, 1 << 21), {"m": 16, "rows": 2, "n": 256}, "step"),
        ((1 << 23, 1024, 1024), {}, "buffer"),
        ((16, 64, 131_072), {"m": 16, "k": 32, "n": 256, "rows": 1}, None),
        ((4096, 64, 131_072), {"n": 128}, "instructions"),
    ],
)
def test_limits_at_their_edges(shape: tuple[int, int, int], change: dict[str, int], limit: str | None) -> None:
    broken = DESIGN.check_design(DESIGN.Shape(*shape), replace(BASE, **change), NPU2)
    assert limit in {v.limit for v in broken} if limit else broken == []
    for violation in broken:
        assert str(violation.found) in str(violation)
        assert str(violation.allowed) in str(violation)


def test_odd_multiples_of_a_tile_get_narrower_tiles_and_the_output_layer_of_a_language_model_is_refused() -> None:
    narrow = DESIGN.choose(DESIGN.Shape(128, 2432, 2432), NPU2)
    assert 2432 % (narrow.n * narrow.cols) == 0
    assert DESIGN.choose(DESIGN.Shape(128, 1000, 1000), NPU2) is None
    assert "multiple of 32" in DESIGN.refusal(DESIGN.Shape(128, 1000, 1000), NPU2)
    assert DESIGN.choose(DESIGN.Shape(128, 1024, 151_936), NPU2) is None
    assert "control code" in DESIGN.refusal(DESIGN.Shape(128, 1024, 151_936), NPU2)


def test_the_choice_does_not_depend_on_anything_but_the_shape() -> None:
    shape = DESIGN.Shape(128, 1024, 2048)
    assert DESIGN.choose(shape, NPU2) == DESIGN.choose(shape, NPU2) == replace(BASE, batch=1)


def test_the_targets_are_described() -> None:
    assert NPU2.shim.step_words * 4 == DESIGN.B_STEP_ELEMENTS
    assert NPU1.refusal is not None
    assert not NPU1.full_elf


# --- a replay that cannot fail proves nothing -------------------------------------------------------------------------

SMALL = DESIGN.Shape(64, 64, 256)
TILES = DESIGN.Parameters(16, 16, 32, 2, 4, 2)


def wrap(name: str, around: Any) -> Any:
    """A change of one name of the API: `around(real, *args, **kwargs)`."""

    def change(api: SimpleNamespace) -> None:
        real = getattr(api, name)
        setattr(api, name, lambda *args, **kwargs: around(real, *args, **kwargs))

    return change


def tap(**changes: Any) -> Any:
    """Change a transfer's numbers, for one fifo."""

    def around(real: Any, fifo: Any, host: Any, **kwargs: Any) -> Any:
        if fifo.fifo.name == "B1_in":
            kwargs |= {key: make(kwargs[key]) for key, make in changes.items()}
        return real(fifo, host, **kwargs)

    return wrap("shim_dma_single_bd_task", around)


def fifo(match: str, **changes: Any) -> Any:
    """Change a fifo's declaration."""

    def around(real: Any, name: str, producer: Any, consumers: Any, depth: Any, kind: Any, **kwargs: Any) -> Any:
        if name.startswith(match):
            kwargs |= {key: make(kwargs[key]) for key, make in changes.items() if key in kwargs}
        return real(name, producer, consumers, depth, kind, **kwargs)

    return wrap("object_fifo", around)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tap(offset=lambda x: x + 1 << 20), "reaches element"),
        (tap(offset=lambda x: 0), "times|differ"),
        (tap(sizes=lambda x: [1, 1, x[1], *x[2:]][:4]), "does not fill|wait|times|differ"),
        (tap(strides=lambda x: [0, x[1], x[2] // 2, 1]), "times"),
        (fifo("B1", dimensionsToStream=lambda x: [x[1], x[0], *x[2:]]), "differ"),
        (fifo("C1_out", dimensionsToStream=lambda x: x[:1] * 4), "does not read|do not read"),
        (wrap("dma_await_task", lambda real, *tasks: None), "freed while"),
        (wrap("npu_load_pdi", lambda real, **kw: None), "configuration"),
        (wrap("npu_load_pdi", lambda real, **kw: real(device_ref="other")), "configuration"),
        (wrap("range_", lambda real, stop: real(stop if stop > 99 else stop - 1)), "differ|standstill|holds|times"),
        (wrap("range_", lambda real, stop: real(stop if stop > 99 else stop + 1)), "standstill|freed"),
    ],
)
def test_a_broken_program_is_caught(change: Any, message: str) -> None:
    with pytest.raises((DesignError, AssertionError), match=message):
        run(SMALL, TILES, change)


def test_a_kernel_that_does_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxpack.kernels.replay.run_function", lambda call, buffers: None)
    with pytest.raises(AssertionError):
        run(SMALL, TILES)


def test_more_transfers_than_a_queue_holds_are_caught() -> None:
    with pytest.raises(DesignError, match="transfers wait"):
        run(replace(SMALL, M=32 * 5), replace(TILES, batch=5))


def test_all_ones_count_every_element_of_k() -> None:
    a, b = np.ones(SMALL.M * SMALL.K, np.int8), np.ones(SMALL.K * SMALL.N, np.int8)
    assert set(replay(record(SMALL, TILES), NPU2, a, b)) == {SMALL.K}


# --- the program's own rules ------------------------------------------------------------------------------------------


def test_the_recorder_refuses_what_the_lowering_would() -> None:
    late = wrap("object_fifo", lambda real, *a, **k: real(*a, **k))

    def late_tile(api: SimpleNamespace) -> None:
        late(api)
        made = api.object_fifo

        def object_fifo(*args: Any, **kwargs: Any) -> Any:
            handle = made(*args, **kwargs)
            api.tile(7, 5)
            return handle

        api.object_fifo = object_fifo

    with pytest.raises(DesignError, match="below a fifo"):
        record(SMALL, TILES, late_tile)
    with pytest.raises(DesignError, match="deal elements out"):
        record(SMALL, TILES, wrap("object_fifo_link", lambda real, a, b, *rest: real(a, [b, b])))
    with pytest.raises(DesignError, match="issue a token"):
        record(
            SMALL,
            TILES,
            wrap("shim_dma_single_bd_task", lambda real, *a, **k: real(*a, **(k | {"issue_token": False}))),
        )


def test_the_planning_half_imports_only_the_standard_library() -> None:
    tree = ast.parse(designs.program("gemm_i8").read_text())
    top = {
        n.names[0].name if isinstance(n, ast.Import) else n.module for n in tree.body if "Import" in type(n).__name__
    }
    assert top <= {"__future__", "json", "sys", "collections.abc", "dataclasses", "types", "typing"}


def test_no_link_goes_to_several_fifos() -> None:
    for link in record(SMALL, TILES).links:
        assert len(link.targets) == 1
