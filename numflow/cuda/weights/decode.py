"""Device functions that decode a unit of a quantised matrix (layout.py): codes as 8 words of bytes, and the header.

Words have 4 codes in their bytes; word g has columns 4 g .. 4 g + 3 of the unit.
"""

import functools

from numflow.cuda.lang.arithmetic import dp4a_us, float_of, half_to_float, high_half, low_half, prmt
from numflow.cuda.lang.intrinsics import stream1, stream2, stream4
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.weights.decode_scaled import scaled
from numflow.cuda.weights.layout import Scheme
from numflow.quant.hub_types import TABLES
from numflow.quant.stored import (
    BASE,
    BYTES16,
    FACTORED,
    GRID,
    GRID16,
    POWER,
    SCALE,
    SCALE16,
    SCALED,
    SIGNED,
    SIGNED16,
    SUPER,
    SUPER16,
)

_LOW = 0x0F0F0F0F
_TWO = 0x03030303
_ONE = 0x01010101


@device
def _nibble_words(words, low, place):
    """Split word j of the low plane into the nibbles of groups 2j and 2j + 1."""
    a, b, c, d = stream4(low, u32(4 * place))
    words[0], words[1] = u32(a & u32(_LOW)), u32(a >> u32(4) & u32(_LOW))
    words[2], words[3] = u32(b & u32(_LOW)), u32(b >> u32(4) & u32(_LOW))
    words[4], words[5] = u32(c & u32(_LOW)), u32(c >> u32(4) & u32(_LOW))
    words[6], words[7] = u32(d & u32(_LOW)), u32(d >> u32(4) & u32(_LOW))


@device
def _four(words, low, high, two, one, place):
    _nibble_words(words, low, place)


@device
def _five(words, low, high, two, one, place):
    _nibble_words(words, low, place)
    bits = stream1(one, place)
    for g in range(8):
        moved = bits << u32(4 - g) if g < 4 else bits >> u32(g - 4)
        words[g] = u32(words[g] | u32(moved) & u32(0x10101010))


@device
def _six(words, low, high, two, one, place):
    _nibble_words(words, low, place)
    a, b = stream2(two, u32(2 * place))
    for g in range(4):
        shift = 4 - 2 * g
        first = a << u32(shift) if shift > 0 else a >> u32(-shift)
        second = b << u32(shift) if shift > 0 else b >> u32(-shift)
        words[g] = u32(words[g] | u32(first) & u32(0x30303030))
        words[4 + g] = u32(words[4 + g] | u32(second) & u32(0x30303030))


@device
def _seven(words, low, high, two, one, place):
    _six(words, low, high, two, one, place)
    bits = stream1(one, place)
    for g in range(8):
        moved = bits << u32(6 - g) if g < 6 else bits >> u32(g - 6)
        words[g] = u32(words[g] | u32(moved) & u32(0x40404040))


@device
def _eight(words, low, high, two, one, place):
    words[0], words[1], words[2], words[3] = stream4(low, u32(4 * place))
    words[4], words[5], words[6], words[7] = stream4(high, u32(4 * place))


@device
def _two_(words, low, high, two, one, place):
    a, b = stream2(two, u32(2 * place))
    for g in range(4):
        words[g] = u32(a >> u32(2 * g) & u32(_TWO))
        words[4 + g] = u32(b >> u32(2 * g) & u32(_TWO))


@device
def _three(words, low, high, two, one, place):
    _two_(words, low, high, two, one, place)
    bits = stream1(one, place)
    for g in range(8):
        moved = bits << u32(2 - g) if g < 2 else bits >> u32(g - 2)
        words[g] = u32(words[g] | u32(moved) & u32(0x04040404))


@device
def sevenths(word):
    """16 * (v // 11) for each byte v < 121, by multiplication: 373 / 4096 is close enough to 1 / 11, and leaves the
    quotient in a high nibble."""
    even = u32(u32(word & u32(0x007F007F)) * 373)
    odd = u32(prmt(word, u32(0), u32(0x4341)) * 373)
    return u32(prmt(even, odd, u32(0x7351)) & u32(0xF0F0F0F0))


@device
def _pairs(words, low, high, two, one, place):
    """Split code pairs: words 2j get the first code of each pair, words 2j + 1 the second."""
    a, b, c, d = stream4(low, u32(4 * place))
    packed = (a, b, c, d)
    for j in range(4):
        both = u32(packed[j] & u32(0x7F7F7F7F))
        second = u32(sevenths(both) >> u32(4))
        words[2 * j], words[2 * j + 1] = u32(both - second * 11), second


@device
def _one_(words, low, high, two, one, place):
    bits = stream1(one, place)
    for g in range(8):
        moved = bits << u32(1) if g < 1 else bits >> u32(g - 1)
        words[g] = u32(u32(moved) & u32(0x02020202))


