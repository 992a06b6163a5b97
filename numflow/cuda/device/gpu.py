"""A GPU as a Device, through the CUDA driver API (cuda.bindings), whose functions are the same in every version.

The main stream runs work in order; a second stream runs work that overlaps with it. Uploads use two pinned buffers:
while one is being copied, the other is filled. A list of launches can be recorded as a CUDA graph and replayed; a
replay reads its inputs from the same addresses.
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
from numflow.cuda.device.features import features
from numflow.cuda.device.launch_config import configuration
from numflow.cuda.device.slabs import Slabs
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.lang.scalar import Pointer, f32, i32
from numflow.errors import DeviceError, DeviceFaultError, DeviceMemoryError, option

STATIC_SHARED = 48 << 10  # bytes of shared memory of a block; more need cuFuncSetAttribute
STAGE = 16 << 20  # bytes of each of the two pinned buffers
_MAPPED = 3       # flags of cuMemHostAlloc: PORTABLE | DEVICEMAP
_PEERS_ALREADY = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: another stream of this GPU has enabled it
FEWER = ("cpu_layers", "host_kv_percent", "host_embeddings")  # options that reduce the GPU memory in use
# CUresults after which the context is unusable ("sticky" errors in the documentation of cudaError).
_FAULTS = {"ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION",
           "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "ECC_UNCORRECTABLE",
           "NVLINK_UNCORRECTABLE", "CONTAINED", "TENSOR_MEMORY_LEAK", "EXTERNAL_DEVICE"}
_CURRENT = threading.local()  # the CUDA context that is current in each thread


def chosen_device(name: str = "auto") -> str:
    """The device that a name stands for: "auto" is $NUMFLOW_CUDA, by default "gpu"."""
    return os.environ.get("NUMFLOW_CUDA", "gpu") if name == "auto" else name


def open_device(name: str = "auto", index: int = 0, seed: int = 0, careful: bool | None = None) -> Device:
    """A device by name: "gpu", "simulator" or "auto" (`chosen_device`). careful: as in Gpu.

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
    """A new device, with its own stream, on the GPU of this index modulo the number of GPUs.

    Raises:
        DeviceError: no driver, or no GPU.
    """
    bindings = driver()
    return Gpu(bindings, index % bindings.cuDeviceGetCount()[1], careful=careful)


