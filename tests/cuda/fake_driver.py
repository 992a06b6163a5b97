"""A fake CUDA driver: device memory of this process, kernels on the simulator, streams that can be captured.

It has the functions of cuda.bindings.driver that numflow/cuda/device/gpu.py calls, with the same return values, and
unpacks kernel arguments as a driver does: kernels see only the bytes of their parameters.
"""

import ctypes
from types import SimpleNamespace

import numpy as np

from numflow.cuda.compiler.compile import Binary
from numflow.cuda.lang.kernel import REGISTRY
from numflow.cuda.lang.scalar import Pointer, f32, i32
from numflow.cuda.lang.simulator import SimulatedPointer, launch


class Code(int):
    """A CUresult."""

    name = property(lambda self: {0: "CUDA_SUCCESS", 2: "CUDA_ERROR_OUT_OF_MEMORY"}[int(self)])


OK = Code(0)


class FakeDriver:
    """A driver with one or more devices of compute capability 9.0."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
                                         CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0, CU_EVENT_DISABLE_TIMING=2)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
                                          CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUlaunchConfig = SimpleNamespace
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, devices=1):
        self.memory, self.launches, self.replays, self.graphs, self.peer_copies = {}, 0, 0, 0, 0
        self.devices, self.captured = devices, {}  # captured: the launches on each stream that is being captured

    @staticmethod
    def CUlaunchAttribute():
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuDriverGetVersion(self):
        return OK, 13000

    def cuMemGetInfo(self):
        return OK, 7 << 30, 8 << 30

    def cuDeviceGetCount(self):
        return OK, self.devices

    def cuDeviceCanAccessPeer(self, device, other):
        return OK, 1

    def cuCtxEnablePeerAccess(self, context, flags):
        return (OK,)

    def cuDeviceGet(self, index):
        return OK, index

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, object()

    def cuDevicePrimaryCtxRelease(self, device):
        return (OK,)

    def cuCtxSetCurrent(self, context):
        return (OK,)

    def cuDeviceGetAttribute(self, value, device):
        return OK, value

    def cuDeviceGetName(self, size, device):
        return OK, b"fake GPU".ljust(size, b"\0")

    def cuStreamCreate(self, flags):
        return OK, object()

    def cuStreamDestroy(self, stream):
        return (OK,)

    def cuStreamSynchronize(self, stream):
        assert stream not in self.captured, "waiting while a stream records"
        return (OK,)

    def cuMemAlloc(self, nbytes):
        whole = np.full(nbytes + 256, 0xFF, np.uint8)
        begin = whole.ctypes.data + -whole.ctypes.data % 256
        self.memory[begin] = whole[begin - whole.ctypes.data:][:nbytes]
        return OK, begin

    def cuMemFree(self, address):
        del self.memory[address]
        return (OK,)

    cuMemFreeHost = cuMemFree

    def cuMemHostAlloc(self, nbytes, flags):
        return self.cuMemAlloc(nbytes)

    def cuMemcpyAsync(self, to, source, nbytes, stream):
        assert stream not in self.captured, "uploading while a stream records"
        ctypes.memmove(to, source, nbytes)
        return (OK,)

    def cuMemcpyPeerAsync(self, to, to_context, source, source_context, nbytes, stream):
        self.peer_copies += 1
        return self.cuMemcpyAsync(to, source, nbytes, stream)

    def cuEventCreate(self, flags):
        return OK, object()

    def cuEventRecord(self, event, stream):
        return (OK,)

    cuEventSynchronize = cuEventDestroy = lambda self, event: (OK,)

    def cuEventElapsedTime(self, begin, end):
        return OK, 1.0

    def cuStreamWaitEvent(self, stream, event, flags):
        return (OK,)

    def cuModuleLoadData(self, image):
        return OK, image

    def cuModuleUnload(self, module):
        return (OK,)

    def cuModuleGetFunction(self, module, symbol):
        assert symbol == module
        return OK, symbol.decode()

    def cuFuncSetAttribute(self, name, which, value):
        assert (which, value) == (8, REGISTRY[name].dynamic)
        return (OK,)

    def cuLaunchKernel(self, name, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, cluster=1):
        kernel = REGISTRY[name]
        assert (bx, by, bz, shared, extra) == (kernel.threads, 1, 1, kernel.dynamic, 0)
        count = len(kernel.signature)
        places = (ctypes.c_void_p * count).from_address(parameters)
        values = [self._value(kind, place) for kind, place in zip(kernel.signature, places, strict=True)]
        if stream in self.captured:
            self.captured[stream].append((kernel, (gx, gy, gz), values, cluster))
        else:
            self._launched(stream, kernel, (gx, gy, gz), values, cluster)
        return (OK,)

    def cuLaunchKernelEx(self, how, name, parameters, extra):
        given = {attribute.id: attribute.value for attribute in how.attrs}
        assert given and set(given) <= {4, 6} and how.numAttrs == len(how.attrs) == len(given)
        assert 6 not in given or given[6].programmaticStreamSerializationAllowed == 1
        shape = given[4].clusterDim if 4 in given else SimpleNamespace(x=1)
        if 4 in given:
            assert shape.x > 1 and shape.y == shape.z == 1 and how.gridDimX % shape.x == 0
        return self.cuLaunchKernel(name, how.gridDimX, how.gridDimY, how.gridDimZ, how.blockDimX, how.blockDimY,
                                   how.blockDimZ, how.sharedMemBytes, how.hStream, parameters, extra, shape.x)

    def cuStreamBeginCapture(self, stream, mode):
        self.captured[stream] = []
        return (OK,)

    def cuStreamEndCapture(self, stream):
        return OK, self.captured.pop(stream)

    def cuGraphInstantiate(self, graph, flags):
        self.graphs += 1
        return OK, list(graph)

    def cuGraphDestroy(self, graph):
        return (OK,)

    def cuGraphExecDestroy(self, graph):
        self.graphs -= 1
        return (OK,)

    def cuGraphLaunch(self, graph, stream):
        self.replays += 1
        for work in graph:
            self._run(*work)
        return (OK,)

    def _launched(self, stream, *work):
        self._run(*work)

    def _value(self, kind, place):
        if isinstance(kind, Pointer):
            return ctypes.c_uint64.from_address(place).value
        return {f32: ctypes.c_float, i32: ctypes.c_int32}.get(kind, ctypes.c_uint32).from_address(place).value

    def _run(self, kernel, grid, values, cluster):
        self.launches += 1
        args = [self._span(kind, value) if isinstance(kind, Pointer) else kind(value)
                for kind, value in zip(kernel.signature, values, strict=True)]
        launch(kernel.plain, grid, kernel.threads, tuple(args))

    def _span(self, kind, address):
        if not address:
            return None
        begin, memory = next((b, m) for b, m in list(self.memory.items()) if b <= address < b + m.size)
        rest = memory[address - begin:]
        return SimulatedPointer(rest[:rest.size - rest.size % kind.to.size].view(kind.to.dtype))


def fake_binary(kernel, capability) -> Binary:
    """A binary for the fake driver: its machine code is the kernel's name."""
    return Binary(kernel.name, kernel.name, kernel.name.encode(), 32, 0, 0, 0)
