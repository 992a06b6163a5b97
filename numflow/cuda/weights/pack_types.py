"""Device functions that read the stored rows of each tensor type: the code of a column, and the headers of a unit.

code(raw, unit, column, units) -> u32: the unsigned code of a column (0 .. 31) of a unit
head(raw, unit, units) -> u32, above(raw, unit) -> u32: headers in the format of layout.py
constant(raw, i) -> u32: word i of the row header: bits of B, D, and of the floats z and dz
"""

import functools
from collections.abc import Callable

from numflow.cuda.lang.arithmetic import bits_of, float_of
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32
from numflow.quant.grids import GRIDS, GridType
from numflow.quant.layout import BASE_BIAS, BASE_SHIFT, HEADER_BYTES, ROW_SCHEMES, RowScheme


@device
def _short(raw, at):
    """The 16-bit integer at a byte offset."""
    return u32(raw[at] | raw[at + 1] << u32(8))


@device
def _none(raw, unit):
    return u32(0)


def _half_block(size: int, codes: int, high: int = 0) -> DeviceFunction:
    """code(...) for blocks of 32 columns and `size` bytes: 16 low and 16 high nibbles at byte `codes`, and if `high` is
    not 0, bit 4 of each code at byte `high`."""

    @device
    def code(raw, unit, column, units):
        at = unit * size
        byte = u32(raw[at + codes + (column & u32(15))])
        value = byte >> u32(4) if column >= 16 else byte & u32(15)
        if high:
            value = u32(value | (u32(raw[at + high + (column >> u32(3))]) >> (column & u32(7)) & u32(1)) << u32(4))
        return u32(value)

    return code


def _first_bytes(size: int, count: int) -> DeviceFunction:
    """head(...): the first 2 or 4 bytes of a block."""

    @device
    def head(raw, unit, units):
        value = _short(raw, unit * size)
        if count == 4:
            value = u32(value | _short(raw, unit * size + 2) << u32(16))
        return value

    return head


@device
def _q8_0(raw, unit, column, units):
    return u32(u32(raw[unit * 34 + 2 + column]) ^ u32(128))


@device
def _mxfp4_head(raw, unit, units):
    # 2^(e - 128) as bfloat16, whose smallest powers are subnormal.
    e = u32(raw[unit * 17])
    return u32((e - 1) << u32(7)) if e > 1 else u32(e * 32 + 32)


@device
def _nvfp4(raw, unit, column, units):
    at = u32((unit >> u32(1)) * 36 + 4 + 16 * (unit & u32(1)) + 8 * (column >> u32(4)) + (column & u32(7)))
    byte = u32(raw[at])
    return u32(byte >> u32(4)) if column & u32(8) else u32(byte & u32(15))


@device
def _half_of_e4m3(bits):
    """Half of an E4M3 float, as the bits of a float16; 127 (NaN) becomes 0."""
    there, bits = bits != 127, u32(bits & u32(127))
    if bits >= 8:
        return u32((bits << u32(7)) + (7 << 10)) if there else u32(0)
    top = u32(2) if bits >= 4 else u32(1) if bits >= 2 else u32(0)  # bits * 2^-10, normal in float16
    return u32((top + 5 << u32(10)) + ((bits << (10 - top)) & 1023)) if bits != 0 else u32(0)


@device
def _nvfp4_head(raw, unit, units):
    at = u32((unit >> u32(1)) * 36 + 2 * (unit & u32(1)))
    return u32(_half_of_e4m3(u32(raw[at])) | _half_of_e4m3(u32(raw[at + 1])) << u32(16))


def _two_bits(size: int, codes: int) -> DeviceFunction:
    """code(...) where 128 columns share 32 bytes: 4 runs of 32 columns, 2 bits each."""

    @device
    def code(raw, unit, column, units):
        inside = unit & u32(7)
        byte = u32(raw[(unit >> u32(3)) * size + codes + 32 * (inside >> u32(2)) + column])
        return u32(byte >> u32(2 * (inside & u32(3))) & u32(3))

    return code


_q3_low = _two_bits(110, 32)


