"""bfloat16 in kernels: pairs of numbers, and their products with pairs, to the same bits on every instruction set.

    a pair   one 32-bit word: an even column in the low half, the odd one behind it in the high half
    product  sum = fma(odd, odd, sum), then sum = fma(even, even, sum), each rounded once to float32

That is `vdpbf16ps`, 32 products in an instruction where AVX-512 has it. It takes numbers below 2^-126 for zeros, so
rounding makes them zeros; only a sum below 2^-126 differs, where others keep it.
"""

from llvmlite import ir

from numflow.cpu.simd.isa import has_bf16
from numflow.cpu.simd.value import Value, constant, fma, load, load_f16
from numflow.quant.stored import BF16, F16

_SIZE, _SMALLEST, _INFINITE, _QUIET = 0x7FFFFFFF, 0x00800000, 0x7F800000, 0x00400000


class _BFloat(ir.Type):
    """LLVM's type, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 32)


def rounded(value: Value) -> Value:
    """f32 lanes as bfloat16 in the upper halves of i32 lanes, whose lower halves are anything.

    To nearest, ties to even; NaN stays NaN, and numbers below 2^-126 become zeros.
    """
    bits = value.as_("i32", value.lanes)
    size = bits & _SIZE
    near = bits + ((bits >> 16) & 1) + 0x7FFF
    near = size.compare("<", constant(bits, "i32", _SMALLEST, bits.lanes)).choose(bits & ~_SIZE, near)
    return size.compare(">", constant(bits, "i32", _INFINITE, bits.lanes)).choose(bits | _QUIET, near)


def paired(even: Value, odd: Value) -> Value:
    """Two vectors from `rounded` as i32 lanes of pairs."""
    return (even >> 16) | (odd & -0x10000)


def pairs_of_columns(values: Value) -> Value:
    """16 neighbouring columns of a row, f32, as the pairs they are, i32x8."""
    if has_bf16():
        return values.call("llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFloat(), 16)).as_("i32", 8)
    bits = rounded(values)
    return paired(bits.pick(range(0, 16, 2)), bits.pick(range(1, 16, 2)))


def pairs_of_rows(address: Value, header: int) -> Value:
    """Two neighbouring columns of 16 rows of plain numbers as i32x16 pairs."""
    if header == BF16:
        both = load(address, "u16", 32)
        return both.part(0, 16).zipped(both.part(16, 16)).as_("i32", 16)
    even, odd = (load_f16(address + 32 * i) if header == F16 else load(address + 64 * i, "f32", 16) for i in range(2))
    if not has_bf16():
        return paired(rounded(even), rounded(odd))
    both = odd.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, even).as_("u16", 32)
    return both.part(0, 16).zipped(both.part(16, 16)).as_("i32", 16)


def add_pair_products(total: Value, pairs: Value, word: Value) -> Value:
    """total f32x16 + for each lane the products of its pair (i32x16) with the pair `word` (i32)."""
    if has_bf16():
        words = word.splat(16)
        return total.call("llvm.x86.avx512bf16.dpbf16ps.512", total.llvm.type,
                          *(Value(v.builder, v.builder.bitcast(v.llvm, _PAIRS)) for v in (pairs, words)))
    other = word.splat(16)
    total = fma((pairs & -0x10000).as_("f32", 16), (other & -0x10000).as_("f32", 16), total)
    return fma((pairs << 16).as_("f32", 16), (other << 16).as_("f32", 16), total)
