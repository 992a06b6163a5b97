"""Unpacking of GGUF's blocks: one function per tensor type that stores a block's codes as bytes and copies its header.

Each is `fn(raw, out, header, lane)` and emits straight-line code of a packing kernel (pack_kernels.py):
raw     address of one row's block; for grid types, in their compact or spread form (quant/grids.py)
out     address of the row's 4-byte word in scratch u8 [column group][16 rows][4]: word i of the row is at out + 64 * i
header  address of the tile's header of this block (layout.py)
lane    index of the row in the tile
A word holds 4 columns, so a vector of 4 words is 16 columns.
"""

from collections.abc import Callable

from numflow.cpu.simd.value import Value, load, save
from numflow.cpu.weights.layout import SPREAD
from numflow.quant.grids import GRIDS, GridType

_NIBBLES, _TWO, _ONE = 0x0F0F0F0F, 0x03030303, 0x01010101


def _put(out: Value, column: int, words: Value) -> None:
    """Store 16 codes, from `column` on."""
    for i in range(4):
        save(out + 64 * (column // 4 + i), words.lane(i))


def _half(raw: Value, header: Value, lane: Value) -> None:
    """Copy a float16 of the block to its lane of the header of 16 rows."""
    save(header + lane * 2, load(raw, "u16"), 2)


def _words(raw: Value) -> Value:
    return load(raw, "i32", 4)


def _bits(raw: Value, to: int) -> Value:
    """16 bits at `raw`, each as bit `to` of a byte, in 4 words."""
    spread = load(raw, "u16").widen().splat(16) >> list(range(16))
    return ((spread & 1) << to).narrow("u8").as_("i32", 4)


def _nibble_block(raw: Value, out: Value, high_bits: Value | None = None) -> None:
    """32 codes: 16 low nibbles, then 16 high nibbles; `high_bits` is the address of bit 4 of each code."""
    words = _words(raw)
    for half, codes in enumerate((words & _NIBBLES, (words >> 4) & _NIBBLES)):
        _put(out, 16 * half, codes if high_bits is None else codes | _bits(high_bits + 2 * half, 4))


def q4_0(raw, out, header, lane):
    """d f16, 16 bytes of nibbles."""
    _half(raw, header, lane)
    _nibble_block(raw + 2, out)


def q4_1(raw, out, header, lane):
    """d f16, m f16, 16 bytes of nibbles."""
    _half(raw, header, lane)
    _half(raw + 2, header + 32, lane)
    _nibble_block(raw + 4, out)


def iq4_xs(raw, out, header, lane):
    """d f16, 2 high bits of each of 8 6-bit scales + 32, their 4 low bits, 128 bytes of nibbles as 8 blocks of 32."""
    _half(raw, header, lane)
    high = load(raw + 2, "u16").widen()
    for sub in range(8):
        low = load(raw + 4 + sub // 2, "u8") >> (4 * (sub % 2)) & 15
        save(header + 32 + 16 * sub + lane, (low | (high >> (2 * sub) & 3).narrow("u8") << 4) - 32, 1)
        _nibble_block(raw + 8 + 16 * sub, out + 512 * sub)


def mxfp4(raw, out, header, lane):
    """e: the scale is 2^(e - 128), which bfloat16 represents exactly; then 16 bytes of nibbles."""
    exponent = load(raw, "u8").widen()
    power = exponent.compare(">", 1).choose((exponent - 1) << 7, exponent * 0x20 + 0x20)
    save(header + lane * 2, power.narrow("u16"), 2)
    _nibble_block(raw + 1, out)


def nvfp4(raw, out, header, lane):
    """4 scales of 16 columns each, 8-bit floats E4M3 that count half; then 4 times 8 bytes of nibbles."""
    for sub in range(4):
        bits = load(raw + sub, "u8").widen()
        save(header + 64 * (sub // 2) + 32 * (sub % 2) + lane * 2, _half_of_e4m3(bits).narrow("u16"), 2)
        words = load(raw + 4 + 8 * sub, "i32", 2)
        for i in range(2):
            save(out + 64 * (4 * sub + i), words.lane(i) & _NIBBLES)
            save(out + 64 * (4 * sub + 2 + i), (words.lane(i) >> 4) & _NIBBLES)


def _half_of_e4m3(bits: Value) -> Value:
    """Half of an E4M3 float (4 bits of exponent, 3 of mantissa), as the bits of a float16; code 127 counts as 0."""
    normal = ((bits & 127) << 7) + (7 << 10)
    for tiny, half in enumerate((0, 0x1400, 0x1800, 0x1A00, 0x1C00, 0x1D00, 0x1E00, 0x1F00)):  # tiny * 2^-10
        normal = (bits & 127).compare("!=", tiny).choose(normal, half)
    return bits.compare("!=", 127).choose(normal, 0)


def q5_0(raw, out, header, lane):
    """d f16, 32 high bits, 16 bytes of nibbles."""
    _half(raw, header, lane)
    _nibble_block(raw + 6, out, raw + 2)


def q5_1(raw, out, header, lane):
    """d f16, m f16, 32 high bits, 16 bytes of nibbles."""
    _half(raw, header, lane)
    _half(raw + 2, header + 32, lane)
    _nibble_block(raw + 8, out, raw + 4)


def q8_0(raw, out, header, lane):
    """d f16, 32 signed bytes; codes are the bytes + 128."""
    _half(raw, header, lane)
    for half in range(2):
        _put(out, 16 * half, (load(raw + 2 + 16 * half, "u8", 16) + 128).as_("i32", 4))


def q2_k(raw, out, header, lane):
    """16 bytes of scale | min << 4, 64 bytes of 2 bits, d f16, dmin f16."""
    _half(raw + 80, header, lane)
    _half(raw + 82, header + 32, lane)
    for sub in range(16):
        save(header + 64 + 16 * sub + lane, load(raw + sub, "u8"), 1)
    for column in range(0, 256, 16):
        _put(out, column, _two_bits(raw + 16, column))


def _two_bits(codes: Value, column: int) -> Value:
    """16 codes of 2 bits: 128 columns share 32 bytes, each run of 32 columns in its own 2 bits of the bytes."""
    run, rest = divmod(column % 128, 32)
    return (_words(codes + 32 * (column // 128) + rest) >> (2 * run)) & _TWO


def q3_k(raw, out, header, lane):
    """32 bytes of high bits, 64 bytes of 2 bits, 12 bytes of 6-bit scales + 32, d f16."""
    _half(raw + 108, header, lane)
    scales = raw + 96
    for sub in range(16):
        low = load(scales + sub % 8, "u8") >> (4 * (sub // 8)) & 15
        high = load(scales + 8 + sub % 4, "u8") >> (2 * (sub // 4)) & 3
        save(header + 32 + 16 * sub + lane, (low | high << 4) - 32, 1)
    for column in range(0, 256, 16):
        high = _words(raw + column % 32) >> (column // 32) & _ONE
        _put(out, column, _two_bits(raw + 32, column) | high << 2)


def _k_header(raw: Value, header: Value, lane: Value) -> None:
    """d f16, dmin f16, 12 bytes with 8 scales and 8 mins of 6 bits."""
    _half(raw, header, lane)
    _half(raw + 2, header + 32, lane)
    for sub in range(4):
        s, m, both = (load(raw + 4 + 4 * i + sub, "u8") for i in range(3))
        values = (s & 63, both & 15 | s >> 6 << 4, m & 63, both >> 4 | m >> 6 << 4)
        for value, offset in zip(values, (64 + 16 * sub, 128 + 16 * sub, 192 + 16 * sub, 256 + 16 * sub)):
            save(header + offset + lane, value, 1)


def q4_k(raw, out, header, lane):
    """Header, 128 bytes of nibbles: 64 columns share 32 bytes."""
    _k_header(raw, header, lane)
    for column in range(0, 256, 16):
        words = _words(raw + 16 + column // 64 * 32 + column % 32)
        _put(out, column, (words >> (4 * (column // 32 % 2))) & _NIBBLES)


def q5_k(raw, out, header, lane):
    """Header, 32 bytes of high bits, 128 bytes of nibbles as in q4_k."""
    _k_header(raw, header, lane)
    for column in range(0, 256, 16):
        words = _words(raw + 48 + column // 64 * 32 + column % 32)
        high = _words(raw + 16 + column % 32) >> (column // 32) & _ONE
        _put(out, column, (words >> (4 * (column // 32 % 2))) & _NIBBLES | high << 4)


def q6_k(raw, out, header, lane):
    """128 bytes of nibbles, 64 bytes of 2 high bits, 16 signed scales, d f16: 128 columns share 64 bytes of nibbles and
    32 bytes of high bits."""
    _half(raw + 208, header, lane)
    for sub in range(16):
        save(header + 32 + 16 * sub + lane, load(raw + 192 + sub, "u8"), 1)
    for column in range(0, 256, 16):
        half, run, rest = column // 128, column % 128 // 32, column % 32
        low = _words(raw + 64 * half + 32 * (run % 2) + rest) >> (4 * (run // 2)) & _NIBBLES
        high = _words(raw + 128 + 32 * half + rest) >> (2 * run) & _TWO
        _put(out, column, low | high << 4)


def q1_0(raw, out, header, lane):
    """d f16, 128 bits; codes are 0 and 2."""
    _half(raw, header, lane)
    for column in range(0, 128, 16):
        _put(out, column, _bits(raw + 2 + column // 8, 1))


def _q2_0(columns: int) -> Callable[[Value, Value, Value, Value], None]:
    def unpack(raw, out, header, lane):
        """d f16, then 2 bits per column, 4 neighbouring columns in a byte."""
        _half(raw, header, lane)
        for column in range(0, columns, 16):
            four = load(raw + 2 + column // 4, "u8", 4).widen()
            _put(out, column, (four | four << 6 | four << 12 | four << 18) & _TWO)
    return unpack


def tq2_0(raw, out, header, lane):
    """64 bytes of 2 bits as in q2_k, d f16."""
    _half(raw + 64, header, lane)
    for column in range(0, 256, 16):
        _put(out, column, _two_bits(raw, column))


def tq1_0(raw, out, header, lane):
    """52 bytes of up to 5 digits in base 3, each byte a fraction of 256: runs of 32, 16 and 4 columns; d f16."""
    _half(raw + 52, header, lane)
    column = 0
    for begin, end, runs in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        for run in range(runs):
            for offset in range(begin, end, 4):
                rest = load(raw + offset, "u8", 4) * 3**run
                save(out + 16 * column, ((rest.widen("u16") * 3) >> 8).narrow("u8").as_("i32", 1))
                column += 4


def _of_grids(grid: GridType) -> Callable[[Value, Value, Value, Value], None]:
    def unpack(raw, out, header, lane):
        """4 words per unit: two of low bits of grid indices, one of their high bits, one of signs."""
        _half(raw, header, lane)
        for pair in range(grid.scales // 2):
            save(header + 32 + 16 * pair + lane, load(raw + 2 + pair, "u8"), 1)
        indices, size = raw + 2 + grid.scales // 2, 32 // grid.width
        high_bits = indices + 8 * size
        signs = high_bits + (16 if grid.high else 0)
        for unit in range(8):
            for word in range(size // 4):
                save(out + 512 * unit + 64 * word, load(indices + size * unit + 4 * word, "i32"))
            if grid.high:
                save(out + 512 * unit + 128, load(high_bits + 2 * unit, "u16").widen())
            if grid.sign:
                save(out + 512 * unit + 192, load(signs + 4 * unit, "i32"))
    return unpack


def _of_spread(grid: GridType) -> Callable[[Value, Value, Value, Value], None]:
    def unpack(raw, out, header, lane):
        """d f16, signed scales, 128 bytes of nibbles, the lower one first. The header has 4-bit fields of scales."""
        _half(raw, header, lane)
        for pair in range(grid.scales // 2):
            low, high = (_field(load(raw + 2 + 2 * pair + i, "u8").widen(), grid.either) for i in range(2))
            save(header + 32 + 16 * pair + lane, (low | high << 4).narrow("u8"), 1)
        for column in range(0, 256, 16):
            bytes_ = load(raw + 2 + grid.scales + column // 2, "u8", 8).widen("u16")
            _put(out, column, ((bytes_ | bytes_ << 4) & 0x0F0F).as_("i32", 4))
    return unpack


def _field(scale: Value, either: bool) -> Value:
    """The 4-bit field of a scale 2 * s + 1: s, or with `either`, s and in bit 3 the sign of the scale."""
    if not either:
        return scale >> 1
    return scale.compare(">", 127).choose((-scale + 255) >> 1 | 8, scale >> 1)


# Unpacking function by tensor type.
BLOCKS = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k,
    "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_NL": q4_0, "IQ4_XS": iq4_xs, "MXFP4": mxfp4, "NVFP4": nvfp4,
    "Q1_0": q1_0, "Q2_0": _q2_0(64), "Q2_0_128": _q2_0(128), "TQ1_0": tq1_0, "TQ2_0": tq2_0,
    **{name: _of_grids(grid) for name, grid in GRIDS.items()},
    **{name + SPREAD: _of_spread(grid) for name, grid in GRIDS.items()},
}
