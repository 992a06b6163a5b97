"""Embeddings, keys and values in host memory, and sampling on the device."""

import numpy as np
import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.program import Program
from numflow.decoding.choice import Choice
from numflow.errors import RequestError
from numflow.lab.shapes import Shape, random_network
from numflow.network import WeightSource
from numflow.ops import Batch
from tests.cuda.fake_driver import FakeDriver, fake_binary

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


def run(gpu, steps=4, greedy=False, **options):
    """Logits, or ids, of a prompt and some single tokens."""
    network, checkpoint = random_network(Shape(2, 32, 2, 1, 32, 40, 64), "q4")
    program = Program(network, WeightSource(network, checkpoint), activations="f32", gpu=gpu, **options)
    program.reserve(2)
    found, tokens = [], np.array([3, 9, 27])
    for step in range(steps):
        begin, count = (0, 3) if step == 0 else (2 + step, 1)
        batch = Batch(tokens[-count:], np.arange(begin, begin + count), np.array([0, count]), np.array([[1]]),
                      np.array([count - 1]))
        found.append(program.sample(batch, [Choice()]) if greedy else program.run(batch))
        tokens = np.array([5 + step])
    facts = program.weights_bytes, program.kv_bytes
    program.close()
    return np.concatenate(found), facts


def test_memory_of_the_host():
    alone = Simulated()
    plain, (weights, _) = run(alone)
    device = Simulated(seed=1)
    hosted, (fewer, _) = run(device, host_embeddings=True, host_kv_percent=50)
    np.testing.assert_allclose(hosted, plain, rtol=1e-4, atol=1e-5)
    assert fewer < weights
    assert device.host_bytes > alone.host_bytes
    fake = FakeDriver()
    np.testing.assert_array_equal(run(Gpu(fake, 0, fake_binary), host_embeddings=True)[0], hosted)
    assert fake.replays == 2  # the host's copies come before the graph
    assert fake.memory == {}


def test_tokens_chosen_on_the_device():
    logits, _ = run(Simulated(), steps=2)
    ids, _ = run(Simulated(seed=2), steps=2, greedy=True)
    np.testing.assert_array_equal(ids, logits.argmax(1))


def test_a_share_that_is_none():
    with pytest.raises(RequestError, match="host_kv_percent should be in 0 .. 100, is 120"):
        run(Simulated(), host_kv_percent=120)
