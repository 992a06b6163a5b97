"""Types of grids as one code for each weight: carriers mean what the `gguf` package expands the blocks to."""

import numpy as np
import pytest

from numflow.formats.types import TYPES, to_f32
from numflow.quant.grids import BLOCK, GRIDS, spread


def _blocks(name: str, count: int) -> np.ndarray:
    """Any codes and scales of blocks, whose float16 is finite."""
    blocks = np.random.default_rng(0).integers(0, 256, (count, TYPES[name].size), np.uint8)
    blocks[:, 55 if name == "IQ1_M" else 1] &= 0xBF
    return blocks


def _meaning(carrier: np.ndarray, name: str) -> np.ndarray:
    grid = GRIDS[name]
    d, scales, nibbles = np.split(carrier.reshape(-1, grid.carrier_bytes), [2, 2 + grid.scales], axis=1)
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
    assert alone.shape == (1024, 3 * GRIDS["IQ3_S"].carrier_bytes)
    np.testing.assert_array_equal(spread(rows, "IQ3_S", 3 * BLOCK, threads=3), alone)
