"""A GPU as a Device, through the driver's own functions (cuda.bindings): they are the same in every version.

One stream runs everything in order, another what is to overlap with it. Weights are uploaded through two pinned
buffers: while one is on its way, the other is filled. A list of launches can be recorded as a graph and replayed; it
finds new numbers in the same memory.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import numpy as np

from numflow.cuda.compiler.compat import ELSE, driver
from numflow.cuda.compiler.compile import PTX_FOR, Binary, cached
from numflow.cuda.compiler.dependent import DEPENDENT_FROM
from numflow.cuda.device.device import Device, Launch, Memory, Order, Ref, Simulated
from numflow.cuda.device.slabs import Slabs
from numflow.cuda.device.ways import configuration
from numflow.cuda.lang.kernel import FLOAT4, FLOAT8, FLOAT8_MAJORS, HOPPER, Kernel, has
from numflow.cuda.lang.scalar import Pointer, f32, i32
from numflow.errors import DeviceError, DeviceFaultError, DeviceMemoryError, option

STATIC_SHARED = 48 << 10  # bytes of a block that a driver gives without being asked
STAGE = 16 << 20  # bytes of each of the two pinned buffers
_MAPPED = 3       # flags of cuMemHostAlloc: for all contexts, and in their address space
_PEERS_ALREADY = 704  # CUresult: another stream of this GPU has asked for access to that one
# CUresults after which a context is of no use any more (the driver's documentation of cudaError, "sticky" errors).
FEWER = ("cpu_layers", "host_kv_percent", "host_embeddings")  # options that take less of a GPU's memory
_FAULTS = {"ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION",
           "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "ECC_UNCORRECTABLE",
           "NVLINK_UNCORRECTABLE", "CONTAINED", "TENSOR_MEMORY_LEAK", "EXTERNAL_DEVICE"}
_CURRENT = threading.local()  # context that a thread has


def chosen_device(name: str = "auto") -> str:
    """The device that a name stands for: "auto" is what $NUMFLOW_CUDA says, else the GPU."""
    return os.environ.get("NUMFLOW_CUDA", "gpu") if name == "auto" else name


def open_device(name: str = "auto", index: int = 0, seed: int = 0, careful: bool | None = None) -> Device:
    """A device by name: "gpu", "simulator" or "auto" (`chosen_device`). careful: as of Gpu.

    Raises:
        DeviceError: no driver, no GPU, or no such device.
    """
    chosen = chosen_device(name)
    if chosen == "simulator":
        return Simulated(index, seed)
    if chosen != "gpu":
        raise DeviceError(f"no GPU device {chosen!r}; known: gpu, simulator")
    return open_gpu(index, careful)


def open_gpu(index: int = 0, careful: bool | None = None) -> "Gpu":
    """A stream of its own on the GPU of this index; indices beyond the GPUs there are begin again with the first.

    Raises:
        DeviceError: no driver, or no GPU.
    """
    bindings = driver()
    return Gpu(bindings, index % bindings.cuDeviceGetCount()[1], careful=careful)


class Gpu:
    """A stream on a GPU; several on one GPU are devices of their own, which share nothing but its time.

    bindings: cuda.bindings.driver. compiled: kernel, capability -> Binary. careful: wait after each launch, so that a
    fault names the kernel that made it ($NUMFLOW_CUDA_CAREFUL=1 says so too); graphs are not used then. dependent:
    whether a kernel begins before the one in front of it ends; from compute capability 9.0 on, if
    $NUMFLOW_CUDA_DEPENDENT is not 0. wgmma: kernels for Hopper alone run, if $NUMFLOW_CUDA_WGMMA is not 0; tma: they
    use the copy engine and clusters, if $NUMFLOW_CUDA_TMA is not 0. float8, float4: its tensor cores multiply floats of
    8 bits, and of 4.
    """

    def __init__(self, bindings: ModuleType, index: int = 0,
                 compiled: Callable[[Kernel, tuple[int, int]], Binary] = cached, careful: bool | None = None):
        self.careful = os.environ.get("NUMFLOW_CUDA_CAREFUL") == "1" if careful is None else careful
        self.graphs = not self.careful
        self._cu, self._compiled = bindings, compiled
        self.cards = self._ask("cuDeviceGetCount")
        if not 0 <= index < self.cards:
            raise DeviceError(f"there is no GPU {index}: the driver knows {self.cards}")
        self.index, self._device = index, self._ask("cuDeviceGet", index)
        self._context = self._ask("cuDevicePrimaryCtxRetain", self._device)
        self._use()
        self.capability = tuple(self.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        if self.capability < PTX_FOR:
            raise DeviceError("device 'cuda' needs a GPU of compute capability {}.{} or newer, GPU {} has {}.{}; "
                              "{}".format(*PTX_FOR, index, *self.capability, ELSE))
        self.wgmma = self.capability == HOPPER and os.environ.get("NUMFLOW_CUDA_WGMMA") != "0"
        self.tma = self.wgmma and os.environ.get("NUMFLOW_CUDA_TMA") != "0"
        self.float8 = self.wgmma or (has(FLOAT8, self.capability) and self.capability[0] in FLOAT8_MAJORS)
        self.float4 = has(FLOAT4, self.capability)
        name = self._ask("cuDeviceGetName", 256, self._device)
        self.name = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
        self._stream = self._ask("cuStreamCreate", int(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.dependent = not (self.capability < DEPENDENT_FROM or self.careful
                              or os.environ.get("NUMFLOW_CUDA_DEPENDENT") == "0")
        self._ways: dict[tuple, Any] = {}
        self._slabs = Slabs(lambda n: int(self._ask("cuMemAlloc", n)), lambda address: self._ask("cuMemFree", address))
        self._pinned: set[int] = set()
        self._functions: dict[str, Any] = {}
        self._modules: list[Any] = []
        self._stages: list[tuple[np.ndarray, int, Any]] = []
        self._turn = 0
        self._events: list[Any] = []
        self._peers: set[int] = set()
        self._second: Any = None
        self._meetings: dict[str, Any] = {}

    def free_bytes(self) -> int:
        """Memory of the GPU that nobody has, the driver and other processes included."""
        self._use()
        return int(self._ask("cuMemGetInfo")[0])

    def alloc(self, nbytes: int) -> Memory:
        """On a multiple of 256 bytes; the content is whatever was there."""
        self._use()
        return Memory(self, nbytes, self._slabs.take(nbytes))

    def alloc_host(self, nbytes: int) -> Memory:
        """Pinned memory of the host, which kernels reach over the bus at the same address."""
        self._use()
        memory = Memory(self, nbytes, int(self._ask("cuMemHostAlloc", max(nbytes, 1), _MAPPED)))
        self._pinned.add(memory.handle)
        return memory

    def free(self, memory: Memory) -> None:
        """Once all that was asked for is done."""
        self.synchronize()
        if memory.handle in self._pinned:
            self._pinned.remove(memory.handle)
            self._ask("cuMemFreeHost", memory.handle)
        else:
            self._slabs.give(memory.handle)

    def upload(self, to: Ref, data: np.ndarray) -> None:
        """Copy an array to the device, in pieces through pinned memory; returns when the array may be changed."""
        self._use()
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._check(to, flat.size)
        for begin in range(0, flat.size, STAGE):
            piece = flat[begin:begin + STAGE]
            stage, address, event = self._stage()
            stage[:piece.size] = piece
            self._ask("cuMemcpyAsync", self.address(to) + begin, address, piece.size, self._stream)
            self._ask("cuEventRecord", event, self._stream)

    def download(self, source: Ref, nbytes: int) -> np.ndarray:
        """uint8 [nbytes]; waits for everything before."""
        self._use()
        self._check(source, nbytes)
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self._ask("cuMemcpyAsync", data.__array_interface__["data"][0], self.address(source), nbytes, self._stream)
            self.synchronize()
        return data

    def copy(self, to: Ref, source: Ref, nbytes: int) -> None:
        """From one place to another of this device."""
        self._use()
        self._ask("cuMemcpyAsync", self.address(to), self.address(source), nbytes, self._stream)

    def fetch(self, to: Ref, other: "Gpu", source: Ref, nbytes: int) -> None:
        """Copy from the memory of another device, which may be on another GPU."""
        self._use()
        if other.index == self.index:
            self._ask("cuMemcpyAsync", self.address(to), self.address(source), nbytes, self._stream)
            return
        if other.index not in self._peers:
            self._befriend(other)
        self._ask("cuMemcpyPeerAsync", self.address(to), self._context, self.address(source), other._context, nbytes,
                  self._stream)

    def _befriend(self, other: "Gpu") -> None:
        """Let copies come straight from the other GPU where the machine can do that; else the driver finds a way."""
        self._peers.add(other.index)
        if self._ask("cuDeviceCanAccessPeer", self._device, other._device):
            (code,) = self._cu.cuCtxEnablePeerAccess(other._context, 0)
            if int(code) not in (0, _PEERS_ALREADY):
                raise DeviceError(f"{self.name}: no copies from {other.name}: the driver says {code.name}")

    def launch(self, work: Launch | Order) -> None:
        """Put a kernel into its queue, or have queues meet."""
        self._use()
        if isinstance(work, Order):
            event, stream = self._meeting(work.event), self._beside() if work.beside else self._stream
            self._ask(*(("cuStreamWaitEvent", stream, event, 0) if work.waits else ("cuEventRecord", event, stream)))
            return
        work.check()
        kernel = work.kernel
        values = [self._argument(kind, value) for kind, value in zip(kernel.signature, work.values)]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        function = self._function(kernel)
        behind = self.dependent and not work.beside and self._asked.startswith("cuLaunchKernel")
        if not behind and work.cluster == 1:
            self._ask("cuLaunchKernel", function, *work.grid, kernel.threads, 1, 1, kernel.dynamic,
                      self._beside() if work.beside else self._stream, ctypes.addressof(addresses), 0)
        else:
            how = self._way(behind, work.cluster, work.beside)
            how.gridDimX, how.gridDimY, how.gridDimZ, how.blockDimX = *work.grid, kernel.threads
            how.sharedMemBytes = kernel.dynamic
            self._ask("cuLaunchKernelEx", how, function, ctypes.addressof(addresses), 0)
        self._asked = "" if work.beside else self._asked
        if self.careful:
            self._await(work)

    def _way(self, *key: Any) -> Any:
        """Configuration of a launch: behind another one, blocks of a cluster, in the second queue."""
        if key not in self._ways:
            behind, cluster, beside = key
            self._ways[key] = configuration(self._cu, self._beside() if beside else self._stream, behind, cluster)
        return self._ways[key]

    def _await(self, work: Launch) -> None:
        """Wait for a launch.

        Raises:
            DeviceFaultError: it did not end well; the message names the kernel and its grid.
        """
        try:
            self._ask("cuStreamSynchronize", self._beside() if work.beside else self._stream)
        except DeviceError as error:
            raise type(error)(f"kernel {work.kernel.name}, grid {work.grid} of {work.kernel.threads} threads: "
                              f"{error}") from error

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        self._use()
        self._ask("cuStreamSynchronize", self._stream)

    def record(self, works: list[Launch | Order]) -> Any:
        """Launches as a graph; their kernels are compiled and loaded first."""
        self._use()
        for work in works:
            if isinstance(work, Launch):
                self._function(work.kernel)
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._ask("cuStreamBeginCapture", self._stream, mode)
        try:
            for work in works:
                self.launch(work)
        finally:
            graph = self._ask("cuStreamEndCapture", self._stream)
        made = self._ask("cuGraphInstantiate", graph, 0)
        self._ask("cuGraphDestroy", graph)
        return made

    def replay(self, graph: Any) -> None:
        """Put a recorded graph into the queue."""
        self._use()
        self._ask("cuGraphLaunch", graph, self._stream)

    def drop(self, graph: Any) -> None:
        """Forget a graph."""
        self.synchronize()
        self._ask("cuGraphExecDestroy", graph)

    def host_array(self, memory: Memory) -> np.ndarray:
        """uint8: memory of `alloc_host` as the host sees it."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.handle))

    def mark(self, again: Any = None, timing: bool = False) -> Any:
        """An event at this place of the queue: `again` moved here, or a new one, which the device keeps."""
        self._use()
        if again is None:
            flags = self._cu.CUevent_flags
            again = self._ask("cuEventCreate", int(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING))
            self._events.append(again)
        self._ask("cuEventRecord", again, self._stream)
        return again

    def until(self, event: Any) -> None:
        """Wait until an event of this device has come; any thread may."""
        self._use()
        self._ask("cuEventSynchronize", event)

    def wait(self, event: Any) -> None:
        """Let all that is queued from here on wait for an event, which may be another device's."""
        self._use()
        self._ask("cuStreamWaitEvent", self._stream, event, 0)

    def lend(self) -> int:
        """Address of the queue, for a library that puts work into it from this thread."""
        self._use()
        return int(self._stream)

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Time between two events made with `timing`; waits for the second."""
        self._use()
        self._ask("cuEventSynchronize", end)
        return float(self._ask("cuEventElapsedTime", begin, end))

    def close(self) -> None:
        """Give back memory, modules and the context; what fails keeps nothing else from being given back.

        Raises:
            DeviceError: the driver refused something.
        """
        with ExitStack() as last:  # from here on in reverse; an error is raised when all have been called
            last.callback(self._ask, "cuDevicePrimaryCtxRelease", self._device)
            last.callback(setattr, _CURRENT, "context", None)
            for stream in (self._stream, *([] if self._second is None else [self._second])):
                last.callback(self._ask, "cuStreamDestroy", stream)
            for module in self._modules:
                last.callback(self._ask, "cuModuleUnload", module)
            for event in (*self._events, *self._meetings.values(), *(event for _, _, event in self._stages)):
                last.callback(self._ask, "cuEventDestroy", event)
            for address in (*self._pinned, *(address for _, address, _ in self._stages)):
                last.callback(self._ask, "cuMemFreeHost", address)
            self._pinned, self._functions, self._modules, self._stages, self._events = set(), {}, [], [], []
            last.callback(self._slabs.close)
            last.callback(self.synchronize)

    def _function(self, kernel: Kernel) -> Any:
        if kernel.name not in self._functions:
            function = self._functions[kernel.name] = self.load(self._compiled(kernel, self.capability))
            if kernel.dynamic > STATIC_SHARED:
                which = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._ask("cuFuncSetAttribute", function, which, kernel.dynamic)
        return self._functions[kernel.name]

    def load(self, binary: Binary) -> Any:
        """The driver's handle of a kernel's machine code, which the device keeps until it is closed."""
        self._use()
        module = self._ask("cuModuleLoadData", binary.cubin)
        self._modules.append(module)
        return self._ask("cuModuleGetFunction", module, binary.symbol.encode())

    def attribute(self, name: str) -> int:
        """A number that the driver knows of the GPU: CU_DEVICE_ATTRIBUTE_<name>."""
        which = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._ask("cuDeviceGetAttribute", which, self._device))

    def _argument(self, kind, value) -> Any:
        """A C object with the value of a parameter."""
        if isinstance(kind, Pointer):
            return ctypes.c_uint64(0 if value is None else self.address(value))
        if kind is f32:
            return ctypes.c_float(value)
        return ctypes.c_int32(value) if kind is i32 else ctypes.c_uint32(int(value) & 0xFFFFFFFF)

    def _beside(self) -> Any:
        """The second queue."""
        if self._second is None:
            self._second = self._ask("cuStreamCreate", int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        return self._second

    def _meeting(self, name: str) -> Any:
        """The event of this name; each record moves it."""
        if name not in self._meetings:
            flag = int(self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            self._meetings[name] = self._ask("cuEventCreate", flag)
        return self._meetings[name]

    def _stage(self) -> tuple[np.ndarray, int, Any]:
        """The pinned buffer whose turn it is, as an array; its last copy is done."""
        if len(self._stages) < 2:
            address = int(self._ask("cuMemHostAlloc", STAGE, 0))
            array = np.ctypeslib.as_array((ctypes.c_uint8 * STAGE).from_address(address))
            event = self._ask("cuEventCreate", int(self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            self._stages.append((array, address, event))
            return self._stages[-1]
        self._turn ^= 1
        self._ask("cuEventSynchronize", self._stages[self._turn][2])
        return self._stages[self._turn]

    @staticmethod
    def address(ref: Ref) -> int:
        """Address of a place in the address space that all GPUs and the host share."""
        return ref.memory.handle + ref.offset

    @staticmethod
    def _check(ref: Ref, nbytes: int) -> None:
        if ref.offset < 0 or ref.offset + nbytes > ref.memory.nbytes:
            raise DeviceError(f"bytes {ref.offset} .. {ref.offset + nbytes} of {ref.memory.nbytes} in device memory")

    def _use(self) -> None:
        """Make this GPU's context the thread's."""
        if getattr(_CURRENT, "context", None) is not self._context:
            self._ask("cuCtxSetCurrent", self._context)
            _CURRENT.context = self._context

    def _ask(self, name: str, *args: Any) -> Any:
        """Call a function of the driver; its results, or the error as a DeviceError."""
        code, *results = getattr(self._cu, name)(*args)
        self._asked = name
        if code:
            what = getattr(code, "name", str(code))
            if "OUT_OF_MEMORY" in what:
                raise DeviceMemoryError(f"{self.name} has no memory left for {args[0]} bytes; it takes fewer with "
                                        f"{', '.join(map(option, FEWER))} or {option('context')}")
            fault = any(what.endswith(end) for end in _FAULTS)
            raise (DeviceFaultError if fault else DeviceError)(f"the GPU's driver says {what} to {name}")
        return results[0] if len(results) == 1 else results or None
