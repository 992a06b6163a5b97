"""bfloat16 in kernels: pairs of numbers, and their products with pairs, to the same bits on every instruction set.

    a pair   one 32-bit word: an even column in the low half, the odd one behind it in the high half
    product  sum = fma(odd, odd, sum), then sum = fma(even, even, sum), each rounded once to float32

That is `vdpbf16ps`, 32 products in an instruction where AVX-512 has it. It takes numbers below 2^-126 for zeros, so
rounding makes them zeros; only a sum below 2^-126 differs, where others keep it.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types

from numflow.cpu.simd.isa import has_bf16
from numflow.cpu.simd.value import Value, constant, fma, load, load_f16, save, save_first, staged
from numflow.cpu.simd.vector import f32x16
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
    near = size.compare("<", constant(bits, "i32", _SMALLEST, bits.lanes)).choose(bits & ~_SIZE, _near(bits))
    return size.compare(">", constant(bits, "i32", _INFINITE, bits.lanes)).choose(bits | _QUIET, near)


def _near(bits: Value) -> Value:
    """The bits of f32 lanes, the upper halves rounded to nearest, ties to even."""
    return bits + ((bits >> 16) & 1) + 0x7FFF


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
    return _pairs(even, odd)


def _pairs(even: Value, odd: Value) -> Value:
    """f32x16 each as i32x16 pairs."""
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


# In kernels.

FACTOR_BYTES = 2 if has_bf16() else 4  # of a number that pairs are multiplied with, of which each row has its own


@staged(types.void, types.int64, f32x16)
def put_pairs_apart(address, columns):
    """16 columns as pairs, 64 bytes from one to the next."""
    pairs = pairs_of_columns(columns)
    for i in range(8):
        save(address + 64 * i, pairs.lane(i))


@staged(types.void, types.int64, types.float32, types.float32)
def put_pair(address, even, odd):
    """One pair."""
    save(address, paired(rounded(even), rounded(odd)))


@staged(types.void, types.int64, f32x16, f32x16)
def put_pairs(address, even, odd):
    """16 pairs, side by side."""
    save(address, _pairs(even, odd))


@staged(types.void, types.int64, f32x16)
def put_odds(address, odd):
    """The odd numbers of 16 pairs, whose even ones are there."""
    save(address, (load(address, "i32", 16) & 0xFFFF) | (rounded(odd) & -0x10000))


@staged(types.void, types.int64, f32x16, types.int64)
def put_factors(address, columns, count):
    """The first `count` of 16 columns of a row that pairs are multiplied with, FACTOR_BYTES each: as pairs, of which
    those behind may be written too, or float32 that is rounded."""
    if has_bf16():
        save(address, pairs_of_columns(columns))
    else:
        save_first(address, (rounded(columns) & -0x10000).as_("f32", 16), count)


@staged(types.void, types.int64, f32x16)
def put_shares(address, shares):
    """put_factors of 16 numbers that are 0 or 2^-126 .. 1, which takes less to round."""
    if has_bf16():
        save(address, pairs_of_columns(shares))
    else:
        save(address, _near(shares.as_("i32", 16)) & -0x10000)



def times_factors(pairs: list[Value]) -> Callable[[Value, list[Value]], list[Value]]:
    """f(address, sums): sums f32x16 + for each lane the products of its pair with the two factors (put_factors) at an
    address. pairs: i32x16, one for each sum; what is made of them is made once."""
    if has_bf16():
        return lambda address, sums: [add_pair_products(t, p, load(address, "i32"))
                                      for t, p in zip(sums, pairs, strict=True)]
    halves = [((p & -0x10000).as_("f32", 16), (p << 16).as_("f32", 16)) for p in pairs]

    def add(address, sums):
        even, odd = (load(address + 4 * i, "f32").splat(16) for i in range(2))
        return [fma(low, even, fma(high, odd, t)) for t, (high, low) in zip(sums, halves, strict=True)]

    return add
