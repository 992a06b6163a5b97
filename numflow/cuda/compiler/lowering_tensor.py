"""Lowering of the intrinsics of lang/tensor_memory.py: table TENSOR, like BUILTINS; `lowered` looks there too."""

from numflow.cuda.compiler import lowering
from numflow.cuda.compiler.lowering_types import PointerType, element_at, intrinsic_of, ir, types
from numflow.cuda.lang.intrinsic import Intrinsic
from numflow.cuda.lang.tensor_memory import ACROSS, LANES, LOADED, SCALES

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_SWIZZLE = 512 >> 4 << 32 | 1 << 46 | 4 << 61  # of a matrix descriptor: 512 bytes between groups of 8 rows, version 1,
                                               # 64-byte swizzle
_ROWS = 128 >> 4 << 32 | 1 << 46               # of scales: 128 bytes between groups of 8 rows of 16 bytes
_AT_ONCE = 8                                   # columns of a load: its registers are adjacent, and more would spill
_KINDS = {"e4m3": 0, "e5m2": 1}                # formats of operands of kind::f8f6f4


def lowered(thing):
    """The compiler's counterpart of an intrinsic, a scalar type or a memory declaration."""
    if isinstance(thing, Intrinsic) and thing.how[0] in TENSOR:
        return TENSOR[thing.how[0]]
    return lowering.lowered(thing)


def _is_pointer(kind, space):
    return isinstance(kind, PointerType) and kind.space == space


def _call(builder, text, operands, constraints, result=None, convergent=False):
    """Emit inline PTX."""
    kind = ir.FunctionType(result or ir.VoidType(), [operand.type for operand in operands])
    call = builder.call(ir.InlineAsm(kind, text, f"{constraints},~{{memory}}", side_effect=True), operands)
    if convergent:
        call.attributes.add("convergent")
    return call


def _on_shared(name, text, n_operands=0, convergent=False):
    """Inline PTX on shared[at], whose address is operand $0; u32 operands follow."""
    def typed(shared, at, *others):
        return types.void(shared, at, *[types.uint32] * len(others)) if _is_pointer(shared, "shared") else None

    def generate(context, builder, sig, args):
        address = builder.ptrtoint(element_at(builder, args[0], args[1], sig.args[1]), _I32)
        operands = [address, *args[2:]]
        _call(builder, text, operands, ",".join("r" * len(operands)), convergent=convergent)
        return context.get_dummy_value()

    return intrinsic_of(name, 2 + n_operands, typed, generate)


