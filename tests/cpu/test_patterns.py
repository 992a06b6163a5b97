"""Fused steps: the same bits as separate steps, and no output that is needed is lost."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cpu.patterns import described, groups, operands_made
from numflow.cpu.program import Program
from numflow.errors import NetworkError
from numflow.learn.cases.build import VOCABULARY
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.network.passes.dataflow import fusible_adds
from numflow.ops import Batch, Step, View
from tests.cpu.matrices import stored

WIDTH, HIDDEN = 320, 544  # more than a chunk of 256 columns, and not a multiple


class Stored:
    """Every matrix as Q8_0 blocks or float32, vectors as stored."""

    def __init__(self, weights, kind):
        self._weights, self._kind = weights, kind

    def f32(self, name):
        return self._weights.f32(name)

    def raw(self, name):
        raw = self._weights.raw(name)
        seed = sum(name.encode())
        return replace(stored(self._kind, *raw.shape, seed=seed), name=name) if raw.shape[1] % 32 == 0 else raw


def network(norm, act):
    """x + down(act(up(norm(x)))), twice, then a norm and a head; some adds are scaled."""
    b = Builder("fused")
    x, z, h, t = b.buffer(WIDTH), b.buffer(WIDTH), b.buffer(2 * HIDDEN), b.buffer(WIDTH)
    gate, up = View(h.buffer, 0, HIDDEN), View(h.buffer, HIDDEN, HIDDEN)
    b.step("embed", (), (x,), {"table": b.weight("table", b.normal(VOCABULARY, WIDTH))})

    def matrix(n, k):
        return {"weight": b.weight("weight", b.normal(n, k) / 8), "bias": b.weight("bias", b.normal(n))}

    for scale in (1.0, 0.7):
        vectors = {"weight": b.weight("norm", 1 + b.normal(WIDTH))}
        if norm == "layer_norm":
            vectors["bias"] = b.weight("shift", b.normal(WIDTH))
        b.step(norm, (x,), (z,), vectors, eps=1e-5)
        b.step("linear", (z,), (h,), matrix(2 * HIDDEN, WIDTH))
        if act == "act_mul":
            b.step("act_mul", (gate, up), (gate,), kind="silu")
        else:
            b.step("act", (gate,), (gate,), kind="gelu_tanh")
        b.step("linear", (gate,), (t,), matrix(WIDTH, HIDDEN))
        b.step("add", (x, t), (x,), scale=scale)
    last, hidden, logits = (b.buffer(n, "logits") for n in (WIDTH, WIDTH, VOCABULARY))
    b.step("select_rows", (x,), (last,))
    b.step(norm, (last,), (hidden,), eps=1e-5)
    b.step("linear", (hidden,), (logits,), matrix(VOCABULARY, WIDTH))
    case = b.case(logits)
    return replace(case.network, outputs={"hidden": hidden, "logits": logits}), case.weights


def run(norm, act, kind, rows, **options):
    built, weights = network(norm, act)
    built = replace(built, weights={name: replace(weight, types=(kind,))
                                    if len(weight.shape) == 2 and weight.shape[1] % 32 == 0 else weight
                                    for name, weight in built.weights.items()})
    made = Program(built, Stored(weights, kind), **options)
    made.reserve(2)
    tokens = np.arange(rows, dtype=np.int32) * 5 % VOCABULARY
    batch = Batch(tokens, np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32), np.zeros((1, 2), np.int32),
                  np.arange(rows, dtype=np.int32))
    results = [made.run(batch, output=output) for output in ("logits", "hidden")]
    return results, made, batch


@pytest.mark.parametrize(("norm", "act", "kind", "activations"), [
    ("rms_norm", "act_mul", "Q8_0", "int8"), ("layer_norm", "act", "Q8_0", "int8"),
    ("rms_norm", "act_mul", "F32", "int8"), ("layer_norm", "act", "F32", "int8"),
    ("rms_norm", "act_mul", "q3h+1%", "int8"), ("rms_norm", "act_mul", "Q8_0", "int16"),
    ("layer_norm", "act", "Q8_0", "int16"), ("rms_norm", "act_mul", "F32", "bf16"),
    ("layer_norm", "act", "F16", "bf16")])
@pytest.mark.thin(4)
def test_the_same_bits_as_unfused(norm, act, kind, activations):
    for rows in (1, 13):
        expected, plain, batch = run(norm, act, kind, rows, threads=1, fused=False, activations=activations)
        for threads in (1, 3):
            results, made, _ = run(norm, act, kind, rows, threads=threads, activations=activations)
            for result, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result, wanted)
        rows_of = {row.index: (row.op, row.kernel) for row in made.trace(batch)}
        assert [op for op, _ in rows_of.values()] == [row.op for row in plain.trace(batch)]
        done = {op for op, kernel in rows_of.values() if kernel.startswith("numflow/cpu/linear/operands_kernels.py:")}
        assert done == {norm, act}
        apart = kind.endswith("%")  # outliers are added to the product first
        assert all(("linear" in kernel) != apart for op, kernel in rows_of.values() if op == "add")
        alone = {norm, "add"} if apart else {norm}  # the last norm
        assert {"rms_norm", "act", "act_mul", "add", "layer_norm"} & set(made.kernels) == alone


@pytest.mark.merge
def test_auto_takes_pairs_where_only_wanted_rows_go_on():
    exact, int8, pairs, auto = (run("rms_norm", "act_mul", "Q8_0", 13, threads=1, activations=mode)[0][0]
                                for mode in ("f32", "int8", "int16", "auto"))
    far = [np.sqrt(np.mean(np.square(found - exact))) for found in (pairs, auto, int8)]
    assert 0 < far[0] < far[1] < far[2]
    np.testing.assert_array_equal(run("rms_norm", "act_mul", "Q8_0", 5, threads=2, activations="auto")[0][0], auto[:5])


X, Y, Z = (View(name, 0, 8) for name in "xyz")


def linear(a, b):
    return Step("linear", (a,), (b,), {"weight": "w"})


def norm(a, b, **params):
    return Step("rms_norm", (a,), (b,), {}, {"eps": 1e-5, **params})


def add(a, b, y):
    return Step("add", (a, b), (y,))


def copy(a, b):
    return Step("copy", (a,), (b,))


def test_which_adds_are_taken_over():
    assert fusible_adds([linear(X, Y), add(Z, Y, Z)], ()) == {0: 1}
    assert fusible_adds([linear(X, Y), add(Z, Y, Z), copy(X, Y), copy(Y, X)], ()) == {0: 1}
    refused = {"read later": [linear(X, Y), add(Z, Y, Z), copy(Y, X)], "added to itself": [linear(X, Y), add(Y, Y, Z)],
               "the other operand": [linear(X, Y), add(Y, Z, Z)], "not neighbours": [linear(X, Y), copy(X, Z),
                                                                                       add(Z, Y, Z)],
               "a part is read": [linear(X, Y), add(Z, Y, Z), copy(View("y", 4, 2), X)],
               "not a linear": [copy(X, Y), add(Z, Y, Z)]}
    for why, steps in refused.items():
        assert fusible_adds(steps, ()) == {}, why
    assert fusible_adds([linear(X, Y), add(Z, Y, Z)], [View("y", 7, 1)]) == {}  # it is an output


def test_which_operands_are_made():
    def made(*steps, outputs=(), kinds=lambda step: (True,)):
        return operands_made(steps, outputs, kinds)

    assert made(norm(X, Y), linear(Y, Z)) == {0: 1}
    assert made(norm(X, Y), linear(Y, Z), linear(Y, X)) == {0: 1}
    assert made(norm(X, X), linear(X, Z), copy(Y, X), copy(X, Y)) == {0: 1}
    assert made(norm(X, Y), linear(Y, Z), copy(Y, X)) == {}
    assert made(norm(X, Y), linear(View("y", 0, 4), Z)) == {}
    assert made(norm(X, Y), copy(Z, View("y", 0, 4)), linear(Y, Z)) == {}
    assert made(norm(X, Y), copy(Z, X), linear(Y, Z)) == {}
    assert made(norm(X, Y)) == {}
    assert made(norm(X, Y, groups=2), linear(Y, Z)) == {}
    assert made(norm(X, Y), linear(Y, Z), outputs=[Y]) == {}
    mixed = iter(((True,), (True, False)))
    assert made(norm(X, Y), linear(Y, Z), linear(Y, X), kinds=lambda step: next(mixed)) == {}


def test_groups_are_data():
    """Groups follow from types alone: which steps are fused into which, and not if outliers are still to be added."""
    built, _ = network("rms_norm", "act_mul")

    def patterns(kind, activations="int8"):
        weights = {name: replace(weight, types=(kind,)) if len(weight.shape) == 2 else weight
                   for name, weight in built.weights.items()}
        return [(group.pattern, group.steps, group.at)
                for group in groups(replace(built, weights=weights), "main", activations)]

    wanted = patterns("Q8_0")
    assert wanted[:2] == [("rms_norm+linear", (1, 2), 2), ("act_mul+linear+add", (3, 4, 5), 4)]
    assert patterns("F32") == patterns("q4") == wanted
    assert [name for name, *_ in patterns("q4+1%")][:2] == ["rms_norm+linear", "act_mul+linear"]
    shown = described(replace(built, weights={name: replace(weight, types=("q4",)) if len(weight.shape) == 2 else weight
                                              for name, weight in built.weights.items()}), "int16")
    assert {facts.operand for facts in shown} == {"int16"} and shown[0].pattern == "rms_norm+linear"


def test_a_source_that_hands_out_other_types_than_the_network_has():
    built, weights = network("rms_norm", "act")
    with pytest.raises(NetworkError, match="is packed as q8_0|its types"):
        Program(built, Stored(weights, "Q8_0"))
