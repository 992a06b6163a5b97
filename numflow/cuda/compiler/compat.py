"""Every import of numba-cuda and cuda-python, and every patch of them: nothing else in the package names them.

Kernels are compiled by numba-cuda and launched by cuda-core. Neither is imported before it is needed, so that the
simulator runs without them, the compiler without a driver, and compiled kernels without the compiler.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType, SimpleNamespace

import numpy as np

from numflow.distribution import install
from numflow.errors import DeviceError, option

INSTALL = install("cuda")
ELSE = f"{option('backend', 'cpu')} runs models without"  # the way out where there is no GPU
INSTALL_NCCL = install("nccl")
PACKAGES = ("numba-cuda", "cuda-core", "cuda-bindings", "cuda-pathfinder", "nvidia-nvvm", "nvidia-cuda-nvrtc",
            "nvidia-nvjitlink", "nccl4py", "nvidia-nccl-cu13", "numba", "llvmlite", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of everything that takes part, "missing" for what is not there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


@functools.cache
def compiler() -> SimpleNamespace:
    """numba-cuda's compiler and what intrinsics are made with.

    Raises:
        DeviceError: numba-cuda is not installed.
    """
    if not hasattr(np, "row_stack"):  # numba-cuda 0.30 asks for it; NumPy 2.5 has dropped it
        setattr(np, "row_stack", np.vstack)  # noqa: B010
    try:
        from llvmlite import ir
        from numba import cuda
        from numba.cuda import dispatcher, libdevice, types
        from numba.cuda import extending as hooks
        from numba.cuda.core import targetconfig
        from numba.cuda.models import models
        from numba.cuda.typing import templates
    except ImportError as error:
        raise DeviceError(f"kernels for the GPU need numba-cuda ({error}): {INSTALL}") from None
    _compare_quickly(targetconfig.TargetConfig)
    return SimpleNamespace(ir=ir, cuda=cuda, dispatcher=dispatcher, libdevice=libdevice, types=types, hooks=hooks,
                           models=models, templates=templates)


def _compare_quickly(settings: type) -> None:
    """Settings are looked up at every call that is typed. numba-cuda compares all 25 and hashes their names, the same
    for all, which takes a tenth of compiling; here those that are not left alone are compared, and hashed by name."""
    def changed(self):
        return {name: value for name, value in self._values.items() if value != self.options[name].default}

    def equal(self, other):
        return self is other or (isinstance(other, settings) and self.options.keys() == other.options.keys()
                                 and changed(self) == changed(other))

    settings.__eq__, settings.__hash__ = equal, lambda self: hash(frozenset(changed(self)))


@contextmanager
def target(capability: tuple[int, int]) -> Iterator[None]:
    """Compile for this compute capability: typing a device function asks for the current device, and there is none."""
    dispatcher = compiler().dispatcher
    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = asked


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage: the compiler leaves so many objects, all in use until a kernel is done, that looking through
    them again and again would take a fifth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def gpu_names() -> list[str]:
    """The GPUs there are, by what they call themselves.

    Raises:
        DeviceError: as `driver`.
    """
    bindings, names = driver(), []
    for index in range(bindings.cuDeviceGetCount()[1]):
        name = bindings.cuDeviceGetName(256, bindings.cuDeviceGet(index)[1])[1]
        names.append(name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name))
    return names


def driver_version() -> str:
    """The newest CUDA that the driver knows, such as "13.0".

    Raises:
        DeviceError: as `driver`.
    """
    found = int(driver().cuDriverGetVersion()[1])
    return f"{found // 1000}.{found % 1000 // 10}"


@functools.cache
def core() -> ModuleType:
    """cuda.core: devices, streams, graphs, linking.

    Raises:
        DeviceError: cuda-core is not installed.
    """
    try:
        import cuda.core
    except ImportError as error:
        raise DeviceError(f"device 'cuda' needs cuda-core ({error}): {INSTALL}") from None
    return cuda.core


@functools.cache
def nccl() -> ModuleType:
    """nccl.bindings.nccl (nccl4py), with NCCL itself behind it.

    Raises:
        DeviceError: the package or the library is not there.
    """
    try:
        from nccl.bindings import nccl as bindings
    except ImportError as error:
        raise DeviceError(f"NCCL needs the package nccl4py ({error}): {INSTALL_NCCL}") from None
    try:
        bindings.get_version()
    except RuntimeError as error:  # the library itself is not there
        why = " ".join(str(error).split())[:200]
        raise DeviceError(f"nccl4py finds no libnccl.so.2 ({why}): {INSTALL_NCCL}") from None
    return bindings


@functools.cache
def driver() -> ModuleType:
    """cuda.bindings.driver, checked to have a driver and a device behind it.

    Raises:
        DeviceError: no package, no driver, or no device.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise DeviceError(f"device 'cuda' needs cuda-bindings ({error}): {INSTALL}; {ELSE}") from None
    try:
        (status,) = bindings.cuInit(0)
        code, count = bindings.cuDeviceGetCount() if int(status) == 0 else (status, 0)
    except RuntimeError as error:  # the library itself is not there
        raise DeviceError(f"device 'cuda' needs an NVIDIA driver, there is none ({error}); {ELSE}") from None
    if int(status) or int(code):
        raise DeviceError(f"device 'cuda' needs an NVIDIA driver and a GPU: cuInit says {status.name}; {ELSE}")
    if not count:
        raise DeviceError(f"device 'cuda' needs an NVIDIA GPU, the driver knows none; {ELSE}")
    return bindings
