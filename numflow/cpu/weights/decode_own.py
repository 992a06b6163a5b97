"""Decoding numflow's own schemes (numflow/quant/layout.py) in the packed layout: GRID headers, and pairs in 7 bits.

The headers of a tile are the file's headers with the rows side by side, in the same number of bits:
    u16 [16]         the row headers; they come first, so that prefetching brings them into the cache in time
    for each block   the fields S | Z << scale_bits of 16 rows, 6 or 12 bits each, row 0 in the lowest bits
A unit of the GRID kinds has one block (GRID) or two (GRID16).

    scale = the float32 whose bits are B + S * D      zero = first + Z * step      B, D, first, step by row, all exact
"""

from numflow.cpu.simd.bits import gather_u16, insert_top_bit, shuffle_bytes
from numflow.cpu.simd.dot import dot2
from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is
from numflow.cpu.simd.lookup import lookup128
from numflow.cpu.simd.value import Value, constant, exact_fma, load
from numflow.cpu.weights.layout import ROW_HEADERS, Scheme
from numflow.quant.layout import BASE_BIAS, BASE_SHIFT, PAIR_LEVELS
from numflow.quant.stored import GRID16


class Grid:
    """Opened headers of a tile: the values of the row headers as vectors of 16 rows.

    A block's fields are shifted to bits 0 .. 22 of a lane, Z above S. Or-ed with the bits of 1.0, Z gives the float32
    1 + Z * 2^(shift of Z - 23); S, shifted, times an equally smaller D gives S * D, a product of 16-bit integers.
    Neither needs a shift or a conversion of its own.

    headers: address of the tile's headers. hold: function that keeps constants in registers.
    """

    def __init__(self, headers: Value, scheme: Scheme, hold: Keep):
        self.hold, self.blocks_at, self.own = hold, headers + ROW_HEADERS, scheme.own
        self.blocks = 2 if scheme.header == GRID16 else 1
        scale_bits, zero_bits = self.own.scale_bits, self.own.zero_bits
        self.shift = 15 - scale_bits  # of S; D is a multiple of 1 << 18 - scale_bits
        rows = load(headers, "u16", 16).widen()
        base, step = rows >> 7, rows >> 2 & 31
        alive = base.compare(">", 0)
        self.base = alive.choose((base + BASE_BIAS) << BASE_SHIFT, 0)
        self.step = alive.choose(((step & 3) + 4) << ((step >> 2) + (18 - scale_bits - self.shift)), 0)
        levels, codes, one = self.own.levels - 1, 1 << zero_bits, 1 << (23 - scale_bits - self.shift)
        unit_bits = constant(rows, "f32", levels / codes).as_("i32", 16)
        self.zero_unit = (unit_bits - ((rows & 3) << 23)).as_("f32", 16)  # levels / codes / 2^window
        self.zero_step, self.zero_first = self.zero_unit * float(one), self.zero_at((1 - codes) / 2 - one)

    def zero_at(self, units: float) -> Value:
        """The zero point that is `units` of its steps from the middle level, f32x16."""
        middle = constant(self.base, "f32", (self.own.levels - 1) / 2)
        return exact_fma(self.zero_unit, constant(self.base, "f32", units), middle)

    def base_below(self, shift: int) -> Value:
        """B of scales divided by 2^shift."""
        return self.base.compare(">", 0).choose(self.base - (shift << 23), 0)

    def scale(self, unit: Value, half: int) -> Value:
        """Scale of a block, f32x16."""
        s = self._fields(unit, half) & self._held(((1 << self.own.scale_bits) - 1) << self.shift)
        if isa() in ("avx512", "neon"):  # 32-bit products leave the ports of dot products free
            return (self.base + s * self.step).as_("f32", 16)
        return dot2(self.base, s, self.step).as_("f32", 16)

    def zero(self, unit: Value, half: int) -> Value:
        """Zero of a block, f32x16."""
        mask = self._held(((1 << self.own.zero_bits) - 1) << (self.own.scale_bits + self.shift))
        z = self._fields(unit, half) & mask
        return exact_fma((z | self._held(0x3F800000)).as_("f32", 16), self.zero_step, self.zero_first)

    def _held(self, value: int | list[int]) -> Value:
        return self.hold(Value(self.base.builder, self.base.like(value)))

    def _fields(self, unit: Value, half: int) -> Value:
        """The fields of 16 rows at bit `shift` of i32 lanes, with other bits around them. Bytes read beyond the block
        belong to the headers that follow."""
        bits = self.own.header_bits
        block = self.blocks_at + (unit * self.blocks + (half if self.blocks == 2 else 0)) * (2 * bits)
        offsets = [divmod(bits * row, 8) for row in range(16)]  # byte, bit
        if isa() == "plain":
            words = gather_u16(block, [byte for byte, _ in offsets]) << [16 - bits - bit for _, bit in offsets]
            return words.widen() << (self.shift + bits - 16)
        picks = [byte + i % 2 for byte, _ in offsets for i in range(4)]
        if bits == 6 or isa() == "avx512":
            upper = shuffle_bytes(load(block, "u8", 16 if bits == 6 else 32), picks, self.hold)
        else:  # 8 rows lie within 16 bytes, so one byte shuffle picks them
            low, high = (load(block + 8 * half, "u8", 16).permute([pick - 8 * half for pick in picks[32 * half:][:32]])
                         for half in range(2))
            upper = low.join(high)
        return upper.as_("i32", 16) >> self._held([16 + bit - self.shift for _, bit in offsets])