def _small_book(table: tuple[int, ...], codes: DeviceFunction) -> DeviceFunction:
    """read(...): look up codes of up to 3 bits in a table of up to 8 bytes (one prmt); the result is the entry +
    128."""
    t0, t1 = (sum((value + 128 & 255) << (8 * i) for i, value in enumerate(table[4 * w:4 * w + 4])) for w in range(2))

    @device
    def read(words, low, high, two, one, place):
        codes(words, low, high, two, one, place)
        for g in range(8):
            pairs = u32(words[g] | words[g] >> u32(4))
            words[g] = prmt(u32(t0), u32(t1), u32(pairs & u32(0xFF) | pairs >> u32(8) & u32(0xFF00)))

    return read


def _bytes_of(table: tuple[int, ...]) -> DeviceFunction:
    """entry(nibbles): look up the 4 lowest nibbles in a table of 16 bytes (prmt)."""
    t0, t1, t2, t3 = (sum(value << (8 * i) for i, value in enumerate(table[4 * w:4 * w + 4])) for w in range(4))

    @device
    def entry(nibbles):
        near = u32(nibbles & u32(0x7777))
        low, high = prmt(u32(t0), u32(t1), near), prmt(u32(t2), u32(t3), near)
        return prmt(low, high, u32(u32(nibbles >> u32(1) & u32(0x4444)) | u32(0x3210)))

    return entry


def _book(table: tuple[int, ...]) -> DeviceFunction:
    """read(...): look up codes of 4 bits in a table of 16 bytes; the result is the entry + 128."""
    entry = _bytes_of(tuple(value + 128 & 255 for value in table))

    @device
    def read(words, low, high, two, one, place):
        a, b, c, d = stream4(low, u32(4 * place))
        packed = (a, b, c, d)
        for j in range(4):
            words[2 * j], words[2 * j + 1] = entry(packed[j]), entry(u32(packed[j] >> u32(16)))

    return read


@functools.cache
def reader(scheme: Scheme) -> DeviceFunction:
    """read(words, low, high, two, one, place): the unit's codes, unsigned bytes, group g in words[g]."""
    if scheme.book:
        return _book(scheme.book) if scheme.bits == 4 else _small_book(scheme.book, {2: _two_, 3: _three}[scheme.bits])
    return {1: _one_, 2: _two_, 3: _three, 3.5: _pairs, 4: _four, 5: _five, 6: _six, 7: _seven, 8: _eight}[scheme.bits]


@device
def _signed(byte):
    """f32 of the low byte as a signed integer."""
    return f32(i32(u32(byte) << u32(24)) >> 24)


@functools.cache
def header(scheme: Scheme) -> DeviceFunction:
    """header(head, above, place, base, step, z, dz) -> (A, C, A16, C16): w = A * code + C.

    place: index of the unit, over all rows. base, step, z, dz: of the row header (GRID). A16 and C16 are for columns
    16 .. 31; they equal A and C if a header is for all 32 columns.
    """
    zero, scale_bits = float(scheme.zero), scheme.own.scale_bits if scheme.is_own else 0
    low_mask, factor = (1 << scale_bits) - 1, scheme.factor

    @device
    def grid(code, base, step, z, dz):
        a = float_of(u32(base + (code & u32(low_mask)) * step))
        return a, -a * (z + f32(code >> u32(scale_bits)) * dz)

    @device
    def scale(head, above, place, base, step, z, dz):
        d = half_to_float(stream1(head, place))
        return d, -f32(zero) * d, d, -f32(zero) * d

    @device
    def power(head, above, place, base, step, z, dz):
        d = float_of(u32(u32(stream1(head, place)) << u32(16)))
        return d, -f32(zero) * d, d, -f32(zero) * d

    @device
    def scale16(head, above, place, base, step, z, dz):
        a, b = half_to_float(stream1(head, u32(2 * place))), half_to_float(stream1(head, u32(2 * place + 1)))
        return a, -f32(zero) * a, b, -f32(zero) * b

    @device
    def with_base(head, above, place, base, step, z, dz):
        d, m = half_to_float(stream1(head, u32(2 * place))), half_to_float(stream1(head, u32(2 * place + 1)))
        return d, m, d, m

    @device
    def factored(head, above, place, base, step, z, dz):
        both = u32(stream1(head, place))
        a, b = z * e4m3(u32(both & u32(255))), z * e4m3(u32(both >> u32(8)))
        return a, -f32(zero) * a, b, -f32(zero) * b

    @device
    def bytes16(head, above, place, base, step, z, dz):
        a, b = u32(stream1(head, u32(2 * place))), u32(stream1(head, u32(2 * place + 1)))
        return (f32(a & u32(255)) * f32(0.001), f32(a >> u32(8)) * f32(0.01) - f32(1),
                f32(b & u32(255)) * f32(0.001), f32(b >> u32(8)) * f32(0.01) - f32(1))

    @device
    def above_both(head, above, place, base, step, z, dz):
        both, top = u32(stream1(head, place)), stream1(above, place >> u32(3))
        a, c = low_half(top) * f32(both & u32(255)), -high_half(top) * f32(both >> u32(8))
        return a, c, a, c

    @device
    def above_both16(head, above, place, base, step, z, dz):
        both, top = u32(stream1(head, place)), stream1(above, place >> u32(3))
        d, e = low_half(top), high_half(top)
        return (d * f32(both & u32(15)), -e * f32(both >> u32(4) & u32(15)),
                d * f32(both >> u32(8) & u32(15)), -e * f32(both >> u32(12)))

    @device
    def signed(head, above, place, base, step, z, dz):
        a = low_half(stream1(above, place >> u32(3))) * _signed(stream1(head, place))
        if factor != 1.0:
            a = a * f32(factor)
        return a, -f32(zero) * a, a, -f32(zero) * a

    @device
    def signed16(head, above, place, base, step, z, dz):
        d, both = low_half(stream1(above, place >> u32(3))), u32(stream1(head, place))
        a, b = d * _signed(both), d * _signed(u32(both >> u32(8)))
        if factor != 1.0:
            a, b = a * f32(factor), b * f32(factor)
        return a, -f32(zero) * a, b, -f32(zero) * b

    @device
    def grid32(head, above, place, base, step, z, dz):
        a, c = grid(u32(stream1(head, place)), base, step, z, dz)
        return a, c, a, c

    @device
    def grid16(head, above, place, base, step, z, dz):
        both = u32(stream1(head, place))
        a, c = grid(u32(both & u32(255)), base, step, z, dz)
        b, d = grid(u32(both >> u32(8)), base, step, z, dz)
        return a, c, b, d

    return {SCALE: scale, SCALE16: scale16, POWER: power, BASE: with_base, BYTES16: bytes16, SUPER: above_both,
            SUPER16: above_both16, SIGNED: signed, SIGNED16: signed16, GRID: grid32, GRID16: grid16,
            SCALED: scaled(scheme) if scheme.header == SCALED else None, FACTORED: factored}[scheme.header]


