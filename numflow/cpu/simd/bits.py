"""Bits and bytes moved to other places of a vector."""

from llvmlite import ir

from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is
from numflow.cpu.simd.value import Value, llvm_type, load


def moved(vector: Value, begin: int, to: int, bits: int, hold: Keep = as_it_is) -> Value:
    """So many bits of u8 lanes from `begin` on, moved to `to`, and nothing else. hold: what constants pass through."""
    mask, lanes = (1 << bits) - 1 << to, vector.lanes
    if isa() != "neon":
        # Pairs of bytes, as the mask takes what comes over from the other one. LLVM would make shifts of bytes products
        # with matrices of bits, which wait for the units that dot products need.
        vector = vector.as_("u16", lanes // 2)
    vector = (vector >> (begin - to) if begin >= to else vector << (to - begin)).as_("u8", lanes)
    return vector if mask == 255 else vector & hold(Value(vector.builder, vector.like(mask)))


def with_bits(vector: Value, other: Value, begin: int, to: int, bits: int, hold: Keep = as_it_is) -> Value:
    """u8 lanes, whose bits from `to` on are 0, with so many bits of another vector, from `begin` on, there."""
    if isa() != "neon" or begin + bits < 8 or vector.lanes < 16:
        return vector | moved(other, begin, to, bits, hold)
    place = Value(vector.builder, ir.IntType(32)(to))
    return vector.by_bytes(lambda low, high: low.call("llvm.aarch64.neon.vsli.v16i8", low.llvm.type, high, place), 16,
                           other >> begin)


def with_top_bit(vector: Value, other: Value, to: int, hold: Keep = as_it_is) -> Value:
    """u8 lanes, whose bit `to` is 0, with the top bits of another vector there. hold: what constants pass through."""
    if isa() not in ("avx2", "avxvnni") or vector.lanes < 64:
        return with_bits(vector, other, 7, to, 1, hold)
    with_bit = vector | hold(Value(vector.builder, vector.like(1 << to)))
    return vector.by_bytes(lambda clear, with_bit, other: clear.call(  # by the sign
        "llvm.x86.avx2.pblendvb", clear.llvm.type, with_bit, other), 32, with_bit, other)


def picked(vector: Value, lanes: list[int], hold: Keep = as_it_is) -> Value:
    """The bytes of these numbers, 64 of them, out of u8 lanes."""
    if isa() != "avx512":
        return vector.pick(lanes)
    whole = vector.padded(64)
    return whole.call("llvm.x86.avx512.permvar.qi.512", whole.llvm.type, hold(Value(whole.builder, whole.like(lanes))))


def gathered(base: Value, offsets: list[int]) -> Value:
    """u16 lanes: what is at these offsets from an address; for processors that cannot pick bytes of a vector."""
    lanes = Value(base.builder, ir.Constant(llvm_type("u16", len(offsets)), ir.Undefined))
    for lane, offset in enumerate(offsets):
        lanes = lanes.with_lane(lane, load(base + offset, "u16"))
    return lanes


def picked_by_16(vector: Value, bytes_: list[int]) -> Value:
    """With AVX2 or NEON: of u8x32, the bytes of these numbers within the same 16 of them, or 0 for 128."""
    if isa() == "neon":
        return vector.by_bytes(lambda v, bytes_: v.call("llvm.aarch64.neon.tbl1.v16i8", v.llvm.type, bytes_), 16,
                               Value(vector.builder, vector.like(bytes_)))
    return vector.call("llvm.x86.avx2.pshuf.b", vector.llvm.type, Value(vector.builder, vector.like(bytes_)))