def pair_codes(codes: Value, pair: int, row: Value | None, hold: Keep = as_it_is) -> Value:
    """7-bit codes of the column groups 2 * pair and 2 * pair + 1, or of four groups: u8x64, or u8x4 of one row."""
    address, lanes = (codes, 64) if row is None else (codes + (row << 2), 4)
    vectors = [load(address + 64 * i, "u8", lanes) for i in range(3)]
    if pair < 3:
        return vectors[pair] if _permutes(vectors[pair]) else vectors[pair] & 127
    if row is None:
        half = load(codes + 192, "u8", 32)
        nibbles = (half.join(half).as_("u16", 32) >> [0] * 16 + [4] * 16).as_("u8", 64)
        last = nibbles & hold(Value(half.builder, nibbles.like(15)))
    else:
        word = load(codes + 192 + ((row & 7) << 2), "i32") >> ((row >> 3) << 2).narrow("i32")
        last = (word & 0x0F0F0F0F).as_("u8", 4)
    for i, vector in enumerate(vectors):
        last = insert_top_bit(last, vector, 4 + i, hold)
    return last


def unpack_pair(code: Value, second: int, hold: Keep = as_it_is) -> Value:
    """The first code of pairs (u8 lanes), or the second: code % 11 or code // 11."""
    if _permutes(code):
        return lookup128(code, [c // PAIR_LEVELS if second else c % PAIR_LEVELS for c in range(128)], hold)
    if isa() == "neon":
        quotient = (code.widen("u16") * 187 >> 8).narrow("u8") >> 3  # / 11, exact up to 127
        return quotient if second else code - quotient * PAIR_LEVELS
    words = code.as_("u16", code.lanes // 2)  # two pairs each; the quotient of the upper pair ends in the upper byte
    lower, upper = (_elevenths(part).as_("u8", code.lanes) for part in (words & 255, words))
    quotient = lower.with_odd(upper)
    return quotient if second else (words - quotient.as_("u16", words.lanes) * PAIR_LEVELS).as_("u8", code.lanes)


def unpack_four(code: Value, index: int, hold: Keep = as_it_is) -> Value:
    """Digit `index` in base 3, the lowest is 0, of codes of 7 bits (u8 lanes)."""
    if _permutes(code):
        return lookup128(code, [c // 3**index % 3 for c in range(128)], hold)
    for _ in range(index):
        code = _third(code)
    return code if index == 3 else code - _third(code) * 3


def _third(code: Value) -> Value:
    """u8 lanes / 3, exact up to 127."""
    if isa() == "neon":
        return (code.widen("u16") * 171 >> 8).narrow("u8") >> 1
    words = code.as_("u16", code.lanes // 2)
    factor = -(-(1 << 16) // 3)
    lower, upper = ((part.high_of_product(factor)).as_("u8", code.lanes) for part in (words & 255, words))
    return lower.with_odd(upper)


def _permutes(code: Value) -> bool:
    """Whether codes are looked up by the low 7 bits of their pair; bit 7 is then ignored."""
    return isa() == "avx512" and code.lanes == 64


def _elevenths(words: Value) -> Value:
    """u16 lanes / 11, exact up to 127; for lanes below 2^15 the upper byte of the quotient is exact."""
    return words.high_of_product(-(-(1 << 16) // PAIR_LEVELS))

