"""The CPU executor on the op cases: against the reference, and bit for bit against itself."""

import numpy as np
import pytest

from numflow.cpu.bind import BINDERS
from numflow.cpu.program import Program
from numflow.learn.cases.build import difference, error, run_case
from numflow.learn.cases.cases import CASES
from numflow.ops import OPS
from numflow.reference.program import Program as Reference


def _ids(case):
    return str(case)


@pytest.mark.parametrize("case", CASES, ids=_ids)
@pytest.mark.thin(16)
def test_against_the_reference(case):
    expected = run_case(case, Reference)
    actual = run_case(case, Program, activations="f32", threads=2)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert error(a, e) < case.bound, difference(a, e, case.bound)


@pytest.mark.parametrize("case", CASES, ids=_ids)
@pytest.mark.thin(16)
def test_bits_do_not_depend_on_the_threads(case):
    one = run_case(case, Program, activations="f32", threads=1)
    for threads in (2, 3):
        for a, b in zip(run_case(case, Program, activations="f32", threads=threads), one, strict=True):
            np.testing.assert_array_equal(a, b)


def test_every_op_has_a_binder():
    assert set(BINDERS) == set(OPS)
