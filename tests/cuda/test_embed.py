"""`embed` from tables of every type, on the simulator."""

import numpy as np
import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.program import Program
from numflow.learn.cases.build import error, run_case
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import QUANTISED, embed_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


@pytest.mark.parametrize("kind", QUANTISED)
def test_rows_of_a_table(kind):
    case = embed_case(kind, 256)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1))
    assert error(actual, run_case(case, Reference)[0]) < 1e-6


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", "q3h"])
def test_rows_of_a_part_of_a_table(kind, host):
    """Tokens whose rows are on another device get -0.0."""
    case = embed_case(kind, 256, held=48, first=30)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1), host_embeddings=host)
    (expected,) = run_case(case, Reference)
    assert error(actual, expected) < 1e-6
    elsewhere = (expected == 0).all(axis=1)
    assert 0 < elsewhere.sum() < len(elsewhere)
    assert np.signbit(actual[elsewhere]).all() and not actual[elsewhere].any()
