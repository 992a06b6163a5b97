"""What a thread does to choose its core (affinity.py)."""

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.access import i64, i64_ptr
from numflow.cpu.affinity import MASK_BYTES
from numflow.cpu.symbols import LINUX

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def current_cpu(typingctx):
    """Number of the CPU this thread runs on, or -1."""
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
