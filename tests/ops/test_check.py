"""Steps that check_step refuses, and the rows of the op table."""

import numpy as np
import pytest

from numflow.errors import NetworkError
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.learn.cases.build import difference
from numflow.op_rows import EXCHANGES, LOCAL
from numflow.ops import OPS


def test_every_op_has_a_known_locality():
    assert {op.local for op in (*OPS.values(), *EXCHANGES.values())} == set(LOCAL)


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


@pytest.mark.parametrize(("params", "width", "message"), [
    ({"sizes": (5, 7, 9)}, 4, "width of the output should be 3, is 4"), ({}, 3, "should be 4, is 3"),
    ({"multipliers": (1, 2)}, 4, "shape of 'state.0' should be .1,., is .2,."),
    ({"sizes": (5, 7, 0, 9)}, 4, "4 parts with rows should be shared by n-grams of 2 .. 3 tokens")])
def test_rows_of_ngrams(params, width, message):
    b = Builder("ngrams")
    ids, state = b.buffer(width, dtype="i32"), b.state(2)
    b.step("ngram_ids", (), (ids,), **{"state": state, "multipliers": (1, 2, 3), "sizes": (5, 7, 9, 11),
                                       "separator": 0} | params)
    with pytest.raises(NetworkError, match=message):
        b.case(ids)


def test_rows_of_given_numbers():
    b = Builder("rows")
    ids, y, table = b.buffer(2, dtype="i32"), b.buffer(30), b.weight("table", b.normal(9, 16))
    b.step("ngram_ids", (), (ids,), state=b.state(1), multipliers=(1, 2), sizes=(4, 5), separator=0)
    b.step("embed_ids", (ids,), (y,), {"table": table})
    with pytest.raises(NetworkError, match="width of the output should be 32, is 30"):
        b.case(y)
