"""Products of codes (mma.sync) on the simulator against the reference. From their PTX they run in on_ptx."""

from dataclasses import replace

import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.lang.kernel import HOPPER, REGISTRY
from numflow.cuda.linear.code_gemm import code_gemm
from numflow.cuda.program import Program
from numflow.errors import DeviceError
from numflow.learn.cases.build import error, run_case
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import experts_case, linear_case, of_float8

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")


@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    ("E4M3_ROW", 20, 96, 70), pytest.param("E4M3_128", 130, 256, 130, marks=pytest.mark.slow),
    pytest.param("E5M2_128", 40, 640, 66, marks=pytest.mark.slow)])
def test_products_of_8_bit_floats(kind, n, k, tokens):
    """Columns of half a tile more, scales of tiles and of rows; a few tokens are as with other activations."""
    case = of_float8(linear_case(kind, n, k, tokens, bias=True), k)
    case = replace(case, schedule=(((0, tokens),), ((0, 3),)))
    device = Simulated(seed=1, float8=True)
    found = zip(run_case(case, Program, gpu=device, activations="fp8"), run_case(case, Reference), (2e-5, 1e-5))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


@pytest.mark.slow
def test_products_of_experts_of_8_bit_floats():
    case = of_float8(replace(experts_case("E4M3_128", 40, 128, experts=2, chosen=1, bias=True),
                             schedule=(((0, 150),), ((0, 9),))), 128)
    found = zip(run_case(case, Program, gpu=Simulated(seed=2, float8=True), activations="fp8"),
                run_case(case, Reference), (2e-5, 6e-3))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


def test_8_bit_floats_need_a_card_that_has_them():
    case = linear_case("E4M3_ROW", 20, 96, 70)
    with pytest.raises(DeviceError, match="activations fp8 needs a GPU of compute capability 8.9, 9.0 or 12.x"):
        Program(case.network, case.weights, gpu=Simulated(), activations="fp8")


def test_cards_that_have_them():
    kernel, operand = code_gemm("e4m3_row"), REGISTRY["operand_e4m3"]
    cards = (8, 0), (8, 6), (8, 9), HOPPER, (10, 0), (12, 0), (12, 1)
    assert [kernel.architecture(card) for card in cards if kernel.runs_on(card)] == ["sm_89", "sm_120", "sm_121"]
    assert [kernel.architecture(card) for card in cards if operand.runs_on(card)] == [
        "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"]
