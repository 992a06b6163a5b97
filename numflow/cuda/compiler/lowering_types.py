"""Pointers as a Numba type with an address space, which decides the instruction: LDG for device memory, LDS for shared.

Indices are 64 bits wide; a negative index is not wrapped around as in NumPy. Imported only to compile a kernel.
"""

import operator

from numflow.cuda.compiler.compat import compiler
from numflow.cuda.lang.scalar import Pointer, Scalar

C = compiler()
ir, types, hooks = C.ir, C.types, C.hooks

SPACES = {"global": 1, "shared": 3, "local": 0}


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
    """Data model of a pointer: the plain LLVM pointer."""

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


def element_at(builder, pointer, index, index_type):
    """Address of an element. The index is sign- or zero-extended to 64 bits, by its type."""
    if index_type.bitwidth < 64:
        widen = builder.sext if index_type.signed else builder.zext
        index = widen(index, ir.IntType(64))
    return builder.gep(pointer, [index])


@hooks.lower_builtin(operator.getitem, PointerType, types.Integer)
def _lower_getitem(context, builder, sig, args):
    return builder.load(element_at(builder, args[0], args[1], sig.args[1]))


@hooks.lower_builtin(operator.setitem, PointerType, types.Integer, types.Any)
def _lower_setitem(context, builder, sig, args):
    value = context.cast(builder, args[2], sig.args[2], sig.args[0].dtype)
    builder.store(value, element_at(builder, args[0], args[1], sig.args[1]))
    return context.get_dummy_value()


@hooks.lower_builtin(operator.add, PointerType, types.Integer)
def _lower_add(context, builder, sig, args):
    return element_at(builder, args[0], args[1], sig.args[1])


def numba_type(kind: Scalar | Pointer):
    """The Numba type of a scalar or of a pointer into device memory."""
    if isinstance(kind, Pointer):
        return PointerType(numba_type(kind.to), "global")
    return getattr(types, kind.numba)


def intrinsic_of(name, arity, typed, generate):
    """An intrinsic of fixed arity: typed(*types) -> signature or None, generate(context, builder, sig, args)."""
    def body(_context, *args):
        sig = typed(*args)
        return None if sig is None else (sig, generate)
    names = ", ".join(f"a{i}" for i in range(arity))
    scope = {"body": body}
    exec(f"def {name}(typingctx{', ' * bool(arity)}{names}): return body(typingctx{', ' * bool(arity)}{names})", scope)
    return hooks.intrinsic(scope[name])
