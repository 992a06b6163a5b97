"""A fake driver that runs nothing and returns made-up times: for each kernel, and for copies by their direction."""

import itertools

import numpy as np

from tests.cuda.fake_driver import OK, FakeDriver

KERNELS = {"gemv_f16_1": 0.25, "gemm_f16_128": 0.4, "copy_rows": 0.002}  # ms on GPU 0
LATENCY = {"host": 0.008, "device": 0.001, "peer": 0.005}                # ms of a copy
BANDWIDTH = {"host": 25e6, "device": 2e9, "peer": 200e6}                 # bytes a ms
OUTLIER = 4  # every fourth time is ten times too long


class TimedDriver(FakeDriver):
    """GPU 1 takes twice as long for a kernel as GPU 0, GPU 2 three times. works: number of kernels and copies so
    far."""

    def __init__(self, devices=1):
        super().__init__(devices)
        self.works, self._now, self._asked, self._current = 0, 0.0, 0, None
        self._at, self._device_of = {}, {}
        self._addresses = itertools.count(1 << 50, 1 << 33)

    def cuDevicePrimaryCtxRetain(self, device):
        context = object()
        self._device_of[context] = device
        return OK, context

    def cuCtxSetCurrent(self, context):
        self._current = context
        return (OK,)

    def cuMemAlloc(self, nbytes):
        address = next(self._addresses)
        self.memory[address] = None
        return OK, address

    def cuMemHostAlloc(self, nbytes, flags):
        memory = np.zeros(nbytes, np.uint8)
        self.memory[memory.ctypes.data] = memory
        return OK, memory.ctypes.data

    def cuMemcpyAsync(self, to, source, nbytes, stream):
        return self._copied("host" if min(to, source) < 1 << 50 else "device", nbytes)

    def cuMemcpyPeerAsync(self, to, to_context, source, source_context, nbytes, stream):
        assert to_context is self._current and self._device_of[source_context] != self._device_of[to_context]
        return self._copied("peer", nbytes)

    def cuEventRecord(self, event, stream):
        self._at[event] = self._now
        return (OK,)

    def cuEventElapsedTime(self, begin, end):
        self._asked += 1
        return OK, (self._at[end] - self._at[begin]) * (1 if self._asked % OUTLIER else 10)

    def _run(self, kernel, grid, values, cluster):
        self.works += 1
        self._now += KERNELS[kernel.name] * (1 + self._device_of[self._current])

    def _copied(self, way, nbytes):
        self.works += 1
        self._now += LATENCY[way] + nbytes / BANDWIDTH[way]
        return (OK,)


def use(monkeypatch, driver) -> None:
    """Replace the machine's driver by this one."""
    from numflow.cuda.compiler import compat
    from numflow.cuda.device import gpu as runtime
    from tests.cuda.fake_driver import fake_binary

    monkeypatch.setattr(compat, "driver", lambda: driver)
    monkeypatch.setattr(runtime, "open_gpu", lambda index, careful=None: runtime.Gpu(driver, index, fake_binary))
