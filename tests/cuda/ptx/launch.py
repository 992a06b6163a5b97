"""Launches: PTX on a grid, with a memory and checks; and functions of Numba straight from Python.

    memory, checks = GlobalMemory(), Checks()
    launch(parse(text), (8, 1, 1), 128, [np.uint64(address), np.int32(1000)], memory, checks)

    @cuda.jit ... or a plain function:
    checks = run(saxpy, 4, 128, y, x, np.float32(2))      # arrays are copied in, and back
"""

import numpy as np

from .findings import Checks
from .lanes import Grid
from .machine import Machine
from .memory import GlobalMemory
from .parse import Kernel, parse
from .races import MOST, Log

LANES = 4096     # that run side by side; more are faster until arrays leave the processor's cache


def launch(kernel: Kernel, blocks: tuple[int, int, int], threads: int, arguments: list, memory: GlobalMemory,
           checks: Checks, name: str = "", seed: int = 0, dynamic: int = 0, lanes: int = LANES,
           cluster: int = 1) -> None:
    """Run a kernel on a grid; what it leaves is in `memory`, what was found in `checks`. cluster: blocks of one.

    Raises:
        Fault: the kernel did what ends it.
    """
    total, together, log = int(np.prod(blocks)), max(1, lanes // threads // cluster) * cluster, Log(False)
    order = range(0, total, together)
    if seed:
        order = np.random.default_rng(seed).permutation(order).tolist()
    for first in order:
        grid = Grid(blocks, threads, first, min(together, total - first), dynamic, cluster)
        Machine(kernel, grid, arguments, memory, checks, name, seed, log).run()
        if log.places > MOST:
            _look(log, threads, checks, name or kernel.name)
    _look(log, threads, checks, name or kernel.name)


def _look(log: Log, threads: int, checks: Checks, name: str) -> None:
    for race in log.races(threads):
        checks.note(name, f"race on global memory between {race}")


def run(function, blocks: int | tuple, threads: int, *values, seed: int = 0, checks: Checks | None = None,
        fastmath: bool = False) -> Checks:
    """Compile a function as Numba's CUDA target does, for sm_80, and run it. Arrays are copied in, and back afterwards.

    Raises:
        Fault: the kernel did what ends it.
    """
    from numba import cuda, types
    from numba.np.numpy_support import from_dtype

    def type_of(value):
        return (types.Array(from_dtype(value.dtype), value.ndim, "C") if isinstance(value, np.ndarray)
                else from_dtype(np.asarray(value).dtype))

    signature = types.void(*map(type_of, values))
    text, _ = cuda.compile_ptx(getattr(function, "py_func", function), signature, cc=(8, 0), fastmath=fastmath)
    memory, checks, arguments, placed = GlobalMemory(), checks or Checks(), [], []
    for value in values:
        if not isinstance(value, np.ndarray):
            arguments.append(np.asarray(value)[()])
            continue
        place = memory.take(value.nbytes)
        place[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        memory.wrote(place)
        placed.append((value, place))
        arguments += [np.uint64(0), np.uint64(0), np.int64(value.size), np.int64(value.itemsize),
                      np.uint64(place.ctypes.data), *map(np.int64, value.shape), *map(np.int64, value.strides)]
    grid = (*np.atleast_1d(blocks).tolist(), 1, 1)[:3]
    launch(parse(text), grid, threads, arguments, memory, checks, getattr(function, "__name__", "kernel"), seed)
    for value, place in placed:
        value[...] = place.view(value.dtype).reshape(value.shape)
    return checks
