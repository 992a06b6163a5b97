"""All imports of numba-cuda and cuda-python, and all patches of them. No other file of the package imports them.

numba-cuda compiles kernels to PTX; cuda-core assembles PTX; the driver's bindings launch kernels. Each package is
imported on first use: the simulator needs none of them, the compiler needs no driver, and compiled kernels need no
compiler.
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
ELSE = f"{option('backend', 'cpu')} runs models without"  # hint for machines without a GPU
INSTALL_NCCL = install("nccl")
PACKAGES = ("numba-cuda", "cuda-core", "cuda-bindings", "cuda-pathfinder", "nvidia-nvvm", "nvidia-cuda-nvrtc",
            "nvidia-nvjitlink", "nccl4py", "nvidia-nccl-cu13", "numba", "llvmlite", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of all packages that kernels depend on; "missing" for a package that is not installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


@functools.cache
def compiler() -> SimpleNamespace:
    """The modules of numba-cuda and llvmlite with which kernels and intrinsics are compiled.

    Raises:
        DeviceError: numba-cuda is not installed.
    """
    if not hasattr(np, "row_stack"):  # numba-cuda 0.30 uses it; NumPy 2.5 removed it
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
    _speed_up_comparison(targetconfig.TargetConfig)
    return SimpleNamespace(ir=ir, cuda=cuda, dispatcher=dispatcher, libdevice=libdevice, types=types, hooks=hooks,
                           models=models, templates=templates)


def _speed_up_comparison(settings: type) -> None:
    """Speed up the comparison of target configurations, which type inference makes at every call.

    numba-cuda compares all 25 settings and hashes their names, which are the same for every configuration. That takes a
    tenth of the compile time. The replacement compares and hashes only settings that differ from their defaults.
    """
    def changed(self):
        return {name: value for name, value in self._values.items() if value != self.options[name].default}

    def equal(self, other):
        return self is other or (isinstance(other, settings) and self.options.keys() == other.options.keys()
                                 and changed(self) == changed(other))

    settings.__eq__, settings.__hash__ = equal, lambda self: hash(frozenset(changed(self)))


@contextmanager
def target(capability: tuple[int, int]) -> Iterator[None]:
    """Compile for this compute capability. Typing a device function asks for the current device; without a GPU, a
    stand-in with this capability answers."""
    dispatcher = compiler().dispatcher
    original = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = original


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection. The compiler keeps very many live objects until a kernel is finished; scanning them
    repeatedly would take a fifth of the compile time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def gpu_names() -> list[str]:
    """Names of the GPUs, as the driver reports them.

    Raises:
        DeviceError: as `driver`.
    """
    bindings, names = driver(), []
    for index in range(bindings.cuDeviceGetCount()[1]):
        name = bindings.cuDeviceGetName(256, bindings.cuDeviceGet(index)[1])[1]
        names.append(name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name))
    return names


def driver_version() -> str:
    """The newest CUDA version that the driver supports, such as "13.0".

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
    """The module nccl.bindings.nccl (nccl4py), after checking that the NCCL library loads.

    Raises:
        DeviceError: the package or the library is missing.
    """
    try:
        from nccl.bindings import nccl as bindings
    except ImportError as error:
        raise DeviceError(f"NCCL needs the package nccl4py ({error}): {INSTALL_NCCL}") from None
    try:
        bindings.get_version()
    except RuntimeError as error:  # libnccl is missing
        why = " ".join(str(error).split())[:200]
        raise DeviceError(f"nccl4py finds no libnccl.so.2 ({why}): {INSTALL_NCCL}") from None
    return bindings


@functools.cache
def driver() -> ModuleType:
    """The module cuda.bindings.driver, after checking that there is a driver and a device.

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
    except RuntimeError as error:  # libcuda is missing
        raise DeviceError(f"device 'cuda' needs an NVIDIA driver, there is none ({error}); {ELSE}") from None
    if int(status) or int(code):
        raise DeviceError(f"device 'cuda' needs an NVIDIA driver and a GPU: cuInit says {status.name}; {ELSE}")
    if not count:
        raise DeviceError(f"device 'cuda' needs an NVIDIA GPU, but the driver reports none; {ELSE}")
    return bindings
