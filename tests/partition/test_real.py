"""A real quantised model on several devices: bit-identical by layer, within rounding by tensor."""

import numpy as np
import pytest

import numflow
from tests.conftest import real_model
from tests.partition.plans import error

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time, in a city by the sea, there lived"


@pytest.fixture(scope="module")
def path():
    return real_model("SmolLM2-135M-Instruct.Q4_1.gguf")


def _results(path, activations, devices=None):
    """(logits of the prompt, greedy tokens)"""
    with numflow.load(path, threads=1, activations=activations, devices=devices) as model:
        ids = model.tokenizer.encode(PROMPT)
        return model.logits(ids), model.generate(ids, max_tokens=24, ignore_eos=True).ids


@pytest.fixture(scope="module")
def exact(path):
    return _results(path, "f32")


@pytest.fixture(scope="module")
def int8(path):
    return _results(path, "int8")


@pytest.mark.parametrize("devices", ["0;1", "0*2;1", "cpu;0"])
def test_by_layer(path, exact, int8, devices):
    for activations, (logits, greedy) in (("f32", exact), ("int8", int8)):
        found, tokens = _results(path, activations, devices)
        np.testing.assert_array_equal(found, logits)
        assert tokens == greedy


@pytest.mark.parametrize("devices", ["0&1", "0&1;2&3", "0&1&2"])
def test_by_tensor(path, exact, devices):
    found, tokens = _results(path, "f32", devices)
    assert error(found, exact[0]) < 1e-5
    assert tokens == exact[1]


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"])
def test_a_tied_table_is_in_memory_once(name):
    """Only vectors are duplicated, and the single key/value head of the second model."""
    def held(devices):
        with numflow.load(real_model(name), threads=1, devices=devices) as model:
            return model.program.weights_bytes
    assert held("0&1") < 1.02 * held(None)


@pytest.mark.parametrize("devices", ["0&1", "0&1;2&3"])
def test_by_tensor_with_rounded_activations(path, exact, int8, devices):
    """Another order of summation may change an int8 activation by one step; the distance to exact logits does not grow.
    """
    found, _ = _results(path, "int8", devices)
    distance = np.sqrt(np.mean((int8[0] - exact[0]) ** 2))
    assert np.sqrt(np.mean((found - exact[0]) ** 2)) < 1.2 * distance
