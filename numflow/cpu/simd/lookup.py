"""Look-ups of bytes in a table of 16, 64 at a time."""

from llvmlite import ir

from numflow.cpu.simd.isa import ARM, isa
from numflow.cpu.simd.value import Value, llvm_type


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
