"""Keys and values as the cache holds them on a device: where the columns of a row are, and how kernels get at them.

A region is what one head has in one KV block: `block_size` rows. Rows are cut into pieces of 8 columns, and hold

    f32, f16   their columns, padded to whole pieces
    q8 .. q2   codes of units of 32 columns (quant/kv.py). All units of a region have their planes one after the other,
               the widest first, then their headers: words of a bfloat16 scale and, above it, a bfloat16 minimum

A plane's word has 4 columns of a piece in its 4 bytes; the first and the second 4 columns, and pieces that share the
word, in bits further up:

    8 bits   2 words for each piece          2 bits   a word for 2 pieces
    4 bits   a word for each piece           1 bit    a word for 4 pieces

"q3h" packs the second 4 columns of a piece with its first: 4 fields of 7 bits for each piece, in planes of 4, 2 and,
behind the headers, 1 bit (16 bits for a unit).
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
_MAGIC = 0x64006400  # two float16 of 1024, whose lowest bits count ones


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
    """From one row to the next: units of codes, or words."""
    columns = width(kind, columns)
    return columns // BLOCK if kind in CODED else columns // 2 if kind == "f16" else columns


def name_of_values(kind: str, columns: int, row: int) -> str:
    """Name part of kernels for the values they read: the first `columns` of rows of `row` columns."""
    own, whole = pitch(kind, columns), pitch(kind, row)
    return f"{kind}_{own}" + f"_of_{whole}" * (whole != own)


@functools.cache
def region(kind: str, columns: int) -> DeviceFunction:
    """region(cache, block, heads, head, block_size) -> pointer to the region of a head of a block."""
    two_rows = region_bytes(kind, columns, 2) // 4  # words; a single row of an odd number of units has half ones

    @device
    def region_of(cache, block, heads, head, block_size):
        return cache + u32(u32(block * heads + head) * (block_size >> u32(1)) * two_rows)

    return region_of


def planes(kind: str) -> tuple[list[tuple[Plane, int]], int]:
    """Planes of whole words, widest first, with the words of a unit before each; the words of a unit before headers."""
    found, at = [], 0
    for plane in sorted(CODED[kind].planes, key=lambda plane: -plane.width):
        if plane.bytes(CODED[kind].codes) >= 4:
            found.append((plane, at))
            at += plane.bytes(CODED[kind].codes) // 4
    return found, at


@functools.cache
def fetcher(kind: str, columns: int) -> DeviceFunction:
    """fetch(region, block_size, place, piece) -> 4 words: of float16, or a header and what `codes` wants.

    region: u32 pointer; place: of the row in the block. Indices are 64 bits wide, so that what is constant of them
    becomes part of the load.
    """
    step = pitch(kind, columns)

    @device
    def fetch_halves(region, block_size, place, piece):
        return load4(region, place * step + 4 * piece)

    if kind == "f16":
        return fetch_halves
    whole, header = planes(kind)
    words = whole[0][0].bytes(CODED[kind].codes) // 4
    second = whole[1][0].width if len(whole) > 1 else 0
    paired = CODED[kind].levels == PAIR_LEVELS

    @device
    def fetch(region, block_size, place, piece):
        unit, quarter, units = place * step + (piece >> u32(2)), u32(piece & u32(3)), u32(block_size * step)
        b, c = u32(0), u32(0)
        if words == 8:
            a, b = load2(region, 8 * unit + 2 * quarter)
        elif words == 4:
            a = region[4 * unit + quarter]
        else:
            a = region[2 * unit + (quarter >> u32(1))]
        if second == 2 and not paired:
            b = region[units * words + 2 * unit + (quarter >> u32(1))]
        elif second > 0:
            b = region[units * words + unit]
        if paired:
            c = u32(as_u16(region)[2 * units * (header + 1) + unit])
        return region[units * header + unit], a, b, c

    return fetch


@functools.cache
def codes(kind: str) -> DeviceFunction:
    """codes(a, b, c, quarter) -> two words of bytes: the codes of columns 0 .. 3 and 4 .. 7 of a piece."""
    whole, _ = planes(kind)
    first = whole[0][0].width
    second, shift = (whole[1][0].width, whole[1][0].shift) if len(whole) > 1 else (0, 0)

    @device
    def plain(a, b, c, quarter):
        return a, b

    @device
    def pairs(a, b, c, quarter):
        fields = u32(a >> u32(4 * (quarter & u32(1))) & u32(0x0F0F0F0F))
        fields = u32(fields | (b >> u32(2 * quarter) & u32(0x03030303)) << u32(4))
        ones = u32(u32((c >> u32(4 * quarter) & u32(15)) * 0x00204081) & u32(0x01010101))
        fields = u32(fields | ones << u32(6))
        above = u32(sevenths(fields) >> u32(4))
        return u32(fields - above * 11), above

    @device
    def planar(a, b, c, quarter):
        if first == 4:
            low, high = u32(a & u32(0x0F0F0F0F)), u32(a >> u32(4) & u32(0x0F0F0F0F))
        else:
            both = u32(a >> u32(4 * (quarter & u32(1))))
            low, high = u32(both & u32(0x03030303)), u32(both >> u32(2) & u32(0x03030303))
        if second == 2:
            more = u32(b >> u32(4 * (quarter & u32(1))))
            low = u32(low | (more & u32(0x03030303)) << u32(shift))
            high = u32(high | (more >> u32(2) & u32(0x03030303)) << u32(shift))
        elif second == 1:
            more = u32(b >> u32(2 * quarter))
            low = u32(low | (more & u32(0x01010101)) << u32(shift))
            high = u32(high | (more >> u32(1) & u32(0x01010101)) << u32(shift))
        return low, high

    return plain if first == 8 else pairs if CODED[kind].levels == PAIR_LEVELS else planar


@functools.cache
def halver(kind: str) -> DeviceFunction:
    """halves(words of fetch..., piece) -> 4 words of float16: the columns of a piece, rotated ones where coded."""
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
    """floats(region, block_size, place, piece) -> the 8 columns of a piece as float32, rotated ones where coded."""
    step = pitch(kind, columns)

    @device
    def of_f32(region, block_size, place, piece):
        at = u32(place * step + 8 * piece)
        a, b, c, d = load4(as_floats(region), at)
        e, f, g, h = load4(as_floats(region), u32(at + 4))
        return a, b, c, d, e, f, g, h

    if kind == "f32":
        return of_f32
    fetch = fetcher(kind, columns)

    @device
    def of_f16(region, block_size, place, piece):
        a, b, c, d = fetch(region, block_size, place, piece)
        return (low_half(a), high_half(a), low_half(b), high_half(b),
                low_half(c), high_half(c), low_half(d), high_half(d))

    if kind == "f16":
        return of_f16
    read = codes(kind)

    @device
    def of_codes(region, block_size, place, piece):
        header, a, b, c = fetch(region, block_size, place, piece)
        low, high = read(a, b, c, u32(piece & u32(3)))
        scale, floor = float_of(u32(header << u32(16))), float_of(u32(header & u32(0xFFFF0000)))
        return (fma(f32(low & u32(255)), scale, floor), fma(f32(low >> u32(8) & u32(255)), scale, floor),
                fma(f32(low >> u32(16) & u32(255)), scale, floor), fma(f32(low >> u32(24)), scale, floor),
                fma(f32(high & u32(255)), scale, floor), fma(f32(high >> u32(8) & u32(255)), scale, floor),
                fma(f32(high >> u32(16) & u32(255)), scale, floor), fma(f32(high >> u32(24)), scale, floor))

    return of_codes


@functools.cache
def element(kind: str, columns: int) -> DeviceFunction:
    """element(region, block_size, place, column) -> one column as float32, a rotated one where coded."""
    step = pitch(kind, columns)

    @device
    def of_f32(region, block_size, place, column):
        return as_floats(region)[u32(place * step + column)]

    @device
    def of_f16(region, block_size, place, column):
        return half_to_float(as_u16(region)[u32(2 * place * step + column)])

    if kind not in CODED:
        return of_f16 if kind == "f16" else of_f32
    fetch, read = fetcher(kind, columns), codes(kind)

    @device
    def of_codes(region, block_size, place, column):
        piece = u32(column >> u32(3))
        header, a, b, c = fetch(region, block_size, place, piece)
        low, high = read(a, b, c, u32(piece & u32(3)))
        chosen = high if column & u32(4) != u32(0) else low
        code = f32(chosen >> u32(8 * (column & u32(3))) & u32(255))
        return fma(code, float_of(u32(header << u32(16))), float_of(u32(header & u32(0xFFFF0000))))

    return of_codes
