"""Synchronisation of threads outside the GIL: atomic int64 operations, a pause, a yield, a clock, a lock to sleep on.

System functions are called by name (symbols.py).
"""

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.runtime.access import i64
from numflow.cpu.runtime.symbols import CLOCK, CLOCK_MICROSECONDS, WINDOWS

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_X86 = binding.get_process_triple().startswith(("x86_64", "i386", "i686"))

def _pointer(builder, address):
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def fetch_add(typingctx, address, value):
    """Add to the int64 at `address`; the value before."""
    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange(typingctx, address, value):
    """Replace the int64 at `address`; the value before."""
    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, address):
    """The int64 at `address`, and everything its writer wrote before it."""
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)
    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Write the int64 at `address` after everything this thread wrote before."""
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a spin loop (x86 `pause`; nothing elsewhere)."""
    def codegen(context, builder, signature, args):
        if _X86:
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()
    return types.void(), codegen


@intrinsic
def cpu_yield(typingctx):
    """Let another thread have this core (sched_yield, SwitchToThread)."""
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


@numba.njit
def microseconds(address):
    """The time, float64; the two int64 at `address` are room for it."""
    read_clock(address)
    return i64(address, 0) * CLOCK_MICROSECONDS[0] + i64(address, 1) * CLOCK_MICROSECONDS[1]


@intrinsic
def acquire(typingctx, lock):
    """Sleep until the lock at this address (see new_lock) is free, and take it."""
    def codegen(context, builder, signature, args):
        fn = ir.FunctionType(_I32, [_I64, _I32])
        builder.call(cgutils.get_or_insert_function(builder.module, fn, "numflow_acquire"), [args[0], _I32(1)])
        return context.get_dummy_value()
    return types.void(types.int64), codegen


@intrinsic
def release(typingctx, lock):
    """Free the lock at this address, whichever thread took it."""
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
