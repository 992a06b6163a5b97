"""Steps that check_step refuses."""

import pytest

from numflow.errors import NetworkError
from tests.ops.build import Builder


def test_a_clamped_gate_needs_two_inputs():
    b = Builder("clamped")
    gate, up = b.inputs(8, 8)
    b.step("act_mul", (gate, up), (gate,), kind="swiglu_clamp", limit=7.0, alpha=1.702)
    b.case(gate)
    b.step("act", (gate,), (gate,), kind="swiglu_clamp")
    with pytest.raises(NetworkError, match="main.* = act.*no activation 'swiglu_clamp'; known: gelu, .*tanh"):
        b.case(gate)
