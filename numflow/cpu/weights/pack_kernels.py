"""Kernels that pack a stored matrix into the packed layout: one kernel per tensor type, run once at load."""

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from numflow.cpu.runtime.access import i32_ptr, i64, share, u8_ptr, u16_ptr
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.value import Value, load, save
from numflow.cpu.simd.vector import inline, merged
from numflow.cpu.weights.layout import PACK_SCRATCH, PIECES, SHIFT_BITS, SPREAD, UNIT, scheme_of
from numflow.cpu.weights.look_up import put_units
from numflow.cpu.weights.pack_blocks import BLOCKS
from numflow.cpu.weights.pack_hub import HUB_BLOCKS, row_header
from numflow.cpu.weights.pack_planes import INFERFLOW_BLOCKS, four_planes, pair_planes
from numflow.formats.types import TYPES
from numflow.quant.grids import GRIDS
from numflow.quant.hub_types import HUB_TYPES
from numflow.quant.stored import FACTORED, STORED

# Arguments: stored rows and their stride in bytes, rows of one group, groups, K, the packed codes and headers, bytes of
# both per tile, and PACK_SCRATCH bytes of scratch per thread.
RAW, ROW_BYTES, ROWS, GROUPS, COLUMNS, CODES, HEADERS, CODE_BYTES, HEADER_BYTES, SCRATCH_AT = range(10)
_BLOCKS = BLOCKS | INFERFLOW_BLOCKS | HUB_BLOCKS


class BlockType(types.Type):
    """A tensor type as the type of a value without content."""

    def __init__(self, name: str):
        stored = name.removesuffix(SPREAD)
        self.type_name, self.scheme, self.emit = name, scheme_of(STORED[stored].kind, name != stored), _BLOCKS[name]
        self.columns = TYPES[stored].block
        self.size = GRIDS[stored].spread_bytes if name != stored else (
            GRIDS[name].compact_bytes if name in GRIDS else TYPES[name].size)
        self.row_header = HUB_TYPES[name].row_header if name in HUB_TYPES else 0
        super().__init__(name=f"Block({name})")


register_model(BlockType)(models.OpaqueModel)


@intrinsic(prefer_literal=True)
def block(typingctx, name):
    """The tensor type with this name, for the functions below."""
    def codegen(context, builder, signature, args):
        return context.get_dummy_value()
    return BlockType(name.literal_value)(name), codegen


@intrinsic
def _sizes(typingctx, kind):
    """Columns of a block, bytes of a stored block, bytes of its packed headers, columns of a strip, bytes of its codes,
    bytes of a row's header before its blocks, and bytes of 16 such row headers when packed.

    Blocks that share a header count as one.
    """
    def codegen(context, builder, signature, args):
        scheme = kind.scheme
        columns, strip = max(kind.columns, scheme.block), UNIT * scheme.strip
        headers, size = columns // scheme.block * scheme.header_bytes, columns // kind.columns * kind.size
        if kind.row_header:
            headers = 16 if scheme.header == FACTORED else 0
        sizes = (columns, size, headers, strip, scheme.strip * scheme.unit_bytes, kind.row_header,
                 scheme.header_bytes if kind.row_header else 0)
        return context.make_tuple(builder, signature.return_type, [ir.Constant(ir.IntType(64), s) for s in sizes])
    return types.UniTuple(types.int64, 7)(kind), codegen


@intrinsic
def _unpack_block(typingctx, raw, out, header, lane, kind):
    def codegen(context, builder, signature, args):
        kind.emit(*(Value(builder, a) for a in args[:4]))
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64, types.int64, kind), codegen


@intrinsic
def _row_header(typingctx, raw, header, lane, kind):
    def codegen(context, builder, signature, args):
        if kind.row_header:
            row_header(kind.type_name, *(Value(builder, a) for a in args[:3]))
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64, kind), codegen


@intrinsic
def put_planes(typingctx, groups, codes, kind):
    """Store the vectors of a strip's column groups, at `groups`, as the bit planes of the scheme, at `codes`.

    For grid types, `groups` holds the words that pack_blocks.py describes.
    """
    def codegen(context, builder, signature, args):
        groups, codes = (Value(builder, a) for a in args[:2])
        if kind.scheme.indexed:
            put_units([load(groups + 64 * word, "i32", 16) for word in range(4)], kind.scheme, codes)
            return context.get_dummy_value()
        vectors = [load(groups + 64 * g, "u8", 64) for g in range(8 * kind.scheme.strip)]
        if kind.scheme.shifted:
            save(codes + 4 * 64, _shift_bits(vectors), 16)
            vectors = [vector >> 1 for vector in vectors]
        for i, plane in enumerate(four_planes(vectors) if kind.scheme.in_fours else planes(vectors, kind.scheme.bits)):
            save(codes + 64 * i, plane)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, kind), codegen


