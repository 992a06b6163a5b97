"""Compilation of a kernel's Python function to machine code, by Numba."""

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core.codegen import get_host_cpu_features

from numflow import kernel_cache
from numflow.cpu.runtime.symbols import NAMED
from numflow.cpu.simd.isa import isa

# No relaxed float rules: LLVM must not reorder or fuse operations, so that the vector body of a loop, its tail and
# tiles of any height agree bit for bit. A kernel calls `fma` for a fused multiply-add.
FASTMATH = False

_SIGNATURE = types.void(types.int64, types.int64, types.int64)

for _name, _function in NAMED.items():
    binding.add_symbol(_name, ctypes.cast(_function, ctypes.c_void_p).value)

if isa() == "neon" and kernel_cache.setting("CPU_FEATURES") is None:
    # LLVM may not know that a new processor has dot products, and would then abort the process at such an instruction.
    numba.config.CPU_FEATURES = ",".join(filter(None, [get_host_cpu_features(), "+neon", "+dotprod"]))


def compile_kernel(fn: Callable[[int, int, int], None], keep: bool) -> tuple[Any, bool]:
    """The compiled function, which has an `address`, and whether Numba loaded it from its cache.

    keep: whether Numba caches it on disk. If not, `object_file` returns its object file.
    """
    config: Any = numba.config
    saved, config.CACHE_DIR = config.CACHE_DIR, str(kernel_cache.folder(fn.__module__))
    collects = gc.isenabled()
    gc.disable()  # the compiler makes so many objects that looking for garbage among them takes a seventh of its time
    try:
        compiled: Any = numba.cfunc(_SIGNATURE, cache=keep, fastmath=FASTMATH, error_model="numpy")(fn)
    finally:
        config.CACHE_DIR = saved
        if collects:
            gc.enable()
    return compiled, compiled.cache_hits > 0


def object_file(compiled: Any) -> bytes:
    """Object file of a compiled function; the symbol of its C function begins with "cfunc."."""
    return compiled._library._get_compiled_object()