@device
def _q3_k(raw, unit, column, units):
    high = u32(raw[(unit >> u32(3)) * 110 + column]) >> (unit & u32(7)) & u32(1)
    return u32(_q3_low(raw, unit, column, units) | high << u32(2))


@device
def _q3_scale(raw, sub):
    low = u32(raw[96 + (sub & u32(7))]) >> u32(4 * (sub >> u32(3))) & u32(15)
    high = u32(raw[104 + (sub & u32(3))]) >> u32(2 * (sub >> u32(2))) & u32(3)
    return u32((low | high << u32(4)) - 32) & u32(255)


@device
def _q3_head(raw, unit, units):
    block, sub = raw + (unit >> u32(3)) * 110, u32(2 * (unit & u32(7)))
    return u32(_q3_scale(block, sub) | _q3_scale(block, u32(sub + 1)) << u32(8))


def _nibble_runs(size: int, codes: int, high: int = 0) -> DeviceFunction:
    """code(...) where 64 columns share 32 bytes of nibbles; bit 4 is at byte `high`, one bit of a byte for each 32
    columns."""

    @device
    def code(raw, unit, column, units):
        at, inside = (unit >> u32(3)) * size, unit & u32(7)
        byte = u32(raw[at + codes + 32 * (inside >> u32(1)) + column])
        value = u32(byte >> u32(4 * (inside & u32(1))) & u32(15))
        if high:
            value = u32(value | (u32(raw[at + high + column]) >> inside & u32(1)) << u32(4))
        return value

    return code


def _k_head(size: int) -> DeviceFunction:
    """head(...): 6-bit scale and minimum of a unit, from 12 bytes at byte 4 of the block."""

    @device
    def head(raw, unit, units):
        at, sub = u32((unit >> u32(3)) * size + 4), unit & u32(7)
        i = sub & u32(3)
        s, m, both = u32(raw[at + i]), u32(raw[at + 4 + i]), u32(raw[at + 8 + i])
        if sub < 4:
            return u32(s & u32(63) | (m & u32(63)) << u32(8))
        return u32(both & u32(15) | s >> u32(6) << u32(4) | (both >> u32(4) | m >> u32(6) << u32(4)) << u32(8))

    return head


@device
def _q6_k(raw, unit, column, units):
    at, inside = (unit >> u32(3)) * 210, unit & u32(7)
    half, quarter = inside >> u32(2), inside & u32(3)
    low = u32(raw[at + 64 * half + 32 * (quarter & u32(1)) + column]) >> u32(4 * (quarter >> u32(1))) & u32(15)
    high = u32(raw[at + 128 + 32 * half + column]) >> u32(2 * quarter) & u32(3)
    return u32(low | high << u32(4))


def _pair_of_bytes(size: int, scales: int) -> DeviceFunction:
    """head(...): two bytes for each unit of a block of 8 units."""

    @device
    def head(raw, unit, units):
        return _short(raw, (unit >> u32(3)) * size + scales + 2 * (unit & u32(7)))

    return head


def _above(size: int, scale: int, minimum: int = -1) -> DeviceFunction:
    """above(...): the scale, and the scale of the minima, of a block of 8 units."""

    @device
    def above(raw, unit):
        at = u32((unit >> u32(3)) * size)
        value = _short(raw, at + scale)
        if minimum >= 0:
            value = u32(value | _short(raw, at + minimum) << u32(16))
        return value

    return above


@device
def _iq4_xs(raw, unit, column, units):
    byte = u32(raw[(unit >> u32(3)) * 136 + 8 + 16 * (unit & u32(7)) + (column & u32(15))])
    return u32(byte >> u32(4)) if column >= 16 else u32(byte & u32(15))


@device
def _iq4_xs_head(raw, unit, units):
    at, sub = u32((unit >> u32(3)) * 136), unit & u32(7)
    low = u32(raw[at + 4 + (sub >> u32(1))]) >> u32(4 * (sub & u32(1))) & u32(15)
    high = _short(raw, at + 2) >> u32(2 * sub) & u32(3)
    return u32((low | high << u32(4)) - 32) & u32(255)


@device
def _q1_0(raw, unit, column, units):
    byte = raw[(unit >> u32(2)) * 18 + 2 + 4 * (unit & u32(3)) + (column >> u32(3))]
    return u32((u32(byte) >> (column & u32(7)) & u32(1)) << u32(1))


