"""bfloat16 in kernels: pairs of values and dot products of pairs, with the same bits on every instruction set.

    a pair   one 32-bit word: an even column in the low half, the next (odd) column in the high half
    product  sum = fma(odd, odd, sum), then sum = fma(even, even, sum), each rounded once to float32

These are the semantics of `vdpbf16ps`, 32 products per instruction of AVX-512 BF16. It flushes subnormal inputs to
zero, so rounding to bfloat16 flushes them here. It flushes sums below 2^-126 too, which other instruction sets keep:
the only difference.
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
    """LLVM's bfloat type, which llvmlite lacks."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 32)


def round_to_bf16(value: Value) -> Value:
    """f32 lanes as bfloat16 in the upper halves of i32 lanes; the lower halves are undefined.

    Rounds to nearest, ties to even. NaN stays NaN, and subnormal values become zeros.
    """
    bits = value.as_("i32", value.lanes)
    size = bits & _SIZE
    near = size.compare("<", constant(bits, "i32", _SMALLEST, bits.lanes)).choose(bits & ~_SIZE, _near(bits))
    return size.compare(">", constant(bits, "i32", _INFINITE, bits.lanes)).choose(bits | _QUIET, near)


def _near(bits: Value) -> Value:
    """The bits of f32 lanes with the upper halves rounded to nearest, ties to even."""
    return bits + ((bits >> 16) & 1) + 0x7FFF


def pack_pairs(even: Value, odd: Value) -> Value:
    """Two vectors of `round_to_bf16` as pairs, i32 lanes."""
    return (even >> 16) | (odd & -0x10000)


def pairs_of_columns(values: Value) -> Value:
    """16 neighbouring columns of a row, f32, as pairs, i32x8."""
    if has_bf16():
        return values.call("llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFloat(), 16)).as_("i32", 8)
    bits = round_to_bf16(values)
    return pack_pairs(bits.permute(range(0, 16, 2)), bits.permute(range(1, 16, 2)))


def pairs_of_rows(address: Value, header: int) -> Value:
    """Two neighbouring columns of 16 rows of float weights, as pairs, i32x16."""
    if header == BF16:
        both = load(address, "u16", 32)
        return both.part(0, 16).zipped(both.part(16, 16)).as_("i32", 16)
    even, odd = (load_f16(address + 32 * i) if header == F16 else load(address + 64 * i, "f32", 16) for i in range(2))
    return _pairs(even, odd)


def _pairs(even: Value, odd: Value) -> Value:
    """Two f32x16 as pairs, i32x16."""
    if not has_bf16():
        return pack_pairs(round_to_bf16(even), round_to_bf16(odd))
    both = odd.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, even).as_("u16", 32)
    return both.part(0, 16).zipped(both.part(16, 16)).as_("i32", 16)


def add_pair_products(total: Value, pairs: Value, word: Value) -> Value:
    """total f32x16 + the dot product of each lane's pair (i32x16) with the pair `word` (i32)."""
    if has_bf16():
        words = word.splat(16)
        return total.call("llvm.x86.avx512bf16.dpbf16ps.512", total.llvm.type,
                          *(Value(v.builder, v.builder.bitcast(v.llvm, _PAIRS)) for v in (pairs, words)))
    words = word.splat(16)
    total = fma((pairs & -0x10000).as_("f32", 16), (words & -0x10000).as_("f32", 16), total)
    return fma((pairs << 16).as_("f32", 16), (words << 16).as_("f32", 16), total)


# In kernels.

FACTOR_BYTES = 2 if has_bf16() else 4  # bytes of a factor (x of a row) that pairs are multiplied with


@staged(types.void, types.int64, f32x16)
def store_pairs_strided(address, columns):
    """Store 16 columns as pairs, 64 bytes apart."""
    pairs = pairs_of_columns(columns)
    for i in range(8):
        save(address + 64 * i, pairs.lane(i))


@staged(types.void, types.int64, types.float32, types.float32)
def store_pair(address, even, odd):
    """Store one pair."""
    save(address, pack_pairs(round_to_bf16(even), round_to_bf16(odd)))


@staged(types.void, types.int64, f32x16, f32x16)
def store_pairs(address, even, odd):
    """Store 16 contiguous pairs."""
    save(address, _pairs(even, odd))


@staged(types.void, types.int64, f32x16)
def store_odd_halves(address, odd):
    """Store the odd columns of 16 pairs whose even columns are in memory already."""
    save(address, (load(address, "i32", 16) & 0xFFFF) | (round_to_bf16(odd) & -0x10000))


@staged(types.void, types.int64, f32x16, types.int64)
def store_factors(address, columns, count):
    """Store the first `count` of 16 columns of a row as factors, FACTOR_BYTES each.

    Factors are bfloat16 pairs (all 16 columns are then written) or float32 rounded to bfloat16.
    """
    if has_bf16():
        save(address, pairs_of_columns(columns))
    else:
        save_first(address, (round_to_bf16(columns) & -0x10000).as_("f32", 16), count)


@staged(types.void, types.int64, f32x16)
def store_probabilities(address, probabilities):
    """store_factors of 16 probabilities, 0 or 2^-126 .. 1: their rounding needs no special cases."""
    if has_bf16():
        save(address, pairs_of_columns(probabilities))
    else:
        save(address, _near(probabilities.as_("i32", 16)) & -0x10000)


def pair_multiplier(pairs: list[Value]) -> Callable[[Value, list[Value]], list[Value]]:
    """f(address, sums): sums f32x16 + the dot product of each lane's pair with the two factors (store_factors) at an
    address.

    pairs: i32x16, one for each sum. Their conversion to float32, if needed, is done once for all calls of f.
    """
    if has_bf16():
        return lambda address, sums: [add_pair_products(t, p, load(address, "i32"))
                                      for t, p in zip(sums, pairs, strict=True)]
    halves = [((p & -0x10000).as_("f32", 16), (p << 16).as_("f32", 16)) for p in pairs]

    def add(address, sums):
        even, odd = (load(address + 4 * i, "f32").splat(16) for i in range(2))
        return [fma(low, even, fma(high, odd, t)) for t, (high, low) in zip(sums, halves, strict=True)]

    return add
