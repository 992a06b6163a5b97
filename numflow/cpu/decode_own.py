"""Reading numflow's own schemes (numflow/quant/layout.py) in the packed layout: GRID headers, and pairs in 7 bits.

The headers of a tile are those of the file with the rows side by side, bit for bit as many:
    u16 [16]         the row headers: first, where reading one tile after the other has them in the cache in time
    for each block   the fields S | Z << scale_bits of 16 rows, each of 6 or 12 bits, row 0 in the lowest ones
A unit of the GRID kinds has one block (GRID) or two (GRID16).

    scale = the float32 whose bits are B + S * D      zero = first + Z * step, all four by row, all exact
"""

import numpy as np
from llvmlite import ir

from numflow.cpu.layout import GRID16, ROW_HEADERS, Scheme
from numflow.cpu.simd_bits import moved, picked
from numflow.cpu.simd_hold import Keep, as_it_is
from numflow.cpu.simd_isa import isa
from numflow.cpu.simd_value import Value, constant, fma, llvm_type, load
from numflow.quant.layout import BASE_BIAS, BASE_SHIFT, PAIR_LEVELS


class Grid:
    """The headers of a tile, opened: what its row headers say, as vectors of 16 rows.

    A block's fields are brought to bits 0 .. 22 of a lane, Z on top of S. Under the exponent of 1 that makes
    1 + Z * 2^(place of Z - 23), and S times a smaller D is S * D: neither needs a shift or a conversion of its own.

    heads: address of the tile's headers; hold: what constants pass through.
    """

    def __init__(self, heads: Value, scheme: Scheme, hold: Keep):
        self.hold, self.blocks_at, self.own = hold, heads + ROW_HEADERS, scheme.own
        self.blocks = 2 if scheme.header == GRID16 else 1
        scale_bits, zero_bits = self.own.scale_bits, self.own.zero_bits
        self.at = min(18 - scale_bits, 23 - zero_bits - scale_bits)  # of S; D is a multiple of 1 << 18 - scale_bits
        rows = load(heads, "u16", 16).widen()
        base, step = rows >> 7, rows >> 2 & 31
        alive = base.compare(">", 0)
        self.base = alive.choose((base + BASE_BIAS) << BASE_SHIFT, 0)
        self.step = alive.choose(((step & 3) + 4) << ((step >> 2) + (18 - scale_bits - self.at)), 0)
        levels, codes, one = self.own.levels - 1, 1 << zero_bits, 1 << (23 - scale_bits - self.at)
        whole = constant(rows, "f32", levels / codes).as_("i32", 16)
        step = (whole - ((rows & 3) << 23)).as_("f32", 16)  # of zeros: levels / codes / 2^window
        self.first = fma(step, constant(rows, "f32", (1 - codes) / 2 - one), constant(rows, "f32", levels / 2))
        self.zero_step = step * float(one)

    def scale(self, unit: Value, half: int) -> Value:
        """Scale of a block, f32x16."""
        s = self._fields(unit, half) & self._held(((1 << self.own.scale_bits) - 1) << self.at)
        return (self.base + s * self.step).as_("f32", 16)

    def zero(self, unit: Value, half: int) -> Value:
        """Zero of a block, f32x16."""
        place = self._held(((1 << self.own.zero_bits) - 1) << (self.own.scale_bits + self.at))
        z = self._fields(unit, half) & place
        return fma((z | self._held(0x3F800000)).as_("f32", 16), self.zero_step, self.first)

    def _held(self, number: int | list[int]) -> Value:
        return self.hold(Value(self.base.builder, self.base.like(number)))

    def _fields(self, unit: Value, half: int) -> Value:
        """The fields of 16 rows at bit `at`, i32, other bits around them; what is read too much are later headers."""
        bits = self.own.header_bits
        block = self.blocks_at + (unit * self.blocks + (half if self.blocks == 2 else 0)) * (2 * bits)
        places = [divmod(bits * row, 8) for row in range(16)]
        picks = [byte + i % 2 for byte, _ in places for i in range(4)]
        upper = picked(load(block, "u8", 16 if bits == 6 else 32), picks, self.hold).as_("i32", 16)
        return upper >> self._held([16 + bit - self.at for _, bit in places])