def _shift_bits(groups: list[Value]) -> Value:
    """For each row the byte of bits 0 of its codes, one for each two groups, u8x16."""
    runs = [(groups[2 * run].as_("i32", 16) & 1) << bit for run, bit in enumerate(SHIFT_BITS)]
    return functools.reduce(Value.__or__, runs).narrow("u8")


@inline
def clear(scratch):
    """Zero a thread's scratch memory."""
    for i in range(PACK_SCRATCH):
        u8_ptr(scratch)[i] = 0


def planes(groups: list[Value], bits: float) -> list[Value]:
    """A strip's column groups, u8x64 each, as the vectors that PIECES describes; 3.5-bit codes as pair_planes does."""
    if bits == 3.5:
        return pair_planes(groups)
    vectors: dict[int, Value] = {}
    for group, pieces in zip(groups, PIECES[bits], strict=True):
        for vector, begin, to, count in pieces:
            field = (group >> to & ((1 << count) - 1)) << begin
            vectors[vector] = vectors[vector] | field if vector in vectors else field
    return [vectors[vector] for vector in sorted(vectors)]


def pack_type(name):
    """Make the kernel that packs rows of a tensor type."""
    def kernel(args, thread, n_threads):
        _pack_blocks(args, thread, n_threads, block(name))
    return kernel


@merged
def _pack_blocks(args, thread, n_threads, kind):
    """Pack rows of blocks of `kind`, which is a value of `block`."""
    columns, size, header_size, strip, strip_size, row_header_size, row_headers_size = _sizes(kind)
    rows = i64(args, ROWS)
    group_tiles, blocks = (rows + 15) // 16, i64(args, COLUMNS) // columns
    scratch = i64(args, SCRATCH_AT) + thread * PACK_SCRATCH
    begin, end = share(group_tiles * i64(args, GROUPS), thread, n_threads)
    for tile in range(begin, end):
        first = tile % group_tiles * 16
        lanes = min(16, rows - first)
        raw = i64(args, RAW) + (tile // group_tiles * rows + first) * i64(args, ROW_BYTES)
        codes = i64(args, CODES) + tile * i64(args, CODE_BYTES)
        header = i64(args, HEADERS) + tile * i64(args, HEADER_BYTES)
        if lanes < 16:
            clear(scratch)
        for lane in range(lanes if row_header_size else 0):
            _row_header(raw + lane * i64(args, ROW_BYTES), header, lane, kind)
        header += row_headers_size
        for b in range(blocks):
            column = b * columns % strip  # within the strip; not 0 if a block is a part of a strip
            if column == 0 and (blocks - b) * columns < strip:
                clear(scratch)
            for lane in range(lanes):
                stored = raw + lane * i64(args, ROW_BYTES) + row_header_size + b * size
                _unpack_block(stored, scratch + 16 * column + 4 * lane, header, lane, kind)
            if column + columns >= strip or b == blocks - 1:
                for s in range(0, column + columns, strip):
                    put_planes(scratch + 16 * s, codes, kind)
                    codes += strip_size
            header += header_size


@merged
def _interleave(args, thread, n_threads, size):
    """Pack float weights of `size` bytes: [tile][K][16 rows]."""
    rows, columns = i64(args, ROWS), i64(args, COLUMNS)
    group_tiles = (rows + 15) // 16
    begin, end = share(group_tiles * i64(args, GROUPS), thread, n_threads)
    for tile in range(begin, end):
        first = tile % group_tiles * 16
        lanes = min(16, rows - first)
        raw = i64(args, RAW) + (tile // group_tiles * rows + first) * i64(args, ROW_BYTES)
        codes = i64(args, CODES) + tile * i64(args, CODE_BYTES)
        for k in range(0, columns, 64):  # the memory of 64 columns stays in the L1 cache
            for lane in range(lanes):
                row, out = raw + lane * i64(args, ROW_BYTES) + k * size, codes + (16 * k + lane) * size
                for i in range(min(64, columns - k)):
                    if size == 4:
                        i32_ptr(out)[16 * i] = i32_ptr(row)[i]
                    else:
                        u16_ptr(out)[16 * i] = u16_ptr(row)[i]


@kernel
def _pack_32_bits(args, thread, n_threads):
    _interleave(args, thread, n_threads, 4)


@kernel
def _pack_16_bits(args, thread, n_threads):
    _interleave(args, thread, n_threads, 2)
