"""Kernels that pack rows of numflow's own schemes (numflow/quant/layout.py) into the packed layout, bit for bit."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from numflow.cpu.runtime.access import i64, share, u8_ptr, u16_ptr
from numflow.cpu.simd.value import Value
from numflow.cpu.simd.vector import merged
from numflow.cpu.weights.layout import PACK_SCRATCH, ROW_HEADERS, SCHEMES, UNIT
from numflow.cpu.weights.pack_kernels import (
    CODE_BYTES,
    CODES,
    COLUMNS,
    GROUPS,
    HEADER_BYTES,
    HEADERS,
    RAW,
    ROW_BYTES,
    ROWS,
    SCRATCH_AT,
    clear,
    put_planes,
)
from numflow.cpu.weights.pack_planes import codes_of_planes, put_words
from numflow.quant.layout import HEADER_BYTES as ROW_HEADER_BYTES


class OwnType(types.Type):
    """A numflow scheme as the type of a value without content."""

    def __init__(self, name: str):
        self.scheme = SCHEMES[name]
        super().__init__(name=f"Own({name})")


register_model(OwnType)(models.OpaqueModel)


@intrinsic(prefer_literal=True)
def own(typingctx, name):
    """The scheme with this name, for the functions below."""
    def codegen(context, builder, signature, args):
        return context.get_dummy_value()
    return OwnType(name.literal_value)(name), codegen


@intrinsic
def _sizes(typingctx, kind):
    """Columns of a block, bits of a block header, bytes of a row's unit, bytes of a packed unit, units of a strip."""
    def codegen(context, builder, signature, args):
        scheme, stored = kind.scheme, kind.scheme.own
        sizes = stored.block, stored.header_bits, stored.unit_bytes, scheme.unit_bytes, scheme.strip
        return context.make_tuple(builder, signature.return_type, [ir.Constant(ir.IntType(64), s) for s in sizes])
    return types.UniTuple(types.int64, 5)(kind), codegen


@intrinsic
def _spread(typingctx, raw, out, kind):
    """Write the codes of one row's unit at `raw` as 8 words of 4 columns, 64 bytes apart."""
    def codegen(context, builder, signature, args):
        raw, out = (Value(builder, a) for a in args[:2])
        stored = kind.scheme.own
        put_words(out, codes_of_planes(raw, stored.planes, stored.unit_codes, stored.paired))
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, kind), codegen


def pack_own(name):
    """Make the kernel that packs rows of a numflow scheme."""
    def kernel(args, thread, n_threads):
        _pack(args, thread, n_threads, own(name))
    return kernel


@merged
def _pack(args, thread, n_threads, kind):
    rows, columns = i64(args, ROWS), i64(args, COLUMNS)
    block, header_bits, unit_bytes, packed_bytes, strip = _sizes(kind)
    group_tiles, blocks, scratch = (rows + 15) // 16, columns // block, i64(args, SCRATCH_AT) + thread * PACK_SCRATCH
    start = ROW_HEADER_BYTES + (blocks * header_bits + 7) // 8
    begin, end = share(group_tiles * i64(args, GROUPS), thread, n_threads)
    for tile in range(begin, end):
        first = tile % group_tiles * 16
        lanes = min(16, rows - first)
        raw = i64(args, RAW) + (tile // group_tiles * rows + first) * i64(args, ROW_BYTES)
        codes = i64(args, CODES) + tile * i64(args, CODE_BYTES)
        headers = i64(args, HEADERS) + tile * i64(args, HEADER_BYTES)
        if lanes < 16:
            clear(scratch)
        for unit in range(columns // UNIT):
            in_strip = unit % strip
            if in_strip == 0 and unit + strip > columns // UNIT:
                clear(scratch)
            for lane in range(lanes):
                _spread(raw + lane * i64(args, ROW_BYTES) + start + unit * unit_bytes,
                        scratch + 512 * in_strip + 4 * lane, kind)
            if in_strip == strip - 1 or unit == columns // UNIT - 1:
                put_planes(scratch, codes + (unit - in_strip) * packed_bytes, kind)
        for lane in range(lanes):
            row = raw + lane * i64(args, ROW_BYTES)
            for b in range(blocks):
                _put_field(row, ROW_HEADER_BYTES * 8 + b * header_bits, headers + ROW_HEADERS + b * 2 * header_bits,
                           lane, header_bits)
            u16_ptr(headers)[lane] = u8_ptr(row)[0] | np.uint16(u8_ptr(row)[1]) << 8


@merged
def _put_field(row, bit, out, lane, bits):
    """Copy the field of `bits` bits at bit `bit` of a row to field `lane` of the zeroed memory at `out`."""
    source, target = u8_ptr(row + bit // 8), u8_ptr(out + lane * bits // 8)
    value = ((source[0] | source[1] << 8 | source[2] << 16) >> bit % 8 & (1 << bits) - 1) << lane * bits % 8
    target[0] |= value & 255
    target[1] |= value >> 8
