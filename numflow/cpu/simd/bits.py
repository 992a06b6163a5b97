"""Bit fields and byte shuffles of vectors."""

from llvmlite import ir

from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is
from numflow.cpu.simd.value import Value, llvm_type, load


def move_bits(vector: Value, begin: int, to: int, bits: int, hold: Keep = as_it_is) -> Value:
    """`bits` bits of u8 lanes from bit `begin` on, moved to bit `to`; all other bits are 0.

    hold: function that keeps constants in registers.
    """
    mask, lanes = (1 << bits) - 1 << to, vector.lanes
    if isa() != "neon":
        # Shift 16-bit lanes: the mask clears bits that cross from the other byte. LLVM would turn shifts of bytes into
        # GF2 affine instructions, which compete for the ports of the dot products.
        vector = vector.as_("u16", lanes // 2)
    vector = (vector >> (begin - to) if begin >= to else vector << (to - begin)).as_("u8", lanes)
    return vector if mask == 255 else vector & hold(Value(vector.builder, vector.like(mask)))


def shift_down(vector: Value, by: int) -> Value:
    """u8x64 shifted right as 16-bit lanes: the top bits of a byte are then any."""
    return (vector.as_("u16", 32) >> by).as_("u8", 64) if by else vector


def insert_bits(vector: Value, other: Value, begin: int, to: int, bits: int, hold: Keep = as_it_is) -> Value:
    """u8 lanes with `bits` bits of another vector, from bit `begin` on, inserted at bit `to`, where they must be 0."""
    if isa() != "neon" or begin + bits < 8 or vector.lanes < 16:
        return vector | move_bits(other, begin, to, bits, hold)
    shift = Value(vector.builder, ir.IntType(32)(to))
    return vector.by_bytes(lambda low, high: low.call("llvm.aarch64.neon.vsli.v16i8", low.llvm.type, high, shift), 16,
                           other >> begin)


def insert_top_bit(vector: Value, other: Value, to: int, hold: Keep = as_it_is) -> Value:
    """u8 lanes with the top bits of another vector inserted at bit `to`, which must be 0."""
    if isa() not in ("avx2", "avxvnni") or vector.lanes < 64:
        return insert_bits(vector, other, 7, to, 1, hold)
    with_bit = vector | hold(Value(vector.builder, vector.like(1 << to)))
    return vector.by_bytes(lambda clear, with_bit, other: clear.call(  # a blend by the sign bit
        "llvm.x86.avx2.pblendvb", clear.llvm.type, with_bit, other), 32, with_bit, other)


def shuffle_bytes(vector: Value, lanes: list[int], hold: Keep = as_it_is) -> Value:
    """64 bytes out of u8 lanes, by their indices `lanes`."""
    if isa() != "avx512":
        return vector.permute(lanes)
    whole = vector.padded(64)
    return whole.call("llvm.x86.avx512.permvar.qi.512", whole.llvm.type, hold(Value(whole.builder, whole.like(lanes))))


def gather_u16(base: Value, offsets: list[int]) -> Value:
    """Gather: u16 lanes loaded at these offsets from an address, for processors without byte shuffles."""
    lanes = Value(base.builder, ir.Constant(llvm_type("u16", len(offsets)), ir.Undefined))
    for lane, offset in enumerate(offsets):
        lanes = lanes.with_lane(lane, load(base + offset, "u16"))
    return lanes


def shuffle_bytes_by_16(vector: Value, bytes_: list[int]) -> Value:
    """AVX2 or NEON: shuffle u8x32 within each 16 bytes by these indices; index 128 gives 0."""
    if isa() == "neon":
        return vector.by_bytes(lambda v, bytes_: v.call("llvm.aarch64.neon.tbl1.v16i8", v.llvm.type, bytes_), 16,
                               Value(vector.builder, vector.like(bytes_)))
    return vector.call("llvm.x86.avx2.pshuf.b", vector.llvm.type, Value(vector.builder, vector.like(bytes_)))
