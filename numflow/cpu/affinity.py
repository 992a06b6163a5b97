"""On which core a thread runs (Linux; elsewhere nothing happens).

A scheduler likes to wake a thread on the core of whoever wakes it. Where the other cores are not quite idle, a worker
then shares the caller's core, and because the two take turns within microseconds neither is ever moved: half the speed
for seconds. So a worker that wakes may run on every core but the caller's.
"""

import ctypes
import os
import sys

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.kernel import i64, i64_ptr

MASK_BYTES = 128  # of a set of 1024 CPUs
_LINUX = sys.platform.startswith("linux")
_I32, _I64 = ir.IntType(32), ir.IntType(64)

if _LINUX:
    for _name in ("sched_getcpu", "sched_setaffinity"):
        _function = getattr(ctypes.CDLL(None), _name)
        binding.add_symbol(f"numflow_{_name}", ctypes.cast(_function, ctypes.c_void_p).value)


def allowed_mask(n_threads: int) -> bytes:
    """The CPUs this process may use as MASK_BYTES bytes; zeros where there are fewer than threads, or it is unknown."""
    cpus = os.sched_getaffinity(0) if _LINUX else set()
    usable = n_threads <= len(cpus) and max(cpus) < 8 * MASK_BYTES
    return sum(1 << cpu for cpu in cpus if usable).to_bytes(MASK_BYTES, "little")


@intrinsic
def current_cpu(typingctx):
    """Number of the CPU this thread runs on, or -1."""
    def codegen(context, builder, signature, args):
        if not _LINUX:
            return _I64(-1)
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "numflow_sched_getcpu")
        return builder.sext(builder.call(fn, []), _I64)
    return types.int64(), codegen


@intrinsic
def _set_affinity(typingctx, mask):
    def codegen(context, builder, signature, args):
        if _LINUX:
            fn_type = ir.FunctionType(_I32, [_I32, _I64, _I64])
            fn = cgutils.get_or_insert_function(builder.module, fn_type, "numflow_sched_setaffinity")
            builder.call(fn, [_I32(0), _I64(MASK_BYTES), args[0]])
        return context.get_dummy_value()
    return types.void(types.int64), codegen


@numba.njit
def avoid_cpu(cpu, allowed, mask):
    """Let this thread run on all CPUs of the mask at `allowed` but `cpu`; `mask` is memory for another mask."""
    left = 0
    for word in range(MASK_BYTES // 8):
        bits = i64(allowed, word)
        if 0 <= cpu - 64 * word < 64:
            bits &= ~(1 << (cpu - 64 * word))
        i64_ptr(mask)[word] = bits
        left |= bits
    if left != 0:
        _set_affinity(mask)