def _q2_0(size: int, shift: int) -> DeviceFunction:
    """code(...): 2 bits for each column, after the float16 scale of a block of 2^shift units."""
    within = (1 << shift) - 1

    @device
    def code(raw, unit, column, units):
        byte = raw[(unit >> u32(shift)) * size + 2 + 8 * (unit & u32(within)) + (column >> u32(2))]
        return u32(u32(byte) >> u32(2 * (column & u32(3))) & u32(3))

    return code


@device
def _tq1_0(raw, unit, column, units):
    # Runs of 32, 16 and 4 columns; each run is the next base-3 digit of its bytes.
    at, inside = u32((unit >> u32(3)) * 54), u32(32 * (unit & u32(7)) + column)
    first, width = u32(0), u32(32)
    if inside >= 240:
        inside, first, width = u32(inside - 240), u32(48), u32(4)
    elif inside >= 160:
        inside, first, width = u32(inside - 160), u32(32), u32(16)
    value = u32(raw[at + first + inside % width])
    for run in range(4):
        if u32(run) < inside // width:
            value = u32(value * 3 & 255)
    return u32(value * 3 >> u32(8))


def _half_of(size: int, at: int, shift: int) -> DeviceFunction:
    """head(...): the float16 at byte `at` of a block of 2^shift units."""

    @device
    def head(raw, unit, units):
        return _short(raw, (unit >> u32(shift)) * size + at)

    return head


def _of_grids(grid: GridType) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction]:
    """(code, head, above) of the expanded form of a type with grids (quant/grids.py)."""
    size, scales = grid.spread_bytes, grid.scales

    @device
    def code(raw, unit, column, units):
        byte = u32(raw[(unit >> u32(3)) * size + 2 + scales + 16 * (unit & u32(7)) + (column >> u32(1))])
        return u32(byte >> u32(4 * (column & u32(1))) & u32(15))

    @device
    def scale(raw, unit, units):
        return u32(raw[(unit >> u32(3)) * size + 2 + (unit & u32(7))])

    return code, _pair_of_bytes(size, 2) if scales == 16 else scale, _above(size, 0)


