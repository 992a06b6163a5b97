"""Intrinsics that take pointers, or that are LLVM's own: table BUILTINS, by the names that intrinsics.py gives."""

from numflow.cuda.compiler.lowering_types import SPACES, PointerType, element_at, intrinsic_of, ir, types
from numflow.cuda.lang.intrinsic import NEWER

_I32 = ir.IntType(32)


def _call(builder, name, result, *args):
    """Call of an LLVM intrinsic."""
    kind = ir.FunctionType(result, [a.type for a in args])
    fn = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(fn, args)


def _register(name):
    def generate(context, builder, sig, args):
        return _call(builder, f"llvm.nvvm.read.ptx.sreg.{name}", _I32)
    return intrinsic_of("register", 0, lambda: types.uint32(), generate)


def _barrier(name):
    def generate(context, builder, sig, args):
        if name == "syncwarp":
            _call(builder, "llvm.nvvm.bar.warp.sync", ir.VoidType(), ir.Constant(_I32, -1))
        else:
            _call(builder, "llvm.nvvm.barrier0", ir.VoidType())
        return context.get_dummy_value()
    return intrinsic_of(name, 0, lambda: types.void(), generate)


def _shuffle(mode, clamp):
    """f32 or 32-bit integers of another lane."""
    def typed(value, lane):
        kind = value if value in (types.float32, types.uint32) else types.int32
        return kind(kind, types.int32)

    def generate(context, builder, sig, args):
        value = builder.bitcast(args[0], _I32) if sig.args[0] == types.float32 else args[0]
        result = _call(builder, f"llvm.nvvm.shfl.sync.{mode}.i32", _I32, ir.Constant(_I32, -1), value, args[1],
                       ir.Constant(_I32, clamp))
        return builder.bitcast(result, ir.FloatType()) if sig.args[0] == types.float32 else result
    return intrinsic_of(f"shuffle_{mode}", 2, typed, generate)


def _ballot():
    def generate(context, builder, sig, args):
        return _call(builder, "llvm.nvvm.vote.ballot.sync", _I32, ir.Constant(_I32, -1), args[0])
    return intrinsic_of("ballot", 1, lambda predicate: types.uint32(types.boolean), generate)


def _is_pointer(kind, *spaces):
    return isinstance(kind, PointerType) and (not spaces or kind.space in spaces)


def _load(count):
    """A vector load that the address space names: LDG or LDS of 64 or 128 bits."""
    def typed(pointer, index):
        return types.UniTuple(pointer.dtype, count)(pointer, index) if _is_pointer(pointer) else None

    def generate(context, builder, sig, args):
        element = context.get_value_type(sig.args[0].dtype)
        vector = ir.VectorType(element, count)
        place = element_at(builder, args[0], args[1], sig.args[1])
        place = builder.bitcast(place, ir.PointerType(vector, SPACES[sig.args[0].space]))
        value = builder.load(place, align=4 * count)
        parts = [builder.extract_element(value, ir.Constant(_I32, i)) for i in range(count)]
        return context.make_tuple(builder, sig.return_type, parts)
    return intrinsic_of(f"load{count}", 2, typed, generate)


def _store(count):
    def typed(pointer, index, *values):
        return types.void(pointer, index, *[pointer.dtype] * count) if _is_pointer(pointer) else None

    def generate(context, builder, sig, args):
        vector = ir.VectorType(context.get_value_type(sig.args[0].dtype), count)
        place = element_at(builder, args[0], args[1], sig.args[1])
        place = builder.bitcast(place, ir.PointerType(vector, SPACES[sig.args[0].space]))
        value = ir.Constant(vector, ir.Undefined)
        for i in range(count):
            value = builder.insert_element(value, args[2 + i], ir.Constant(_I32, i))
        builder.store(value, place, align=4 * count)
        return context.get_dummy_value()
    return intrinsic_of(f"store{count}", 2 + count, typed, generate)


