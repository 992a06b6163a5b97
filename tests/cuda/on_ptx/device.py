"""A device of numflow that runs each kernel from its compiled PTX on the interpreter of tests/cuda/ptx.

    device = PtxDevice()                            # where tests have Simulated()
    run_case(case, Program, gpu=device)
    device.checks.notes, device.launched            # findings; launches of each kernel
"""

import functools
from collections import Counter

import numpy as np

from numflow import places, trust
from numflow.cuda.compiler.compile import PTX_FOR, digest, folder, to_ptx
from numflow.cuda.compiler.dependent import dependent
from numflow.cuda.device.device import Launch, Memory, Order, Ref, Simulated
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.lang.scalar import Pointer, f32, i32
from tests.cuda.ptx.findings import Checks, Fault
from tests.cuda.ptx.launch import launch
from tests.cuda.ptx.memory import GlobalMemory
from tests.cuda.ptx.parse import Kernel as Parsed
from tests.cuda.ptx.parse import parse


class PtxDevice(Simulated):
    """The simulator, but with compiled kernels.

    seed: of a random order of warps, 0 for the default order. changed: kernels that replace those of the same names,
    for tests of the checks.
    """

    def __init__(self, index: int = 0, seed: int = 0, checks: Checks | None = None, nbytes: int = 512 << 20,
                 wgmma: bool = False, tma: bool = True, float8: bool = False, float4: bool = False,
                 tcgen05: bool = False):
        super().__init__(index, seed, wgmma, tma, float8, float4, tcgen05)
        self.name, self.checks, self.global_memory = f"PTX machine {index}", checks or Checks(), GlobalMemory(nbytes)
        self.launched: Counter[str] = Counter()
        self.changed: dict[str, Parsed] = {}

    def alloc(self, nbytes: int) -> Memory:
        """Allocate memory, with guard bytes around it, 0xFF until written."""
        return Memory(self, nbytes, self.global_memory.allocate(nbytes))

    def alloc_host(self, nbytes: int) -> Memory:
        """Allocate host memory. It counts as written, because the host's writes are not seen."""
        memory = super().alloc_host(nbytes)
        self.global_memory.mark_written(memory.handle)
        return memory

    def free(self, memory: Memory) -> None:
        """Free memory; later accesses are faults."""
        self.global_memory.free(memory.handle)

    def upload(self, to: Ref, data: np.ndarray) -> None:
        """Copy an array to the device."""
        super().upload(to, data)
        self.global_memory.mark_written(self._bytes(to, data.nbytes))

    def copy(self, to: Ref, source: Ref, nbytes: int) -> None:
        """Copy within the device's memory. Unwritten bytes stay marked as unwritten."""
        super().copy(to, source, nbytes)
        self._shadow(to, nbytes)[:] = self._shadow(source, nbytes)

    def fetch(self, to: Ref, other: Simulated, source: Ref, nbytes: int) -> None:
        """Copy from another device's memory."""
        super().fetch(to, other, source, nbytes)
        self.global_memory.mark_written(self._bytes(to, nbytes))

    def launch(self, work: Launch | Order) -> None:
        """Run a kernel from its PTX.

        Raises:
            Fault: an error that ends the kernel.
        """
        if isinstance(work, Order):
            return
        work.check()
        self.launches += 1
        kernel = work.kernel
        self.launched[kernel.name] += 1
        launch(self.changed.get(kernel.name) or parsed(kernel.name, digest_of(kernel), kernel), work.grid,
               kernel.threads, [self._value(kind, value) for kind, value in zip(kernel.signature, work.values)],
               self.global_memory, self.checks, kernel.name, self.seed, kernel.dynamic, cluster=work.cluster)

    def _shadow(self, ref: Ref, nbytes: int) -> np.ndarray:
        begin = self._bytes(ref, nbytes).ctypes.data - self.global_memory.base
        return self.global_memory.written[begin:begin + nbytes]

    def _value(self, kind, value):
        """A kernel argument as the driver passes it."""
        if isinstance(kind, Pointer):
            if value is None:
                return np.uint64(0)
            if value.memory.device is not self:
                raise Fault(f"{self.name} was given memory of {value.memory.device.name}")
            return np.uint64(value.memory.handle.ctypes.data + value.offset)
        if kind is f32:
            return np.float32(value)
        return np.int32(value) if kind is i32 else np.uint32(int(value) & 0xFFFFFFFF)


@functools.cache
def digest_of(kernel: Kernel) -> str:
    """The digest of a kernel, computed once."""
    return digest(kernel)


_PARSED: dict[str, Parsed] = {}


def parsed(name: str, key: str, kernel: Kernel) -> Parsed:
    """The kernel's PTX for sm_90 (dependent.py), or for the only target that it has, parsed once in a process."""
    if f"{name}-{key}" not in _PARSED:
        target = kernel.target if kernel.target.endswith("a") else "sm_90"
        _PARSED[f"{name}-{key}"] = parse(dependent(assembly(kernel), target))
    return _PARSED[f"{name}-{key}"]


def assembly(kernel: Kernel) -> str:
    """The kernel's PTX, from the disk cache, or compiled and stored there, in a folder beside the machine code."""
    path = folder() / "ptx" / f"{kernel.name}-{digest_of(kernel)}.ptx"
    if not trust.usable(path.parent, "PTX of kernels"):
        return to_ptx(kernel, PTX_FOR)
    try:
        return trust.read(path).decode()
    except OSError:
        text = to_ptx(kernel, PTX_FOR)
    keep(path, text)
    return text


def keep(path, text: str) -> None:
    """Write a file atomically: a temporary file, then a rename."""
    import tempfile
    from pathlib import Path

    places.make(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)
