"""Several devices: a tiny model cut by layer and by tensor over simulated GPUs, and over streams of one GPU."""

import pytest

from numflow.cuda.runtime import Gpu
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.partition.plans import TOLERANCE, error, model_of, one_device, placed, run

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


@pytest.mark.parametrize("devices", ["0;1", "0&1"])
def test_the_same_as_one_device(devices):
    built, checkpoint, given = model_of("qwen2")
    program = placed(built, checkpoint, "cuda", devices, activations="f32", gpu="simulator")
    try:
        found = run(program, output="logits", **given)
    finally:
        program.close()
    assert error(found, one_device(built, checkpoint, "reference", **given)) < TOLERANCE


def test_streams_of_one_gpu(monkeypatch):
    """Values pass between two devices of one driver by its copies and events."""
    fake = FakeDriver()
    monkeypatch.setattr("numflow.cuda.runtime.driver", lambda: fake)
    monkeypatch.setattr("numflow.cuda.runtime.open_gpu", lambda index: Gpu(fake, 0, fake_binary))
    built, checkpoint, given = model_of("qwen2")
    program = placed(built, checkpoint, "cuda", "0&1", activations="f32", gpu="gpu")
    try:
        found = run(program, output="logits", **given)
    finally:
        program.close()
    assert error(found, one_device(built, checkpoint, "reference", **given)) < TOLERANCE
    assert fake.memory == {}
