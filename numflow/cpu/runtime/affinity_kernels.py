"""Function by which a thread sets its CPU affinity (affinity.py)."""

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.runtime.access import i64, i64_ptr
from numflow.cpu.runtime.affinity import MASK_BYTES
from numflow.cpu.runtime.symbols import LINUX
from numflow.cpu.simd.vector import inline

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def current_cpu(typingctx):
    """Index of the CPU that this thread runs on, or -1."""
    def codegen(context, builder, signature, args):
        if not LINUX:
            return _I64(-1)
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "numflow_sched_getcpu")
        return builder.sext(builder.call(fn, []), _I64)
    return types.int64(), codegen


@intrinsic
def _set_affinity(typingctx, mask):
    def codegen(context, builder, signature, args):
        if LINUX:
            fn_type = ir.FunctionType(_I32, [_I32, _I64, _I64])
            fn = cgutils.get_or_insert_function(builder.module, fn_type, "numflow_sched_setaffinity")
            builder.call(fn, [_I32(0), _I64(MASK_BYTES), args[0]])
        return context.get_dummy_value()
    return types.void(types.int64), codegen


@numba.njit
def choose_cpu(thread, n_threads, caller, allowed, mask):
    """Let this thread run on all CPUs of the mask at `allowed` except `caller`; if threads outnumber the CPUs, pin it
    to one CPU, counted from the caller's CPU by thread index. `mask` is memory for a mask.
    """
    count, rank = 0, 0
    for cpu in range(8 * MASK_BYTES):
        if _has(allowed, cpu):
            count += 1
            rank += cpu < caller
    if count < 2 or caller < 0:
        return
    wanted, index = (rank + thread) % count, 0
    for word in range(MASK_BYTES // 8):
        i64_ptr(mask)[word] = 0
    for cpu in range(8 * MASK_BYTES):
        if _has(allowed, cpu):
            if index == wanted if n_threads > count else cpu != caller:
                i64_ptr(mask)[cpu // 64] |= 1 << (cpu % 64)
            index += 1
    _set_affinity(mask)


@inline
def _has(mask, cpu):
    return (i64(mask, cpu // 64) >> (cpu % 64)) & 1 != 0
