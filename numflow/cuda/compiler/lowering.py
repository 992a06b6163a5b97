"""Lowering of intrinsics, scalar types and memory declarations to Numba objects. Imported only to compile a kernel.

`lowered` maps each name of lang/ to inline PTX, an LLVM intrinsic, a Numba type or a memory declaration.
"""

import functools
import math

from numflow.cuda.compiler.lowering_builtin import BUILTINS
from numflow.cuda.compiler.lowering_types import SPACES, PointerType, intrinsic_of, ir, numba_type, types
from numflow.cuda.lang.intrinsic import Intrinsic, LocalArray, SharedArray
from numflow.cuda.lang.scalar import Scalar

_LETTERS = {"f32": "f", "i32": "r", "u32": "r", "u16": "h", "u64": "l"}


@functools.cache
def lowered(thing):
    """The compiler's counterpart of an intrinsic, a scalar type or a memory declaration."""
    if isinstance(thing, Scalar):
        return numba_type(thing)
    if isinstance(thing, SharedArray):
        return _memory(thing, "shared")
    if isinstance(thing, LocalArray):
        return _memory(thing, "local")
    assert isinstance(thing, Intrinsic)
    if thing.how[0] == "asm":
        return _assembly(thing.name, *thing.how[1:])
    if thing.how[0].startswith("math."):
        return getattr(math, thing.how[0].removeprefix("math."))
    return BUILTINS[thing.how[0]]


def _assembly(name, results, arguments, text, flags):
    """An intrinsic that is inline PTX. flags: "memory" clobbers memory; "effect" has side effects; "convergent" must
    not be moved across branches, because all lanes of the warp execute it together."""
    ins, outs = [numba_type(t) for t in arguments], [numba_type(t) for t in results]
    letters = ["=" + _LETTERS[t.name] for t in results] + [_LETTERS[t.name] for t in arguments]
    constraints = ",".join(letters + ["~{memory}"] * ("memory" in flags))
    result = types.void if not outs else outs[0] if len(outs) == 1 else types.UniTuple(outs[0], len(outs))

    def typed(*args):
        return result(*ins)

    def generate(context, builder, sig, args):
        kinds = [context.get_value_type(t) for t in ins]
        returns = [context.get_value_type(t) for t in outs]
        value = ir.VoidType() if not outs else returns[0] if len(outs) == 1 else ir.LiteralStructType(returns)
        call = builder.call(ir.InlineAsm(ir.FunctionType(value, kinds), text, constraints,
                                         side_effect="effect" in flags or "convergent" in flags), args)
        if "convergent" in flags:
            call.attributes.add("convergent")
        if not outs:
            return context.get_dummy_value()
        if len(outs) == 1:
            return call
        return context.make_tuple(builder, result, [builder.extract_value(call, i) for i in range(len(outs))])

    return intrinsic_of(name, len(ins), typed, generate)


def _memory(declaration, space):
    """A function without arguments that returns a pointer to shared memory or to an array of the thread (local)."""
    kind = PointerType(numba_type(declaration.scalar), space)

    def generate(context, builder, sig, args):
        element = context.get_value_type(kind.dtype)
        dynamic = space == "shared" and declaration.dynamic
        shape = ir.ArrayType(element, 0 if dynamic else declaration.count)
        if space == "shared":
            name = builder.module.get_unique_name(f"shared_{declaration.scalar.name}")
            memory = ir.GlobalVariable(builder.module, shape, name, SPACES["shared"])
            memory.linkage, memory.align = "external" if dynamic else "internal", declaration.alignment
            memory.initializer = None if dynamic else ir.Constant(shape, ir.Undefined)
        else:
            with builder.goto_entry_block():
                memory = builder.alloca(shape)
        zero = ir.Constant(ir.IntType(32), 0)
        return builder.gep(memory, [zero, zero])

    return intrinsic_of(f"{space}_memory", 0, lambda: kind(), generate)
