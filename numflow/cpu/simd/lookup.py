"""Look-ups: of bytes in tables of 16 and 128, 64 at a time, and of words in a table of any size."""

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from numflow.cpu.simd.isa import ARM, isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is
from numflow.cpu.simd.value import Value, llvm_type, load


def lookup16(indices: Value, table: list[int]) -> Value:
    """table[index] of u8 lanes; indices are 0 .. 15, the table is known now."""
    if indices.lanes < 64:
        return _selected(indices, table)
    if isa() == "avx512":
        return _shuffle(indices, table, "llvm.x86.avx512.pshuf.b.512", 64)
    if isa() in ("avx2", "avxvnni"):
        return _shuffle(indices, table, "llvm.x86.avx2.pshuf.b", 32)
    return _shuffle(indices, table, "llvm.aarch64.neon.tbl1.v16i8", 16) if ARM else _selected(indices, table)


def _shuffle(indices: Value, table: list[int], name: str, lanes: int) -> Value:
    """By an instruction that takes `lanes` indices, and the table in each 16 bytes of its first operand."""
    whole = Value(indices.builder, ir.Constant(llvm_type("u8", lanes), None))
    whole = Value(indices.builder, whole.like(table * (lanes // 16)))
    return indices.by_bytes(lambda part: whole.call(name, whole.llvm.type, part), lanes)


def _selected(indices: Value, table: list[int]) -> Value:
    """Bit by bit of the index, each choosing between the two halves of what is left of the table."""
    builder = indices.builder
    entries = [indices.like(entry) for entry in table]
    for bit in range(4):
        odd = builder.icmp_unsigned("!=", (indices & (1 << bit)).llvm, indices.like(0))
        entries = [builder.select(odd, high, low) for low, high in zip(entries[::2], entries[1::2])]
    return Value(builder, entries[0])


def lookup128(indices: Value, table: list[int], hold: Keep = as_it_is) -> Value:
    """With AVX-512: table[index & 127] of u8x64, by one instruction of VBMI. hold: what the table passes through."""
    low, high = (hold(Value(indices.builder, indices.like(part))) for part in (table[:64], table[64:]))
    return low.call("llvm.x86.avx512.vpermi2var.qi.512", low.llvm.type, indices, high)


def lookup_words(indices: list[Value], table: np.ndarray, name: str) -> Value:
    """table[index], i32 lanes, or one i32 of one index; the table u32 is known now. name: of the table in the code."""
    builder = indices[0].builder
    found = builder.module.globals.get(name)
    if found is None:
        word = ir.IntType(32)
        found = cgutils.global_constant(builder.module, name, ir.Constant(
            ir.ArrayType(word, len(table)), [ir.Constant(word, int(entry)) for entry in table]))
        found.align = 64
    at = Value(builder, builder.ptrtoint(found, ir.IntType(64)))
    if len(indices) == 1:
        return _entry(at, indices[0])
    words = Value(builder, ir.Constant(llvm_type("i32", len(indices)), ir.Undefined))
    for lane, index in enumerate(indices):
        words = words.with_lane(lane, _entry(at, index))
    return words


def _entry(at: Value, index: Value) -> Value:
    builder = at.builder
    return load(at + (Value(builder, builder.zext(index.llvm, at.llvm.type)) << 2), "i32")
