"""Tiles of 4-bit float matrices for tensor cores (code_gemm.py, tensor_memory_gemm.py): unchanged codes, and scale
words.

A tile has 128 columns, which are four units of 32 (weights/layout.py) with adjacent codes.
"""

from numflow.cuda.lang.arithmetic import high_half, low_half
from numflow.cuda.lang.float8 import pack_e4m3
from numflow.cuda.lang.intrinsics import as_words, copy_async, load2, stream1
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.warpgroup import TILE, TILE_WORDS, tile_place
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import SCHEMES, Kept, Scheme
from numflow.cuda.weights.operand_float4 import tile4
from numflow.quant.stored import E2M1, FACTORED, POWER, SCALE16

_OPERANDS = {FACTORED: "nvfp4", SCALE16: "nvfp4", POWER: "mxfp4"}


def float4_operand(weight: Kept) -> str:
    """The operand of weights/operand_float4.py with the same kind of scales as a matrix; "" for other matrices."""
    scheme = SCHEMES.get(weight.kind)
    fits = scheme is not None and scheme.book == E2M1 and scheme.bits == 4 and not weight.outliers
    return _OPERANDS.get(scheme.header, "") if fits else ""


def codes4_copier(threads: int) -> DeviceFunction:
    """The function by which `threads` threads copy a tile of as many rows."""

    @device
    def copy_codes(tile, at, low, high, first, above, n, unit, units, thread):
        """Copy 128 columns of rows first .. first + threads - 1 of a matrix of n rows that begins at row `above`. If
        the row ends within the tile, its last unit is repeated, where tokens are 0."""
        for i in range(4):
            place, part = u32(thread + threads * i) >> u32(2), thread & u32(3)
            row = u32(first + place) if first + place < n else u32(n - 1)
            source = u32(4 * unit + part) if 4 * unit + part < units else u32(units - 1)
            copy_async(tile, u32(at + tile_place(place, part)), low, u32(((above + row) * units + source) * 4))

    return copy_codes


def scale_words(scheme: Scheme) -> DeviceFunction:
    """load(head, row, unit, units): the two scale words (lang/float4.py) of 128 columns of a row. A negative scale,
    which no known file has, becomes NaN, because scales of tensor cores have no sign."""
    header = scheme.header

    @device
    def of_unit(head, place):
        if header == SCALE16:                # float16, half the scale
            both = stream1(as_words(head), place)
            return u32(u32(pack_e4m3(low_half(both) * f32(2), high_half(both) * f32(2))))
        bits = u32(stream1(head, place))
        if header == POWER:                  # bfloat16, half the scale; its smallest powers are subnormal
            return u32((bits >> u32(7)) + (u32(1) if bits > u32(63) else u32(0)))
        return bits

    @device
    def load(head, row, unit, units):
        begin, first, shift = u32(row * units), u32(4 * unit), u32(8 if header == POWER else 16)
        a = of_unit(head, u32(begin + first))
        b = of_unit(head, u32(begin + (first + 1 if first + 1 < units else u32(units - 1))))
        c = of_unit(head, u32(begin + (first + 2 if first + 2 < units else u32(units - 1))))
        d = of_unit(head, u32(begin + (first + 3 if first + 3 < units else u32(units - 1))))
        low, high = u32(a | b << shift), u32(c | d << shift)
        if header == POWER:
            return low, high
        return _unsigned(low), _unsigned(high)

    return load


@device
def _unsigned(word):
    """Four E4M3 floats; negative ones become NaN."""
    signs = u32(word & u32(0x80808080))
    return u32((word & u32(0x7F7F7F7F)) | u32(signs - (signs >> u32(7))))


def rows_scaler(scheme: Scheme, m_tiles: int, sums_of: int) -> DeviceFunction:
    """apply(sums, per_row, above, row, n): multiply the sums by the scales of their rows, if there are any. Tiles are
    16 rows apart; as in float8.scales_of."""
    row_of, has_rows = row_header(scheme), scheme.row_words > 0

    @device
    def apply(sums, per_row, above, row, n):
        if has_rows:
            for i in range(2 * m_tiles):
                at = u32(row + 8 * (i & 1) + 16 * (i >> 1))
                _, _, d, _ = row_of(per_row, u32(above + (at if at < n else u32(n - 1))))
                for j in range(sums_of // 2):
                    sums[sums_of * (i >> 1) + 4 * (j >> 1) + 2 * (i & 1) + (j & 1)] *= d * f32(2)

    return apply


def row4_scale(scheme: Scheme) -> DeviceFunction:
    """scale_of(head, tops, per_row, above, row, n, unit, units) -> the scale of a row; 1 if there is none. Arguments as
    in float8.row_scale."""
    row_of, has_rows = row_header(scheme), scheme.row_words > 0

    @device
    def scale_of(head, tops, per_row, above, row, n, unit, units):
        scale = f32(1)
        if has_rows:
            _, _, d, _ = row_of(per_row, u32(above + (row if row < n else u32(n - 1))))
            scale = d * f32(2)
        return scale

    return scale_of


@device
def store_scales(shared, at, row, low, high):
    """Write a row's scale words of 128 columns for tensor memory (lang/tensor_memory.py): those of 128 rows and 64
    columns are 128 words, followed by those of the other 64 columns."""
    place = u32(at + u32(row >> u32(7)) * 256 + u32(row & u32(31)) * 4 + u32(row >> u32(5) & u32(3)))
    shared[place] = low
    shared[place + 128] = high


def tokens4_copier(threads: int, copies: int) -> DeviceFunction:
    """copy(...): copy 64 bytes of each token of an operand of 4-bit floats to a tile, by `threads` threads.

    rows_of: the rows of x that a thread copies, `copies` in number.
    """

    @device
    def copy(tile, at, x, rows_of, unit, units, thread):
        for i in range(copies):
            token, part = u32(thread + threads * i) >> u32(2), thread & u32(3)
            source = u32(tile4(rows_of[i], unit, units) + tile_place(rows_of[i] & u32(TILE - 1), part))
            copy_async(tile, u32(at + tile_place(token, part)), x, source)

    return copy


@device
def load_words(words, load_scales, head, x, row, token, unit, units, tiles):
    """Load the scale words of a tile: two of a row of the matrix, two of a token."""
    words[0], words[1] = load_scales(head, row, unit, units)
    words[2], words[3] = load2(x, u32(tile4(token, unit, tiles) + TILE_WORDS + 2 * (token & u32(TILE - 1))))
