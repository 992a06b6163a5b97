"""Every family's tiny model over several devices gives what one device gives."""

import numpy as np
import pytest

from numflow.errors import DeviceError, NetworkError
from tests.partition.plans import error, model_of, one_device, several_devices
from tests.specs.case import gguf_names, names

SHARING = ("gemma3n", "gemma4")  # whose last layers read the keys and values of earlier ones
NOISE = 2e-5  # some of these models magnify rounding: on one device, the two executors differ by up to 1e-5
LOUD = {"gemma4": 6e-5}  # there they differ by 3.0e-5


@pytest.mark.parametrize("name", names())
def test_on_the_reference(name):
    _check(name, *model_of(name), "reference", ("0;1",), ("0&1;2", "0*3&1"))


@pytest.mark.parametrize("name", gguf_names())
def test_checkpoints_in_gguf(name):
    _check(name, *model_of(name, gguf=True), "reference", (), ("0&1;2&3",))


@pytest.mark.parametrize("name", names())
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


def test_what_magnifies_rounding():
    """A larger bound is for a model whose two executors differ by more than the others' on one device."""
    for name, bound in LOUD.items():
        built, checkpoint, given = model_of(name)
        apart = error(*(one_device(built, checkpoint, backend, **given) for backend in ("reference", "cpu")))
        assert NOISE < apart < bound
