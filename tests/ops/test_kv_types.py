"""Keys and values of every type: the compiled attention against the reference, which stores the same bits."""

import itertools

import numpy as np
import pytest

from numflow.cpu.program import Program
from numflow.learn.cases.attention_cases import attention_cases
from numflow.learn.cases.build import VOCABULARY, error, run_case
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.ops import Batch
from numflow.quant.bits import to_bfloat16
from numflow.quant.kv import CODED, KV_TYPES, stored, value_bytes
from numflow.reference.program import Program as Reference

# Causal with grouped heads; a head size that is no multiple of 32; a window; bidirectional with a window; values of
# another size than keys; an encoder memory; more keys than a span.
CASES = {case.name: case for case in attention_cases()}
NAMES = ("attention-grouped", "attention-head-20", "attention-window", "attention-both-ways-window",
         "attention-value-size", "attention-cross", "attention-long", "attention-values-in-keys-28-20",
         "attention-values-in-keys-96-48", "attention-values-in-keys-64-64")


def _compare(name, kv_k, kv_v):
    case, kv = CASES[name], {"kv_k": kv_k, "kv_v": kv_v}
    expected = run_case(case, Reference, **kv)
    for actual, e in zip(run_case(case, Program, activations="f32", threads=2, **kv), expected, strict=True):
        assert error(actual, e) < case.bound


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thin(120)
def test_every_type(name, kind):
    _compare(name, kind, kind)


@pytest.mark.parametrize(("kv_k", "kv_v"), [
    ("f32", "f16"), ("f16", "q4"), ("bf16", "q4"), ("f16", "bf16"), ("q8", "f32"), ("q5", "q3h"), ("q2", "q6")])
def test_keys_and_values_of_two_types(kv_k, kv_v):
    _compare("attention-grouped", kv_k, kv_v)
    _compare("attention-value-size", kv_k, kv_v)


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.merge
def test_int8_programs_multiply_codes(kind):
    """Errors of queries and of probabilities are 2^-16 of the largest in a block; threads change no bit."""
    for name in ("attention-grouped", "attention-long", "attention-values-in-keys-28-20"):
        case, kv = CASES[name], {"kv_k": kind, "kv_v": kind}
        expected = run_case(case, Reference, **kv)
        one, three = (run_case(case, Program, activations="int8", threads=n, **kv) for n in (1, 3))
        for y, again, e in zip(one, three, expected, strict=True):
            assert error(y, e) < 1e-2
            np.testing.assert_array_equal(y, again)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.merge] * ("values-in-keys" in name))
                                  for name in NAMES])
def test_bf16_programs_multiply_pairs(name):
    """Factors of 8 significant bits, against the reference, which rounds only keys and values."""
    case, kv = CASES[name], {"kv_k": "bf16", "kv_v": "bf16"}
    expected = run_case(case, Reference, **kv)
    one, three = (run_case(case, Program, activations="int8", threads=n, **kv) for n in (1, 3))
    for y, again, e in zip(one, three, expected, strict=True):
        assert error(y, e) < 3e-2
        np.testing.assert_array_equal(y, again)


def test_bf16_rounds_what_it_multiplies():
    """Rounded are queries, keys, values and probabilities relative to the largest of 64 keys."""
    case, count = _writer(), 61
    (table,) = case.weights.arrays.values()
    rows = table[np.arange(count) % VOCABULARY].astype(np.float64)
    q, k, v = (rows[:, at:at + 96].reshape(count, 2, 48).swapaxes(0, 1) for at in (0, 100, 200))
    expected = []
    for rounded in (to_bfloat16, np.array):
        s = rounded(0.1 * q) @ rounded(k).swapaxes(1, 2)
        s = np.where(np.tri(count, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(axis=2, keepdims=True))
        y = rounded(p) @ rounded(v) / p.sum(axis=2, keepdims=True)
        expected.append(y.swapaxes(0, 1).reshape(count, 96).astype(np.float32))
    found = []
    for threads in (1, 3):
        program = Program(case.network, case.weights, threads=threads, kv_k="bf16", kv_v="bf16", activations="int8")
        program.reserve(9)
        found.append(program.run(_batch(0, count, [3, 5])))
    np.testing.assert_array_equal(*found)
    assert error(found[0], expected[0]) < 1e-3 < error(found[0], expected[1]) / 3


@pytest.mark.parametrize("kind", ["bf16", *(pytest.param(kind, marks=pytest.mark.merge) for kind in ("q8", "q3h"))])
def test_int8_programs_have_the_same_bits_in_pieces(kind):
    case, results = _writer(), []
    for cuts in ((0, 100), (0, 37, 99, 100)):
        program = Program(case.network, case.weights, threads=1, kv_k=kind, kv_v=kind, activations="int8")
        program.reserve(9)
        results.append(np.concatenate([program.run(_batch(*cut, [3, 5])) for cut in itertools.pairwise(cuts)]))
    np.testing.assert_array_equal(*results)


def _writer():
    """A network that writes rows of a table to a cache, and the table."""
    b = Builder("writer")
    q, k, v = b.inputs(96, 96, 96)
    y = b.buffer(96)
    cache = b.cache(kv_heads=2, k_dim=48)
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (q,), (y,), cache=cache, heads=2, scale=0.1)
    return b.case(y)


def _batch(begin, end, block):
    ids = np.arange(begin, end, dtype=np.int32)
    return Batch(tokens=ids % VOCABULARY, positions=ids, starts=np.array([0, len(ids)], np.int32),
                 blocks=np.array([block], np.int32), logit_rows=np.arange(len(ids), dtype=np.int32))


@pytest.mark.parametrize("kind", KV_TYPES)
def test_blocks_are_copied_and_swapped_byte_for_byte(kind):
    case = _writer()
    program = Program(case.network, case.weights, threads=1, kv_k=kind, kv_v=kind, activations="f32")
    program.reserve(9)
    program.run(_batch(0, 100, [3, 5]))
    expected = program.run(_batch(100, 101, [3, 5]))
    program.copy_blocks([3, 5], [7, 1])
    saved = program.save_blocks([3, 5])
    assert saved.shape == (2, program.block_bytes)
    assert program.block_bytes * 9 == program.kv_bytes
    program.load_blocks([0, 8], saved)
    for blocks in ([7, 1], [0, 8]):
        np.testing.assert_array_equal(program.run(_batch(100, 101, blocks)), expected)


def test_bytes_of_a_block_are_those_of_the_types():
    case = _writer()
    for kind in KV_TYPES:
        program = Program(case.network, case.weights, threads=1, kv_k=kind, kv_v=kind, activations="f32")
        assert program.block_bytes == 64 * 2 * 2 * (64 if kind in CODED else 48) * value_bytes(kind)


def test_error_falls_with_the_bits():
    x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    x[:, 5] *= 20  # a column with outliers, as keys have
    errors = [float(np.sqrt(np.mean((stored(x, kind) - x)[:, :5] ** 2))) for kind in KV_TYPES]
    assert errors[0] == 0
    assert errors == sorted(errors)


@pytest.mark.parametrize("kind", CODED)
def test_a_row_that_is_constant_or_of_any_magnitude(kind):
    x = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    relative = [np.abs(stored(x * np.float32(2.0**e), kind) / np.float32(2.0**e) - x).max() for e in (-40, -10, 0, 30)]
    assert len(set(relative)) == 1
    np.testing.assert_array_equal(stored(np.zeros((1, 40), np.float32), kind), 0)
