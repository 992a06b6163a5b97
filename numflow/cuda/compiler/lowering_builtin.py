"""Lowering of intrinsics that take pointers or map to LLVM intrinsics: table BUILTINS, by names of intrinsics.py."""

from numflow.cuda.compiler.lowering_cluster import CLUSTER
from numflow.cuda.compiler.lowering_types import SPACES, PointerType, element_at, intrinsic_of, ir, types
from numflow.cuda.lang.intrinsic import NEWER
from numflow.cuda.lang.warpgroup import ACROSS, SUMS, TILE

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _call(builder, name, result, *args):
    """Emit a call of an LLVM intrinsic."""
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
    """Warp shuffle: the f32 or 32-bit integer of another lane."""
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
    """A vector load of 64 or 128 bits: LDG from device memory, LDS from shared memory."""
    def typed(pointer, index):
        return types.UniTuple(pointer.dtype, count)(pointer, index) if _is_pointer(pointer) else None

    def generate(context, builder, sig, args):
        element = context.get_value_type(sig.args[0].dtype)
        vector = ir.VectorType(element, count)
        address = element_at(builder, args[0], args[1], sig.args[1])
        address = builder.bitcast(address, ir.PointerType(vector, SPACES[sig.args[0].space]))
        value = builder.load(address, align=4 * count)
        parts = [builder.extract_element(value, ir.Constant(_I32, i)) for i in range(count)]
        return context.make_tuple(builder, sig.return_type, parts)
    return intrinsic_of(f"load{count}", 2, typed, generate)


def _store(count):
    def typed(pointer, index, *values):
        return types.void(pointer, index, *[pointer.dtype] * count) if _is_pointer(pointer) else None

    def generate(context, builder, sig, args):
        vector = ir.VectorType(context.get_value_type(sig.args[0].dtype), count)
        address = element_at(builder, args[0], args[1], sig.args[1])
        address = builder.bitcast(address, ir.PointerType(vector, SPACES[sig.args[0].space]))
        value = ir.Constant(vector, ir.Undefined)
        for i in range(count):
            value = builder.insert_element(value, args[2 + i], ir.Constant(_I32, i))
        builder.store(value, address, align=4 * count)
        return context.get_dummy_value()
    return intrinsic_of(f"store{count}", 2 + count, typed, generate)


def _stream(count):
    """A load for weights: through the read-only path, without allocation in L1, 128 bytes at a time into L2."""
    def typed(pointer, index):
        if not _is_pointer(pointer, "global"):
            return None
        kind = types.UniTuple(pointer.dtype, count) if count > 1 else pointer.dtype
        return kind(pointer, index)

    def generate(context, builder, sig, args):
        element = context.get_value_type(sig.args[0].dtype)
        address = builder.ptrtoint(element_at(builder, args[0], args[1], sig.args[1]), ir.IntType(64))
        is_u16 = element == ir.IntType(16)
        width, letter = ("u16", "h") if is_u16 else ("u32", "r")
        names = [f"${i}" for i in range(count)]
        shape = f".v{count}" if count > 1 else ""
        value = ir.LiteralStructType([element] * count) if count > 1 else element
        destination = f"{{{', '.join(names)}}}" if count > 1 else names[0]
        text = f"ld.global.nc.L1::no_allocate.L2::128B{shape}.{width} {destination}, [${count}];"
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
    """Cast of a pointer to another element type."""
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
        target = builder.ptrtoint(element_at(builder, args[0], args[1], sig.args[1]), _I32)
        address = builder.ptrtoint(element_at(builder, args[2], args[3], sig.args[3]), ir.IntType(64))
        asm = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [target.type, address.type]),
                           "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", side_effect=True)
        builder.call(asm, [target, address])
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


def _multiply_tiles(kinds, columns=16, flags="1, 1, 1, 0, 0"):
    """Add the product of two tiles with rows of 64 bytes to a thread's 64 accumulators: two wgmma of 32 bytes each.

    warpgroup.py describes the tiles.
    """
    def typed(sums, at, a, a_index, b, b_index):
        tiles = _is_pointer(a, "shared") and _is_pointer(b, "shared") and _is_pointer(sums, "local")
        return types.void(sums, at, a, a_index, b, b_index) if tiles else None

    def generate(context, builder, sig, args):
        addresses = [builder.gep(args[0], [builder.add(args[1], ir.Constant(args[1].type, i))]) for i in range(SUMS)]
        tiles = [_descriptor(builder, *args[i:i + 2], sig.args[i + 1]) for i in (2, 4)]
        sums = ", ".join(f"${i}" for i in range(SUMS))
        text = "".join(f"wgmma.mma_async.sync.aligned.m{TILE}n{ACROSS}k{columns}.f32.{kinds} {{{sums}}}, "
                       f"${2 * SUMS + 2 * k}, ${2 * SUMS + 2 * k + 1}, {flags}; " for k in (0, 1))
        second_half = [builder.add(tile, ir.Constant(tile.type, 32 >> 4)) for tile in tiles]
        _tied(builder, text, addresses, [*tiles, *second_half])
        return context.get_dummy_value()
    return intrinsic_of("multiply_tiles", 6, typed, generate)


def _descriptor(builder, pointer, index, index_type):
    """Matrix descriptor of a tile for wgmma: address / 16, stride of 512 bytes between groups of 8 rows, 64-byte
    swizzle."""
    address = builder.ptrtoint(element_at(builder, pointer, index, index_type), _I32)
    encoded = builder.and_(builder.lshr(address, ir.Constant(_I32, 4)), ir.Constant(_I32, 0x3FFF))
    return builder.or_(builder.zext(encoded, _I64), ir.Constant(_I64, 1 << 16 | 512 >> 4 << 32 | 2 << 62))


def _wait_tiles():
    """Wait for all wgmma of the warpgroup. All accumulators are operands, so that the compiler moves no use of them
    before the wait."""
    def generate(context, builder, sig, args):
        addresses = [builder.gep(args[0], [ir.Constant(_I32, i)]) for i in range(2 * SUMS)]
        _tied(builder, "wgmma.wait_group.sync.aligned 0;", addresses, [])
        return context.get_dummy_value()
    return intrinsic_of("wait_tiles", 1, lambda sums: types.void(sums) if _is_pointer(sums, "local") else None,
                        generate)


def _tied(builder, text, addresses, operands):
    """Inline PTX that updates float32 registers: load them from these addresses, tie inputs to outputs, store them."""
    values = [builder.load(address) for address in addresses]
    kind = ir.LiteralStructType([value.type for value in values])
    constraints = ",".join(["=f"] * len(values) + [str(i) for i in range(len(values))] + ["l"] * len(operands)
                           + ["~{memory}"])
    call = builder.call(ir.InlineAsm(ir.FunctionType(kind, [value.type for value in (*values, *operands)]), text,
                                     constraints, side_effect=True), [*values, *operands])
    call.attributes.add("convergent")
    for i, address in enumerate(addresses):
        builder.store(builder.extract_value(call, i), address)


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
    "ldmatrix4t": _load_matrices(".trans"), "wgmma_f16": _multiply_tiles("f16.f16"),
    "wgmma_bf16": _multiply_tiles("bf16.bf16"), "wgmma_e4m3": _multiply_tiles("e4m3.e4m3", 32, "1, 1, 1"),
    "wgmma_e5m2": _multiply_tiles("e5m2.e4m3", 32, "1, 1, 1"), "wgmma_wait": _wait_tiles(), **CLUSTER,
}
