"""Attention and the KV cache on the simulator, in random thread orders, against the reference."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.estimate import KV_TYPES
from numflow.cuda.program import Program
from numflow.cuda.state.cache_code import region_bytes
from numflow.learn.cases.attention_cases import attention_cases
from numflow.learn.cases.build import error, run_case
from numflow.ops import Batch
from numflow.quant.kv import CODED
from numflow.reference.program import Program as Reference
from tests.cuda.attention_shapes import attention_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them

CASES = {case.name: case for case in attention_cases()}
# Sequences with many and with few new tokens; both with few; one with many; several with few, of different lengths.
MIXED, ALONE, FEW = (((0, 20), (1, 3)), ((1, 2), (0, 1))), (((0, 19),), ((0, 1),)), (((0, 2), (1, 1)), ((1, 1), (0, 1)))
HALF = 4e-3  # error bound: queries, weights and decoded values are float16


def _compare(case, bound, activations="int8", kv_k="f16", kv_v="f16", seed=1):
    kv = {"kv_k": kv_k, "kv_v": kv_v}
    actual = run_case(case, Program, activations=activations, gpu=Simulated(seed=seed), **kv)
    for a, e in zip(actual, run_case(case, Reference, **kv), strict=True):
        assert error(a, e) < bound
    return actual


@pytest.mark.parametrize("name", ["attention-multi-query", "attention-window", "attention-softcap", "attention-slopes",
                                  "attention-sinks-window", "attention-buckets-causal", "attention-value-size"])
def test_tensor_cores(name):
    _compare(replace(CASES[name], schedule=MIXED), HALF)


@pytest.mark.parametrize("name", ["attention-both-ways", "attention-both-ways-window", "attention-slopes-both-ways",
                                  "attention-cross"])
def test_tensor_cores_of_an_encoder(name):
    _compare(CASES[name], HALF)


@pytest.mark.parametrize(("name", "schedule"), [("", ALONE), ("-window", FEW), ("-biased", MIXED)])
def test_own_keys_and_those_of_an_encoder(name, schedule, monkeypatch):
    """Two parts over each cache, and several of 8 keys."""
    case = replace(CASES[f"attention-merged{name}"], schedule=schedule, encoder=(17, 2)[:1 + (schedule is not ALONE)])
    _compare(case, HALF)
    monkeypatch.setattr("numflow.cuda.attention.attention.PART_KEYS", 8)
    _compare(case, HALF)
    if schedule is FEW:
        _compare(case, 2e-5, "f32", "q4", "f32")


@pytest.mark.parametrize("case", [
    attention_case(1, 1, 256, 256, ALONE), attention_case(1, 1, 24, 8, (((0, 70),), ((0, 1),))),
    attention_case(3, 3, 80, 40, FEW), attention_case(16, 1, 16, 16, FEW), attention_case(20, 1, 8, 8, FEW),
    attention_case(2, 2, 136, 136, FEW)], ids=str)
def test_heads_of_odd_sizes(case):
    _compare(case, HALF)


@pytest.mark.parametrize("kind", CODED)
def test_codes_on_tensor_cores(kind):
    _compare(attention_case(2, 1, 32, 32, MIXED[:1]), HALF, kv_k=kind, kv_v=kind)


@pytest.mark.parametrize("kind", CODED)
def test_codes_are_those_of_the_reference(kind):
    _compare(attention_case(2, 1, 40, 72, (((0, 5), (1, 3)), ((1, 1), (0, 1)))), 2e-5, "f32", kind, kind)


@pytest.mark.parametrize(("kv_k", "kv_v"), [("f32", "f16"), ("f16", "q4"), ("q8", "f16"), ("q5", "q3h"), ("q2", "f32")])
def test_keys_and_values_of_two_types(kv_k, kv_v):
    _compare(attention_case(4, 2, 32, 48, FEW), HALF, kv_k=kv_k, kv_v=kv_v)


@pytest.mark.parametrize("schedule", [ALONE, FEW, MIXED], ids=["many", "few", "both"])
def test_parts(schedule, monkeypatch):
    """Parts of 8 keys, most of which are empty."""
    monkeypatch.setattr("numflow.cuda.attention.attention.PART_KEYS", 8)
    case = replace(CASES["attention-sinks-window"], schedule=schedule)
    _compare(case, HALF)
    if schedule is FEW:
        _compare(case, 2e-5, "f32", "q4", "f32")


def test_the_order_of_threads_does_not_matter():
    case = attention_case(2, 1, 32, 32, MIXED)
    first = _compare(case, HALF, kv_k="q6", kv_v="f16", seed=0)
    for a, b in zip(_compare(case, HALF, kv_k="q6", kv_v="f16", seed=3), first, strict=True):
        np.testing.assert_array_equal(a, b)


def _batch(begin, end, block):
    ids = np.arange(begin, end, dtype=np.int32)
    return Batch(tokens=ids, positions=ids, starts=np.array([0, len(ids)], np.int32),
                 blocks=np.array([[block]], np.int32), logit_rows=np.arange(len(ids), dtype=np.int32))


@pytest.mark.parametrize(("kv_k", "kv_v"), [("q3h", "q5"), ("f16", "q2")])
def test_blocks_are_copied_and_swapped(kv_k, kv_v):
    case = attention_case(1, 1, 40, 40)
    program = Program(case.network, case.weights, gpu=Simulated(seed=1), kv_k=kv_k, kv_v=kv_v)
    program.reserve(5)
    program.run(_batch(0, 6, 3), output=None)
    expected = program.run(_batch(6, 7, 3))
    assert np.isfinite(expected).all()
    program.copy_blocks([3], [2])
    program.load_blocks([0, 4], program.save_blocks([3, 2]))
    for block in (2, 0, 4):
        np.testing.assert_array_equal(program.run(_batch(6, 7, block)), expected)


def test_bytes_of_a_region():
    for kind in KV_TYPES:
        bits = CODED[kind].bits_per_value if kind in CODED else {"f32": 32, "f16": 16}[kind]
        assert region_bytes(kind, 64, 64) == 64 * 64 * bits / 8
        assert region_bytes(kind, 36, 64) == 64 * (64 if kind in CODED else 40) * bits / 8


@pytest.mark.parametrize(("kind", "name"), [
    ("f16", "28-20"), ("f16", "96-48"), ("f16", "352-320"), ("q8", "352-320"), ("q8", "28-20"), ("q3h", "96-48"),
    ("q5", "64-64")])
def test_values_that_are_a_prefix_of_keys(kind, name):
    """On tensor cores and in float32. For the widest values, a block has a slice of columns, and several blocks share
    rows."""
    case = replace(CASES[f"attention-values-in-keys-{name}"], schedule=FEW if name == "352-320" else MIXED)
    for activations, bound in (("int8", HALF), ("f32", 2e-5)):
        _compare(case, bound, activations, kind, kind)