def _free():
    def generate(context, builder, sig, args):
        _call(builder, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, $1;", args, "r,r", convergent=True)
        return context.get_dummy_value()

    return intrinsic_of("free_columns", 2, lambda address, columns: types.void(types.uint32, types.uint32), generate)


def instruction_descriptor(left: str, right: str) -> int:
    """Instruction descriptor of a product with float32 results: formats of the operands, N / 8, M / 16."""
    return 1 << 4 | _KINDS[left] << 7 | _KINDS[right] << 10 | ACROSS >> 3 << 17 | LANES >> 4 << 24


def scaled_descriptor(powers: bool) -> int:
    """Instruction descriptor of a product of 4-bit floats with scales: formats of the operands (1: E2M1) and of the
    scales (1: powers of two), N / 8, M / 16."""
    return 1 << 7 | 1 << 10 | ACROSS >> 3 << 17 | powers << 23 | LANES >> 4 << 24


def _multiply(kind, descriptor, scaled=False):
    """The product of two tiles with rows of 64 bytes: two tcgen05.mma of 32 bytes each; the second one accumulates.
    scaled: two more arguments, the addresses of scales."""
    def typed(address, a, a_index, b, b_index, *others):
        if not _is_pointer(a, "shared") or not _is_pointer(b, "shared"):
            return None
        return types.void(types.uint32, a, a_index, b, b_index, *[types.uint32] * len(others))

    def generate(context, builder, sig, args):
        tiles = [_descriptor(builder, *args[i:i + 2], sig.args[i + 1]) for i in (1, 3)]
        second_half = [builder.add(tile, ir.Constant(_I64, 32 >> 4)) for tile in tiles]
        scales = ["[$7], [$8], ", f"[$7 + {SCALES}], [$8 + {SCALES}], "] if scaled else ["", ""]
        mma = f"tcgen05.mma.cta_group::1.kind::{kind} [$0]"
        _call(builder, f"{{.reg .pred adds, always; setp.ne.u32 adds, $6, 0; setp.eq.u32 always, $6, $6; "
                       f"{mma}, $1, $2, $5, {scales[0]}adds; {mma}, $3, $4, $5, {scales[1]}always;}}",
              [args[0], *tiles, *second_half, ir.Constant(_I32, descriptor), args[-1], *args[5:-1]],
              "r,l,l,l,l,r,r" + ",r,r" * scaled)
        return context.get_dummy_value()

    return intrinsic_of("multiply", 6 + 2 * scaled, typed, generate)


def _descriptor(builder, pointer, index, index_type, constant=1 << 16 | _SWIZZLE):
    """Matrix descriptor of a tile: address / 16, and a constant."""
    address = builder.ptrtoint(element_at(builder, pointer, index, index_type), _I32)
    encoded = builder.and_(builder.lshr(address, ir.Constant(_I32, 4)), ir.Constant(_I32, 0x3FFF))
    return builder.or_(builder.zext(encoded, _I64), ir.Constant(_I64, constant))


def _copy_scales():
    def typed(address, shared, at):
        return types.void(types.uint32, shared, at) if _is_pointer(shared, "shared") else None

    def generate(context, builder, sig, args):
        source = _descriptor(builder, *args[1:], sig.args[2], _ROWS)
        _call(builder, "tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;", [args[0], source], "r,l")
        return context.get_dummy_value()

    return intrinsic_of("copy_scales", 3, typed, generate)


def _load():
    """tcgen05.ld with its wait, in one statement: no compiler can move a use of the registers before the wait."""
    def typed(values, address):
        return types.void(values, types.uint32) if _is_pointer(values, "local") else None

    def generate(context, builder, sig, args):
        text = "".join(f"tcgen05.ld.sync.aligned.32x32b.x{_AT_ONCE}.b32 "
                       f"{{{', '.join(f'${i + j}' for j in range(_AT_ONCE))}}}, [${LOADED} + {i}]; "
                       for i in range(0, LOADED, _AT_ONCE)) + "tcgen05.wait::ld.sync.aligned;"
        call = _call(builder, text, args[1:], "=f," * LOADED + "r", ir.LiteralStructType([ir.FloatType()] * LOADED),
                     convergent=True)
        for i in range(LOADED):
            builder.store(builder.extract_value(call, i), builder.gep(args[0], [ir.Constant(_I32, i)]))
        return context.get_dummy_value()

    return intrinsic_of("load_tensor", 2, typed, generate)


TENSOR = {
    "columns_allocate": _on_shared("allocate_columns", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 "
                                   "[$0], $1;", 1, convergent=True),
    "columns_free": _free(), "tensor_load": _load(),
    "tcgen05_e4m3": _multiply("f8f6f4", instruction_descriptor("e4m3", "e4m3")),
    "tcgen05_e5m2": _multiply("f8f6f4", instruction_descriptor("e5m2", "e4m3")),
    "tcgen05_nvfp4": _multiply("mxf4nvf4.block_scale.scale_vec::4X", scaled_descriptor(False), scaled=True),
    "tcgen05_mxfp4": _multiply("mxf4.block_scale.scale_vec::2X", scaled_descriptor(True), scaled=True),
    "tcgen05_copy": _copy_scales(),
    "tcgen05_commit": _on_shared("commit_products", "tcgen05.commit.cta_group::1.mbarrier::arrive::one."
                                 "shared::cluster.b64 [$0];"),
}
