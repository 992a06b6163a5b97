"""`embed` from tables of every type on the simulator."""

import pytest

from numflow.cuda.device import Simulated
from numflow.cuda.program import Program
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import QUANTISED, embed_case
from tests.ops.build import error, run_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


@pytest.mark.parametrize("kind", QUANTISED)
def test_rows_of_a_table(kind):
    case = embed_case(kind, 256)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1))
    assert error(actual, run_case(case, Reference)[0]) < 1e-6