@device
def e4m3(code):
    """f32 of an E4M3 code: its bits, as a float16, are 2^-8 times the value, also for subnormals."""
    number = low_half(u32((code & u32(127)) << u32(7) | (code & u32(128)) << u32(8))) * f32(256)
    return float_of(u32(0x7FC00000)) if (code & u32(127)) == 127 else number


@device
def e5m2(code):
    """f32 of an E5M2 code, which is the upper byte of a float16."""
    return low_half(u32(code << u32(8)))


@functools.cache
def numbers_of(scheme: Scheme) -> DeviceFunction:
    """numbers(word) -> 4 float32 for the codes of a word: table entries, or codes minus the zero point, or (if headers
    have a base) codes.

    The zero point is subtracted before the product, because a subtraction of rounded products would lose precision.
    """
    if scheme.table in ("e4m3", "e5m2"):
        float8 = e4m3 if scheme.table == "e4m3" else e5m2

        @device
        def floats(word):
            return (float8(u32(word & u32(255))), float8(u32(word >> u32(8) & u32(255))),
                    float8(u32(word >> u32(16) & u32(255))), float8(u32(word >> u32(24))))

        return floats
    if scheme.table:
        return _looked_up(scheme.table)

    above = float((1 << 23) + (0 if scheme.with_base else scheme.zero))

    @device
    def numbers(word):  # the float32 with bits 0x4B000000 | code is 2^23 + code
        power = u32(0x4B000000)
        return (float_of(prmt(word, power, u32(0x7440))) - f32(above),
                float_of(prmt(word, power, u32(0x7441))) - f32(above),
                float_of(prmt(word, power, u32(0x7442))) - f32(above),
                float_of(prmt(word, power, u32(0x7443))) - f32(above))

    return numbers


def _looked_up(table: str) -> DeviceFunction:
    """numbers(word) for codes of 4 bits in a table of floats, which is looked up byte by byte."""
    data = TABLES[table].view("u1").reshape(16, 4).T
    first, second, third, last = (_bytes_of(tuple(int(byte) for byte in plane)) for plane in data)

    @device
    def numbers(word):
        pairs = u32(word | word >> u32(4))
        codes = u32(pairs & u32(0xFF) | pairs >> u32(8) & u32(0xFF00))
        a, b, c, d = first(codes), second(codes), third(codes), last(codes)
        low, high = prmt(a, b, u32(0x5140)), prmt(c, d, u32(0x5140))  # halves of the floats of codes 0 and 1
        low2, high2 = prmt(a, b, u32(0x7362)), prmt(c, d, u32(0x7362))
        return (float_of(prmt(low, high, u32(0x5410))), float_of(prmt(low, high, u32(0x7632))),
                float_of(prmt(low2, high2, u32(0x5410))), float_of(prmt(low2, high2, u32(0x7632))))

    return numbers


@device
def pair_header(first, second, base, step, z, dz):
    """(A, C) of a unit of code pairs, whose header is in the top bits of words 0 and 1."""
    s = dp4a_us(u32(first >> u32(7) & u32(_ONE)), u32(0x00040201), i32(0))
    zero = dp4a_us(u32(second >> u32(7) & u32(_ONE)), u32(0x00040201), i32(0))
    a = float_of(u32(base + s * step))
    return a, -a * (z + f32(zero) * dz)