def _stream(count):
    """Loads of weights: read-only, not kept in the first cache, 128 bytes at a time into the second."""
    def typed(pointer, index):
        if not _is_pointer(pointer, "global"):
            return None
        kind = types.UniTuple(pointer.dtype, count) if count > 1 else pointer.dtype
        return kind(pointer, index)

    def generate(context, builder, sig, args):
        element = context.get_value_type(sig.args[0].dtype)
        address = builder.ptrtoint(element_at(builder, args[0], args[1], sig.args[1]), ir.IntType(64))
        short = element == ir.IntType(16)
        width, letter = ("u16", "h") if short else ("u32", "r")
        names = [f"${i}" for i in range(count)]
        shape = f".v{count}" if count > 1 else ""
        value = ir.LiteralStructType([element] * count) if count > 1 else element
        wanted = f"{{{', '.join(names)}}}" if count > 1 else names[0]
        text = f"ld.global.nc.L1::no_allocate.L2::128B{shape}.{width} {wanted}, [${count}];"
        constraints = ",".join([f"={letter}"] * count + ["l"])
        call = builder.call(ir.InlineAsm(ir.FunctionType(value, [address.type]), text, constraints), [address])
        if count == 1:
            return call
        parts = [builder.extract_value(call, i) for i in range(count)]
        return context.make_tuple(builder, sig.return_type, parts)
    return intrinsic_of(f"stream{count}", 2, typed, generate)


def _prefetch():
    def typed(pointer, index):
        return types.void(pointer, index) if _is_pointer(pointer, "global") else None

    def generate(context, builder, sig, args):
        address = builder.ptrtoint(element_at(builder, args[0], args[1], sig.args[1]), ir.IntType(64))
        builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), [address.type]), f"{NEWER}prefetch.global.L2 [$0];",
                                  "l", side_effect=True), [address])
        return context.get_dummy_value()
    return intrinsic_of("prefetch", 2, typed, generate)


def _view(dtype):
    """The same address, of other elements."""
    def typed(pointer):
        return PointerType(dtype, pointer.space)(pointer) if _is_pointer(pointer) else None

    def generate(context, builder, sig, args):
        return builder.bitcast(args[0], context.get_value_type(sig.return_type))
    return intrinsic_of("view", 1, typed, generate)


def _copy_async():
    def typed(shared, at, source, index):
        if _is_pointer(shared, "shared") and _is_pointer(source, "global"):
            return types.void(shared, at, source, index)
        return None

    def generate(context, builder, sig, args):
        to = builder.ptrtoint(element_at(builder, args[0], args[1], sig.args[1]), _I32)
        address = builder.ptrtoint(element_at(builder, args[2], args[3], sig.args[3]), ir.IntType(64))
        asm = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [to.type, address.type]),
                           "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", side_effect=True)
        builder.call(asm, [to, address])
        return context.get_dummy_value()
    return intrinsic_of("copy_async", 4, typed, generate)


def _atomic_add():
    def typed(pointer, index, value):
        return pointer.dtype(pointer, index, pointer.dtype) if _is_pointer(pointer) else None

    def generate(context, builder, sig, args):
        return builder.atomic_rmw("add", element_at(builder, args[0], args[1], sig.args[1]), args[2], "monotonic")
    return intrinsic_of("atomic_add", 3, typed, generate)


def _load_matrices(transposed=""):
    def typed(shared, index):
        return types.UniTuple(types.uint32, 4)(shared, index) if _is_pointer(shared, "shared") else None

    def generate(context, builder, sig, args):
        at = builder.ptrtoint(element_at(builder, args[0], args[1], sig.args[1]), _I32)
        value = ir.LiteralStructType([_I32] * 4)
        asm = ir.InlineAsm(ir.FunctionType(value, [_I32]),
                           f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
                           "=r,=r,=r,=r,r,~{memory}", side_effect=True)
        call = builder.call(asm, [at])
        call.attributes.add("convergent")
        return context.make_tuple(builder, sig.return_type, [builder.extract_value(call, i) for i in range(4)])
    return intrinsic_of("load_matrices", 2, typed, generate)


BUILTINS = {
    "tid": _register("tid.x"), "laneid": _register("laneid"),
    **{f"{name}.{axis}": _register(f"{name}.{axis}") for name in ("ctaid", "nctaid") for axis in "xyz"},
    "syncthreads": _barrier("syncthreads"), "syncwarp": _barrier("syncwarp"),
    "shfl_xor": _shuffle("bfly", 31), "shfl_idx": _shuffle("idx", 31), "ballot": _ballot(),
    "load4": _load(4), "load2": _load(2), "store4": _store(4), "store2": _store(2),
    "stream4": _stream(4), "stream2": _stream(2), "stream1": _stream(1),
    "prefetch": _prefetch(), "as_u32": _view(types.uint32), "as_u16": _view(types.uint16),
    "as_f32": _view(types.float32),
    "cp_async": _copy_async(), "atomic_add": _atomic_add(), "ldmatrix4": _load_matrices(),
    "ldmatrix4t": _load_matrices(".trans"),
}
