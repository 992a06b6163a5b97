"""Packing of rows of numflow's own schemes on a device (quant/layout.py): codes for the headers that were found."""

import functools

from numflow.cuda.lang.arithmetic import add_exactly, divide_exactly, multiply_exactly
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.scalar import f32, u8, u32
from numflow.cuda.weights.search import Headers, nearest
from numflow.cuda.weights.search_rows import scale_of
from numflow.quant.layout import HEADER_BYTES, PAIR_LEVELS, UNIT, RowScheme

THREADS = 128


@functools.cache
def _code_of(scheme: RowScheme) -> DeviceFunction:
    """code(w, unit, index, ...): the code at an index of a unit, of one weight or of a pair."""
    size, span, scale_bits, paired = scheme.block, float(scheme.levels - 1), scheme.scale_bits, scheme.paired

    @device
    def single(w, column, header, blocks, zeros):
        chosen = u32(blocks[u32(column // u32(size))])
        inverse = divide_exactly(f32(1), scale_of(header, u32(chosen & u32((1 << scale_bits) - 1)), scale_bits))
        zero = zeros[u32(chosen >> u32(scale_bits))]
        return u32(nearest(add_exactly(multiply_exactly(w[column], inverse), zero), f32(span)))

    @device
    def code(w, unit, index, header, blocks, zeros):
        if u32(header >> u32(7)) == 0:
            return u32(0)
        if paired:
            column = u32(unit * UNIT + 2 * index)
            second = single(w, u32(column + 1), header, blocks, zeros)
            return u32(single(w, column, header, blocks, zeros) + u32(PAIR_LEVELS * second))
        return single(w, u32(unit * UNIT + index), header, blocks, zeros)

    return code


@functools.cache
def _byte_of(scheme: RowScheme) -> DeviceFunction:
    """byte_of(w, unit, byte, ...): a byte of a unit, whose planes follow each other."""
    ends, fields = [], []
    for plane in scheme.planes:
        ends.append((ends[-1] if ends else 0) + plane.bytes(scheme.unit_codes))
        fields.append((plane.width, plane.shift))
    ends, fields = ends + ends[-1:] * (3 - len(ends)), fields + fields[-1:] * (3 - len(fields))
    (end0, end1, _), ((width0, shift0), (width1, shift1), (width2, shift2)) = ends, fields
    code = _code_of(scheme)

    @device
    def field(w, unit, byte, header, blocks, zeros, width, shift):
        value = u32(0)
        for i in range(8 // width):
            c = code(w, unit, u32(byte * (8 // width) + i), header, blocks, zeros)
            value = u32(value | (u32(c >> u32(shift)) & u32((1 << width) - 1)) << u32(i * width))
        return value

    @device
    def byte_of(w, unit, byte, header, blocks, zeros):
        if byte < end0:
            return field(w, unit, byte, header, blocks, zeros, width0, shift0)
        if byte < end1:
            return field(w, unit, u32(byte - end0), header, blocks, zeros, width1, shift1)
        return field(w, unit, u32(byte - end1), header, blocks, zeros, width2, shift2)

    return byte_of


@functools.cache
def pack_kernel(scheme: RowScheme) -> Kernel:
    """The packing kernel: one thread for each byte of a row."""
    header_bits, unit_bytes, zero_codes = scheme.header_bits, scheme.unit_bytes, 1 << scheme.zero_bits
    byte_of = _byte_of(scheme)

    @kernel(f"quantise_pack_{scheme.name}", THREADS, exact=True)
    def _pack(raw: u8.ptr, x: f32.ptr, found: Headers, zeros: f32.ptr, columns: u32, blocks: u32, row_bytes: u32):
        at, row = u32(block_x() * THREADS + thread_index()), block_y()
        if at >= row_bytes:
            return
        header, headers = u32(found.rows[row]), found.blocks + u32(row * blocks)
        first = u32(row_bytes - u32(columns // u32(UNIT)) * unit_bytes)
        value = u32(0)
        if at < HEADER_BYTES:
            value = u32(header >> u32(8 * at))
        elif at < first:
            # Eight bits of the stream of block headers.
            for i in range(8):
                bit = u32(8 * u32(at - HEADER_BYTES) + i)
                block = u32(bit // u32(header_bits))
                if block < blocks:
                    own = u32(headers[block]) >> u32(bit - u32(block * header_bits)) & u32(1)
                    value = u32(value | own << u32(i))
        else:
            # A byte of a unit's codes.
            unit = u32(u32(at - first) // u32(unit_bytes))
            byte = u32(u32(at - first) - u32(unit * unit_bytes))
            value = byte_of(x + u32(row * columns), unit, byte, header, headers,
                            zeros + u32(u32(header & u32(3)) * zero_codes))
        raw[u32(row * row_bytes + at)] = u8(value & u32(255))

    return _pack
