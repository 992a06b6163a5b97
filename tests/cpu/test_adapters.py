"""Low-rank adapters on the CPU: tiles of rows, float16 if allowed, and the same bits in any tile."""

import numpy as np
import pytest

from numflow.cpu.adapters.adapt import DOWN, ROUTED_DOWN, ROUTED_UP, UP
from numflow.cpu.adapters.tables import FIELDS, TILE_WORDS, _packed, row_tiles
from numflow.cpu.memory.arena import Arena
from numflow.cpu.memory.buffers import aligned, padded
from numflow.cpu.runtime.kernel import Call, Code
from numflow.network.adapters.parts import AdaptedPart

CODE = Code("numflow.cpu.adapters.adapt_kernels")


def part(rng, columns, width, rank, halves, vectors):
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((rank, columns), (width, rank)))
    if halves:  # bfloat16, whose smallest values float16 cannot represent
        a, b = ((values.view(np.uint32) & 0xFFFF0000).view(np.float32) for values in (a, b))
        a[0, 0], b[0, 0] = 2.0**-20, 2.0**-22
    bias, scale = (rng.standard_normal(width, np.float32) if vectors else None for _ in range(2))
    return AdaptedPart(a, b, bias, scale)


def run(parts, adapters, x, y, exact=True):
    """y with the products of the rows' adapters added."""
    packed = [_packed(one, False, exact, Arena(1 << 20)) for one in parts]
    table = np.zeros((len(parts), 1, FIELDS), np.int64)
    table[:, 0] = [one.entry() for one in packed]
    ranks = max(one.rank for one in packed)
    rows = row_tiles(np.array(adapters, np.int32))
    tiles, h = np.array([len(rows), rows.ctypes.data]), aligned((len(x), ranks), np.float32)
    own = [aligned((len(values), padded(values.shape[1])), np.float32) for values in (x, y)]
    for memory, values in zip(own, (x, y), strict=True):
        memory[:] = np.nan  # memory behind must not be read
        memory[:, :values.shape[1]] = values
    shared = {"tiles": tiles, "table": table, "h": h, "ranks": ranks}
    calls = (Call.named(None, CODE.kernel("adapter_down"), DOWN, **shared, x=own[0], x_stride=own[0].shape[1],
                        columns=x.shape[1]),
             Call.named(None, CODE.kernel("adapter_up"), UP, **shared, y=own[1], y_stride=own[1].shape[1],
                        width=y.shape[1]))
    for call in calls:
        for thread in range(3):
            call(thread, 3)
    return own[1][:, :y.shape[1]].copy(), packed


def expected(parts, adapters, x, y):
    y = y.astype(np.float64)
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            own = parts[adapter]
            y[row] *= 1 if own.scale is None else own.scale
            y[row] += own.b.astype(np.float64) @ (own.a @ x[row]) + (0 if own.bias is None else own.bias)
    return y


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("columns, width, rank", [(64, 128, 16), (75, 37, 3), (16, 16, 8), (5, 200, 1)])
@pytest.mark.merge
def test_rows_add_what_their_adapters_have_in_any_company(columns, width, rank, halves):
    rng = np.random.default_rng(columns)
    parts = [part(rng, columns, width, rank, halves, vectors=adapter == 1) for adapter in range(3)]
    adapters = [0, 2, -1, 0, 1, 0, 1, 2, 0, 0, -1, 2, 0, 1, 0, 0]
    x, y = (rng.standard_normal((len(adapters), size), np.float32) for size in (columns, width))
    found, packed = run(parts, adapters, x, y)
    assert all((one.a.dtype == np.float16) == halves for one in packed)
    wanted = expected(parts, adapters, x, y)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    for row, adapter in enumerate(adapters):
        alone, _ = run(parts, [adapter], x[row:row + 1], y[row:row + 1])
        assert np.array_equal(found[row], alone[0]), row


