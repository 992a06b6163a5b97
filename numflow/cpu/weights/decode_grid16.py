"""Headers of numflow's own schemes with blocks of 16 columns (GRID16): both blocks of a unit, or all four of a strip,
decoded at once."""

import numpy as np
from llvmlite import ir

from numflow.cpu.simd.bits import shuffle_bytes, shuffle_bytes_by_16
from numflow.cpu.simd.dot import dot2
from numflow.cpu.simd.llvm_barriers import FEW_TOKENS, Keep
from numflow.cpu.simd.value import Value, fma, llvm_type, load
from numflow.cpu.weights.decode_own import Grid
from numflow.cpu.weights.layout import Scheme

STRIP_HEADERS = 48  # bytes of the block headers of two units by 16 columns


class Grid16(Grid):
    """Base class: the fields of both blocks of a unit at once, in the two 16-bit halves of a lane.

    SHIFTS: bit position at which the codes of each block of a strip are multiplied. STRIP_TOKENS: most tokens for which
    strips are decoded at once.
    """

    SHIFTS: tuple[int, ...]
    STRIP_TOKENS: int

    def blocks_of_strip(self, strip: Value) -> list[tuple[Value, Value]]:
        """For each block of a strip of q2: scale / 2^shift and zero * 2^shift, f32x16, exact."""
        raise NotImplementedError

    def dot(self, products: Value, shift: int) -> Value:
        """A block's dot products, i32x16, as float32 in the same scaling as these scales and zeros."""
        return products.to_f32()


