"""Compiled kernels that pack, unpack and decode rows of numflow's own schemes (layout.py)."""

import numpy as np

from numflow.quant.bits_kernels import pack_block, plane_table, unpack_block
from numflow.quant.layout import BASE_BIAS, BASE_SHIFT, HEADER_BYTES, PAIR_LEVELS, UNIT, Fields, RowScheme
from numflow.quant.scheme import checked_bytes
from numflow.quant.threads import kernel, over_rows


def pack(fields: Fields, threads: int | None = None) -> np.ndarray:
    """Fields -> uint8 [N, row_bytes]"""
    scheme, (n, columns) = fields.scheme, fields.codes.shape
    raw = np.zeros((n, scheme.row_bytes(columns)), np.uint8)
    over_rows(_pack, n, threads, fields.rows, fields.blocks, fields.codes, *_sizes(scheme), raw)
    return raw


def unpack(raw: np.ndarray, scheme: RowScheme, columns: int, threads: int | None = None) -> Fields:
    """uint8 [N, row_bytes] -> Fields; errors as `layout.unpack_reference`."""
    raw = checked_bytes(raw, scheme, columns)
    n = len(raw)
    fields = Fields(scheme, np.empty(n, np.uint16), np.zeros((n, columns // scheme.block), np.uint16),
                    np.empty((n, columns), np.uint8))
    over_rows(_unpack, n, threads, raw, *_sizes(scheme), fields.rows, fields.blocks, fields.codes)
    return fields


def decode(raw: np.ndarray, scheme: RowScheme, columns: int, threads: int | None = None) -> np.ndarray:
    """uint8 [N, row_bytes] -> float32 [N, columns]; errors as `layout.unpack_reference`."""
    raw = checked_bytes(raw, scheme, columns)
    x = np.empty((len(raw), columns), np.float32)
    over_rows(_decode, len(raw), threads, raw, *_sizes(scheme), scheme.block, scheme.scale_bits, scheme.steps(),
              scheme.zeros(), x)
    return x


def _sizes(scheme: RowScheme) -> tuple:
    return (int(scheme.paired), scheme.header_bits, scheme.unit_codes, scheme.unit_bytes,
            plane_table(scheme.planes, scheme.unit_codes))


@kernel
def _pack(rows, blocks, codes, paired, header_bits, unit_codes, unit_bytes, planes, raw, begin, end):
    """rows u16 [N], blocks u16 [N, B], codes u8 [N, K]; raw u8 [N, row_bytes], zeros."""
    unit = np.empty(UNIT, np.uint8)
    first = raw.shape[1] - codes.shape[1] // UNIT * unit_bytes
    for row in range(begin, end):
        out = raw[row]
        out[0], out[1] = rows[row] & 255, rows[row] >> 8
        for b in range(blocks.shape[1]):
            for i in range(header_bits):
                bit = b * header_bits + i
                out[HEADER_BYTES + bit // 8] |= ((blocks[row, b] >> i) & 1) << (bit % 8)
        for u in range(codes.shape[1] // UNIT):
            for i in range(unit_codes):
                if paired:
                    unit[i] = codes[row, u * UNIT + 2 * i] + PAIR_LEVELS * codes[row, u * UNIT + 2 * i + 1]
                else:
                    unit[i] = codes[row, u * UNIT + i]
            pack_block(unit, unit_codes, planes, out[first + u * unit_bytes:])


@kernel
def _unpack(raw, paired, header_bits, unit_codes, unit_bytes, planes, rows, blocks, codes, begin, end):
    """raw u8 [N, row_bytes]; rows u16 [N], blocks u16 [N, B], codes u8 [N, K]."""
    for row in range(begin, end):
        rows[row] = row_header(raw[row])
        block_headers(raw[row], header_bits, blocks[row])
        row_codes(raw[row], paired, unit_codes, unit_bytes, planes, codes[row])


@kernel
def _decode(raw, paired, header_bits, unit_codes, unit_bytes, planes, block, scale_bits, steps, zeros, x, begin, end):
    """raw u8 [N, row_bytes]; steps i32 [32], zeros f32 [4, Z]; x f32 [N, K]."""
    codes, blocks = np.empty(x.shape[1], np.uint8), np.empty(x.shape[1] // block, np.uint16)
    pattern = np.empty(1, np.int32)
    for row in range(begin, end):
        header = row_header(raw[row])
        if header >> 7 == 0:
            x[row] = np.float32(0)
            continue
        block_headers(raw[row], header_bits, blocks)
        row_codes(raw[row], paired, unit_codes, unit_bytes, planes, codes)
        base, step = ((header >> 7) + BASE_BIAS) << BASE_SHIFT, np.int64(steps[header >> 2 & 31])
        for b in range(blocks.size):
            pattern[0] = base + (blocks[b] & ((1 << scale_bits) - 1)) * step
            scale, zero = pattern.view(np.float32)[0], zeros[header & 3, blocks[b] >> scale_bits]
            for i in range(b * block, (b + 1) * block):
                x[row, i] = scale * (np.float32(codes[i]) - zero)


@kernel
def row_header(raw):
    """Header of a row u8 [row_bytes]."""
    return np.int64(raw[0]) | np.int64(raw[1]) << 8


@kernel
def block_headers(raw, header_bits, blocks):
    """Block headers of a row, into `blocks` u16 [B]."""
    mask, word, bits, offset = (1 << header_bits) - 1, np.int64(0), 0, HEADER_BYTES
    for b in range(blocks.size):
        while bits < header_bits:
            word |= np.int64(raw[offset]) << bits
            bits, offset = bits + 8, offset + 1
        blocks[b] = word & mask
        word, bits = word >> header_bits, bits - header_bits


@kernel
def row_codes(raw, paired, unit_codes, unit_bytes, planes, codes):
    """Codes of a row, into `codes` u8 [K]."""
    first = raw.size - codes.size // UNIT * unit_bytes
    unit = np.empty(UNIT, np.int64)
    for u in range(codes.size // UNIT):
        unpack_block(raw[first + u * unit_bytes:], unit_codes, planes, unit)
        for i in range(unit_codes):
            if paired:
                codes[u * UNIT + 2 * i] = unit[i] % PAIR_LEVELS
                codes[u * UNIT + 2 * i + 1] = min(unit[i] // PAIR_LEVELS, PAIR_LEVELS - 1)
            else:
                codes[u * UNIT + i] = unit[i]
