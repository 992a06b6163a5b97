"""Outliers beside a packed matrix: against the dequantised matrix; a row's bits depend on that row alone."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cpu.estimate import weight_bytes
from numflow.cpu.linear.embed import embed, embed_ids
from numflow.cpu.weights.layout import tiles_of
from numflow.cpu.weights.pack import pack
from numflow.formats.types import to_f32
from numflow.ops import Part, Step, View, Weight
from numflow.quant import decode, encode, find
from numflow.quant.apart import Outliers, joined, take_apart
from tests.cpu.matrices import Bench, activations, quantized, quantized_twice, run_linear, stored
from tests.cpu.test_expert_linear import EXPERTS, ROWS, _expected, _run

COLUMNS = 192


def matrix(kind, rows=45, columns=COLUMNS, groups=1, seed=0):
    """(stored, packed, dequantised float64) matrices of weights with heavy tails."""
    raw = stored(kind, rows, columns, groups, seed)
    return raw, pack(raw), to_f32(raw.rows, kind).astype(np.float64)


def base_of(raw):
    """The stored matrix without outliers, and the outliers."""
    base, outliers = take_apart(raw.rows, find(raw.type), raw.shape[1])
    return replace(raw, type=find(raw.type).base.name, rows=base), outliers


@pytest.mark.parametrize(("kind", "mode"), [("q3h+2%", "int8"), ("q3h+2%", "f32"), ("q2+5%", "int8"),
                                            ("q8_b32t2+0.5%", "int8"), ("q3h+2%", "int16")])
@pytest.mark.thin(8)
def test_against_double_precision(kind, mode):
    raw, packed, weight = matrix(kind)
    x, bias = activations(33, COLUMNS), np.linspace(-3, 3, 45, dtype=np.float32)
    y = run_linear(packed, x, mode, bias, before=5)
    base, _ = base_of(raw)
    dense = decode(np.ascontiguousarray(base.rows), find(base.type), COLUMNS).astype(np.float64)
    coded = {"int8": quantized, "int16": quantized_twice, "f32": np.asarray}[mode](x)
    exact = coded @ dense.T + x @ (weight - dense).T + bias
    bound = 1e-6 * (np.abs(x) @ (np.abs(dense) + np.abs(weight - dense)).T + np.abs(bias))
    assert (np.abs(y - exact) <= bound).all()
    assert np.abs(run_linear(pack(base), x, mode, bias) - exact).max() > 0.01 * np.abs(exact).max()


@pytest.mark.parametrize("mode", ["int8", "f32"])
def test_rows_do_not_depend_on_their_neighbours(mode):
    _, packed, _ = matrix("q3h+2%")
    x = activations(33, COLUMNS)
    together = run_linear(packed, x, mode)
    for begin, end, threads in ((0, 1, 1), (4, 6, 3), (7, 10, 2), (3, 10, 1), (24, 33, 5), (0, 33, 4)):
        np.testing.assert_array_equal(run_linear(packed, x[begin:end], mode, threads=threads), together[begin:end])


def test_many_tokens_pass_in_blocks():
    _, packed, weight = matrix("q3h+0.5%", 20, 8192)
    x = activations(40, 8192)
    y = run_linear(packed, x, "f32")
    bound = 2e-6 * (np.abs(x) @ np.abs(weight).T).max()
    np.testing.assert_allclose(y, x.astype(np.float64) @ weight.T, rtol=0, atol=bound)
    np.testing.assert_array_equal(run_linear(packed, x[37:39], "f32"), y[37:39])


@pytest.mark.parametrize(("mode", "shared"), [("int8", True), ("f32", False)])
@pytest.mark.merge
def test_experts(mode, shared):
    raw, packed, _ = matrix("q3h+2%", EXPERTS * ROWS, groups=EXPERTS)
    rng = np.random.default_rng(3)
    ids = np.array([rng.permutation(EXPERTS - 1)[:3] for _ in range(23)], np.int32)
    ids[ids == 1] = 0
    bias, x = rng.standard_normal(EXPERTS * ROWS).astype(np.float32), activations(23 if shared else 69, COLUMNS)
    y = _run(packed, x, ids, mode, bias, shared=shared)
    np.testing.assert_array_equal(y, _expected(raw, x, ids, mode, bias, shared))
    np.testing.assert_array_equal(_run(packed, x, ids, mode, bias, threads=3, shared=shared), y)


@pytest.mark.parametrize(("first", "scale"), [(0, 1.0), (20, 0.5)])
def test_rows_of_a_table(first, scale):
    _, packed, weight = matrix("q6+2%")
    ids = np.array([44, 3, 20, 0, 64, 19, 3], np.int32)
    bench = Bench({"y": COLUMNS}, {"y": "tokens"}, len(ids), packed, "int8")
    step = Step("embed", (), (View("y", 0, COLUMNS),), {"table": "w"}, {"scale": scale, "first": first})
    bench.run(embed(step, bench), len(ids), ids=ids)
    inside = (ids >= first) & (ids < first + 45)
    wanted = np.where(inside[:, None], scale * weight[(ids - first) % 45], 0)
    np.testing.assert_allclose(bench.array("y")[:, :COLUMNS], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["q6+2%", "q4", "BF16"])
def test_several_rows_of_a_table_side_by_side(kind):
    """Rows that the table does not have are -0.0."""
    _, packed, weight = matrix(kind)
    ids = np.array([[44, 3, 20], [0, 64, 19], [20, 63, 62], [30, 3, 3]], np.int32)
    bench = Bench({"y": 3 * COLUMNS, "rows": 3}, {"y": "tokens", "rows": "tokens"}, len(ids), packed, "int8")
    bench.array("rows")[:, :3] = ids.view(np.float32)
    step = Step("embed_ids", (View("rows", 0, 3),), (View("y", 0, 3 * COLUMNS),), {"table": "w"}, {"first": 19})
    bench.run(embed_ids(step, bench), len(ids))
    inside, found = (ids >= 19) & (ids < 19 + 45), bench.array("y")[:, :3 * COLUMNS].reshape(4, 3, COLUMNS)
    wanted = np.where(inside[..., None], weight[(ids - 19) % 45], -0.0)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert np.signbit(found[~inside]).all()


def test_columns_cut_out():
    raw, _, weight = matrix("q3h+2%", 40, 256)
    _, outliers = base_of(raw)
    begin, end = 64, 128
    dense = weight.astype(np.float32) - outliers.add_to(np.zeros((40, 256), np.float32))
    cut = outliers.between(begin, end)
    np.testing.assert_allclose(cut.add_to(dense[:, begin:end].copy()), weight[:, begin:end], rtol=1e-6, atol=1e-6)
    fullest = ((outliers.columns >= begin) & (outliers.columns < end)).sum(1).max()
    assert cut.columns.shape == (40, fullest) and fullest < outliers.columns.shape[1]
    both = joined([cut, outliers])
    assert both.columns.shape == (80, outliers.columns.shape[1])
    np.testing.assert_array_equal(both.add_to(np.zeros((80, 256), np.float32))[40:], weight.astype(np.float32) - dense)


def test_rows_with_fewer_outliers_and_none():
    """A tile has as many slots as its fullest row needs; a matrix without outliers has no slots."""
    raw, _, _ = matrix("q3h+2%", 40)
    base, outliers = base_of(raw)
    values = outliers.values.copy()
    values[:16, 1:], values[16:32], values[32:, 2:] = 0, 0, 0
    packed = pack(replace(base, rows=np.ascontiguousarray(base.rows), outliers=Outliers(outliers.columns, values)))
    assert np.diff(packed.outliers.starts).tolist() == [1, 0, 2]
    weight = Outliers(outliers.columns, values).add_to(decode(np.ascontiguousarray(base.rows), find("q3h"), COLUMNS))
    x = activations(3, COLUMNS)
    np.testing.assert_allclose(run_linear(packed, x, "f32"), x @ weight.T, rtol=1e-4, atol=1e-3)
    none = Outliers(outliers.columns[:, :0], values[:, :0])
    np.testing.assert_array_equal(run_linear(pack(replace(base, outliers=none)), x, "int8"),
                                  run_linear(pack(base), x, "int8"))


def test_sizes():
    raw, packed, _ = matrix("q3h+2%", 100, 256)
    base, _ = base_of(raw)
    assert packed.nbytes == pack(base).nbytes + 7 * (find("q3h+2%").count(256) * 64 + 8) + 8
    weight = Weight("w", (100, 256), (Part("t"),), types=("q3h+2%",))
    assert weight_bytes(weight) == packed.nbytes - 8
    x = np.random.default_rng(1).standard_normal((512, 4096)).astype(np.float32)
    _, outliers = take_apart(encode(x, find("q4+1%")), find("q4+1%"), 4096)
    half = Weight("w", (512, 2048), (Part("t", columns=(0, 2048)),), types=("q4+1%",))
    plain = Weight("w", (512, 2048), (Part("t", columns=(0, 2048)),), types=("q4",))
    used = np.sort((outliers.columns < 2048).sum(1).reshape(tiles_of(512), 16).max(1)).sum() * 64
    assert weight_bytes(half) - weight_bytes(plain) == pytest.approx(used, rel=0.05)
