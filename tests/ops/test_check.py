"""Steps that check_step refuses."""

import numpy as np
import pytest

from numflow.errors import NetworkError
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.learn.cases.build import difference


def test_a_clamped_gate_needs_two_inputs():
    b = Builder("clamped")
    gate, up = b.inputs(8, 8)
    b.step("act_mul", (gate, up), (gate,), kind="swiglu_clamp", limit=7.0, alpha=1.702)
    b.case(gate)
    b.step("act", (gate,), (gate,), kind="swiglu_clamp")
    with pytest.raises(NetworkError, match="main.* = act.*no activation 'swiglu_clamp'; known: .*gelu, .*tanh"):
        b.case(gate)


def test_a_difference_names_its_place_both_numbers_and_its_size():
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    actual = expected.copy()
    actual[1, 2:], actual[2, 0] = 0, np.nan
    said = difference(actual, expected, 1e-3)
    assert said.startswith("at [1, 2] of [3, 4]: got 0, expected 6, off by 1.7 (allowed 0.001)")
    assert said.endswith("3 of 12 numbers are wrong, in 2 of 3 rows")
    assert difference(expected, expected, 1e-3) == "no number differs"
