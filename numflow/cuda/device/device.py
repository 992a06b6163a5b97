"""Interface of a device: memory, copies, launches, order. Two implement it: the simulator, here, and a GPU.

    device.alloc(n) -> Memory      memory.at(offset) -> Ref      device.launch(Launch(kernel, grid, args))

An argument of a kernel is a number or a Ref, which becomes a pointer of the type that the kernel's signature says.
Everything that is put into a device's queue runs in order; `record` and `wait` order queues of different devices.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.lang.parameters import is_group
from numflow.cuda.lang.scalar import Pointer
from numflow.cuda.lang.simulator import SimulatedPointer, launch
from numflow.errors import DeviceError

MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # of a grid
MOST_BYTES = 1 << 34  # of a matrix, and of one layer's keys or values: kernels count their words of 4 bytes in 32 bits


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of a device. handle: the device's own: an address, or the array that stands for it."""

    device: Any
    nbytes: int
    handle: Any

    def at(self, offset: int = 0) -> "Ref":
        """The place `offset` bytes from the start."""
        return Ref(self, offset)


@dataclass(frozen=True)
class Ref:
    """A place in device memory."""

    memory: Memory
    offset: int = 0

    def __add__(self, nbytes: int) -> "Ref":
        return Ref(self.memory, self.offset + int(nbytes))


@dataclass(frozen=True)
class Launch:
    """A kernel on a grid of blocks (x, y, z).

    args:    one for each parameter as the kernel is written (lang/parameters.py).
    beside:  in the second queue of the device.
    cluster: so many blocks, side by side along x, run at the same time and reach each other (lang/cluster.py).
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    args: tuple
    beside: bool = False
    cluster: int = 1

    def check(self) -> None:
        """Refuse what no GPU takes, before it says so in its own way.

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
            wanted = parameter.__name__ if is_group(parameter) else "one value"
            given = type(value).__name__ if isinstance(value, tuple) else "one value"
            if given != wanted:
                raise DeviceError(f"kernel {name}: parameter {index} is {wanted}, {given} was given")

    @property
    def values(self) -> tuple:
        """The arguments one by one, as the kernel's signature has them."""
        return tuple(each for value in self.args for each in (value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True)
class Order:
    """Order between queues: the queue (`beside` the main one, or that) has come to the event, or waits for it."""

    event: str
    beside: bool
    waits: bool


def within_reach(what: str, nbytes: int) -> int:
    """The number of bytes, which kernels can address.

    Raises:
        DeviceError: there are more than MOST_BYTES.
    """
    if nbytes > MOST_BYTES:
        raise DeviceError(f"{what} takes {nbytes / 2**30:.1f} GiB; kernels reach {MOST_BYTES >> 30} GiB; "
                          "a type of fewer bits, or several devices, make it smaller")
    return nbytes


class Device(Protocol):
    """A queue of work on one GPU, or on what stands for it."""

    name: str
    graphs: bool  # whether launches can be recorded and replayed (record, replay, drop)
    wgmma: bool   # whether kernels for Hopper alone run on it (lang/warpgroup.py)
    tma: bool     # whether these use the copy engine and clusters (lang/cluster.py)
    float8: bool  # whether its tensor cores multiply 8-bit floats
    float4: bool  # whether they multiply 4-bit floats with scales of blocks
    cards: int    # GPUs that the driver knows; with any, `address` and `lend` are there for libraries

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
    """NumPy memory, kernels as Python. Fresh memory is 0xFF bytes, NaN as floats; refs of other devices are refused.

    seed: order in which threads run. wgmma: whether it is to be a Hopper; tma: and to use the copy engine, though its
    clusters are single blocks. float8: whether it is to multiply 8-bit floats, as a Hopper does;
    float4: and 4-bit floats.
    """

    graphs, cards = False, 0

    def __init__(self, index: int = 0, seed: int = 0, wgmma: bool = False, tma: bool = True,
                 float8: bool = False, float4: bool = False):
        self.wgmma, self.tma = wgmma, wgmma and tma
        self.float8, self.float4 = wgmma or float8 or float4, float4
        self.name, self.seed, self.launches, self.host_bytes = f"simulated GPU {index}", seed, 0, 0

    def alloc(self, nbytes: int) -> Memory:
        """Aligned to 256 bytes, as a GPU's."""
        whole = np.full(nbytes + 256, 0xFF, np.uint8)
        begin = -whole.ctypes.data % 256
        return Memory(self, nbytes, whole[begin:begin + nbytes])

    def alloc_host(self, nbytes: int) -> Memory:
        """Memory of the host that kernels can read and write."""
        self.host_bytes += nbytes
        return self.alloc(nbytes)

    def free(self, memory: Memory) -> None:
        """NumPy's memory goes with the last reference."""

    def upload(self, to: Ref, data: np.ndarray) -> None:
        """Copy an array to the device."""
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._bytes(to, data.size)[:] = data

    def download(self, source: Ref, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of the caller's own."""
        return self._bytes(source, nbytes).copy()

    def copy(self, to: Ref, source: Ref, nbytes: int) -> None:
        """From one place on the device to another."""
        self._bytes(to, nbytes)[:] = self._bytes(source, nbytes)

    def launch(self, work: Launch | Order) -> None:
        """Run a kernel; all queues are one here."""
        if isinstance(work, Order):
            return
        self.launches += 1
        work.check()
        args = tuple(self._argument(kind, value) for kind, value in zip(work.kernel.signature, work.values))
        launch(work.kernel.plain, work.grid, work.kernel.threads, args, self.seed)

    def host_array(self, memory: Memory) -> np.ndarray:
        """uint8: memory of `alloc_host` as the host sees it."""
        return memory.handle

    def mark(self, again: None = None, timing: bool = False) -> None:
        """No event is needed: all work is done when it is asked for."""

    def until(self, event: None) -> None:
        """It has come."""

    def wait(self, event: None) -> None:
        """It has come."""

    def fetch(self, to: Ref, other: "Simulated", source: Ref, nbytes: int) -> None:
        """Copy from another device's memory."""
        self._bytes(to, nbytes)[:] = other.download(source, nbytes)

    def synchronize(self) -> None:
        """All work is done when it is asked for."""

    def close(self) -> None:
        """Nothing is held."""

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
