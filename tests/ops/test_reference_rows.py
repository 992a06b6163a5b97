"""Row-wise ops of the reference, against loops over single elements."""

import math

import numpy as np
import pytest

from numflow.ops import Batch
from numflow.ops import Cache as Shape
from numflow.reference import act, attention, moe


def rng(*shape, seed=0, spread=1.0):
    return (spread * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def test_xielu():
    x = np.array([[-20, -1.5, -1e-7, 0, 1e-7, 0.5, 3]], np.float32)
    expected = [0.5 * v + (0.8 * v * v if v > 0 else 1.3 * (math.expm1(min(v, -1e-6)) - v)) for v in x[0].tolist()]
    found = act.act(x, kind="xielu", positive=0.8, negative=1.3, beta=0.5, eps=-1e-6)
    np.testing.assert_allclose(found[0], expected, rtol=1e-6, atol=1e-8)


def test_queries_grow_with_their_position():
    positions = np.array([0, 6, 7, 15, 700], np.int32)
    batch = Batch(np.zeros(5, np.int32), positions, np.array([0, 5]), np.zeros((1, 1), int), np.array([4]))
    found = act.scale_by_position(np.ones((5, 2), np.float32), batch=batch, scale=0.1, length=8, offset=1)
    expected = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3), 1 + 0.1 * math.log(1 + 701 // 8)]
    np.testing.assert_allclose(found, np.transpose([expected] * 2), rtol=1e-6)


def test_queries_grow_smoothly_from_a_length_on():
    batch = Batch(*(np.array(values, np.int32) for values in ([0] * 3, [0, 7, 19], [0, 3], [[0, 1]], [0])))
    found = act.scale_by_position(np.ones((3, 1), np.float32), batch=batch, scale=0.5, length=8, offset=1, smooth=1)
    np.testing.assert_allclose(found[:, 0], [1, 1, 1 + 0.5 * math.log(20 / 8)], rtol=1e-6)


def test_queries_grow_by_a_power():
    batch = Batch(*(np.array(values, np.int32) for values in ([0] * 2, [0, 19], [0, 2], [[0, 1]], [0])))
    found = act.scale_by_position(np.ones((2, 1), np.float32), batch=batch, scale=0.5, length=8, offset=1, smooth=2)
    np.testing.assert_allclose(found[:, 0], [math.sqrt(9 / 8), math.sqrt(28 / 8)], rtol=1e-6)


def logistic(v):
    return 1 / (1 + math.exp(-v))


def test_gates_of_equal_parts():
    x, gate = rng(2, 6), rng(2, 3, seed=1)
    for plain, f in ((False, logistic), (True, float)):
        expected = [[row[j] * f(g[j // 2]) for j in range(6)] for row, g in zip(x.tolist(), gate.tolist(), strict=True)]
        np.testing.assert_allclose(act.gate_rows(x, gate, plain=plain), expected, rtol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
def test_sigmoid_of_the_logits_that_were_chosen(biased):
    """A bias affects the choice, which is by logits."""
    logits, bias = rng(20, 7, spread=1.5), rng(7, seed=3) if biased else None
    rules = {**ROUTE, "score": "sigmoid_topk", "normalize": True, "scale": 2.0}
    ids, gates = moe.moe_route(logits, bias, width=3, **rules)
    for t in range(20):
        values = logits[t].tolist()
        best = sorted(range(7), key=lambda x: -values[x] - (bias[x] if biased else 0))[:3]
        total = sum(logistic(values[x]) for x in best)
        assert ids[t].tolist() == best
        np.testing.assert_allclose(gates[t], [2 * logistic(values[x]) / total for x in best], rtol=1e-5)


def test_sparsify():
    x = rng(3, 40, spread=2.0)
    found = act.sparsify(x, deviations=0.5)
    for row, values in zip(found, x.astype(np.float64)):
        mean = sum(values) / 40
        cut = mean + 0.5 * math.sqrt(sum((v - mean) ** 2 for v in values) / 40)
        np.testing.assert_allclose(row, [max(v - cut, 0) for v in values], atol=1e-6)
    assert 0.2 < (found > 0).mean() < 0.45


def test_scale_and_shift_of_columns():
    x = np.array([[1, 2], [-3, 4]], np.float32)
    weight, shift = np.array([2, -1], np.float32), np.array([0.5, 7], np.float32)
    np.testing.assert_array_equal(act.scale(x, weight, shift, scale=3.0), [[6.5, 1], [-17.5, -5]])
    np.testing.assert_array_equal(act.scale(x, None, shift, scale=2.0), [[2.5, 11], [-5.5, 15]])


def test_match_rms():
    x, like = rng(2, 6, spread=3.0), rng(2, 3, seed=1)
    x[1, 3:] = 0
    found = act.match_rms(x, like, least=1e-5)
    size = [math.sqrt(sum(v * v for v in row) / 3) for row in like.tolist()]
    for t, part in ((0, slice(0, 3)), (0, slice(3, 6)), (1, slice(0, 3))):
        assert math.sqrt(float(np.mean(found[t, part] ** 2))) == pytest.approx(size[t], rel=1e-6)
        np.testing.assert_allclose(found[t, part] / x[t, part], found[t, part][0] / x[t, part][0], rtol=1e-6)
    assert not found[1, 3:].any()


@pytest.mark.parametrize(("parts", "sources"), [(3, 3), (4, 1), (1, 2)])
def test_mix(parts, sources):
    base, x, gates = rng(2, 5 * parts), rng(2, 5 * sources, seed=1), rng(2, parts * sources, seed=2)
    found = act.mix(base, x, gates, parts=parts, plus=0.25)
    for t, i, c in np.ndindex(2, parts, 5):
        added = sum((gates[t, i * sources + j] + 0.25) * x[t, 5 * j + c] for j in range(sources))
        assert found[t, 5 * i + c] == pytest.approx(float(base[t, 5 * i + c] + added), rel=1e-5, abs=1e-6)


ROUTE = {"normalize": False, "scale": 1.0, "groups": 1, "top_groups": 1, "group_best": 2}


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparsemixer_has_a_softmax_for_each_choice(jitter):
    logits = rng(30, 7, spread=1.5)
    ids, gates = moe.moe_route(logits, width=2, score="sparsemixer", jitter=jitter, **ROUTE)
    alone = 0
    for t in range(30):
        values, left = logits[t].astype(np.float64), set(range(7))
        for s in range(2):
            best = max(left, key=lambda x: values[x])
            near = [x for x in left if (values[best] - values[x]) / max(abs(values[x]), values[best]) <= 2 * jitter]
            alone += len(near) == 1
            assert ids[t, s] == best
            assert gates[t, s] == pytest.approx(1 / sum(math.exp(values[x] - values[best]) for x in near), rel=1e-5)
            left.remove(best)
    assert 0 < alone <= 60


def test_experts_have_scales_of_their_own():
    logits, scales = rng(4, 5), np.array([1, 2, 3, 4, 5], np.float32)
    ids, plain = moe.moe_route(logits, width=2, score="softmax", **ROUTE)
    same, scaled = moe.moe_route(logits, None, scales, width=2, score="softmax", **ROUTE)
    np.testing.assert_array_equal(ids, same)
    np.testing.assert_allclose(scaled, plain * (ids + 1), rtol=1e-6)


def test_gates_before_the_expert():
    x, gates = rng(2, 3), rng(2, 2, seed=1)
    found = moe.expert_scale(x, gates)
    np.testing.assert_allclose(found, [x[t] * gates[t, s] for t in range(2) for s in range(2)])
    np.testing.assert_allclose(moe.expert_combine(found, gates, weighted=False),
                               [x[t] * (gates[t, 0] + gates[t, 1]) for t in range(2)], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("both", [True, False])
def test_queries_and_keys_meet_the_vectors_of_their_distance(both):
    q, k, v, vectors = rng(5, 2, 3), rng(5, 2, 3, seed=1), rng(5, 2, 3, seed=2), rng(2, 2, 4, 3, seed=3)
    of_queries, of_keys = (np.einsum("the,hne->thn", x, each).reshape(5, 8) for x, each in zip((q, k), vectors))
    places = np.array([3, 0, 2, 1, 3], np.float32)  # relative positions -2 .. 2

    class Cache:
        lengths, table = staticmethod(lambda batch: [5]), staticmethod(lambda batch: [None])
        read = staticmethod(lambda blocks, length, position: (k, v))
        shape, value_dim = Shape("c", 2, 3, 3), 3

    batch = Batch(np.zeros(5, np.int32), np.arange(5), np.array([0, 5]), np.zeros((1, 1), int), np.array([4]))
    found = attention.attention(q.reshape(5, 6), of_queries, *[of_keys] * both, position_buckets=places, batch=batch,
                                heads=2, cache=Cache, scale=0.5, causal=False, window=0, softcap=0.0, bucket_distance=0)
    for h in range(2):
        for i in range(5):
            numbers = [int(places[min(max(j - i, -2), 2) + 2]) for j in range(5)]
            scores = [0.5 * (q[i, h] @ k[j, h] + q[i, h] @ vectors[0, h, n] + both * vectors[1, h, n] @ k[j, h])
                      for j, n in enumerate(numbers)]
            shares = [math.exp(score) for score in scores]
            expected = sum(share * v[j, h] for j, share in enumerate(shares)) / sum(shares)
            np.testing.assert_allclose(found[i, 3 * h:3 * h + 3], expected, rtol=1e-5, atol=1e-6)


def test_each_index_head_chooses_blocks_of_its_own():
    keys, q = np.sign(rng(9, 4)), np.sign(rng(3, 8, seed=1))

    class Cache:
        shape, every = Shape("keys", 1, 4, 0), 0
        lengths, table = staticmethod(lambda batch: [9]), staticmethod(lambda batch: [None])
        read = staticmethod(lambda blocks, length: (keys[:length, None], None))

    batch = Batch(np.zeros(3, np.int32), np.array([6, 7, 8], np.int32), np.array([0, 3]), np.zeros((1, 1), int),
                  np.array([2]))
    found = attention.block_select(q, batch=batch, cache=Cache, heads=2, block=3, top_k=2, local=1, width=4)
    assert (found.dtype, found.shape) == (np.int32, (3, 4)) and not found[:, 1::2].any()
    for t, h in np.ndindex(3, 2):
        own = (6 + t) // 3
        scores = {p: max(float(q[t, 4 * h:4 * h + 4] @ k) for k in keys[3 * p:min(3 * p + 3, 7 + t)])
                  for p in range(own)}
        best = min(scores, key=lambda p: (-scores[p], p))
        assert found[t, 2 * h] == 1 << own | 1 << best
    every = attention.block_select(q, batch=batch, cache=Cache, heads=2, block=3, top_k=9, local=0, width=2)
    assert every.tolist() == [[0b111] * 2] * 3


def test_an_index_chooses_the_best_keys_of_those_that_are_seen():
    keys, q, weights = np.sign(rng(9, 4)), np.sign(rng(3, 8, seed=1)), rng(3, 2, seed=2)

    class Cache:
        shape, every = Shape("keys", 1, 4, 0), 1
        lengths, table = staticmethod(lambda batch: [9]), staticmethod(lambda batch: [None])
        read = staticmethod(lambda blocks, length, position: (keys[:length, None], None))

    batch = Batch(np.zeros(3, np.int32), np.array([6, 7, 8], np.int32), np.array([0, 3]), np.zeros((1, 1), int),
                  np.array([2]))
    found = attention.index_select(q, weights, batch=batch, cache=Cache, heads=2, top_k=4, width=2)
    assert (found.dtype, found.shape) == (np.int32, (3, 2)) and not found[:, 1].any()
    for t in range(3):
        scores = {p: sum(weights[t, h] * max(float(q[t, 4 * h:4 * h + 4] @ keys[p]), 0) for h in range(2))
                  for p in range(7 + t)}
        best = sorted(scores, key=lambda p: (-scores[p], p))[:4]
        assert found[t, 0] == sum(1 << p for p in best)
    every = attention.index_select(q, weights, batch=batch, cache=Cache, heads=2, top_k=20, width=1)
    assert every[:, 0].tolist() == [(1 << n) - 1 for n in (7, 8, 9)]