def _own_code(scheme: RowScheme) -> DeviceFunction:
    """code(...) of numflow's own schemes: the fields of its planes, of 32 codes or 16 pairs."""
    planes, at = [], 0
    for plane in scheme.planes:
        planes.append((at, plane.width, plane.shift))
        at += plane.bytes(scheme.unit_codes)
    planes += [(0, 0, 0)] * (3 - len(planes))
    (at0, width0, shift0), (at1, width1, shift1), (at2, width2, shift2) = planes
    unit_bytes, header_bits, block, pair = scheme.unit_bytes, scheme.header_bits, scheme.block, scheme.paired

    @device
    def field(raw, begin, width, shift, index):
        if width == 0:
            return u32(0)
        bit = index * width
        return u32((u32(raw[begin + (bit >> u32(3))]) >> (bit & u32(7)) & u32((1 << width) - 1)) << shift)

    @device
    def code(raw, unit, column, units):
        begin = u32(HEADER_BYTES + (units * (32 // block) * header_bits + 7 >> u32(3)) + unit * unit_bytes)
        index = u32(column >> u32(1)) if pair else column
        value = u32(field(raw, u32(begin + at0), u32(width0), u32(shift0), index)
                    | field(raw, u32(begin + at1), u32(width1), u32(shift1), index)
                    | field(raw, u32(begin + at2), u32(width2), u32(shift2), index))
        if pair:
            second = u32(value * 373 >> u32(12))
            return second if column & u32(1) else u32(value - second * 11)
        return value

    return code


def _own_head(scheme: RowScheme) -> DeviceFunction:
    """head(...) of numflow's own schemes: the header of one block, or of two blocks of 16 columns."""
    bits, two = scheme.header_bits, scheme.block == 16

    @device
    def block_header(raw, block):
        bit = u32(block * bits)
        at = u32(HEADER_BYTES + (bit >> u32(3)))
        value = u32(raw[at])
        if (bit & u32(7)) + bits > 8:
            value = u32(value | u32(raw[at + 1]) << u32(8))
        if (bit & u32(7)) + bits > 16:
            value = u32(value | u32(raw[at + 2]) << u32(16))
        return u32(value >> (bit & u32(7)) & u32((1 << bits) - 1))

    @device
    def head(raw, unit, units):
        if two:
            return u32(block_header(raw, u32(2 * unit)) | block_header(raw, u32(2 * unit + 1)) << u32(8))
        return block_header(raw, unit)

    return head


def _own_constant(scheme: RowScheme) -> DeviceFunction:
    """constant(...) of numflow's own schemes: B, D, z and dz of a row, from its 16-bit header."""
    span, zero_bits, scale_bits = float(scheme.levels - 1), scheme.zero_bits, scheme.scale_bits
    finest = 1.0 / (1 << zero_bits)

    @device
    def constant(raw, i):
        header = _short(raw, u32(0))
        base, step, window = header >> u32(7), header >> u32(2) & u32(31), header & u32(3)
        narrow = float_of(u32((127 - window) << u32(23)))  # 2^-window
        if i == 0:
            return u32((base + BASE_BIAS) << u32(BASE_SHIFT)) if base != 0 else u32(0)
        if i == 1:
            distance = u32((4 + (step & u32(3))) << u32((step >> u32(2)) + 18 - scale_bits))
            return distance if base != 0 else u32(0)
        if i == 2:
            return bits_of(f32(span) * (f32(0.5) + (f32(0.5 * finest) - f32(0.5)) * narrow))
        return bits_of(f32(span * finest) * narrow)

    return constant


_BLOCKS: dict[str, tuple[Callable, Callable, Callable]] = {
    **dict.fromkeys(("Q4_0", "IQ4_NL"), (_half_block(18, 2), _first_bytes(18, 2), _none)),
    "Q4_1": (_half_block(20, 4), _first_bytes(20, 4), _none),
    "Q5_0": (_half_block(22, 6, 2), _first_bytes(22, 2), _none),
    "Q5_1": (_half_block(24, 8, 4), _first_bytes(24, 4), _none), "Q8_0": (_q8_0, _first_bytes(34, 2), _none),
    "MXFP4": (_half_block(17, 1), _mxfp4_head, _none), "NVFP4": (_nvfp4, _nvfp4_head, _none),
    "Q2_K": (_two_bits(84, 16), _pair_of_bytes(84, 0), _above(84, 80, 82)),
    "Q3_K": (_q3_k, _q3_head, _above(110, 108)),
    "Q4_K": (_nibble_runs(144, 16), _k_head(144), _above(144, 0, 2)),
    "Q5_K": (_nibble_runs(176, 48, 16), _k_head(176), _above(176, 0, 2)),
    "Q6_K": (_q6_k, _pair_of_bytes(210, 192), _above(210, 208)),
    "IQ4_XS": (_iq4_xs, _iq4_xs_head, _above(136, 0)),
    "Q1_0": (_q1_0, _half_of(18, 0, 2), _none), "Q2_0": (_q2_0(18, 1), _half_of(18, 0, 1), _none),
    "Q2_0_128": (_q2_0(34, 2), _half_of(34, 0, 2), _none),
    "TQ1_0": (_tq1_0, _half_of(54, 52, 3), _none), "TQ2_0": (_two_bits(66, 0), _half_of(66, 64, 3), _none),
    **{name: _of_grids(grid) for name, grid in GRIDS.items()},
}


PACKED = {*_BLOCKS, *ROW_SCHEMES}  # types with a packing kernel; others are packed by pack_fields.py


@functools.cache
def codes_of(kind: str) -> DeviceFunction:
    """The function `code` of a tensor type."""
    return _own_code(ROW_SCHEMES[kind]) if kind in ROW_SCHEMES else _BLOCKS[kind][0]


@functools.cache
def headers_of(kind: str) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction]:
    """The functions `head`, `above` and `constant` of a tensor type."""
    if kind in ROW_SCHEMES:
        return _own_head(ROW_SCHEMES[kind]), _none, _own_constant(ROW_SCHEMES[kind])
    return _BLOCKS[kind][1], _BLOCKS[kind][2], _none
