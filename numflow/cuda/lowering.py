"""What the names of intrinsics.py and scalar.py mean to the compiler; imported only when a kernel is compiled.

Pointers are a Numba type of our own, because the address space decides the instruction: LDG for device memory, LDS for
shared. Indices are 64 bits wide and never negative-wrapped. Inline assembly and intrinsics are all made by one
function, `lowered`.
"""

import functools
import operator

from numflow.cuda.compat import compiler
from numflow.cuda.intrinsic import Intrinsic, LocalArray, SharedArray
from numflow.cuda.scalar import Pointer, Scalar

C = compiler()
ir, types, hooks = C.ir, C.types, C.hooks

SPACES = {"global": 1, "shared": 3, "local": 0}
_LETTERS = {"f32": "f", "i32": "r", "u32": "r", "u16": "h", "u64": "l"}


class PointerType(types.Type):
    """Pointer to `dtype` in an address space of SPACES."""

    def __init__(self, dtype, space: str):
        self.dtype, self.space = dtype, space
        super().__init__(f"{space}_pointer({dtype})")

    @property
    def key(self):
        return self.dtype, self.space


@hooks.register_model(PointerType)
class PointerModel(C.models.PrimitiveModel):
    """The bare address."""

    def __init__(self, manager, kind):
        pointee = manager.lookup(kind.dtype).get_data_type()
        super().__init__(manager, kind, ir.PointerType(pointee, SPACES[kind.space]))


@C.templates.infer_global(operator.getitem)
class _GetItem(C.templates.AbstractTemplate):
    def generic(self, args, kwargs):
        if isinstance(args[0], PointerType) and isinstance(args[1], types.Integer):
            return C.templates.signature(args[0].dtype, args[0], args[1])
        return None


@C.templates.infer_global(operator.setitem)
class _SetItem(C.templates.AbstractTemplate):
    def generic(self, args, kwargs):
        if isinstance(args[0], PointerType) and isinstance(args[1], types.Integer):
            return C.templates.signature(types.none, args[0], args[1], args[0].dtype)
        return None


@C.templates.infer_global(operator.add)
class _Add(C.templates.AbstractTemplate):
    def generic(self, args, kwargs):
        if len(args) == 2 and isinstance(args[0], PointerType) and isinstance(args[1], types.Integer):
            return C.templates.signature(args[0], args[0], args[1])
        return None


def _place(builder, pointer, index, index_type):
    """Address of an element; the index is widened by its own sign."""
    if index_type.bitwidth < 64:
        widen = builder.sext if index_type.signed else builder.zext
        index = widen(index, ir.IntType(64))
    return builder.gep(pointer, [index])


@hooks.lower_builtin(operator.getitem, PointerType, types.Integer)
def _lower_getitem(context, builder, sig, args):
    return builder.load(_place(builder, args[0], args[1], sig.args[1]))


@hooks.lower_builtin(operator.setitem, PointerType, types.Integer, types.Any)
def _lower_setitem(context, builder, sig, args):
    value = context.cast(builder, args[2], sig.args[2], sig.args[0].dtype)
    builder.store(value, _place(builder, args[0], args[1], sig.args[1]))
    return context.get_dummy_value()


@hooks.lower_builtin(operator.add, PointerType, types.Integer)
def _lower_add(context, builder, sig, args):
    return _place(builder, args[0], args[1], sig.args[1])


def numba_type(kind: Scalar | Pointer):
    """The Numba type of a scalar or of a pointer into device memory."""
    if isinstance(kind, Pointer):
        return PointerType(numba_type(kind.to), "global")
    return getattr(types, kind.numba)


def _intrinsic(name, arity, typed, generate):
    """An intrinsic of fixed arity: typed(*types) -> signature or None, generate(context, builder, sig, args)."""
    def body(_context, *args):
        sig = typed(*args)
        return None if sig is None else (sig, generate)
    names = ", ".join(f"a{i}" for i in range(arity))
    scope = {"body": body}
    exec(f"def {name}(typingctx{', ' * bool(arity)}{names}): return body(typingctx{', ' * bool(arity)}{names})", scope)
    return hooks.intrinsic(scope[name])


@functools.cache
def lowered(thing):
    """What stands in for an intrinsic, a scalar type or a memory declaration in compiled code."""
    if isinstance(thing, Scalar):
        return numba_type(thing)
    if isinstance(thing, SharedArray):
        return _memory(thing, "shared")
    if isinstance(thing, LocalArray):
        return _memory(thing, "local")
    assert isinstance(thing, Intrinsic)
    if thing.how[0] == "asm":
        return _assembly(thing.name, *thing.how[1:])
    from numflow.cuda.lowering_builtin import BUILTINS

    if thing.how[0].startswith("math."):
        import math

        return getattr(math, thing.how[0].removeprefix("math."))
    return BUILTINS[thing.how[0]]


def _assembly(name, results, arguments, text, flags):
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

    return _intrinsic(name, len(ins), typed, generate)


def _memory(declaration, space):
    """A function without arguments that gives the pointer to the memory."""
    kind = PointerType(numba_type(declaration.scalar), space)

    def generate(context, builder, sig, args):
        element = context.get_value_type(kind.dtype)
        shape = ir.ArrayType(element, declaration.count)
        if space == "shared":
            name = builder.module.get_unique_name(f"shared_{declaration.scalar.name}")
            memory = ir.GlobalVariable(builder.module, shape, name, SPACES["shared"])
            memory.linkage, memory.align = "internal", 16
            memory.initializer = ir.Constant(shape, ir.Undefined)
        else:
            with builder.goto_entry_block():
                memory = builder.alloca(shape)
        zero = ir.Constant(ir.IntType(32), 0)
        return builder.gep(memory, [zero, zero])

    return _intrinsic(f"{space}_memory", 0, lambda: kind(), generate)
