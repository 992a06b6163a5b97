"""The CUDA executor's kernels on the simulator, under shuffled thread orders, against the reference."""

import numpy as np
import pytest

from numflow.cuda.device import Simulated
from numflow.cuda.program import Program
from numflow.reference.program import Program as Reference
from tests.cuda.small import CASES, ONE_PER_OP
from tests.ops.build import error, run_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(case):
    actual = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    for a, e in zip(actual, run_case(case, Reference), strict=True):
        assert error(a, e) < case.bound


@pytest.mark.parametrize("case", ONE_PER_OP, ids=str)
def test_bits_do_not_depend_on_the_order_of_threads(case):
    first = run_case(case, Program, activations="f32", gpu=Simulated(seed=0))
    for seed in (2, 3):
        for a, b in zip(run_case(case, Program, activations="f32", gpu=Simulated(seed=seed)), first, strict=True):
            np.testing.assert_array_equal(a, b)
