"""head_linear against linear with each head's matrix: the same bits, for any number of tokens and threads."""

import numpy as np
import pytest

from numflow.cpu.linear.linear import head_linear
from numflow.cpu.weights.pack import pack
from numflow.network.weights.source import RawMatrix
from numflow.ops import Step, View
from tests.cpu.matrices import Bench, activations, pack_stored, run_linear

HEADS, ROWS, BEFORE = 3, 21, 5


def _run(packed, x, mode, threads=1):
    """y [T, HEADS * ROWS] begins some columns into its buffer, and the columns around it must not change."""
    columns, width = x.shape[1], HEADS * ROWS
    bench = Bench({"x": columns, "y": BEFORE + width + 3}, {"x": "tokens", "y": "tokens"}, len(x) + 2, packed, mode,
                  threads=threads)
    bench.array("x")[:len(x), :columns] = x
    y = bench.array("y")
    y[:] = np.float32(-7)
    step = Step("head_linear", (View("x", 0, columns),), (View("y", BEFORE, width),), {"weight": "w"},
                {"heads": HEADS})
    bench.run(head_linear(step, bench), len(x))
    outside = np.ones(y.shape, bool)
    outside[:len(x), BEFORE:BEFORE + width] = False
    assert (y[outside] == -7).all()
    return y[:len(x), BEFORE:BEFORE + width].copy()


@pytest.mark.parametrize(("kind", "mode", "columns"), [
    ("Q4_K", "int8", 256), ("Q4_K", "f32", 256), ("q3h", "int8", 64), ("q3h", "int16", 64), ("F16", "bf16", 64),
    ("q4+1%", "int8", 64), pytest.param("q4+1%", "f32", 64, marks=pytest.mark.slow), ("F16", "int8", 20),
    pytest.param("BF16", "f32", 64, marks=pytest.mark.slow), ("F32", "f32", 12)])
@pytest.mark.merge
def test_as_linear_of_each_head(kind, mode, columns):
    raw, packed = pack_stored(kind, HEADS * ROWS, columns, HEADS)
    for tokens in (1, 3, 23):
        x = activations(tokens, HEADS * columns)
        y = _run(packed, x, mode)
        for head in range(HEADS):
            one = RawMatrix("w", kind, raw.rows[head * ROWS:(head + 1) * ROWS], (ROWS, columns))
            own = np.ascontiguousarray(x[:, head * columns:(head + 1) * columns])
            np.testing.assert_array_equal(y[:, head * ROWS:(head + 1) * ROWS], run_linear(pack(one), own, mode))
        np.testing.assert_array_equal(_run(packed, x, mode, threads=4), y)
