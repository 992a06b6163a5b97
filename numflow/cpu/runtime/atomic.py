"""Synchronisation of threads outside the GIL: atomic int64 operations, spin and yield, a clock, locks to sleep on.

System functions are called by name (symbols.py).
"""

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.runtime.access import i64
from numflow.cpu.runtime.symbols import CLOCK, CLOCK_MICROSECONDS, NAP, WINDOWS

_I32, _I64 = ir.IntType(32), ir.IntType(64)
LONG_YIELD, CROWD_LASTS = 1000, 200_000  # microseconds
_X86 = binding.get_process_triple().startswith(("x86_64", "i386", "i686"))

def _pointer(builder, address):
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def fetch_add(typingctx, address, value):
    """Add to the int64 at `address`; returns the old value."""
    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange(typingctx, address, value):
    """Replace the int64 at `address`; returns the old value."""
    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, address):
    """Load the int64 at `address` with acquire semantics: everything its writer stored before is visible."""
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)
    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Store the int64 at `address` with release semantics: everything this thread stored before is visible first."""
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Hint that this is a spin loop (x86 `pause`; nothing elsewhere)."""
    def codegen(context, builder, signature, args):
        if _X86:
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()
    return types.void(), codegen


@intrinsic
def cpu_yield(typingctx):
    """Yield the core to another thread (sched_yield, SwitchToThread)."""
    def codegen(context, builder, signature, args):
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "numflow_yield"), [])
        return context.get_dummy_value()
    return types.void(), codegen


@intrinsic
def read_clock(typingctx, address):
    """Write the time to the two int64 at `address` (symbols.CLOCK_MICROSECONDS)."""
    def codegen(context, builder, signature, args):
        arguments = [args[0]] if WINDOWS else [_I32(CLOCK), args[0]]
        fn = ir.FunctionType(_I32, [a.type for a in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, fn, "numflow_clock"), arguments)
        return context.get_dummy_value()
    return types.void(types.int64), codegen


@intrinsic
def _two_words(typingctx):
    """Address of two int64 on the stack, set to 0."""
    def codegen(context, builder, signature, args):
        memory = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        builder.store(ir.Constant(ir.ArrayType(_I64, 2), None), memory)
        return builder.ptrtoint(memory, _I64)
    return types.int64(), codegen


@numba.njit
def microseconds():
    """The time in microseconds, int64."""
    address = _two_words()
    read_clock(address)
    return np.int64(i64(address, 0) * CLOCK_MICROSECONDS[0] + i64(address, 1) * CLOCK_MICROSECONDS[1])


@numba.njit
def give_way(crowded):
    """Yield the core once, unless other programs are assumed to compete for it; returns whether they do.

    crowded: address of the time until which they are assumed to. A yield that takes long, because another program ran
    meanwhile, sets the time.
    """
    begin = microseconds()
    if begin < load_acquire(crowded):
        return True
    cpu_yield()
    end = microseconds()
    if end - begin < LONG_YIELD:
        return False
    store_release(crowded, end + CROWD_LASTS)
    return True


@intrinsic
def nap(typingctx):
    """Sleep for the shortest time that the system offers without a lock: about 0.1 ms, on Windows 1 ms."""
    def codegen(context, builder, signature, args):
        fn = ir.FunctionType(_I32, [_I32])
        builder.call(cgutils.get_or_insert_function(builder.module, fn, "numflow_nap"), [_I32(NAP)])
        return context.get_dummy_value()
    return types.void(), codegen


@intrinsic
def acquire(typingctx, lock):
    """Sleep until the lock at this address (threads.py: _new_lock) is free, and acquire it."""
    def codegen(context, builder, signature, args):
        fn = ir.FunctionType(_I32, [_I64, _I32])
        builder.call(cgutils.get_or_insert_function(builder.module, fn, "numflow_acquire"), [args[0], _I32(1)])
        return context.get_dummy_value()
    return types.void(types.int64), codegen


@intrinsic
def release(typingctx, lock):
    """Release the lock at this address, whichever thread acquired it."""
    def codegen(context, builder, signature, args):
        fn = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(cgutils.get_or_insert_function(builder.module, fn, "numflow_release"), [args[0]])
        return context.get_dummy_value()
    return types.void(types.int64), codegen


@intrinsic
def call_kernel(typingctx, address, args_address, thread, n_threads):
    """Call the kernel at `address`."""
    def codegen(context, builder, signature, args):
        fn = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64]).as_pointer()
        builder.call(builder.inttoptr(args[0], fn), args[1:])
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64, types.int64), codegen
