"""Memory access in kernels. An address is an int64; p = f32_ptr(address) is indexed like an array, unchecked.

args is the address of a kernel's arguments: i64(args, 3) and f64(args, 4) read them. i64 reads any array of int64.
"""

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _pointer(numba_type: types.Type, llvm_type: ir.Type) -> Any:
    @intrinsic
    def pointer(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], llvm_type.as_pointer())
        return types.CPointer(numba_type)(types.int64), codegen
    return pointer


f32_ptr = _pointer(types.float32, ir.FloatType())
f64_ptr = _pointer(types.float64, ir.DoubleType())
i64_ptr = _pointer(types.int64, ir.IntType(64))
i32_ptr = _pointer(types.int32, ir.IntType(32))
u16_ptr = _pointer(types.uint16, ir.IntType(16))
u8_ptr = _pointer(types.uint8, ir.IntType(8))
i8_ptr = _pointer(types.int8, ir.IntType(8))


def _argument(numba_type: types.Type, llvm_type: ir.Type) -> Any:
    @intrinsic
    def argument(typingctx, args_address, index):
        def codegen(context, builder, signature, args):
            base = builder.inttoptr(args[0], llvm_type.as_pointer())
            return builder.load(builder.gep(base, [args[1]]))
        return numba_type(types.int64, types.int64), codegen
    return argument


i64 = _argument(types.int64, ir.IntType(64))
f64 = _argument(types.float64, ir.DoubleType())


def _bitcast(source: types.Type, target: types.Type, llvm_target: ir.Type) -> Any:
    @intrinsic
    def bitcast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_target)
        return target(source), codegen
    return bitcast


f32_bits = _bitcast(types.float32, types.int32, ir.IntType(32))
f32_from_bits = _bitcast(types.int32, types.float32, ir.FloatType())


@numba.njit(inline="always")
def share(n, thread, n_threads):
    """begin, end of this thread's even, contiguous share of n items."""
    return n * thread // n_threads, n * (thread + 1) // n_threads
