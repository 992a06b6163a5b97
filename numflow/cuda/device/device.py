"""The interface of a device: memory, copies, launches, events. Implementations: a simulator (here), a GPU (gpu.py).

    device.alloc(n) -> Memory      memory.at(offset) -> Ref      device.launch(Launch(kernel, grid, args))

A kernel argument is a number, or a Ref, which becomes a pointer of the type in the kernel's signature. A device has one
main stream, whose work runs in order. `mark` and `wait` order the streams of different devices by events.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.lang.parameters import is_group
from numflow.cuda.lang.scalar import Pointer
from numflow.cuda.lang.simulator import SimulatedPointer, launch
from numflow.errors import DeviceError

MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # limits of a grid in x, y and z
MOST_BYTES = 1 << 34  # of a matrix, or of one layer's keys or values: kernels index 4-byte words by 32-bit integers


@dataclass(frozen=True, eq=False)
class Memory:
    """An allocation on a device. handle: its address, or on the simulator a NumPy array."""

    device: Any
    nbytes: int
    handle: Any

    def at(self, offset: int = 0) -> "Ref":
        """The address `offset` bytes from the start."""
        return Ref(self, offset)


@dataclass(frozen=True)
class Ref:
    """An address in device memory: an allocation and an offset in bytes."""

    memory: Memory
    offset: int = 0

    def __add__(self, nbytes: int) -> "Ref":
        return Ref(self.memory, self.offset + int(nbytes))


@dataclass(frozen=True)
class Launch:
    """A kernel launch on a grid of blocks (x, y, z).

    args:    one for each parameter of the kernel as written; a group of parameters is one tuple (lang/parameters.py).
    beside:  launch in the device's second stream.
    cluster: blocks of a thread block cluster, adjacent in x; 1 for none (lang/cluster.py).
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    args: tuple
    beside: bool = False
    cluster: int = 1

    def check(self) -> None:
        """Check the grid and the arguments, for a clearer message than the driver's.

        Raises:
            DeviceError: the grid is too large, or the arguments are not those of the kernel's parameters.
        """
        name = self.kernel.name
        if any(count > most for count, most in zip(self.grid, MOST_BLOCKS)):
            raise DeviceError(f"kernel {name}: a grid of {self.grid} blocks is larger than {MOST_BLOCKS}, the most "
                              "that a GPU takes; a batch of fewer tokens makes it smaller")
        if self.grid[0] % self.cluster:
            raise DeviceError(f"kernel {name}: {self.grid[0]} blocks are not whole clusters of {self.cluster}")
        parameters = self.kernel.parameters
        if len(self.args) != len(parameters):
            raise DeviceError(f"kernel {name} has {len(parameters)} parameters, {len(self.args)} were given")
        for index, (parameter, value) in enumerate(zip(parameters, self.args)):
            expected = parameter.__name__ if is_group(parameter) else "one value"
            given = type(value).__name__ if isinstance(value, tuple) else "one value"
            if given != expected:
                raise DeviceError(f"kernel {name}: parameter {index} is {expected}, {given} was given")

    @property
    def values(self) -> tuple:
        """The arguments with groups flattened, one for each parameter of the kernel's signature."""
        return tuple(each for value in self.args for each in (value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True)
class Order:
    """Order between the two streams of a device: record an event in a stream, or let the stream wait for the event.

    beside: the second stream; else the main one.
    """

    event: str
    beside: bool
    waits: bool


def within_reach(what: str, nbytes: int) -> int:
    """Return `nbytes` after checking that kernels can address that many bytes.

    Raises:
        DeviceError: there are more than MOST_BYTES.
    """
    if nbytes > MOST_BYTES:
        raise DeviceError(f"{what} takes {nbytes / 2**30:.1f} GiB; kernels reach {MOST_BYTES >> 30} GiB; "
                          "a type of fewer bits, or several devices, make it smaller")
    return nbytes


class Device(Protocol):
    """A stream of work on one GPU, or on its simulator."""

    name: str
    graphs: bool  # whether launches can be recorded as a CUDA graph and replayed (record, replay, drop)
    wgmma: bool   # whether kernels for Hopper run on it (lang/warpgroup.py)
    tcgen05: bool  # whether kernels for compute capability 10.x run on it (lang/tensor_memory.py)
    tma: bool     # whether both use bulk copies and thread block clusters (lang/cluster.py)
    float8: bool  # whether it has products of 8-bit floats (wgmma, tcgen05, or linear/code_gemm.py)
    float4: bool  # whether it has products of 4-bit floats with block scales (tcgen05, or linear/code_gemm.py)
    cards: int    # GPUs that the driver reports; if any, `address` and `lend` give libraries addresses and the stream

    def alloc(self, nbytes: int) -> Memory: ...
    def alloc_host(self, nbytes: int) -> Memory: ...
    def free(self, memory: Memory) -> None: ...
    def upload(self, to: Ref, data: np.ndarray) -> None: ...
    def download(self, source: Ref, nbytes: int) -> np.ndarray: ...
    def copy(self, to: Ref, source: Ref, nbytes: int) -> None: ...
    def launch(self, work: Launch | Order) -> None: ...
    def host_array(self, memory: Memory) -> np.ndarray: ...
    def mark(self, again: Any = None) -> Any: ...
    def until(self, event: Any) -> None: ...
    def wait(self, event: Any) -> None: ...
    def fetch(self, to: Ref, other: "Device", source: Ref, nbytes: int) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


class Simulated:
    """The simulator: NumPy memory, and kernels that run as Python. Fresh memory is filled with 0xFF bytes (NaN as
    floats). Addresses of other devices are refused.

    seed: of the order in which threads run. wgmma: simulate a Hopper GPU. tcgen05: simulate one of compute capability
    10.x. tma: use bulk copies too; clusters have one block. float8, float4: simulate a GPU with products of 8-bit
    floats, and of 4-bit floats too.
    """

    graphs, cards = False, 0

    def __init__(self, index: int = 0, seed: int = 0, wgmma: bool = False, tma: bool = True,
                 float8: bool = False, float4: bool = False, tcgen05: bool = False):
        self.wgmma, self.tcgen05, self.tma = wgmma, tcgen05, (wgmma or tcgen05) and tma
        self.float8, self.float4 = wgmma or tcgen05 or float8 or float4, tcgen05 or float4
        self.name, self.seed, self.launches, self.host_bytes = f"simulated GPU {index}", seed, 0, 0

    def alloc(self, nbytes: int) -> Memory:
        """Allocate memory, aligned to 256 bytes as on a GPU."""
        buffer = np.full(nbytes + 256, 0xFF, np.uint8)
        begin = -buffer.ctypes.data % 256
        return Memory(self, nbytes, buffer[begin:begin + nbytes])

    def alloc_host(self, nbytes: int) -> Memory:
        """Allocate host memory that kernels can read and write."""
        self.host_bytes += nbytes
        return self.alloc(nbytes)

    def free(self, memory: Memory) -> None:
        """Nothing to do: NumPy frees the memory with its last reference."""

    def upload(self, to: Ref, data: np.ndarray) -> None:
        """Copy an array to the device."""
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._bytes(to, data.size)[:] = data

    def download(self, source: Ref, nbytes: int) -> np.ndarray:
        """A copy of device memory, uint8 [nbytes]."""
        return self._bytes(source, nbytes).copy()

    def copy(self, to: Ref, source: Ref, nbytes: int) -> None:
        """Copy within the device's memory."""
        self._bytes(to, nbytes)[:] = self._bytes(source, nbytes)

    def launch(self, work: Launch | Order) -> None:
        """Run a kernel to its end. Both streams are one here, so an Order has no effect."""
        if isinstance(work, Order):
            return
        self.launches += 1
        work.check()
        args = tuple(self._argument(kind, value) for kind, value in zip(work.kernel.signature, work.values))
        launch(work.kernel.plain, work.grid, work.kernel.threads, args, self.seed)

    def host_array(self, memory: Memory) -> np.ndarray:
        """Memory of `alloc_host` as a NumPy array, uint8."""
        return memory.handle

    def mark(self, again: None = None, timing: bool = False) -> None:
        """Nothing to record: work is complete when a call returns."""

    def until(self, event: None) -> None:
        """Nothing to wait for."""

    def wait(self, event: None) -> None:
        """Nothing to wait for."""

    def fetch(self, to: Ref, other: "Simulated", source: Ref, nbytes: int) -> None:
        """Copy from another device's memory."""
        self._bytes(to, nbytes)[:] = other.download(source, nbytes)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to release."""

    def _argument(self, kind, value):
        if not isinstance(kind, Pointer):
            return kind(value)
        if value is None:
            return None
        size = value.memory.nbytes - value.offset
        memory = self._bytes(value, size - size % kind.to.size)
        return SimulatedPointer(memory.view(kind.to.dtype))

    def _bytes(self, ref: Ref, nbytes: int) -> np.ndarray:
        if ref.memory.device is not self:
            raise DeviceError(f"{self.name} was given memory of {ref.memory.device.name}")
        if ref.offset < 0 or ref.offset + nbytes > ref.memory.nbytes:
            raise DeviceError(f"bytes {ref.offset} .. {ref.offset + nbytes} of {ref.memory.nbytes} on {self.name}")
        return ref.memory.handle[ref.offset:ref.offset + nbytes]