class Gpu:
    """A device on a GPU, with a stream of its own. Several devices on one GPU are independent of each other.

    bindings: cuda.bindings.driver. compiled: kernel, capability -> Binary. careful: wait after each launch, so that an
    error names its kernel, and use no graphs ($NUMFLOW_CUDA_CAREFUL=1). dependent: programmatic dependent launch, from
    compute capability 9.0 on ($NUMFLOW_CUDA_DEPENDENT=0: off). wgmma, tcgen05, tma, float8, float4: of features.py.
    """

    def __init__(self, bindings: ModuleType, index: int = 0,
                 compiled: Callable[[Kernel, tuple[int, int]], Binary] = cached, careful: bool | None = None):
        self.careful = os.environ.get("NUMFLOW_CUDA_CAREFUL") == "1" if careful is None else careful
        self.graphs = not self.careful
        self._cu, self._compiled = bindings, compiled
        self.cards = self._call("cuDeviceGetCount")
        if not 0 <= index < self.cards:
            raise DeviceError(f"there is no GPU {index}: the driver reports {self.cards}")
        self.index, self._device = index, self._call("cuDeviceGet", index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._make_current()
        self.capability = tuple(self.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        if self.capability < PTX_FOR:
            raise DeviceError("device 'cuda' needs a GPU of compute capability {}.{} or newer, GPU {} has {}.{}; "
                              "{}".format(*PTX_FOR, index, *self.capability, ELSE))
        self.wgmma, self.tcgen05, self.tma, self.float8, self.float4 = features(self.capability)
        name = self._call("cuDeviceGetName", 256, self._device)
        self.name = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
        self._stream = self._call("cuStreamCreate", int(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.dependent = not (self.capability < DEPENDENT_FROM or self.careful
                              or os.environ.get("NUMFLOW_CUDA_DEPENDENT") == "0")
        self._configurations: dict[tuple, Any] = {}
        self._slabs = Slabs(lambda n: int(self._call("cuMemAlloc", n)), lambda at: self._call("cuMemFree", at))
        self._pinned: set[int] = set()
        self._functions: dict[str, Any] = {}
        self._modules: list[Any] = []
        self._events: list[Any] = []
        self._stages, self._stage_index = list[tuple[np.ndarray, int, Any]](), 0
        self._peers: set[int] = set()
        self._second_stream: Any = None
        self._named_events: dict[str, Any] = {}

    def free_bytes(self) -> int:
        """Free memory of the GPU, as the driver reports it: what the driver and other processes use is not free."""
        self._make_current()
        return int(self._call("cuMemGetInfo")[0])

    def alloc(self, nbytes: int) -> Memory:
        """Allocate memory, aligned to 256 bytes, with undefined content."""
        self._make_current()
        return Memory(self, nbytes, self._slabs.take(nbytes))

    def alloc_host(self, nbytes: int) -> Memory:
        """Allocate pinned host memory, which kernels reach over the bus at the same address."""
        self._make_current()
        memory = Memory(self, nbytes, int(self._call("cuMemHostAlloc", max(nbytes, 1), _MAPPED)))
        self._pinned.add(memory.handle)
        return memory

    def free(self, memory: Memory) -> None:
        """Free memory, after all queued work has finished."""
        self.synchronize()
        if memory.handle in self._pinned:
            self._pinned.remove(memory.handle)
            self._call("cuMemFreeHost", memory.handle)
        else:
            self._slabs.give(memory.handle)

    def upload(self, to: Ref, data: np.ndarray) -> None:
        """Copy an array to the device, in pieces through pinned buffers. The array may be changed after the return."""
        self._make_current()
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._check(to, flat.size)
        for begin in range(0, flat.size, STAGE):
            piece = flat[begin:begin + STAGE]
            stage, address, event = self._stage()
            stage[:piece.size] = piece
            self._call("cuMemcpyAsync", self.address(to) + begin, address, piece.size, self._stream)
            self._call("cuEventRecord", event, self._stream)

    def download(self, source: Ref, nbytes: int) -> np.ndarray:
        """Copy of device memory, uint8 [nbytes], after all queued work has finished."""
        self._make_current()
        self._check(source, nbytes)
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self._call("cuMemcpyAsync", data.__array_interface__["data"][0], self.address(source), nbytes, self._stream)
            self.synchronize()
        return data

    def copy(self, to: Ref, source: Ref, nbytes: int) -> None:
        """Copy within the device's memory, in stream order."""
        self._make_current()
        self._call("cuMemcpyAsync", self.address(to), self.address(source), nbytes, self._stream)

    def fetch(self, to: Ref, other: "Gpu", source: Ref, nbytes: int) -> None:
        """Copy from the memory of another device, which may be on another GPU, in stream order."""
        self._make_current()
        if other.index == self.index:
            self._call("cuMemcpyAsync", self.address(to), self.address(source), nbytes, self._stream)
            return
        if other.index not in self._peers:
            self._enable_peer_access(other)
        self._call("cuMemcpyPeerAsync", self.address(to), self._context, self.address(source), other._context, nbytes,
                  self._stream)

    def _enable_peer_access(self, other: "Gpu") -> None:
        """Enable direct copies from the other GPU (peer access) if the hardware can; else the driver stages them."""
        self._peers.add(other.index)
        if self._call("cuDeviceCanAccessPeer", self._device, other._device):
            (code,) = self._cu.cuCtxEnablePeerAccess(other._context, 0)
            if int(code) not in (0, _PEERS_ALREADY):
                raise DeviceError(f"{self.name}: no peer access to {other.name}: the driver returns {code.name}")

    def launch(self, work: Launch | Order) -> None:
        """Launch a kernel in its stream, or record or await an event in a stream."""
        self._make_current()
        if isinstance(work, Order):
            event, stream = self._named_event(work.event), self._side_stream() if work.beside else self._stream
            self._call(*(("cuStreamWaitEvent", stream, event, 0) if work.waits else ("cuEventRecord", event, stream)))
            return
        work.check()
        kernel = work.kernel
        values = [self._argument(kind, value) for kind, value in zip(kernel.signature, work.values)]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        function = self._function(kernel)
        is_dependent = self.dependent and not work.beside and self._last_call.startswith("cuLaunchKernel")
        if not is_dependent and work.cluster == 1:
            self._call("cuLaunchKernel", function, *work.grid, kernel.threads, 1, 1, kernel.dynamic,
                      self._side_stream() if work.beside else self._stream, ctypes.addressof(addresses), 0)
        else:
            config = self._configuration(is_dependent, work.cluster, work.beside)
            config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX = *work.grid, kernel.threads
            config.sharedMemBytes = kernel.dynamic
            self._call("cuLaunchKernelEx", config, function, ctypes.addressof(addresses), 0)
        self._last_call = "" if work.beside else self._last_call
        if self.careful:
            self._finish(work)

    def _configuration(self, *key: Any) -> Any:
        """Cached launch configuration. key: (dependent launch, blocks of a cluster, second stream)."""
        if key not in self._configurations:
            is_dependent, cluster, beside = key
            stream = self._side_stream() if beside else self._stream
            self._configurations[key] = configuration(self._cu, stream, is_dependent, cluster)
        return self._configurations[key]

    def _finish(self, work: Launch) -> None:
        """Wait for a launch to finish.

        Raises:
            DeviceFaultError: the kernel failed; the message names the kernel and its grid.
        """
        try:
            self._call("cuStreamSynchronize", self._side_stream() if work.beside else self._stream)
        except DeviceError as error:
            raise type(error)(f"kernel {work.kernel.name}, grid {work.grid} of {work.kernel.threads} threads: "
                              f"{error}") from error

    def synchronize(self) -> None:
        """Wait until all work in the main stream has finished."""
        self._make_current()
        self._call("cuStreamSynchronize", self._stream)

    def record(self, works: list[Launch | Order]) -> Any:
        """Record launches as a CUDA graph by stream capture. Their kernels are compiled and loaded first."""
        self._make_current()
        for work in works:
            if isinstance(work, Launch):
                self._function(work.kernel)
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            for work in works:
                self.launch(work)
        finally:
            graph = self._call("cuStreamEndCapture", self._stream)
        executable = self._call("cuGraphInstantiate", graph, 0)
        self._call("cuGraphDestroy", graph)
        return executable

    def replay(self, graph: Any) -> None:
        """Launch a recorded graph in the main stream."""
        self._make_current()
        self._call("cuGraphLaunch", graph, self._stream)

    def drop(self, graph: Any) -> None:
        """Destroy a recorded graph."""
        self.synchronize()
        self._call("cuGraphExecDestroy", graph)

    def host_array(self, memory: Memory) -> np.ndarray:
        """Memory of `alloc_host` as a NumPy array, uint8."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.handle))

    def mark(self, again: Any = None, timing: bool = False) -> Any:
        """Record an event in the main stream: `again` if given, else a new event, which the device owns."""
        self._make_current()
        if again is None:
            flags = self._cu.CUevent_flags
            again = self._call("cuEventCreate", int(flags.CU_EVENT_DEFAULT if timing else
                                                    flags.CU_EVENT_DISABLE_TIMING))
            self._events.append(again)
        self._call("cuEventRecord", again, self._stream)
        return again

    def until(self, event: Any) -> None:
        """Block the calling thread until an event of this device has occurred. Any thread may call it."""
        self._make_current()
        self._call("cuEventSynchronize", event)

    def wait(self, event: Any) -> None:
        """Make later work of the main stream wait for an event, which may be another device's."""
        self._make_current()
        self._call("cuStreamWaitEvent", self._stream, event, 0)

    def lend(self) -> int:
        """Handle of the main stream, for a library that this thread calls to put work into the stream."""
        self._make_current()
        return int(self._stream)

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Time between two events made with `timing`, after waiting for the second."""
        self._make_current()
        self._call("cuEventSynchronize", end)
        return float(self._call("cuEventElapsedTime", begin, end))

    def close(self) -> None:
        """Release memory, modules and the context. If one release fails, the others are done nevertheless.

        Raises:
            DeviceError: a call of the driver failed.
        """
        with ExitStack() as last:  # callbacks run in reverse order; an error is raised after all of them have run
            last.callback(self._call, "cuDevicePrimaryCtxRelease", self._device)
            last.callback(setattr, _CURRENT, "context", None)
            for stream in (self._stream, *([] if self._second_stream is None else [self._second_stream])):
                last.callback(self._call, "cuStreamDestroy", stream)
            for module in self._modules:
                last.callback(self._call, "cuModuleUnload", module)
            for event in (*self._events, *self._named_events.values(), *(event for _, _, event in self._stages)):
                last.callback(self._call, "cuEventDestroy", event)
            for address in (*self._pinned, *(address for _, address, _ in self._stages)):
                last.callback(self._call, "cuMemFreeHost", address)
            self._pinned, self._functions, self._modules, self._stages, self._events = set(), {}, [], [], []
            last.callback(self._slabs.close)
            last.callback(self.synchronize)

    def _function(self, kernel: Kernel) -> Any:
        if kernel.name not in self._functions:
            function = self._functions[kernel.name] = self.load(self._compiled(kernel, self.capability))
            if kernel.dynamic > STATIC_SHARED:
                attribute_id = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", function, attribute_id, kernel.dynamic)
        return self._functions[kernel.name]

    def load(self, binary: Binary) -> Any:
        """Load a kernel's machine code, and return the driver's function handle. The device owns the module."""
        self._make_current()
        module = self._call("cuModuleLoadData", binary.cubin)
        self._modules.append(module)
        return self._call("cuModuleGetFunction", module, binary.symbol.encode())

    def attribute(self, name: str) -> int:
        """The device attribute CU_DEVICE_ATTRIBUTE_<name>."""
        attribute_id = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute_id, self._device))

    def _argument(self, kind, value) -> Any:
        """A kernel argument as a ctypes object."""
        if isinstance(kind, Pointer):
            return ctypes.c_uint64(0 if value is None else self.address(value))
        if kind is f32:
            return ctypes.c_float(value)
        return ctypes.c_int32(value) if kind is i32 else ctypes.c_uint32(int(value) & 0xFFFFFFFF)

    def _side_stream(self) -> Any:
        """The second stream, created on first use."""
        if self._second_stream is None:
            self._second_stream = self._call("cuStreamCreate", int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        return self._second_stream

    def _named_event(self, name: str) -> Any:
        """The event of this name, created on first use."""
        if name not in self._named_events:
            flag = int(self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            self._named_events[name] = self._call("cuEventCreate", flag)
        return self._named_events[name]

    def _stage(self) -> tuple[np.ndarray, int, Any]:
        """The next pinned buffer, after its last copy has finished: array, address, and the event of its copies."""
        if len(self._stages) < 2:
            address = int(self._call("cuMemHostAlloc", STAGE, 0))
            array = np.ctypeslib.as_array((ctypes.c_uint8 * STAGE).from_address(address))
            event = self._call("cuEventCreate", int(self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            self._stages.append((array, address, event))
            return self._stages[-1]
        self._stage_index ^= 1
        self._call("cuEventSynchronize", self._stages[self._stage_index][2])
        return self._stages[self._stage_index]

    @staticmethod
    def address(ref: Ref) -> int:
        """Address in the unified address space of the host and all GPUs."""
        return ref.memory.handle + ref.offset

    @staticmethod
    def _check(ref: Ref, nbytes: int) -> None:
        if ref.offset < 0 or ref.offset + nbytes > ref.memory.nbytes:
            raise DeviceError(f"bytes {ref.offset} .. {ref.offset + nbytes} of {ref.memory.nbytes} in device memory")

    def _make_current(self) -> None:
        """Make this GPU's context current in the calling thread."""
        if getattr(_CURRENT, "context", None) is not self._context:
            self._call("cuCtxSetCurrent", self._context)
            _CURRENT.context = self._context

    def _call(self, name: str, *args: Any) -> Any:
        """Call a driver function and return its results; an error code becomes a DeviceError."""
        code, *results = getattr(self._cu, name)(*args)
        self._last_call = name
        if code:
            error = getattr(code, "name", str(code))
            if "OUT_OF_MEMORY" in error:
                raise DeviceMemoryError(f"{self.name} has no memory left for {args[0]} bytes; it takes fewer with "
                                        f"{', '.join(map(option, FEWER))} or {option('context')}")
            is_fault = any(error.endswith(end) for end in _FAULTS)
            raise (DeviceFaultError if is_fault else DeviceError)(f"the GPU's driver returns {error} from {name}")
        return results[0] if len(results) == 1 else results or None
