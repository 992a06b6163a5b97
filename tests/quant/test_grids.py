"""Grid types in both forms: they decode to the values of the `gguf` package."""

import numpy as np
import pytest

from numflow.formats.types import TYPES, to_f32
from numflow.quant.grids import BLOCK, GRIDS, compact, spread, table


def _blocks(name: str, count: int) -> np.ndarray:
    """Random codes and scales of blocks, with finite float16 scales."""
    blocks = np.random.default_rng(0).integers(0, 256, (count, TYPES[name].size), np.uint8)
    blocks[:, 55 if name == "IQ1_M" else 1] &= 0xBF
    return blocks


def _meaning(carrier: np.ndarray, name: str) -> np.ndarray:
    grid = GRIDS[name]
    d, scales, nibbles = np.split(carrier.reshape(-1, grid.spread_bytes), [2, 2 + grid.scales], axis=1)
    d, scales = np.ascontiguousarray(d).view("<f2").astype(np.float64), scales.view(np.int8)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(-1, BLOCK)
    assert codes.max() < len(grid.book) == 1 << grid.bits
    return np.array(grid.book)[codes] * np.repeat(scales, BLOCK // grid.scales, axis=1) * d * grid.factor


@pytest.mark.parametrize("name", GRIDS)
def test_no_weight_changes(name):
    rows = _blocks(name, 60).reshape(20, -1)
    expected = to_f32(rows, name)
    carrier = spread(rows, name, 3 * BLOCK)
    np.testing.assert_array_equal(_meaning(carrier, name).reshape(expected.shape), expected)


def test_threads_and_gaps_between_rows_change_nothing():
    wide = _blocks("IQ3_S", 4096).reshape(1024, -1)
    rows = wide[:, :-TYPES["IQ3_S"].size]
    alone = spread(np.ascontiguousarray(rows), "IQ3_S", 3 * BLOCK)
    assert alone.shape == (1024, 3 * GRIDS["IQ3_S"].spread_bytes)
    np.testing.assert_array_equal(spread(rows, "IQ3_S", 3 * BLOCK, threads=3), alone)


def _looked_up(rows: np.ndarray, name: str) -> np.ndarray:
    """The values of blocks in compact form, decoded one grid index after the other."""
    grid, found = GRIDS[name], []
    places, units = BLOCK // grid.width, 32 // grid.width
    for block in rows.reshape(-1, grid.compact_bytes):
        d = float(block[:2].view("<f2")[0])
        steps = [int(byte) >> shift & 15 for byte in block[2:2 + grid.scales // 2] for shift in (0, 4)]
        scales = [(2 * (s & 7) + 1) * (-1 if s & 8 else 1) if grid.either else 2 * s + 1 for s in steps]
        at = 2 + grid.scales // 2
        low, above, signs = block[at:at + places], block[at + places:], block[-32:]
        for i in range(places):
            high = int(above[:16].view("<u2")[i // units]) >> grid.high * (i % units) if grid.high else 0
            codes = table(name)[int(low[i]) | (high & (1 << grid.high) - 1) << 8].copy()
            if grid.sign:
                bits = np.unpackbits(signs, bitorder="little")[i * grid.width:(i + 1) * grid.width]
                codes |= bits << grid.sign
            column = i * grid.width
            found += [grid.book[code] * scales[column * grid.scales // BLOCK] * d * grid.factor for code in codes]
    return np.array(found)


@pytest.mark.parametrize("name", GRIDS)
def test_places_say_the_same(name):
    rows = _blocks(name, 6).reshape(2, -1)
    carrier = compact(rows, name, 3 * BLOCK)
    np.testing.assert_array_equal(_looked_up(carrier, name).reshape(2, -1), to_f32(rows, name))
