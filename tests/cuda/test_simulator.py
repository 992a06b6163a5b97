"""Errors that the simulator must find."""

import numpy as np
import pytest

from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.lang import intrinsics as i
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.kernel import REGISTRY, Kernel, device, kernel
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.simulator import SimulatorError
from numflow.errors import DeviceError

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
shared = SharedArray(f32, 64)


def run(body, threads, seed=0, grid=(1, 1, 1)):
    """y f32 [64] after a kernel with one argument."""
    device = Simulated(seed=seed)
    memory = device.alloc(256)
    device.upload(memory.at(), np.zeros(64, np.float32))
    device.launch(Launch(Kernel("probe", body, (f32.ptr,), threads), grid, (memory.at(),)))
    return device.download(memory.at(), 256).view(np.float32)


def test_a_missing_barrier_shows_under_some_seed():
    def forgets(y):
        t, part = i.thread_index(), shared()
        part[t] = f32(t)
        y[t] = part[(t + 32) % 64]

    def waits(y):
        t, part = i.thread_index(), shared()
        part[t] = f32(t)
        i.sync_block()
        y[t] = part[(t + 32) % 64]

    expected = (np.arange(64, dtype=np.float32) + 32) % 64
    for seed in range(3):
        np.testing.assert_array_equal(run(waits, 64, seed), expected)
        assert not np.array_equal(run(forgets, 64, seed), expected)


def test_threads_that_skip_a_barrier():
    def half(y):
        if i.thread_index() < 16:
            i.sync_block()

    def one_warp(y):
        if i.thread_index() < 32:
            i.sync_block()

    def mixed(y):
        if i.lane_index() < 16:
            i.sync_warp()
        else:
            i.sync_block()

    for body, message in ((half, "some are at block and some at end"), (one_warp, "1 of 2 warps wait"),
                          (mixed, "some are at block and some at warp")):
        with pytest.raises(SimulatorError, match=message):
            run(body, 64)


def test_an_index_outside_its_memory():
    def beyond(y):
        y[u32(i.thread_index() + 33)] = f32(0)

    with pytest.raises(SimulatorError, match=r"global float32\[64\] accessed at 64"):
        run(beyond, 32)


def test_memory_of_another_device():
    one, other = Simulated(0), Simulated(1)
    memory = other.alloc(256)
    with pytest.raises(DeviceError, match="simulated GPU 0 was given memory of simulated GPU 1"):
        one.launch(Launch(Kernel("probe", lambda y: None, (f32.ptr,), 32), (1, 1, 1), (memory.at(),)))


def test_fresh_memory_is_not_zero():
    device = Simulated()
    assert np.isnan(device.download(device.alloc(64).at(), 64).view(np.float32)).all()


def test_every_block_of_the_grid_runs():
    def count(y):
        if i.thread_index() == 0:
            y[i.block_x() + 3 * i.block_y() + 6 * i.block_z()] = f32(i.grid_x() * 100 + i.grid_y() * 10 + i.grid_z())

    assert run(count, 32, seed=5, grid=(3, 2, 2))[:12].tolist() == [322.0] * 12


def test_kernels_of_one_name_are_told_apart_by_what_they_compute():
    """Kernels are compared by content, not by identity of the objects they use: the same device function twice, or two
    equal ones."""
    def doubled():
        @device
        def double(x):
            return x + x

        return double

    def made(first, second, factor):
        @kernel("test_names")
        def body(y: f32.ptr):
            y[0] = first(y[0]) + second(y[0]) * f32(factor)

        return body

    one = doubled()
    try:
        assert made(one, one, 2.0) is made(one, doubled(), 2.0) is made(doubled(), doubled(), 2.0)
        with pytest.raises(AssertionError, match="two kernels are called test_names"):
            made(one, one, 3.0)
    finally:
        REGISTRY.pop("test_names", None)
