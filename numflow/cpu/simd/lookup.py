"""Table look-ups: 64 bytes at a time in tables of 16 or 128 bytes, and words in a table of any size."""

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from numflow.cpu.simd.bits import shift_down
from numflow.cpu.simd.isa import ARM, isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is
from numflow.cpu.simd.value import Value, constant, llvm_type, load


def lookup16(indices: Value, table: list[int]) -> Value:
    """table[index], u8 lanes; indices are 0 .. 15, the table is a compile-time constant."""
    if indices.lanes < 64:
        return _selected(indices, table)
    if isa() == "avx512":
        return _shuffle(indices, table, "llvm.x86.avx512.pshuf.b.512", 64)
    if isa() in ("avx2", "avxvnni"):
        return _shuffle(indices, table, "llvm.x86.avx2.pshuf.b", 32)
    return _shuffle(indices, table, "llvm.aarch64.neon.tbl1.v16i8", 16) if ARM else _selected(indices, table)


def _shuffle(indices: Value, table: list[int], name: str, lanes: int) -> Value:
    """Look up by a byte shuffle of `lanes` indices, with the table in every 16 bytes of its first operand."""
    whole = Value(indices.builder, ir.Constant(llvm_type("u8", lanes), None))
    whole = Value(indices.builder, whole.like(table * (lanes // 16)))
    return indices.by_bytes(lambda part: whole.call(name, whole.llvm.type, part), lanes)


def _selected(indices: Value, table: list[int]) -> Value:
    """Look up by selects: each bit of the index halves the remaining entries."""
    builder = indices.builder
    entries = [indices.like(entry) for entry in table]
    for bit in range(4):
        odd = builder.icmp_unsigned("!=", (indices & (1 << bit)).llvm, indices.like(0))
        entries = [builder.select(odd, high, low) for low, high in zip(entries[::2], entries[1::2])]
    return Value(builder, entries[0])


def lookup64(indices: Value, table: list[int], hold: Keep = as_it_is) -> Value:
    """AVX-512: table[index & 63], u8x64, by one VBMI instruction. hold: function that keeps the table in registers."""
    whole = hold(Value(indices.builder, indices.like(table)))
    return whole.call("llvm.x86.avx512.permvar.qi.512", whole.llvm.type, indices)


def lookup_bits(vector: Value, begin: int, bits: int, table: list[int], hold: Keep = as_it_is) -> Value:
    """AVX-512: table[field], u8x64, for the field of at most 6 bits from bit `begin` on; the other bits are ignored.

    Most fields need neither a shift nor a mask.
    """
    vector, begin = within_6_bits(vector, begin, bits)
    return lookup64(vector, [table[index >> begin & (1 << bits) - 1] for index in range(64)], hold)


def within_6_bits(vector: Value, begin: int, bits: int) -> tuple[Value, int]:
    """u8x64 with a field moved to the low 6 bits, which `lookup64` takes, and the field's first bit there."""
    down = max(0, begin + bits - 6)
    return shift_down(vector, down), begin - down


def lookup_floats(indices: Value, table: list[float]) -> Value:
    """AVX-512: table[index & 15], f32x16, of i32x16; the table is a compile-time constant."""
    whole = constant(indices, "f32", 0)
    return Value(whole.builder, whole.like(table)).call("llvm.x86.avx512.permvar.sf.512", whole.llvm.type, indices)


def lookup128(indices: Value, table: list[int], hold: Keep = as_it_is) -> Value:
    """AVX-512: table[index & 127], u8x64, by one VBMI instruction. hold: function that keeps the table in registers."""
    low, high = (hold(Value(indices.builder, indices.like(part))) for part in (table[:64], table[64:]))
    return low.call("llvm.x86.avx512.vpermi2var.qi.512", low.llvm.type, indices, high)


def lookup_words(indices: list[Value], table: np.ndarray, name: str) -> Value:
    """table[index], i32 lanes, or a scalar for one index.

    table: u32, a compile-time constant. name: symbol of the table in the module.
    """
    builder = indices[0].builder
    variable = builder.module.globals.get(name)
    if variable is None:
        word = ir.IntType(32)
        variable = cgutils.global_constant(builder.module, name, ir.Constant(
            ir.ArrayType(word, len(table)), [ir.Constant(word, int(entry)) for entry in table]))
        variable.align = 64
    address = Value(builder, builder.ptrtoint(variable, ir.IntType(64)))
    if len(indices) == 1:
        return _entry(address, indices[0])
    words = Value(builder, ir.Constant(llvm_type("i32", len(indices)), ir.Undefined))
    for lane, index in enumerate(indices):
        words = words.with_lane(lane, _entry(address, index))
    return words


def _entry(address: Value, index: Value) -> Value:
    builder = address.builder
    return load(address + (Value(builder, builder.zext(index.llvm, address.llvm.type)) << 2), "i32")
