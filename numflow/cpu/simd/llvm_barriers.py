"""Barriers to LLVM: constants stay in registers, and instructions stay in order.

LLVM loads masks, tables and matrices of bits anew in every round of a loop, though registers are free: each round of
decoding then waits for 10 loads besides its own. What has passed through an empty piece of assembly is no constant to
LLVM any more. And it orders the instructions of a loop as if it had more than 16 registers, and spills them.
"""

from collections.abc import Callable

from llvmlite import ir

from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.value import Value, joined

Keep = Callable[[Value], Value]
FEW_TOKENS = 2  # with more of them, sums need the registers


class Hold:
    """Holds constants for the loop that begins at the builder's place, over `tokens` tokens."""

    def __init__(self, builder: ir.IRBuilder, tokens: int):
        self._builder, self._before = builder, builder.block
        self._active, self._held = isa() not in ("neon", "plain") and tokens <= FEW_TOKENS, dict[str, Value]()

    def __call__(self, constant: Value) -> Value:
        """The same vector of 64 bytes, in a register, or two where all registers have 32."""
        if not self._active:
            return constant
        entries, each = constant.llvm.constant, constant.lanes // (1 if isa() == "avx512" else 2)
        return joined([self._held_part(entries[i:i + each]) for i in range(0, constant.lanes, each)])

    def _held_part(self, entries: list[ir.Constant]) -> Value:
        key = str([str(entry) for entry in entries])
        if key not in self._held:
            part = ir.Constant(ir.VectorType(entries[0].type, len(entries)), entries)
            with self._builder.goto_block(self._before):
                self._held[key], = _opaque([Value(self._builder, part)])
        return self._held[key]


def in_order(address: Value, vectors: list[Value]) -> tuple[Value, list[Value]]:
    """The same address and vectors, but nothing is read from that address before these vectors are computed."""
    if not vectors or isa() in ("avx512", "neon", "plain"):  # two have registers enough, the last one's are not these
        return address, vectors
    address, *parts = _opaque([address, *(half for v in vectors for half in v.halves())])
    return address, [low.join(high) for low, high in zip(parts[::2], parts[1::2])]


def broadcast(number: Value) -> Value:
    """A scalar in all of 16 lanes, which LLVM does not take for one: what is done to it is done after the broadcast."""
    if isa() in ("avx2", "avxvnni"):
        part, = _opaque([number.splat(8)])
        return part.join(part)
    return number.splat(16)


def as_it_is(constant: Value) -> Value:
    """For code that is no loop."""
    return constant


def _opaque(values: list[Value]) -> list[Value]:
    """The same values, of which LLVM does not know any more where they come from."""
    kinds = [v.llvm.type for v in values]
    places = ["v" if isa() == "avx512" else "x" if v.lanes > 1 else "r" for v in values]
    result = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    asm = ir.InlineAsm(ir.FunctionType(result, kinds), "", ",".join(
        [f"={place}" for place in places] + [str(i) for i in range(len(places))]))
    builder = values[0].builder
    out = builder.call(asm, [v.llvm for v in values])
    if len(kinds) == 1:
        return [Value(builder, out)]
    return [Value(builder, builder.extract_value(out, i)) for i in range(len(kinds))]