STRIP_HEADERS = 48  # bytes of the block headers of two units by 16 columns


class Grid16(Grid):
    """GRID16 with AVX-512: the fields of both blocks of a unit at once, in the two halves of a lane.

    S is at bits 12 .. 14 of each, so that a dot product of 16-bit numbers makes it B + S * D; Z at bits 0 .. 2, which,
    with the row's window above, number the 32 zeros there are. Where these have 8 significant bits (q2), the upper
    halves of their float32 are a table of 16-bit numbers, and one look-up is for both blocks.
    """

    def __init__(self, heads: Value, scheme: Scheme, hold: Keep):
        super().__init__(heads, scheme, hold)
        rows = load(heads, "u16", 16).widen()
        self._steps = [self.step << (self.at - 12 + 16 * half) for half in range(2)]
        self._windows = (rows & 3) << 3 | (rows & 3) << 19
        zeros = self.own.zeros().ravel()
        bits = zeros.view(np.uint32)
        self._short = not (bits & 0xFFFF).any()
        tables = [("u16", bits >> 16)] if self._short else [("f32", zeros[:16]), ("f32", zeros[16:])]
        self._zeros = [self._held_table(*table) for table in tables]
        if scheme.strip == 2:
            self._open_strips(zeros)

    def scale(self, unit: Value, half: int) -> Value:
        s = self._both(unit) & self._held(0x70007000)
        return self.base.call("llvm.x86.avx512.vpdpwssd.512", self.base.llvm.type, s, self._steps[half]).as_("f32", 16)

    def zero(self, unit: Value, half: int) -> Value:
        numbers = self._both(unit) & self._held(0x00070007) | self._windows
        if self._short:
            table, = self._zeros
            both = table.call("llvm.x86.avx512.permvar.hi.512", table.llvm.type, numbers.as_("u16", 32)).as_("i32", 16)
            return (both & self._held(-65536) if half else both << 16).as_("f32", 16)
        low, high = self._zeros
        return low.call("llvm.x86.avx512.vpermi2var.ps.512", low.llvm.type, numbers >> 16 * half, high)

    def blocks_of_strip(self, strip: Value) -> list[tuple[Value, Value]]:
        """For both units of a strip of q2: scale / 4^b and zero * 4^b of block b, f32x16 each, all exact.

        All fields of two rows are 8 bytes, so one instruction brings them to a lane of 64 bits.
        """
        starts = [12 * (row // 2) // 8 for row in range(0, 16, 2)]
        picks = [start + 12 * block + byte for start in starts for block in range(4) for byte in range(2)]
        fields, blocks = picked(load(self.blocks_at + strip * STRIP_HEADERS, "u8", 64), picks, self.hold), []
        for unit in range(2):
            both = self._placed(fields, 32 * unit)
            scales, (low, high) = both & self._held(0x70007000), self._strip_zeros[unit]
            numbers = (both & self._held(0x00070007) | self._strip_windows).as_("u16", 32)
            zeros = low.call("llvm.x86.avx512.vpermi2var.hi.512", low.llvm.type, numbers, high).as_("i32", 16)
            for half, zero in enumerate((zeros << 16, zeros & self._held(-65536))):
                scale = self._strip_bases[2 * unit + half].call(
                    "llvm.x86.avx512.vpdpwssd.512", self.base.llvm.type, scales, self._steps[half])
                blocks.append((scale.as_("f32", 16), zero.as_("f32", 16)))
        return blocks

    def _open_strips(self, zeros: np.ndarray) -> None:
        """What blocks_of_strip takes from the row headers; zeros: f32 [32]."""
        alive = self.base.compare(">", 0)
        self._strip_bases = [alive.choose(self.base - (2 * b << 23), 0) for b in range(4)]
        self._strip_windows = self._windows | 32 << 16  # the second block of a unit looks up among the upper 32
        tables = [self._held_table("u16", (zeros * 4 ** b).astype(np.float32).view(np.uint32) >> 16) for b in range(4)]
        self._strip_zeros = [tables[:2], tables[2:]]

    def _held_table(self, kind: str, entries: np.ndarray) -> Value:
        vector = llvm_type(kind, len(entries))
        return self.hold(Value(self.base.builder, ir.Constant(vector, [vector.element(e) for e in entries.tolist()])))

    def _both(self, unit: Value) -> Value:
        """Fields of 16 rows, i32; bytes are Z and what follows, and S with 4 bits before, of both blocks."""
        first = [12 * (row // 2) // 8 for row in range(16)]  # byte where the fields of a pair of rows begin
        picks = [first[2 * i] + 12 * half + byte if half < 2 else 0
                 for i in range(8) for half in range(4) for byte in range(2)]
        return self._placed(picked(load(self.blocks_at + unit * 24, "u8", 32), picks, self.hold), 0)

    def _placed(self, fields: Value, at: int) -> Value:
        """Fields of two blocks, 16 bits apart from bit `at` of every 64 on, to where `_both` has them."""
        bits = [12 * (row // 2) % 8 + row % 2 * 6 for row in range(16)]
        shifts = [(at + bit + 16 * half + byte) % 64 for bit in bits for half in range(2) for byte in (3, -4)]
        shifts = self.hold(Value(fields.builder, fields.like(shifts)))
        return shifts.call("llvm.x86.avx512.pmultishift.qb.512", fields.llvm.type, fields).as_("i32", 16)


def pair_codes(codes: Value, pair: int, row: Value | None, hold: Keep = as_it_is) -> Value:
    """Pairs of weights of column groups 2 * pair and 2 * pair + 1: u8x64, or u8x4 of one row; bit 7 is anything."""
    at, lanes = (codes, 64) if row is None else (codes + (row << 2), 4)
    vectors = [load(at + 64 * i, "u8", lanes) for i in range(3)]
    if pair < 3:
        return vectors[pair]
    if row is None:
        half = load(codes + 192, "u16", 16).widen()
    else:
        half = load(codes + 192 + (row << 1), "u16").widen()
    nibbles = hold(Value(half.builder, half.like(0x0F0F0F0F))) if row is None else 0x0F0F0F0F
    words = (half | half << 12) & nibbles  # low nibbles are columns 0 and 1, high ones 2 and 3
    last = words.as_("u8", lanes)
    for i, vector in enumerate(vectors):
        last = last | moved(vector, 7, 4 + i, 1, hold)
    return last


def of_pair(code: Value, second: int, hold: Keep = as_it_is) -> Value:
    """The first weight of pairs (u8 lanes, bit 7 is anything), or the second: code % 11 or code // 11."""
    if isa() == "avx512" and code.lanes == 64:
        return _permuted(code, [c // PAIR_LEVELS if second else c % PAIR_LEVELS for c in range(128)], hold)
    code = code & 127
    words = code.as_("u16", code.lanes // 2)
    quotient = (((words & 255) * 187) >> 11 | (((words >> 8) * 187) >> 11) << 8)  # exact up to 127
    return (quotient if second else words - quotient * PAIR_LEVELS).as_("u8", code.lanes)


def _permuted(code: Value, table: list[int], hold: Keep) -> Value:
    """table[code & 127] by one instruction of VBMI."""
    kind = llvm_type("u8", 64)
    low, high = (hold(Value(code.builder, ir.Constant(kind, [ir.Constant(kind.element, entry) for entry in part])))
                 for part in (table[:64], table[64:]))
    return low.call("llvm.x86.avx512.vpermi2var.qi.512", kind, code, high)
