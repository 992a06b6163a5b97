"""Layout of keys and values in the KV cache on a device, and device functions that read them.

A region is the memory of one head in one KV block: `block_size` rows. A row is cut into pieces of 8 columns:

    f32, f16   the columns, padded to whole pieces
    q8 .. q2   codes of units of 32 columns (quant/kv.py). A region has the bit planes of all its units, one plane after
               the other, the widest first; then the headers of all units. A header is a word: a bfloat16 scale in the
               low half, a bfloat16 minimum in the high half

A word of a plane has 4 columns of a piece in its 4 bytes. The second 4 columns of the piece, and further pieces that
share the word, are in higher bits of the bytes:

    8 bits   2 words for each piece          2 bits   1 word for 2 pieces
    4 bits   1 word for each piece           1 bit    1 word for 4 pieces

"q3h" combines each of the first 4 columns of a piece with one of the second 4 in a field of 7 bits (11 levels each): 4
fields for each piece. The fields are in planes of 4 and 2 bits and, after the headers, 1 bit (16 bits for a unit).
"""

import functools

from numflow.cuda.lang.arithmetic import (
    float_of,
    fma,
    fma_halves,
    half_to_float,
    high_half,
    low_half,
    pack_halves,
    prmt,
    sub_halves,
)
from numflow.cuda.lang.intrinsics import as_floats, as_u16, load2, load4
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.weights.decode import sevenths
from numflow.quant.bits import Plane
from numflow.quant.kv import BLOCK, CODED, PAIR_LEVELS

PIECE = 8
_MAGIC = 0x64006400  # two float16 of value 1024: the lowest mantissa bit is worth 1, so 0x6400 | byte is 1024 + byte