class Grid16Avx512(Grid16):
    """AVX-512: S is at bits 12 .. 14, so that a dot product of 16-bit integers gives B + S * D.

    Z is at bits 0 .. 2. With the row's window in the bits above, it is an index into the 32 possible zero points. If
    these have 8 significant bits (q2), the upper halves of their float32 form a table of 16-bit integers, and one
    look-up serves both blocks.
    """

    SHIFTS, STRIP_TOKENS = (0, 2, 4, 6), FEW_TOKENS  # as stored; more tokens need the registers

    def __init__(self, headers: Value, scheme: Scheme, hold: Keep):
        super().__init__(headers, scheme, hold)
        rows = load(headers, "u16", 16).widen()
        self._steps = [self.step << 16 * half for half in range(2)]
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
        return dot2(self.base, s, self._steps[half]).as_("f32", 16)

    def zero(self, unit: Value, half: int) -> Value:
        indices = self._both(unit) & self._held(0x00070007) | self._windows
        if self._short:
            table, = self._zeros
            both = table.call("llvm.x86.avx512.permvar.hi.512", table.llvm.type, indices.as_("u16", 32)).as_("i32", 16)
            return (both & self._held(-65536) if half else both << 16).as_("f32", 16)
        low, high = self._zeros
        return low.call("llvm.x86.avx512.vpermi2var.ps.512", low.llvm.type, indices >> 16 * half, high)

    def blocks_of_strip(self, strip: Value) -> list[tuple[Value, Value]]:
        # All fields of two rows are 8 bytes, so one byte shuffle brings them to a 64-bit lane.
        starts = [12 * (row // 2) // 8 for row in range(0, 16, 2)]
        picks = [start + 12 * block + byte for start in starts for block in range(4) for byte in range(2)]
        fields, blocks = shuffle_bytes(load(self.blocks_at + strip * STRIP_HEADERS, "u8", 64), picks, self.hold), []
        for unit in range(2):
            both = self._aligned(fields, 32 * unit)
            scales, (low, high) = both & self._held(0x70007000), self._strip_zeros[unit]
            indices = (both & self._held(0x00070007) | self._strip_windows).as_("u16", 32)
            zeros = low.call("llvm.x86.avx512.vpermi2var.hi.512", low.llvm.type, indices, high).as_("i32", 16)
            for half, zero in enumerate((zeros << 16, zeros & self._held(-65536))):
                scale = dot2(self._strip_bases[2 * unit + half], scales, self._steps[half])
                blocks.append((scale.as_("f32", 16), zero.as_("f32", 16)))
        return blocks

    def _open_strips(self, zeros: np.ndarray) -> None:
        """Prepare the values of the row headers that blocks_of_strip takes; zeros: f32 [32]."""
        self._strip_bases = [self.base_below(shift) for shift in self.SHIFTS]
        self._strip_windows = self._windows | 32 << 16  # the second block of a unit looks up in the upper 32 entries
        tables = [self._held_table("u16", (zeros * 2 ** shift).view(np.uint32) >> 16) for shift in self.SHIFTS]
        self._strip_zeros = [tables[:2], tables[2:]]

    def _held_table(self, kind: str, entries: np.ndarray) -> Value:
        vector = llvm_type(kind, len(entries))
        return self.hold(Value(self.base.builder, ir.Constant(vector, [vector.element(e) for e in entries.tolist()])))

    def _both(self, unit: Value) -> Value:
        """Fields of 16 rows, i32, of both blocks: a byte with Z in its low bits, then a byte with S in bits 4 .. 6."""
        first = [12 * (row // 2) // 8 for row in range(16)]  # byte where the fields of a pair of rows begin
        picks = [first[2 * i] + 12 * half + byte if half < 2 else 0
                 for i in range(8) for half in range(4) for byte in range(2)]
        return self._aligned(shuffle_bytes(load(self.blocks_at + unit * 24, "u8", 32), picks, self.hold), 0)

    def _aligned(self, fields: Value, first: int) -> Value:
        """Fields of two blocks, 16 bits apart from bit `first` of each 64-bit lane on, as `_both` returns them."""
        bits = [12 * (row // 2) % 8 + row % 2 * 6 for row in range(16)]
        shifts = [(first + bit + 16 * half + byte) % 64 for bit in bits for half in range(2) for byte in (3, -4)]
        held = self.hold(Value(fields.builder, fields.like(shifts)))
        return held.call("llvm.x86.avx512.pmultishift.qb.512", fields.llvm.type, fields).as_("i32", 16)


class Grid16Avx2(Grid16):
    """AVX2: S is at bits 10 .. 12 and Z at bits 13 .. 15."""

    SHIFTS, STRIP_TOKENS = (0, 2, 0, 2), 4  # larger shifts would overflow 16-bit sums

    def __init__(self, headers: Value, scheme: Scheme, hold: Keep):
        super().__init__(headers, scheme, hold)
        self._steps = [self.step << 2 + 16 * half for half in range(2)]
        first, shifts = self.zero_at(-3.5), set(self.SHIFTS) if scheme.strip == 2 else {0}
        self._bases = {shift: self.base_below(shift) for shift in shifts}
        self._zeros = {shift: [first * 2.0 ** shift, *(self.zero_unit * 2.0 ** (shift - bit) for bit in (13, 0))]
                       for shift in shifts}

    def scale(self, unit: Value, half: int) -> Value:
        return self._scale(self._both(unit), half, 0)

    def zero(self, unit: Value, half: int) -> Value:
        return self._zero(self._both(unit), half, 0)

    def blocks_of_strip(self, strip: Value) -> list[tuple[Value, Value]]:
        units = [self._both((strip << 1) + unit) for unit in range(2)]
        return [(self._scale(units[b // 2], b % 2, shift), self._zero(units[b // 2], b % 2, shift))
                for b, shift in enumerate(self.SHIFTS)]

    def _scale(self, both: Value, half: int, shift: int) -> Value:
        return dot2(self._bases[shift], both & 0x1C001C00, self._steps[half]).as_("f32", 16)

    def _zero(self, both: Value, half: int, shift: int) -> Value:
        first, low, high = self._zeros[shift]
        return fma((both >> 29).to_f32(), high, first) if half else fma((both & 0xE000).to_f32(), low, first)

    def _both(self, unit: Value) -> Value:
        """Fields of 16 rows in the top bits of both halves of an i32 lane, with other bits below."""
        block, nothing = self.blocks_at + unit * 24, 0x80
        # 4 rows have 3 bytes of each block; the last row needs only one byte.
        picks = [byte + 12 * half if byte < 3 else nothing
                 for row in range(4) for half in range(2) for byte in (6 * row // 8, 6 * row // 8 + 1)]
        later = [pick if pick == nothing else pick + 1 for pick in picks]  # of a load that ends with the headers
        low, high = (shuffle_bytes_by_16(load(block + a, "u8", 16).join(load(block + b, "u8", 16)), picks + more)
                     for a, b, more in ((0, 3, picks), (6, 8, later)))
        return (low.join(high).as_("u16", 32) << [10 - 6 * (i // 2) % 8 for i in range(32)]).as_("i32", 16)


class Grid16Neon(Grid16Avx2):
    """NEON, which has no product of neighbouring lanes, but has conversions that divide by a power of two."""

    SHIFTS = 0, 2, 4, 0

    def blocks_of_strip(self, strip: Value) -> list[tuple[Value, Value]]:
        return [(self.scale(unit, half), self.zero(unit, half))
                for unit in (strip << 1, (strip << 1) + 1) for half in range(2)]

    def dot(self, products: Value, shift: int) -> Value:
        return products.to_f32(shift)

    def _scale(self, both: Value, half: int, shift: int) -> Value:
        s = (both >> 16 if half else both) & 0x1C00
        return (self._bases[shift] + s * self._steps[0]).as_("f32", 16)
