"""Every family's tiny model on several devices gives the results of one device."""

import numpy as np
import pytest

from numflow import network
from numflow.errors import DeviceError, NetworkError
from tests.partition.plans import error, model_of, one_device, several_devices
from tests.specs.case import gguf_names, load_case, memory_checkpoint, names
from tests.specs.weights import values

# Some of whose layers read the keys and values of earlier ones.
SHARING = ("gemma3n", "gemma4", "gemma4_unified_multimodal", "mistral_large4")
NOISE = 2e-5  # some of these models magnify rounding: on one device, the two executors differ by up to 1e-5
# There they differ by 1.4e-5 to 4.5e-5, as the instructions of the processor round.
LOUD = {"gemma4": 6e-5, "muse_spark": 6e-5, "zamba2": 2e-4, "zamba2_adapted": 8e-5, "zamba2_one_block": 8e-5}
CHANGE, MAGNIFIED = 1e-5, 150  # a relative change of the weights; how many times that the logits of a LOUD model differ


@pytest.mark.parametrize("name", names())
@pytest.mark.thin(10)
def test_on_the_reference(name):
    _check(name, *model_of(name), "reference", ("0;1",), ("0&1;2", "0*3&1"))


@pytest.mark.parametrize("name", gguf_names())
@pytest.mark.thin(8)
def test_checkpoints_in_gguf(name):
    _check(name, *model_of(name, gguf=True), "reference", (), ("0&1;2&3",))


@pytest.mark.parametrize("name", names())
@pytest.mark.thin(32)
def test_on_the_cpu(name):
    _check(name, *model_of(name), "cpu", ("0*2;1",), ("0&1;2&3",))


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_on_the_cpu_in_more_ways(name):
    _check(name, *model_of(name), "cpu", ("0;1", "cpu;0"), ("0&1", "0*2&1&2", "0&1&2;3*0.5"))


def _check(name, built, checkpoint, given, backend, by_layer, by_tensor):
    expected = one_device(built, checkpoint, backend, **given)
    for devices in (*by_layer, *by_tensor):
        try:
            found = several_devices(built, checkpoint, backend, devices, **given)
        except DeviceError as problem:
            assert ";" in devices and "1 layers cannot be cut into 2 groups" in str(problem)
            continue
        except NetworkError as problem:  # layers that read another's keys stay with it
            assert ";" in devices and name in SHARING and "cut the model elsewhere, or by tensor" in str(problem)
            continue
        if devices in by_layer:
            np.testing.assert_array_equal(found, expected, err_msg=devices)
        else:
            assert error(found, expected) < LOUD.get(name, NOISE), devices


@pytest.mark.merge
def test_what_magnifies_rounding():
    """Models with a larger bound amplify small changes of their weights; the amplification does not depend on the
    processor."""
    for name, bound in LOUD.items():
        built, checkpoint, given = model_of(name)
        exact = one_device(built, checkpoint, "reference", **given)
        assert error(one_device(built, checkpoint, "cpu", **given), exact) < bound
        assert np.median([_magnified(name, seed) for seed in range(3)]) > MAGNIFIED > _magnified("gemma3n", 0)


def _magnified(name: str, seed: int) -> float:
    """Relative change of the reference's logits over CHANGE, the relative random change of all weights."""
    case, rng = load_case(name), np.random.default_rng(seed)

    def logits(change: float) -> np.ndarray:
        def make(tensor: str, shape: tuple[int, ...]) -> np.ndarray:
            return (values(tensor, shape) * (1 + change * rng.standard_normal(shape))).astype(np.float32)
        checkpoint = memory_checkpoint(case.configs[0], case.tensors, make=make)
        built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
        return one_device(built, checkpoint, "reference", ids=case.inputs[0]["ids"])
    return error(logits(CHANGE), logits(0)) / CHANGE
