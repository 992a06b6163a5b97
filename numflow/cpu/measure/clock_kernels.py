"""The kernel that reads the clock (clock.py)."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.runtime.access import i64, i64_ptr
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.runtime.symbols import CLOCK, WINDOWS

_I32, _I64 = ir.IntType(32), ir.IntType(64)

# Arguments: address of int64 [2] that the clock is read into.
AT = 0


@intrinsic
def _read_clock(typingctx, address):
    """Write the time to the two int64 at `address`."""
    def codegen(context, builder, signature, args):
        arguments = [args[0]] if WINDOWS else [_I32(CLOCK), args[0]]
        fn = ir.FunctionType(_I32, [a.type for a in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, fn, "numflow_clock"), arguments)
        return context.get_dummy_value()
    return types.void(types.int64), codegen


@kernel
def stamp(args, thread, n_threads):
    """args: address of the two int64."""
    if thread == 0:
        at = i64(args, AT)
        i64_ptr(at)[0] = 0
        i64_ptr(at)[1] = 0
        _read_clock(at)
