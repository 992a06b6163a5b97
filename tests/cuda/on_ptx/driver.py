"""A simulated driver with several GPUs, streams and events, whose kernels run from their PTX in one address space.

Streams make progress in any order that the events allow (lazy_driver.py), and warps in a random order. A copy or kernel
that is not ordered after the writes that it needs reads uninitialised memory, which is a finding, or wrong values.
"""

import ctypes

import numpy as np

from numflow.cuda.lang.scalar import Pointer, f32, i32
from tests.cuda.fake_driver import OK
from tests.cuda.lazy_driver import LazyDriver
from tests.cuda.on_ptx.device import digest_of, parsed
from tests.cuda.ptx.findings import Checks
from tests.cuda.ptx.launch import launch
from tests.cuda.ptx.memory import GlobalMemory


class PtxDriver(LazyDriver):
    """LazyDriver with compiled kernels. checks: the findings. ordered: False plants a bug: streams ignore events."""

    def __init__(self, devices: int = 1, seed: int = 0, nbytes: int = 1 << 30, ordered: bool = True):
        super().__init__(devices, seed)
        self.global_memory, self.checks, self.ordered = GlobalMemory(nbytes), Checks(), ordered

    def cuMemAlloc(self, nbytes):
        memory = self.global_memory.allocate(nbytes)
        self.memory[memory.ctypes.data] = memory
        return OK, memory.ctypes.data

    def cuMemHostAlloc(self, nbytes, flags):
        code, address = self.cuMemAlloc(nbytes)
        self.global_memory.mark_written(self.memory[address])     # because the host's writes are not seen
        return code, address

    def cuMemFree(self, address):
        memory = self.memory[address]
        freed = super().cuMemFree(address)
        self.global_memory.free(memory)
        return freed

    cuMemFreeHost = cuMemFree

    def cuMemcpyAsync(self, to, source, nbytes, stream):
        assert stream not in self.captured, "uploading while a stream records"
        return self._put(stream, lambda: self._copied(to, source, nbytes))

    def cuStreamWaitEvent(self, stream, event, flags):
        return super().cuStreamWaitEvent(stream, event, flags) if self.ordered else (OK,)

    def _copied(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes and their flags of being written. Bytes from memory without flags count as written."""
        ctypes.memmove(to, source, nbytes)
        there, here = (self._shadow(place, nbytes) for place in (to, source))
        if there is not None:
            there[:] = True if here is None else here

    def _shadow(self, address: int, nbytes: int) -> np.ndarray | None:
        """The flags of being written of these bytes; None outside of global memory."""
        begin, memory = address - self.global_memory.base, self.global_memory
        return memory.written[begin:begin + nbytes] if 0 <= begin < memory.bytes.size else None

    def _run(self, kernel, grid, values, cluster):
        self.launches += 1
        arguments = [np.uint64(value) if isinstance(kind, Pointer) else
                     {f32: np.float32, i32: np.int32}.get(kind, np.uint32)(value)
                     for kind, value in zip(kernel.signature, values, strict=True)]
        launch(parsed(kernel.name, digest_of(kernel), kernel), grid, kernel.threads, arguments, self.global_memory,
               self.checks, kernel.name, self._dice.randrange(1, 1 << 30), kernel.dynamic, cluster=cluster)
