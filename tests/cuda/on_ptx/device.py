"""A device of numflow that runs each kernel from the PTX that is compiled for a GPU.

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
    """As the simulator, with the compiled kernels. seed: of a random order of warps; 0 for the lowest block first.

    changed: kernels that run in place of those of these names, for tests of the checks.
    """

    def __init__(self, index: int = 0, seed: int = 0, checks: Checks | None = None, nbytes: int = 512 << 20,
                 wgmma: bool = False, tma: bool = True, float8: bool = False, float4: bool = False):
        super().__init__(index, seed, wgmma, tma, float8, float4)
        self.name, self.checks, self.global_memory = f"PTX machine {index}", checks or Checks(), GlobalMemory(nbytes)
        self.launched: Counter[str] = Counter()
        self.changed: dict[str, Parsed] = {}

    def alloc(self, nbytes: int) -> Memory:
        """Apart from all others; 0xFF until written."""
        return Memory(self, nbytes, self.global_memory.take(nbytes))

    def alloc_host(self, nbytes: int) -> Memory:
        """Memory of the host, which writes unseen: it counts as written."""
        memory = super().alloc_host(nbytes)
        self.global_memory.wrote(memory.handle)
        return memory

    def free(self, memory: Memory) -> None:
        """Nobody's from here on."""
        self.global_memory.drop(memory.handle)

    def upload(self, to: Ref, data: np.ndarray) -> None:
        """Copy an array to the device."""
        super().upload(to, data)
        self.global_memory.wrote(self._bytes(to, data.nbytes))

    def copy(self, to: Ref, source: Ref, nbytes: int) -> None:
        """From one place on the device to another: what is unwritten stays so."""
        super().copy(to, source, nbytes)
        self._shadow(to, nbytes)[:] = self._shadow(source, nbytes)

    def fetch(self, to: Ref, other: Simulated, source: Ref, nbytes: int) -> None:
        """Copy from another device's memory."""
        super().fetch(to, other, source, nbytes)
        self.global_memory.wrote(self._bytes(to, nbytes))

    def launch(self, work: Launch | Order) -> None:
        """Run a kernel from its PTX.

        Raises:
            Fault: it does what no kernel may.
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
        """A parameter as the driver passes it."""
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
    """As digest, worked out once."""
    return digest(kernel)


_PARSED: dict[str, Parsed] = {}


def parsed(name: str, key: str, kernel: Kernel) -> Parsed:
    """The kernel's PTX as it is for sm_90, or the only cards that have its instructions; parsed once in a process."""
    if f"{name}-{key}" not in _PARSED:
        target = kernel.target if kernel.target.endswith("a") else "sm_90"
        _PARSED[f"{name}-{key}"] = parse(dependent(assembly(kernel), target))
    return _PARSED[f"{name}-{key}"]


def assembly(kernel: Kernel) -> str:
    """The kernel's PTX, from the disk or compiled and kept there: beside machine code, in a folder of its own."""
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
    """Put a whole file in its place."""
    import tempfile
    from pathlib import Path

    places.make(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)
