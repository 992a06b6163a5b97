"""Explicit SIMD inside Numba: vector registers as a Numba type, operations on them as LLVM IR.

A kernel written with these reads like plain Python and is compiled for the instruction set of `isa()`. Vectors are
always 64 bytes wide; LLVM splits them if registers are narrower. A Vec exists in local variables of compiled functions
only. Addresses are int64. Every operation gives the same bits on every instruction set. value.py is the language for
longer pieces of code.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from numflow.cpu.simd.isa import has_half

_I32 = ir.IntType(32)
_ELEMENT = {"i32": _I32, "f32": ir.FloatType(), "f64": ir.DoubleType()}

# Decorators for helpers of kernels. LLVM inlines an `inline` helper, so constant arguments select code at compile time.
# Numba inlines a `merged` helper before that, which compiles faster if the helper is called once.
NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inline = njit(forceinline=True, error_model="numpy", **NO_WRAPPERS)
merged = njit(inline="always", error_model="numpy")


class Vec(types.Type):
    """A SIMD register: `kind` is the element type, `lanes` how many elements."""

    def __init__(self, kind: str, lanes: int):
        self.kind, self.lanes = kind, lanes
        super().__init__(name=f"{kind}x{lanes}")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(_ELEMENT[self.kind], self.lanes)


@register_model(Vec)
class VecModel(models.PrimitiveModel):
    """LLVM's own vector type."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


i32x16, f32x16 = Vec("i32", 16), Vec("f32", 16)


# Helpers for emitters of IR.

def constant(llvm: ir.VectorType, value: int | float) -> ir.Constant:
    """`value` in every lane."""
    return ir.Constant(llvm, [ir.Constant(llvm.element, value)] * llvm.count)


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    """A scalar value in every lane of a new vector."""
    llvm = ir.VectorType(scalar.type, lanes)
    undef = ir.Constant(llvm, ir.Undefined)
    first = builder.insert_element(undef, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undef, ir.Constant(ir.VectorType(_I32, lanes), None))


def load_at(builder: ir.IRBuilder, address: ir.Value, llvm: ir.Type) -> ir.Value:
    """An unaligned load."""
    value = builder.load(builder.inttoptr(address, llvm.as_pointer()))
    value.align = 1
    return value


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call the LLVM intrinsic `name`."""
    fn_type = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fn_type, name), args)


def widen_f16_ir(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """<16 x i16> float16 bits -> <16 x float>."""
    if has_half():
        return builder.fpext(builder.bitcast(half, ir.VectorType(ir.HalfType(), 16)), f32x16.llvm)
    # Without conversion instructions LLVM would call a run-time library that may be missing.
    llvm, wide = i32x16.llvm, builder.zext(half, i32x16.llvm)
    magnitude = builder.shl(builder.and_(wide, constant(llvm, 0x7FFF)), constant(llvm, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, f32x16.llvm), constant(f32x16.llvm, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant(llvm, 0x7C00 << 13))  # infinities and NaN
    bits = builder.select(special, builder.or_(magnitude, constant(llvm, 0x7F800000)),
                          builder.bitcast(scaled, llvm))
    sign = builder.shl(builder.and_(wide, constant(llvm, 0x8000)), constant(llvm, 16))
    return builder.bitcast(builder.or_(bits, sign), f32x16.llvm)


# Intrinsics: functions of compiled code.

def op(result: types.Type, *arguments: types.Type) -> Any:
    """Decorator: make emit(builder, *LLVM values) -> LLVM value callable from compiled code, with this signature."""
    def make(emit):
        def typing(typingctx, *args):
            def codegen(context, builder, signature, values):
                value = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else value
            return result(*arguments), codegen
        return named_intrinsic(typing, emit, list(inspect.signature(emit).parameters.values())[1:])
    return make


def named_intrinsic(typing: Callable, emit: Callable, parameters: list[inspect.Parameter]) -> Any:
    """`typing` as an intrinsic with the name, the docstring and these parameters of `emit`."""
    typing.__name__ = typing.__qualname__ = emit.__name__
    typing.__doc__ = emit.__doc__
    first = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    typing.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return intrinsic(typing)


@op(f32x16, types.int64)
def load_f32(builder, address):
    """Load 16 float32."""
    return load_at(builder, address, f32x16.llvm)


@op(f32x16, types.int64)
def load_f16(builder, address):
    """Load 16 float16, widened to float32."""
    return widen_f16_ir(builder, load_at(builder, address, ir.VectorType(ir.IntType(16), 16)))


@op(types.void, types.int64, f32x16)
def store_f32(builder, address, value):
    """Store 16 float32."""
    builder.store(value, builder.inttoptr(address, f32x16.llvm.as_pointer())).align = 1


def first_lanes(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """<16 x i1> that is true in the first `count` (int64) lanes."""
    lanes = ir.Constant(i32x16.llvm, [ir.Constant(_I32, i) for i in range(16)])
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, _I32), 16))


def masked_store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, mask: ir.Value) -> None:
    """Store the lanes whose mask is true; the memory of the others is not written."""
    fn_type = ir.FunctionType(ir.VoidType(), [f32x16.llvm, pointer.type, _I32, mask.type])
    fn = cgutils.get_or_insert_function(builder.module, fn_type, "llvm.masked.store.v16f32.p0")
    builder.call(fn, [value, pointer, ir.Constant(_I32, 4), mask])


@op(f32x16)
def zero_f32(builder):
    """Zeros."""
    return ir.Constant(f32x16.llvm, None)
