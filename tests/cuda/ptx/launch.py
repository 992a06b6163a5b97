"""Launches of PTX kernels on a grid, and of Numba functions.

PTX, with device memory of the caller's:

    memory, checks = GlobalMemory(), Checks()
    launch(parse(text), (8, 1, 1), 128, [np.uint64(address), np.int32(1000)], memory, checks)

A function, with or without @cuda.jit; arrays are copied to the device and back:

    checks = run(saxpy, 4, 128, y, x, np.float32(2))
"""

import numpy as np

from .findings import Checks
from .lanes import Grid
from .machine import Machine
from .memory import GlobalMemory
from .parse import Kernel, parse
from .races import MOST, Log

LANES = 4096     # lanes that run side by side; more are faster, as long as their registers fit in the CPU's cache


def launch(kernel: Kernel, blocks: tuple[int, int, int], threads: int, arguments: list, memory: GlobalMemory,
           checks: Checks, name: str = "", seed: int = 0, dynamic: int = 0, lanes: int = LANES,
           cluster: int = 1) -> None:
    """Run a kernel on a grid. Results are in `memory`, findings in `checks`.

    arguments: one NumPy scalar for each parameter. name: of the kernel in findings. seed: of the execution order, 0 for
    the default one. dynamic: bytes of dynamic shared memory. cluster: blocks of a thread block cluster.

    Raises:
        Fault: an error that ends the kernel.
    """
    total, at_once, log = int(np.prod(blocks)), max(1, lanes // threads // cluster) * cluster, Log(False)
    order = range(0, total, at_once)
    if seed:
        order = np.random.default_rng(seed).permutation(order).tolist()
    for first in order:
        grid = Grid(blocks, threads, first, min(at_once, total - first), dynamic, cluster)
        Machine(kernel, grid, arguments, memory, checks, name, seed, log).run()
        if log.words > MOST:
            _report_races(log, threads, checks, name or kernel.name)
    _report_races(log, threads, checks, name or kernel.name)


def _report_races(log: Log, threads: int, checks: Checks, name: str) -> None:
    for race in log.races(threads):
        checks.note(name, f"race on global memory between {race}")


def run(function, blocks: int | tuple, threads: int, *values, seed: int = 0, checks: Checks | None = None,
        fastmath: bool = False) -> Checks:
    """Compile a function by numba-cuda for compute capability 8.0, and run it. Returns the checks with the findings.

    blocks: of the grid, up to three dimensions. threads: of a block. values: arguments; arrays are copied to the
    machine's memory, and back afterwards. fastmath: as in cuda.jit.

    Raises:
        Fault: an error that ends the kernel.
    """
    from numba import cuda, types
    from numba.np.numpy_support import from_dtype

    def type_of(value):
        return (types.Array(from_dtype(value.dtype), value.ndim, "C") if isinstance(value, np.ndarray)
                else from_dtype(np.asarray(value).dtype))

    signature = types.void(*map(type_of, values))
    text, _ = cuda.compile_ptx(getattr(function, "py_func", function), signature, cc=(8, 0), fastmath=fastmath)
    memory, checks, arguments, copies = GlobalMemory(), checks or Checks(), [], []
    for value in values:
        if not isinstance(value, np.ndarray):
            arguments.append(np.asarray(value)[()])
            continue
        device_array = memory.allocate(value.nbytes)
        device_array[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        memory.mark_written(device_array)
        copies.append((value, device_array))
        arguments += [np.uint64(0), np.uint64(0), np.int64(value.size), np.int64(value.itemsize),
                      np.uint64(device_array.ctypes.data), *map(np.int64, value.shape), *map(np.int64, value.strides)]
    grid = (*np.atleast_1d(blocks).tolist(), 1, 1)[:3]
    launch(parse(text), grid, threads, arguments, memory, checks, getattr(function, "__name__", "kernel"), seed)
    for value, device_array in copies:
        value[...] = device_array.view(value.dtype).reshape(value.shape)
    return checks
