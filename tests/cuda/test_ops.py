"""The CUDA executor's kernels on the simulator, in random thread orders, against the reference."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.program import Program
from numflow.learn.cases.build import difference, error, run_case
from numflow.learn.cases.cases import CASES as ALL
from numflow.reference.program import Program as Reference
from tests.cuda.small import CASES, ONE_PER_OP

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(case):
    actual = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    for a, e in zip(actual, run_case(case, Reference), strict=True):
        assert error(a, e) < case.bound, difference(a, e, case.bound)


@pytest.mark.parametrize("case", ONE_PER_OP, ids=str)
def test_bits_do_not_depend_on_the_order_of_threads(case):
    first = run_case(case, Program, activations="f32", gpu=Simulated(seed=0))
    for seed in (2, 3):
        for a, b in zip(run_case(case, Program, activations="f32", gpu=Simulated(seed=seed)), first, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["attention-grouped", "attention-sinks-window", "attention-softcap"])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_keys_shared_by_several_warps(name, kv_type, monkeypatch):
    """Parts of 16 keys, some of them empty; float16 has 11 significant bits."""
    monkeypatch.setattr("numflow.cuda.attention.attention.PART_KEYS", 16)
    case = next(case for case in ALL if case.name == name)
    case = replace(case, schedule=(((0, 35), (1, 1)), ((0, 1), (1, 1))))
    actual = run_case(case, Program, activations="f32", kv_type=kv_type, gpu=Simulated(seed=1))
    for a, e in zip(actual, run_case(case, Reference), strict=True):
        assert error(a, e) < (case.bound if kv_type == "f32" else 5e-3)
