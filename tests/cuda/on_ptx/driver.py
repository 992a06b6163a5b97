"""Several PTX machines at once: the lazy driver's queues, whose kernels run from their PTX in an address space of all.

Streams get on in any order that events allow, warps in a random order of their own. A copy or a kernel that is not
ordered behind what it reads finds memory that nobody wrote, which is a finding, or other numbers.
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
    """As the lazy driver. checks: what was found. ordered: whether streams heed events; not, to plant that bug."""

    def __init__(self, devices: int = 1, seed: int = 0, nbytes: int = 1 << 30, ordered: bool = True):
        super().__init__(devices, seed)
        self.global_memory, self.checks, self.ordered = GlobalMemory(nbytes), Checks(), ordered

    def cuMemAlloc(self, nbytes):
        memory = self.global_memory.take(nbytes)
        self.memory[memory.ctypes.data] = memory
        return OK, memory.ctypes.data

    def cuMemHostAlloc(self, nbytes, flags):
        code, address = self.cuMemAlloc(nbytes)
        self.global_memory.wrote(self.memory[address])     # by the host, which writes unseen
        return code, address

    def cuMemFree(self, address):
        memory = self.memory[address]
        freed = super().cuMemFree(address)
        self.global_memory.drop(memory)
        return freed

    cuMemFreeHost = cuMemFree

    def cuMemcpyAsync(self, to, source, nbytes, stream):
        assert stream not in self.captured, "uploading while a stream records"
        return self._put(stream, lambda: self._copied(to, source, nbytes))

    def cuStreamWaitEvent(self, stream, event, flags):
        return super().cuStreamWaitEvent(stream, event, flags) if self.ordered else (OK,)

    def _copied(self, to: int, source: int, nbytes: int) -> None:
        """Bytes, and whether they were written: what comes from elsewhere was."""
        ctypes.memmove(to, source, nbytes)
        there, here = (self._shadow(place, nbytes) for place in (to, source))
        if there is not None:
            there[:] = True if here is None else here

    def _shadow(self, address: int, nbytes: int) -> np.ndarray | None:
        """Which of these bytes were written; None for memory that is not the machines'."""
        begin, memory = address - self.global_memory.base, self.global_memory
        return memory.written[begin:begin + nbytes] if 0 <= begin < memory.bytes.size else None

    def _run(self, kernel, grid, values, cluster):
        self.launches += 1
        arguments = [np.uint64(value) if isinstance(kind, Pointer) else
                     {f32: np.float32, i32: np.int32}.get(kind, np.uint32)(value)
                     for kind, value in zip(kernel.signature, values, strict=True)]
        launch(parsed(kernel.name, digest_of(kernel), kernel), grid, kernel.threads, arguments, self.global_memory,
               self.checks, kernel.name, self._dice.randrange(1, 1 << 30), kernel.dynamic, cluster=cluster)