def width(kind: str, columns: int) -> int:
    """Columns of a row in memory."""
    unit = BLOCK if kind in CODED else PIECE
    return -(-columns // unit) * unit


def region_bytes(kind: str, columns: int, block_size: int) -> int:
    """Bytes of a region."""
    columns = width(kind, columns)
    if kind in CODED:
        return block_size * columns // BLOCK * CODED[kind].block_bytes
    return block_size * columns * (2 if kind == "f16" else 4)


def pitch(kind: str, columns: int) -> int:
    """Distance between rows, in units for codes, in 32-bit words for floats."""
    columns = width(kind, columns)
    return columns // BLOCK if kind in CODED else columns // 2 if kind == "f16" else columns


def name_of_values(kind: str, columns: int, row: int) -> str:
    """The part of a kernel's name that describes its values: the first `columns` of rows of `row` columns."""
    used, stored = pitch(kind, columns), pitch(kind, row)
    return f"{kind}_{used}" + f"_of_{stored}" * (stored != used)


@functools.cache
def region(kind: str, columns: int) -> DeviceFunction:
    """region(cache, block, heads, head, block_size) -> pointer to the region of a head in a KV block."""
    two_rows = region_bytes(kind, columns, 2) // 4  # words of two rows; one row may have an odd number of 16-bit halves

    @device
    def region_of(cache, block, heads, head, block_size):
        return cache + u32(u32(block * heads + head) * (block_size >> u32(1)) * two_rows)

    return region_of


def planes(kind: str) -> tuple[list[tuple[Plane, int]], int]:
    """The planes that have whole words for a unit, widest first, each with the words of a unit in the planes before.

    The second result is the words of a unit before the headers.
    """
    found, words = [], 0
    for plane in sorted(CODED[kind].planes, key=lambda plane: -plane.width):
        if plane.bytes(CODED[kind].codes) >= 4:
            found.append((plane, words))
            words += plane.bytes(CODED[kind].codes) // 4
    return found, words


@functools.cache
def fetcher(kind: str, columns: int) -> DeviceFunction:
    """fetch(region, block_size, offset, piece) -> 4 words: 8 float16, or a header and the three words for `codes`.

    region: u32 pointer. offset: of the row in the KV block. Indices are 64 bits wide, so that the compiler folds their
    constant parts into the load instruction.
    """
    step = pitch(kind, columns)

    @device
    def fetch_halves(region, block_size, offset, piece):
        return load4(region, offset * step + 4 * piece)

    if kind == "f16":
        return fetch_halves
    whole, header = planes(kind)
    words = whole[0][0].bytes(CODED[kind].codes) // 4
    second_width = whole[1][0].width if len(whole) > 1 else 0
    paired = CODED[kind].levels == PAIR_LEVELS

    @device
    def fetch(region, block_size, offset, piece):
        unit, quarter, units = offset * step + (piece >> u32(2)), u32(piece & u32(3)), u32(block_size * step)
        b, c = u32(0), u32(0)
        if words == 8:
            a, b = load2(region, 8 * unit + 2 * quarter)
        elif words == 4:
            a = region[4 * unit + quarter]
        else:
            a = region[2 * unit + (quarter >> u32(1))]
        if second_width == 2 and not paired:
            b = region[units * words + 2 * unit + (quarter >> u32(1))]
        elif second_width > 0:
            b = region[units * words + unit]
        if paired:
            c = u32(as_u16(region)[2 * units * (header + 1) + unit])
        return region[units * header + unit], a, b, c

    return fetch


@functools.cache
def codes(kind: str) -> DeviceFunction:
    """codes(a, b, c, quarter) -> 2 words of 4 bytes: the codes of columns 0 .. 3 and of 4 .. 7 of a piece.

    quarter: index of the piece in its unit.
    """
    whole, _ = planes(kind)
    first_width = whole[0][0].width
    second_width, shift = (whole[1][0].width, whole[1][0].shift) if len(whole) > 1 else (0, 0)

    @device
    def plain(a, b, c, quarter):
        return a, b

    @device
    def pairs(a, b, c, quarter):
        fields = u32(a >> u32(4 * (quarter & u32(1))) & u32(0x0F0F0F0F))
        fields = u32(fields | (b >> u32(2 * quarter) & u32(0x03030303)) << u32(4))
        ones = u32(u32((c >> u32(4 * quarter) & u32(15)) * 0x00204081) & u32(0x01010101))
        fields = u32(fields | ones << u32(6))
        quotients = u32(sevenths(fields) >> u32(4))
        return u32(fields - quotients * 11), quotients

    @device
    def planar(a, b, c, quarter):
        if first_width == 4:
            low, high = u32(a & u32(0x0F0F0F0F)), u32(a >> u32(4) & u32(0x0F0F0F0F))
        else:
            both = u32(a >> u32(4 * (quarter & u32(1))))
            low, high = u32(both & u32(0x03030303)), u32(both >> u32(2) & u32(0x03030303))
        if second_width == 2:
            more = u32(b >> u32(4 * (quarter & u32(1))))
            low = u32(low | (more & u32(0x03030303)) << u32(shift))
            high = u32(high | (more >> u32(2) & u32(0x03030303)) << u32(shift))
        elif second_width == 1:
            more = u32(b >> u32(2 * quarter))
            low = u32(low | (more & u32(0x01010101)) << u32(shift))
            high = u32(high | (more >> u32(1) & u32(0x01010101)) << u32(shift))
        return low, high

    return plain if first_width == 8 else pairs if CODED[kind].levels == PAIR_LEVELS else planar


@functools.cache
def halver(kind: str) -> DeviceFunction:
    """halves(4 words of fetch, piece) -> 4 words of float16: the columns of a piece. Coded columns stay rotated."""
    if kind == "f16":
        @device
        def same(first, second, third, fourth, piece):
            return first, second, third, fourth

        return same
    read = codes(kind)

    @device
    def halves(header, a, b, c, piece):
        low, high = read(a, b, c, u32(piece & u32(3)))
        scale, floor = float_of(u32(header << u32(16))), float_of(u32(header & u32(0xFFFF0000)))
        by, plus = pack_halves(scale, scale), pack_halves(floor, floor)
        w0, w1 = prmt(low, u32(0x64646464), u32(0x4140)), prmt(low, u32(0x64646464), u32(0x4342))
        w2, w3 = prmt(high, u32(0x64646464), u32(0x4140)), prmt(high, u32(0x64646464), u32(0x4342))
        return (fma_halves(sub_halves(w0, u32(_MAGIC)), by, plus), fma_halves(sub_halves(w1, u32(_MAGIC)), by, plus),
                fma_halves(sub_halves(w2, u32(_MAGIC)), by, plus), fma_halves(sub_halves(w3, u32(_MAGIC)), by, plus))

    return halves


@functools.cache
def floats(kind: str, columns: int) -> DeviceFunction:
    """floats(region, block_size, offset, piece) -> the 8 columns of a piece as float32. Coded columns stay rotated."""
    step = pitch(kind, columns)

    @device
    def of_f32(region, block_size, offset, piece):
        at = u32(offset * step + 8 * piece)
        a, b, c, d = load4(as_floats(region), at)
        e, f, g, h = load4(as_floats(region), u32(at + 4))
        return a, b, c, d, e, f, g, h

    if kind == "f32":
        return of_f32
    fetch = fetcher(kind, columns)

    @device
    def of_f16(region, block_size, offset, piece):
        a, b, c, d = fetch(region, block_size, offset, piece)
        return (low_half(a), high_half(a), low_half(b), high_half(b),
                low_half(c), high_half(c), low_half(d), high_half(d))

    if kind == "f16":
        return of_f16
    read = codes(kind)

    @device
    def of_codes(region, block_size, offset, piece):
        header, a, b, c = fetch(region, block_size, offset, piece)
        low, high = read(a, b, c, u32(piece & u32(3)))
        scale, floor = float_of(u32(header << u32(16))), float_of(u32(header & u32(0xFFFF0000)))
        return (fma(f32(low & u32(255)), scale, floor), fma(f32(low >> u32(8) & u32(255)), scale, floor),
                fma(f32(low >> u32(16) & u32(255)), scale, floor), fma(f32(low >> u32(24)), scale, floor),
                fma(f32(high & u32(255)), scale, floor), fma(f32(high >> u32(8) & u32(255)), scale, floor),
                fma(f32(high >> u32(16) & u32(255)), scale, floor), fma(f32(high >> u32(24)), scale, floor))

    return of_codes


@functools.cache
def element(kind: str, columns: int) -> DeviceFunction:
    """element(region, block_size, offset, column) -> one column as float32. A coded column stays rotated."""
    step = pitch(kind, columns)

    @device
    def of_f32(region, block_size, offset, column):
        return as_floats(region)[u32(offset * step + column)]

    @device
    def of_f16(region, block_size, offset, column):
        return half_to_float(as_u16(region)[u32(2 * offset * step + column)])

    if kind not in CODED:
        return of_f16 if kind == "f16" else of_f32
    fetch, read = fetcher(kind, columns), codes(kind)

    @device
    def of_codes(region, block_size, offset, column):
        piece = u32(column >> u32(3))
        header, a, b, c = fetch(region, block_size, offset, piece)
        low, high = read(a, b, c, u32(piece & u32(3)))
        word = high if column & u32(4) != u32(0) else low
        code = f32(word >> u32(8 * (column & u32(3))) & u32(255))
        return fma(code, float_of(u32(header << u32(16))), float_of(u32(header & u32(0xFFFF0000))))

    return of_codes
