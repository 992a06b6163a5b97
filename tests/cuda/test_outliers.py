"""Matrices with outliers kept apart: a GPU has them as float32, whole ones and columns cut out."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device import Simulated
from numflow.cuda.estimate import weight_bytes
from numflow.cuda.program import Program
from numflow.formats.types import tensor_type
from numflow.network.columns import stored_columns
from numflow.network.weights import RawMatrix
from numflow.ops import Part, Weight
from numflow.quant import encode, find
from numflow.quant.apart import take_apart
from tests.ops.build import Builder, FakeWeights, error, run_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
KIND, N, K = "q3h+2%", 5, 256


class Apart(FakeWeights):
    """FakeWeights whose matrix is stored with outliers; `columns` of it."""

    def __init__(self, other, raw, columns):
        super().__init__(other.arrays, other.weights)
        self._raw, self._columns = raw, columns

    def raw(self, name):
        if not name.startswith("weight"):
            return super().raw(name)
        begin, end = self._columns
        if (begin, end) == (0, K):
            return RawMatrix(name, KIND, self._raw, (N, K))
        base, outliers = take_apart(self._raw, find(KIND), K)
        rows = stored_columns(base, tensor_type("q3h"), K, begin, end)
        return RawMatrix(name, "q3h", rows, (N, end - begin), outliers=outliers.between(begin, end))


@pytest.mark.parametrize("columns", [(0, K), (64, 128)])
def test_a_linear(columns):
    raw = encode(np.random.default_rng(0).standard_t(2, (N, K)).astype(np.float32), find(KIND), threads=1)
    matrix = RawMatrix("w", KIND, raw, (N, K)).f32()[:, slice(*columns)].copy()
    b = Builder("outliers")
    x, _ = b.inputs(matrix.shape[1], 4)
    y = b.buffer(N)
    b.step("linear", (x,), (y,), {"weight": b.weight("weight", matrix)})
    case = b.case(y, (((0, 2),),))
    table = next(a for name, a in case.weights.arrays.items() if name.startswith("table"))
    tokens = case.runs(64)[0].batch.tokens
    case = replace(case, weights=Apart(case.weights, raw, columns))
    for activations in ("f32", "int8"):  # plain numbers meet float32 in both
        (actual,) = run_case(case, Program, activations=activations, gpu=Simulated(seed=1))
        assert error(actual, table[tokens][:, :matrix.shape[1]] @ matrix.T) < 1e-5


def test_planned_bytes_are_those_of_float32():
    assert weight_bytes(Weight("w", (N, K), (Part("t"),), types=(KIND,))) == 4 * N * K
