"""Constants that stay in registers while a loop runs.

LLVM loads masks, tables and matrices of bits anew in every round of a loop, though half of the registers are free: each
round of decoding then waits for 10 loads besides its own. What has passed through here is no constant to LLVM any more.
"""

from collections.abc import Callable

from llvmlite import ir

from numflow.cpu.simd_isa import isa
from numflow.cpu.simd_value import Value

Keep = Callable[[Value], Value]
FEW_TOKENS = 2  # with more of them, sums need the registers


class Hold:
    """Holds constants for the loop that begins at the builder's place, over `tokens` tokens."""

    def __init__(self, builder: ir.IRBuilder, tokens: int):
        self._builder, self._before = builder, builder.block
        self._active, self._held = isa() == "avx512" and tokens <= FEW_TOKENS, dict[str, Value]()

    def __call__(self, constant: Value) -> Value:
        """The same vector of 64 bytes, in a register."""
        if not self._active:
            return constant
        key = str(constant.llvm)
        if key not in self._held:
            kind = constant.llvm.type
            opaque = ir.InlineAsm(ir.FunctionType(kind, [kind]), "", "=v,0")
            with self._builder.goto_block(self._before):
                self._held[key] = Value(self._builder, self._builder.call(opaque, [constant.llvm]))
        return self._held[key]


def as_it_is(constant: Value) -> Value:
    """For code that is no loop."""
    return constant
