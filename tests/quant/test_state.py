"""Types of recurrent states, in NumPy."""

import numpy as np
import pytest

from numflow.engine import options
from numflow.quant.state import STATE_TYPES, row_bytes, stored
from numflow.spec.schema import SECTIONS

STEP = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8": 0.5 / 127}


def test_options_know_the_types():
    assert SECTIONS["recurrent"]["state_type"].choices == options.STATES == STATE_TYPES


@pytest.mark.parametrize("dtype", STATE_TYPES)
def test_numbers_come_back_within_half_a_step(dtype):
    rows = np.random.default_rng(0).standard_normal((3, 5, 48)).astype(np.float32)
    found = stored(rows, dtype)
    assert found.shape == rows.shape and found.dtype == np.float32
    largest = np.abs(rows).max(axis=-1, keepdims=True) if dtype == "q8" else np.abs(rows)
    assert (np.abs(found - rows) <= STEP[dtype] * 1.001 * largest).all()
    np.testing.assert_array_equal(stored(found, dtype) if dtype != "q8" else found, found)
    assert row_bytes(dtype, 48) == {"f32": 192, "f16": 96, "bf16": 96, "q8": 52}[dtype]
    assert not stored(np.zeros((2, 16), np.float32), dtype).any()


def test_halves_are_rounded_to_even():
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(stored(x, "bf16"), np.array([1, 1 + 2.0**-6, np.inf, np.nan], np.float32))
    assert np.isinf(stored(np.array([1e5], np.float32), "f16")).all()
