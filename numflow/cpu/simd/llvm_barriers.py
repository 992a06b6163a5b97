"""Optimisation barriers for LLVM: constants stay in registers, and instructions stay in order.

LLVM reloads masks, tables and bit matrices in every iteration of a loop, though registers are free: an iteration of
decoding then does 10 additional loads. A value that has passed through an empty inline assembly is no constant to LLVM
any more. LLVM also schedules the instructions of a loop as if there were more than 16 registers, and then spills.
"""

from collections.abc import Callable

from llvmlite import ir

from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.value import Value, joined

Keep = Callable[[Value], Value]
FEW_TOKENS = 2  # with more tokens, accumulators need the registers


class Hold:
    """Keeps constants in registers during the loop that begins at the builder's position, over `tokens` tokens."""

    def __init__(self, builder: ir.IRBuilder, tokens: int):
        self._builder, self._before = builder, builder.block
        self._active, self._held = isa() not in ("neon", "plain") and tokens <= FEW_TOKENS, dict[str, Value]()

    def __call__(self, constant: Value) -> Value:
        """The same vector of 64 bytes in one register, or in two registers of 32 bytes."""
        if not self._active:
            return constant
        entries, lanes = constant.llvm.constant, constant.lanes // (1 if isa() == "avx512" else 2)
        return joined([self._held_part(entries[i:i + lanes]) for i in range(0, constant.lanes, lanes)])

    def _held_part(self, entries: list[ir.Constant]) -> Value:
        key = str([str(entry) for entry in entries])
        if key not in self._held:
            part = ir.Constant(ir.VectorType(entries[0].type, len(entries)), entries)
            with self._builder.goto_block(self._before):
                self._held[key], = _opaque([Value(self._builder, part)])
        return self._held[key]


def in_order(address: Value, vectors: list[Value]) -> tuple[Value, list[Value]]:
    """The same address and vectors; nothing is loaded from the address before the vectors are computed."""
    # AVX-512 and NEON have enough registers; "plain" has registers of another kind.
    if not vectors or isa() in ("avx512", "neon", "plain"):
        return address, vectors
    address, *parts = _opaque([address, *(half for v in vectors for half in v.halves())])
    return address, [low.join(high) for low, high in zip(parts[::2], parts[1::2])]


def broadcast(scalar: Value) -> Value:
    """A scalar in 16 lanes. LLVM does not know that the lanes are equal: operations stay behind the broadcast."""
    if isa() in ("avx2", "avxvnni"):
        part, = _opaque([scalar.splat(8)])
        return part.join(part)
    return scalar.splat(16)


def as_it_is(constant: Value) -> Value:
    """The constant unchanged, for code outside of loops."""
    return constant


def _opaque(values: list[Value]) -> list[Value]:
    """The same values, with an origin that LLVM cannot see through."""
    kinds = [v.llvm.type for v in values]
    registers = ["v" if isa() == "avx512" else "x" if v.lanes > 1 else "r" for v in values]
    result = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    asm = ir.InlineAsm(ir.FunctionType(result, kinds), "", ",".join(
        [f"={register}" for register in registers] + [str(i) for i in range(len(registers))]))
    builder = values[0].builder
    out = builder.call(asm, [v.llvm for v in values])
    if len(kinds) == 1:
        return [Value(builder, out)]
    return [Value(builder, builder.extract_value(out, i)) for i in range(len(kinds))]
