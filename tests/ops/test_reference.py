"""The reference executor against independent loops and formulas in double precision."""

import math

import numpy as np
import pytest

from numflow.errors import NetworkError, RequestError
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.learn.cases.build import error, run_case
from numflow.learn.cases.cases import CASES
from numflow.network.t5_buckets import bucket
from numflow.ops import OPS, Batch, View
from numflow.reference import act, embed, linear, moe, norm, rope, select
from numflow.reference.program import KERNELS, Program

BY_NAME = {case.name: case for case in CASES}



def rng(*shape, seed=0, spread=1.0):
    return (spread * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def batch(tokens=(3, 1, 4, 1), positions=(0, 1, 2, 0), types=None):
    return Batch(np.array(tokens), np.array(positions), np.array([0, 3, 4]), np.zeros((2, 1), int),
                 np.array([2, 3]), types)


def test_every_op_has_a_kernel_and_a_case():
    assert set(KERNELS) == set(OPS)
    assert {s.op for c in CASES for steps in c.network.entries.values() for s in steps} == set(OPS)
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.thin(4)
def test_results_do_not_depend_on_the_block_size(case):
    for a, b in zip(*(run_case(case, Program, block_size=size) for size in (3, 64)), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_embeddings():
    table, x, b = rng(6, 8), rng(4, 8, seed=1), batch(types=np.array([0, 1, 1, 0]))
    for t, token in enumerate(b.tokens):
        np.testing.assert_array_equal(embed.embed(table, batch=b, scale=2.0)[t], table[token] * 2)
        some = embed.embed(table[2:4], batch=b, scale=2.0, first=2, vocabulary=len(table))[t]
        np.testing.assert_array_equal(some, table[token] * 2 if 2 <= token < 4 else 0 * table[token])
        assert np.signbit(some).all() or 2 <= token < 4
        np.testing.assert_array_equal(embed.embed_position(x, table, batch=b, offset=2)[t],
                                      x[t] + table[b.positions[t] + 2])
        np.testing.assert_array_equal(embed.embed_type(x, table, batch=b)[t], x[t] + table[b.types[t]])
    np.testing.assert_array_equal(embed.embed_type(x, table, batch=batch()), x + table[0])


@pytest.mark.parametrize(("groups", "weights"), [(1, 12), (3, 4), (3, 12)])
def test_norms(groups, weights):
    x, w, b = rng(5, 12, spread=3.0), rng(weights, seed=1), rng(weights, seed=2)
    size = 12 // groups
    rms, layer = np.empty((5, 12)), np.empty((5, 12))
    for t in range(5):
        for g in range(groups):
            part = [float(v) for v in x[t, g * size:(g + 1) * size]]
            mean = math.fsum(part) / size
            square = math.fsum(v * v for v in part) / size
            var = math.fsum((v - mean) ** 2 for v in part) / size
            for i, v in enumerate(part):
                at = i if weights == size else g * size + i
                rms[t, g * size + i] = v / math.sqrt(square + 1e-3) * w[at]
                layer[t, g * size + i] = (v - mean) / math.sqrt(var + 1e-3) * w[at] + b[at]
    assert error(norm.rms_norm(x, w, eps=1e-3, groups=groups), rms) < 1e-6
    assert error(norm.layer_norm(x, w, b, eps=1e-3, groups=groups), layer) < 1e-6


def test_norm_by_hand():
    x = np.array([[3.0, 4.0]], np.float32)
    np.testing.assert_allclose(norm.rms_norm(x, eps=0.0, groups=1), [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-6)
    np.testing.assert_allclose(norm.layer_norm(x, eps=0.0, groups=1), [[-1, 1]], rtol=1e-6)


def test_linear():
    x, w, b = rng(3, 7), rng(5, 7, seed=1), rng(5, seed=2)
    expected = [[math.fsum(float(x[t, k]) * float(w[n, k]) for k in range(7)) + b[n] for n in range(5)]
                for t in range(3)]
    assert error(linear.linear(x, w, b), np.array(expected)) < 1e-6
    assert error(linear.linear(x, w), np.array(expected) - b) < 1e-6


def test_head_linear():
    x, w = rng(3, 2 * 7), rng(2 * 5, 7, seed=1)
    expected = [[math.fsum(float(x[t, 7 * h + k]) * float(w[5 * h + n, k]) for k in range(7))
                 for h in range(2) for n in range(5)] for t in range(3)]
    assert error(linear.head_linear(x, w, heads=2), np.array(expected)) < 1e-6


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("start", [0, 3])
def test_rope_turns_each_pair_in_the_plane(pairing, start):
    heads, head_dim, half = 2, 10, 3
    x, b = rng(4, heads * head_dim), batch(positions=(0, 1, 50, 7))
    inv_freq = np.array([1.0, 0.3, 0.01], np.float32)
    angles = rope.rope_angles(inv_freq, batch=b, scale=1.5)
    expected = x.astype(np.float64)
    for t, position in enumerate(b.positions):
        for h in range(heads):
            for f in range(half):
                i, j = (f, f + half) if pairing == "half" else (2 * f, 2 * f + 1)
                i, j = (h * head_dim + start + c for c in (i, j))
                turned = complex(x[t, i], x[t, j]) * 1.5 * np.exp(1j * float(np.float32(position) * inv_freq[f]))
                expected[t, i], expected[t, j] = turned.real, turned.imag
    y = rope.rope(x, angles, heads=heads, head_dim=head_dim, pairing=pairing, start=start)
    assert error(y, expected) < 1e-6
    np.testing.assert_array_equal(y[0].reshape(2, 10)[:, start + 6:], x[0].reshape(2, 10)[:, start + 6:])


def phi(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def logistic(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


ACT = {
    "relu": lambda x: max(x, 0.0), "relu2": lambda x: max(x, 0.0) ** 2, "gelu": lambda x: x * phi(x),
    "gelu_tanh": lambda x: x * logistic(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_quick": lambda x: x * logistic(1.702 * x), "silu": lambda x: x * logistic(x), "sigmoid": logistic,
    "tanh": math.tanh,
}


@pytest.mark.parametrize("kind", ACT)
def test_activations(kind):
    x = np.linspace(-30, 30, 401, dtype=np.float32).reshape(1, -1)
    up = rng(1, 401)
    expected = np.array([[ACT[kind](float(v)) for v in x[0]]])
    np.testing.assert_allclose(act.act(x, kind=kind), expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(act.act_mul(x, up, kind=kind, limit=0.0, alpha=0.0), expected * up, rtol=1e-5, atol=1e-5)


def test_activations_neither_overflow_nor_warn():
    x = np.array([[-1e4, -200.0, 0.0, 100.0, 1e4]], np.float32)
    np.testing.assert_array_equal(act.act(x, kind="silu"), [[0, 0, 0, 100, 1e4]])
    np.testing.assert_array_equal(act.act(x, kind="gelu"), [[0, 0, 0, 100, 1e4]])


def test_gelu_by_hand():
    assert float(act.gelu(np.float32([1.0]))[0]) == pytest.approx(0.841344746, abs=1e-7)
    assert float(act.gelu_tanh(np.float32([1.0]))[0]) == pytest.approx(0.841191990, abs=1e-7)


def test_swiglu_clamp():
    gate, up = rng(3, 9, spread=6.0), rng(3, 9, seed=1, spread=6.0)
    expected = np.empty((3, 9))
    for i in np.ndindex(3, 9):
        g, u = min(float(gate[i]), 7.0), min(max(float(up[i]), -7.0), 7.0)
        expected[i] = g * logistic(1.702 * g) * (u + 1)
    assert error(act.act_mul(gate, up, kind="swiglu_clamp", limit=7.0, alpha=1.702), expected) < 1e-6


def test_silu_clamp():
    gate, up = rng(3, 9, spread=6.0), rng(3, 9, seed=1, spread=6.0)
    expected = np.empty((3, 9))
    for i in np.ndindex(3, 9):
        g, u = min(float(gate[i]), 2.0), min(max(float(up[i]), -2.0), 2.0)
        expected[i] = g * logistic(g) * u
    assert error(act.act_mul(gate, up, kind="silu_clamp", limit=2.0, alpha=0.0), expected) < 1e-6


def test_sums_scales_and_caps():
    a, b = rng(2, 5), rng(2, 5, seed=1)
    np.testing.assert_allclose(act.add(a, b, scale=0.5), a + 0.5 * b, rtol=1e-6)
    np.testing.assert_allclose(act.scale(a, scale=3.0), 3 * a)
    expected = [[2 * math.tanh(float(v) / 2) for v in row] for row in a]
    np.testing.assert_allclose(act.softcap(a, cap=2.0), expected, rtol=1e-6)
    np.testing.assert_array_equal(act.clamp(np.array([-2, -0.5, 0, 3], np.float32), limit=0.5), [-0.5, -0.5, 0, 0.5])
    expected = [[float(v) * logistic(float(g[0])) for v in row] for row, g in zip(a, b, strict=True)]
    np.testing.assert_allclose(act.gate_rows(a, b[:, :1]), expected, rtol=1e-6)
    np.testing.assert_array_equal(select.select_rows(rng(4, 3), batch=batch()), rng(4, 3)[[2, 3]])


def test_head_concat():
    a, each, shared = rng(2, 6), rng(2, 3, seed=1), rng(2, 1, seed=2)
    own = [[a[t, 0], a[t, 1], each[t, 0], a[t, 2], a[t, 3], each[t, 1], a[t, 4], a[t, 5], each[t, 2]] for t in (0, 1)]
    np.testing.assert_array_equal(select.head_concat(a, each, heads=3, width=9), own)
    one = [[a[t, 0], a[t, 1], shared[t, 0], a[t, 2], a[t, 3], shared[t, 0], a[t, 4], a[t, 5], shared[t, 0]]
           for t in (0, 1)]
    np.testing.assert_array_equal(select.head_concat(a, shared, heads=3, width=9), one)


ROUTE = {"score": "softmax", "normalize": False, "scale": 1.0, "groups": 1, "top_groups": 1, "group_best": 2}


def plain_route(logits, bias, width, score, normalize, scale, groups, top_groups, group_best):
    """Routing, one token at a time, in Python floats."""
    exps = [math.exp(v) for v in logits]
    scores = {"softmax": [e / sum(exps) for e in exps], "sigmoid": [logistic(v) for v in logits],
              "softmax_topk": list(logits)}[score]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(choice) // groups
    value = {g: sum(sorted(choice[g * size:(g + 1) * size])[-group_best:]) for g in range(groups)}
    kept = sorted(value, key=lambda g: -value[g])[:top_groups]
    ids = sorted((x for x in range(len(choice)) if x // size in kept), key=lambda x: -choice[x])[:width]
    gates = [scores[x] for x in ids]
    if score == "softmax_topk":
        gates = [math.exp(g) / sum(math.exp(v) for v in gates) for g in gates]
    if normalize:
        gates = [g / sum(gates) for g in gates]
    return ids, [g * scale for g in gates]


@pytest.mark.parametrize("params", [
    {}, {"normalize": True}, {"score": "sigmoid", "scale": 2.5}, {"score": "softmax_topk"},
    {"score": "sigmoid", "normalize": True, "groups": 4, "top_groups": 2}, {"groups": 3, "top_groups": 1},
    {"groups": 4, "top_groups": 2, "group_best": 1}])
@pytest.mark.parametrize("biased", [False, True])
def test_route(params, biased):
    logits, params = rng(20, 12, spread=2.0), {**ROUTE, **params}
    bias = rng(12, seed=3, spread=0.3) if biased else None
    ids, gates = moe.moe_route(logits, bias, width=3, **params)
    assert ids.dtype == np.int32 and gates.dtype == np.float32
    for t in range(20):
        plain = plain_route(logits[t].tolist(), bias.tolist() if biased else [0.0] * 12, 3, **params)
        assert ids[t].tolist() == plain[0]
        np.testing.assert_allclose(gates[t], plain[1], rtol=1e-5)


def test_route_takes_the_lower_id_of_equal_scores():
    ids, _ = moe.moe_route(np.zeros((1, 6), np.float32), width=3, **ROUTE)
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("shared", [True, False])
def test_experts(shared):
    ids, gates = np.array([[2, 0], [1, 2], [2, 1]], np.int32), rng(3, 2)
    x, w, b = rng(3 if shared else 6, 5), rng(3 * 4, 5, seed=1), rng(3, 4, seed=2)
    y = moe.expert_linear(x, ids, w, b, groups=3)
    total = np.zeros((3, 4))
    for t in range(3):
        for s in range(2):
            e = ids[t, s]
            row = w[4 * e:4 * e + 4].astype(np.float64) @ x[t if shared else 2 * t + s] + b[e]
            np.testing.assert_allclose(y[2 * t + s], row, rtol=1e-5, atol=1e-6)
            total[t] += gates[t, s] * row
    np.testing.assert_allclose(moe.expert_combine(y, gates), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("causal", "expected"), [
    # by hand: 8 buckets up to distance 16; causal: 4 exact, then 4 + floor(4 log(d / 4) / log 4)
    (True, {5: 0, 0: 0, -1: 1, -3: 3, -4: 4, -5: 4, -6: 5, -8: 6, -11: 6, -12: 7, -16: 7, -500: 7}),
    # both ways: 4 each, 2 of them exact, then 2 + floor(2 log(d / 2) / log 8)
    (False, {0: 0, -1: 1, -2: 2, -5: 2, -6: 3, -99: 3, 1: 5, 2: 6, 5: 6, 6: 7, 99: 7})])
def test_buckets(causal, expected):
    distance = np.array(list(expected))
    assert bucket(distance, 8, 16, causal).tolist() == list(expected.values())


def test_reserve_keeps_what_is_cached():
    case = BY_NAME["attention-grouped"]
    expected = run_case(case, Program, block_size=8)
    program = Program(case.network, case.weights, block_size=8)
    results = []
    for i, run in enumerate(case.runs(8)):
        program.reserve(case.blocks(8) + 3 * i)
        results.append(program.run(run.batch, run.entry, run.output))
    for actual, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_run_stops_at_the_wanted_output():
    b = Builder("stops")
    (x,) = b.inputs(8)
    hidden, logits = b.buffer(8, "logits"), b.buffer(4, "logits")
    b.step("select_rows", (x,), (hidden,))
    b.step("scale", (hidden,), (hidden,), scale=2.0)
    b.step("linear", (hidden,), (logits,), {"weight": "absent"})
    b.weights["absent"] = type(next(iter(b.weights.values())))("absent", (4, 8))
    case = b.case(logits)
    case.network.outputs["hidden"] = hidden
    run = case.runs(8)[0]
    program = Program(case.network, case.weights)
    y = program.run(run.batch, output="hidden")  # stops before the head, whose weight is missing
    np.testing.assert_array_equal(y, 2 * case.weights.f32("table.0")[run.batch.tokens])
    with pytest.raises(KeyError):
        program.run(run.batch)


def test_unknown_entries_and_outputs_are_refused():
    case = BY_NAME["copy"]
    program, run = Program(case.network, case.weights), case.runs(16)[0]
    with pytest.raises(RequestError, match="no entry 'mian'; did you mean 'main'"):
        program.run(run.batch, entry="mian")
    with pytest.raises(RequestError, match="no 'logit'; did you mean 'logits'"):
        program.run(run.batch, output="logit")


def test_a_result_of_the_wrong_shape_is_refused():
    case = BY_NAME["copy"]
    step = case.network.entries["main"][1]
    wrong = type(step)("copy", step.inputs, (View(step.outputs[0].buffer, 0, 7),), label="here")
    network = type(case.network)("n", {"main": (case.network.entries["main"][0], wrong)}, case.network.buffers,
                                 case.network.weights, {}, {}, {})
    with pytest.raises(NetworkError, match=r"here: .*result is"):
        Program(network, case.weights).run(case.runs(16)[0].batch, output=None)


def test_trace_names_every_step_and_its_kernel():
    case = BY_NAME["moe-feed-forward"]
    program = Program(case.network, case.weights)
    rows = program.trace(case.runs(16)[0].batch)
    assert [row.op for row in rows] == [step.op for step in case.network.entries["main"]]
    assert rows[0].shapes == "- -> [13, 72]"
    assert all(row.kernel.startswith("numflow/reference/") and row.microseconds > 0 for row in rows)
    assert program.weights_bytes == sum(4 * np.prod(w.shape) for w in case.network.weights.values())


def test_no_rows_are_wanted():
    """The last layer computes only rows whose logits are wanted: most chunks of a prompt have none."""
    none = np.zeros((0, 6), np.float32)
    assert act.match_rms(none, none[:, :3], least=1e-5).shape == (0, 6)
    assert act.mix(none, none[:, :4], none[:, :6], parts=3).shape == (0, 6)
    assert moe.expert_combine(none, none[:, :2]).shape == (0, 6)
