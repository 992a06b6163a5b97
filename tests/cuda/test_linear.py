"""`linear` for every type of weights on the simulator, against the reference on the de-quantised matrix."""

import numpy as np
import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.program import Program
from numflow.learn.cases.build import error, run_case
from numflow.quant.stored import STORED
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import QUANTISED, linear_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


@pytest.mark.parametrize("kind", ["F16", "BF16", *QUANTISED])
def test_float_activations(kind):
    case = linear_case(kind, 6, 512, 2, bias=True)
    (actual,) = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    (expected,) = run_case(case, Reference)
    assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("kind", QUANTISED)
def test_int8_activations(kind):
    """The product with x rounded to int8 per 32 columns, computed here in NumPy; float tables multiply x unrounded."""
    case = linear_case(kind, 5, 512, 3)
    if STORED[kind].kind.table:
        (actual,) = run_case(case, Program, activations="int8", gpu=Simulated(seed=2))
        assert error(actual, run_case(case, Reference)[0]) < 1e-5
    else:
        _check_int8(case, 512, 3)


@pytest.mark.parametrize("kind", ["Q4_K", "q3h"])
@pytest.mark.parametrize("k", [1024, 1312])
def test_a_row_shared_by_the_warps_of_a_block(kind, k):
    if kind == "q3h" or k % 256 == 0:
        _check_int8(linear_case(kind, 3, k, 1), k, 1)


def test_many_rows_with_a_warp_each():
    """Units that remain after the loop that loads several at a time."""
    _check_int8(linear_case("q4", 6, 5 * 32, 1), 160, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numflow.cuda.linear.gemv.SPLIT_BELOW", 1)
        _check_int8(linear_case("q4", 2, 32 * 165, 1), 32 * 165, 1)


def _check_int8(case, k, tokens):
    (actual,) = run_case(case, Program, activations="int8", gpu=Simulated(seed=2))
    table = next(a for name, a in case.weights.arrays.items() if name.startswith("table"))
    x = table[case.runs(64)[0].batch.tokens][:, :k].reshape(tokens, k // 32, 32)
    scale = np.abs(x).max(2, keepdims=True) / np.float32(127)
    rounded = (np.rint(x / scale) * scale).reshape(tokens, k)
    matrix = next(a for name, a in case.weights.arrays.items() if name.startswith("weight"))
    assert error(actual, (rounded @ matrix.T).astype(np.float32)) < 2e-5


@pytest.mark.parametrize(("kind", "tokens"), [(kind, 9) for kind in ("F16", "BF16", *QUANTISED)]
                         + [("q4", 40), ("F16", 70), ("q3h", 130)])
def test_tensor_cores(kind, tokens):
    """Weights and activations in float16 (or bfloat16), accumulation in float32."""
    case = linear_case(kind, 20, 256, tokens, bias=tokens > 9)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1))
    (expected,) = run_case(case, Reference)
    # The product of a zero point and the step is rounded to float16 too.
    assert error(actual, expected) < (1e-2 if kind == "BF16" else 8e-3 if kind.startswith("U") else 4e-3)


def test_columns_in_parts():
    """Codes: parts of 36 and of 31 units. Floats: 4 parts of 9 units, the last one of 6."""
    for case in linear_case("q4", 34, 32 * 67, 9, bias=True), linear_case("F16", 130, 32 * 33, 9, bias=True):
        (actual,) = run_case(case, Program, gpu=Simulated(seed=3))
        assert error(actual, run_case(case, Reference)[0]) < 4e-3
