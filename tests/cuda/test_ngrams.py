"""Hashed n-grams on the simulator, and kernels of Qwen4-Exp: gates of columns of streams, an index of means."""

import numpy as np
import pytest

from numflow import network
from numflow.cuda.device.device import Simulated
from numflow.cuda.program import Program
from numflow.learn.cases.build import Case, error, run_case
from numflow.learn.cases.cases import CASES
from numflow.network import WeightSource
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import embed_ids_case
from tests.specs.case import load_case, memory_checkpoint

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")

BOUND = 1e-4


def _model(name):
    case = load_case(name)
    checkpoint = memory_checkpoint(case.configs[0], case.tensors)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    return case, built, WeightSource(built, checkpoint)


@pytest.mark.parametrize("host", [False, True])
def test_rows_of_ngrams(host):
    for case in (case for case in CASES if case.name.startswith("embed_ids")):
        actual = run_case(case, Program, activations="f32", gpu=Simulated(seed=1), host_embeddings=host)
        for a, e in zip(actual, run_case(case, Reference), strict=True):
            np.testing.assert_array_equal(a, e)


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("kind", ["q4", "q3h+0.5%", "BF16"])
def test_rows_of_stored_types(kind, host):
    case = embed_ids_case(kind, 64)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1), host_embeddings=host)
    assert error(actual, run_case(case, Reference)[0]) < 1e-6


@pytest.mark.slow
def test_pieces_and_company():
    """Windows of four tokens, taps of a convolution and n-grams across the ends of pieces."""
    _, built, weights = _model("qwen4_exp")
    case = Case("qwen4_exp", built, weights, (((0, 7), (1, 3)), ((1, 6), (0, 1)), ((0, 1), (1, 1))))
    actual = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    for a, e in zip(actual, run_case(case, Reference), strict=True):
        assert error(a, e) < BOUND