def run_routed(parts, adapters, ids, x, y, first, threads=3):
    """y [T S, N] with the products of the experts ids [T, S] of the tokens' adapters; x has a row per token or route.

    parts: by adapter, the parts of its experts from id `first` on, None for no change.
    """
    routes, held = ids.shape[1], len(parts[0])
    table, packed = np.zeros((len(parts), held, FIELDS), np.int64), []
    for adapter, own in enumerate(parts):
        for expert, one in enumerate(own):
            if one is not None:
                packed.append(_packed(one, False, True, Arena(1 << 20)))
                table[adapter, expert] = packed[-1].entry()
    ranks = max(one.rank for one in packed)
    h, own = aligned((len(y), ranks), np.float32), [aligned((len(values), padded(values.shape[1])), np.float32)
                                                    for values in (x, y)]
    for memory, values in zip(own, (x, y), strict=True):
        memory[:] = np.nan
        memory[:, :values.shape[1]] = values
    adapters, ids = np.array(adapters, np.int32), np.ascontiguousarray(ids, np.int32)
    header = np.array([len(y), adapters.ctypes.data], np.int64)
    words = table.shape[0] * held + (1 + TILE_WORDS) * len(y)
    groups = np.full(threads * words, 7, np.int32)
    shared = {"header": header, "rows": 0, "adapters": 1, "table": table, "experts": held, "first": first, "ids": ids,
              "ids_stride": routes, "routes": routes, "entries": table.shape[0] * held, "max_rows": len(y),
              "groups": groups, "group_words": words, "h": h, "ranks": ranks}
    calls = (Call.named(None, CODE.kernel("routed_down"), ROUTED_DOWN, **shared, x=own[0], x_stride=own[0].shape[1],
                        shared=len(y) // len(x), columns=x.shape[1]),
             Call.named(None, CODE.kernel("routed_up"), ROUTED_UP, **shared, y=own[1], y_stride=own[1].shape[1],
                        width=y.shape[1]))
    for call in calls:
        for thread in range(threads):
            call(thread, threads)
    tiles = groups[words - TILE_WORDS * len(y):words].reshape(-1, TILE_WORDS)
    return own[1][:, :y.shape[1]].copy(), tiles


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens, routes, halves", [(1, 2, True), (23, 3, True), (40, 4, False)])
@pytest.mark.merge
def test_routed_rows_of_an_adapter_and_expert_meet_its_matrices_together(tokens, routes, halves, shared):
    rng = np.random.default_rng(tokens)
    columns, width, experts, first = 37, 53, 5, 1
    parts = [[None if (adapter, expert) == (1, 2) else part(rng, columns, width, 4 + 3 * adapter, halves, expert == 1)
              for expert in range(experts - 2)] for adapter in range(3)]  # the first and the last are on other devices
    adapters = rng.integers(-1, 3, tokens)
    ids = np.array([rng.permutation(experts)[:routes] for _ in range(tokens)])
    x = rng.standard_normal((tokens if shared else tokens * routes, columns), np.float32)
    y = rng.standard_normal((tokens * routes, width), np.float32)
    (found, tiles), wanted = run_routed(parts, adapters, ids, x, y, first), y.astype(np.float64)
    if tokens == 40:
        assert (tiles[0, 1:] >= 0).all()  # four rows of one expert
    rows_of_x = np.repeat(x, routes, axis=0) if shared else x
    for row in range(len(y)):
        expert, adapter = ids.flat[row] - first, adapters[row // routes]
        if adapter >= 0 and 0 <= expert < experts - 2 and parts[adapter][expert] is not None:
            wanted[row] = expected([parts[adapter][expert]], [0], rows_of_x[row:row + 1], y[row:row + 1])[0]
        else:
            assert np.array_equal(found[row], y[row])
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert np.array_equal(found, run_routed(parts, adapters, ids, x, y, first, threads=1)[0])
    for token in range(tokens):
        rows = slice(token * routes, (token + 1) * routes)
        alone, _ = run_routed(parts, adapters[token:token + 1], ids[token:token + 1],
                           x[token:token + 1] if shared else x[rows], y[rows], first)
        assert np.array_equal(found[rows], alone), token


def test_rounded_to_float16_they_are_close_and_half_as_large():
    rng = np.random.default_rng(1)
    own = part(rng, 96, 64, 8, halves=False, vectors=False)
    x, y = rng.standard_normal((5, 96), np.float32), np.zeros((5, 64), np.float32)
    (found, packed), (exact, whole) = (run([own], [0] * 5, x, y, exact) for exact in (False, True))
    assert packed[0].nbytes * 2 == whole[0].nbytes
    assert 0 < np.abs(found - exact).max() < 1e-3 * np.abs(exact).max()
    for factor in (2.0**60, np.inf):  # too large for a power of two in range: kept as float32
        far = AdaptedPart(own.a * np.float32(factor), own.b)
        assert _packed(far, False, False, Arena(1 << 20)).a.dtype == np.float32


def test_tiles_hold_each_row_once_with_its_adapter():
    rng = np.random.default_rng(2)
    for rows in (1, 7, 32, 200):
        adapters = rng.integers(-1, 5, rows).astype(np.int32)
        tiles = row_tiles(adapters)
        held = [(tile[0], row) for tile in tiles for row in tile[1:] if row >= 0]
        assert sorted(row for _, row in held) == np.flatnonzero(adapters >= 0).tolist()
        assert all(adapters[row] == adapter for adapter, row in held)
        assert all((tile[1:][:-1] >= 0).tolist() == sorted((tile[1:][:-1] >= 0).tolist(), reverse=True)
                   for tile in tiles)
    assert row_tiles(np.full(4, -1, np.int32)).shape == (0, 5)
