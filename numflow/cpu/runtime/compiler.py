"""From a kernel's Python function to machine code, by Numba."""

import ctypes
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core.codegen import get_host_cpu_features

from numflow import kernel_cache
from numflow.cpu.runtime.symbols import NAMED
from numflow.cpu.simd.isa import isa

# No relaxed float rules: a kernel computes what it says, so that a vector body, its tail and a tile of any height agree
# bit for bit. Where a * b + c should be fused, the kernel calls `fma`.
FASTMATH = False

_SIGNATURE = types.void(types.int64, types.int64, types.int64)

for _name, _function in NAMED.items():
    binding.add_symbol(_name, ctypes.cast(_function, ctypes.c_void_p).value)

if isa() == "neon" and kernel_cache.setting("CPU_FEATURES") is None:
    # LLVM may not know of a new processor that it has dot products, and it ends the process where it meets one then.
    numba.config.CPU_FEATURES = ",".join(filter(None, [get_host_cpu_features(), "+neon", "+dotprod"]))


def compile_kernel(fn: Callable[[int, int, int], None], keep: bool) -> tuple[Any, bool]:
    """The compiled function, which has an `address`, and whether Numba had it on disk.

    keep: let Numba keep it there. What is not kept can be had as an object_file.
    """
    config: Any = numba.config
    saved, config.CACHE_DIR = config.CACHE_DIR, str(kernel_cache.folder(fn.__module__))
    try:
        compiled: Any = numba.cfunc(_SIGNATURE, cache=keep, fastmath=FASTMATH, error_model="numpy")(fn)
    finally:
        config.CACHE_DIR = saved
    return compiled, compiled.cache_hits > 0


def object_file(compiled: Any) -> bytes:
    """Object file that LLVM made of a compiled function; its C function is named "cfunc. ..."."""
    return compiled._library._get_compiled_object()
