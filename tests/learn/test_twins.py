"""Plain Python twins compute the same as the fast kernels."""

import inspect

import numpy as np
import pytest

from numflow.cpu.program import Program
from numflow.formats.types import to_f32
from numflow.lab.op_bench import _network, _Weights
from numflow.lab.shapes import encoded
from numflow.learn.cases import cases
from numflow.learn.cases.build import error, run_case
from numflow.learn.twins import chunked, online, packed, tile
from numflow.ops import Batch
from numflow.quant import find
from numflow.quant.layout import unpack_reference
from numflow.reference import program as reference
from numflow.reference.state import sequences

ROWS, COLUMNS, TOKENS = 16, 96, 4


def by_kernel(kind, activations):
    """(rows as stored, activations f32 [T, K], y [T, N]): the linear op run by the CPU's kernel."""
    network, stored, _ = _network("linear", kind, ROWS, COLUMNS)
    program = Program(network, _Weights(network, stored), activations=activations, threads=1)
    ids = np.arange(TOKENS, dtype=np.int32)
    batch = Batch(tokens=ids, positions=ids, starts=np.array([0, TOKENS], np.int32), blocks=np.zeros((1, 0), np.int32),
                  logit_rows=ids)
    try:
        return stored["w"], stored["table"].view(np.float32)[:TOKENS], program.run(batch)
    finally:
        program.close()


@pytest.mark.merge
def test_the_product_from_packed_bytes():
    rows, x, y = by_kernel("q3h", "f32")
    found = np.stack([packed.product(rows, one) for one in x])
    assert error(found, y) < 1e-5
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((5, 64)) * np.float32([[1], [1e-6], [1e6], [0], [3]])).astype(np.float32)
    rows, x = encoded(values, "q3h"), rng.standard_normal(64).astype(np.float32)
    assert np.allclose(packed.product(rows, x), to_f32(rows, "q3h") @ x, rtol=1e-4, atol=1e-9)


@pytest.mark.merge
def test_the_tile_of_bytes():
    rows, x, y = by_kernel("q4", "int8")
    fields = unpack_reference(rows, find("q4"), COLUMNS)
    found = tile.tile(fields.codes, *fields.scales_and_zeros(), x)
    assert error(found, y) < 2e-4
    assert error(found, x @ to_f32(rows, "q4").T) > 1e-4  # activations are rounded to integers


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.name in ("attention", "attention-grouped")],
                         ids=str)
@pytest.mark.parametrize("spans", [1, 3])
def test_online_attention(case, spans, monkeypatch):
    def attention(q, *, batch, cache, heads, scale, **_):
        y = np.empty((len(q), heads * cache.value_dim), np.float32)
        for b, length in enumerate(cache.lengths(batch)):
            rows = slice(batch.starts[b], batch.starts[b + 1])
            k, v = cache.read(cache.table(batch)[b], length, 0)
            queries, group = q[rows].reshape(-1, heads, k.shape[2]), heads // k.shape[1]
            y[rows] = np.concatenate([online.attention(queries[:, h], k[:, h // group], v[:, h // group],
                                                       batch.positions[rows], scale, spans)
                                      for h in range(heads)], axis=1)
        return y

    fast = run_case(case, Program, threads=2)
    monkeypatch.setitem(reference.KERNELS, "attention", attention)
    for plain, found in zip(run_case(case, reference.Program), fast, strict=True):
        assert error(plain, found) < 2e-5


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.name in (
    "linear_attention-delta", "linear_attention-delta-tiled")], ids=str)
@pytest.mark.parametrize("size", [16, 5, 1])
@pytest.mark.thin(6)
def test_the_delta_rule_in_blocks(case, size, monkeypatch):
    def linear_attention(q, k, v, steps, beta, *, rate, batch, state, heads, key_heads, tiled, **_):
        owners = np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)
        q, k = (x.reshape(len(x), key_heads, -1)[:, owners] for x in (q, k))
        v = v.reshape(len(v), heads, -1)
        y = np.empty(v.shape, np.float32)
        for rows, (memory,) in sequences(batch, state):
            for h in range(heads):
                y[rows, h], memory[h] = chunked.attention(q[rows, h], k[rows, h], v[rows, h], steps[rows, h] * rate[h],
                                                          beta[rows, h], memory[h], size)
        return y.reshape(len(y), -1)

    fast = run_case(case, Program, threads=2)
    monkeypatch.setitem(reference.KERNELS, "linear_attention", linear_attention)
    for plain, found in zip(run_case(case, reference.Program), fast, strict=True):
        assert error(plain, found) < 2e-5


def test_twins_are_short_and_named_by_what_they_are_twins_of():
    import numflow.cpu.attention.linear_attention as linear_attention
    import numflow.cpu.attention.tile as attention_tile
    import numflow.cpu.linear.tile as linear_tile
    import numflow.cuda.linear.gemv as gemv

    for fast, twin in ((linear_tile, "packed"), (linear_tile, "tile"), (attention_tile, "online"), (gemv, "warp_sum"),
                       (linear_attention, "chunked")):
        assert twin in inspect.getdoc(fast), (fast, twin)
    for module in (packed, tile, online, chunked):
        lines = [line for line in inspect.getsource(module).split('"""', 2)[2].splitlines() if line.strip()]
        assert len(lines) <= 45, (module.__name__, len(lines))
