"""expert_linear against linear with each expert's matrix: the same bits, whatever the other routes are."""

import numpy as np
import pytest

from numflow.cpu.linear.linear import expert_linear
from numflow.cpu.weights.pack import pack
from numflow.network.weights.source import RawMatrix
from numflow.ops import Step, View
from tests.cpu.matrices import Bench, activations, pack_stored, run_linear

EXPERTS, ROWS = 6, 21


def _run(packed, x, ids, mode, bias, threads=1, shared=True):
    tokens, chosen = ids.shape
    bench = Bench({"x": x.shape[1], "ids": chosen, "y": ROWS},
                  {"x": "tokens" if shared else "routes", "ids": "tokens", "y": "routes"}, tokens + 1, packed, mode,
                  {"b": bias}, threads, chosen)
    bench.array("x")[:len(x), :x.shape[1]] = x
    bench.array("ids")[:tokens, :chosen] = ids
    step = Step("expert_linear", (View("x", 0, x.shape[1]), View("ids", 0, chosen)), (View("y", 0, ROWS),),
                {"weight": "w", "bias": "b"})
    bench.run(expert_linear(step, bench), tokens, tokens * chosen)
    return bench.array("y")[:tokens * chosen, :ROWS].copy()


def _expected(raw, x, ids, mode, bias, shared):
    y = np.empty((ids.size, ROWS), np.float32)
    for route, expert in enumerate(ids.ravel()):
        one = RawMatrix("w", raw.type, raw.rows[expert * ROWS:(expert + 1) * ROWS], (ROWS, raw.shape[1]))
        row = x[route // ids.shape[1] if shared else route][None]
        y[route] = run_linear(pack(one), row, mode, bias[expert * ROWS:(expert + 1) * ROWS])[0]
    return y


@pytest.mark.parametrize(("kind", "mode"), [("Q4_K", "int8"), ("Q4_K", "f32"), ("F16", "f32"), ("q3h", "int8"),
                                            ("q3h", "int16"), ("F16", "bf16"),
                                            *(pytest.param(kind, "int8", marks=pytest.mark.slow)
                                              for kind in ("IQ2_XXS", "Q1_0"))])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.merge
def test_as_linear_of_each_expert(kind, mode, shared):
    raw, packed = pack_stored(kind, EXPERTS * ROWS, 256, EXPERTS)
    rng = np.random.default_rng(3)
    ids = np.array([rng.permutation(EXPERTS - 1)[:3] for _ in range(23)], np.int32)  # the last expert has no route
    ids[ids == 1] = 0  # and one has many
    bias = rng.standard_normal(EXPERTS * ROWS).astype(np.float32)
    x = activations(23 if shared else 69, 256)
    y = _run(packed, x, ids, mode, bias, shared=shared)
    np.testing.assert_array_equal(y, _expected(raw, x, ids, mode, bias, shared))
    np.testing.assert_array_equal(_run(packed, x, ids, mode, bias, threads=3, shared=shared), y)


def test_one_token():
    raw, packed = pack_stored("q4", EXPERTS * ROWS, 256, EXPERTS)
    ids, bias, x = np.array([[5, 2]], np.int32), np.zeros(EXPERTS * ROWS, np.float32), activations(1, 256)
    np.testing.assert_array_equal(_run(packed, x, ids, "int8", bias, threads=2),
                                  _expected(raw, x, ids, "int8", bias, True))
