"""Unpacking of quantised keys and values of a chunk to bytes or float32 in scratch memory.

A chunk is unpacked into the L1 cache just before its use and serves all rows of a tile, so the KV cache is read once,
in its few bits. `kind` is one of kv_rows.KINDS; addresses are of the first key (or value) of a chunk, `size` is the
bytes of a row, `width` its columns. A part is a block of 32 columns of 16 tokens.
"""

from llvmlite import ir
from numba import types

from numflow.cpu.simd.value import Value, fma, load, load_bf16, save, staged, transpose
from numflow.cpu.simd.value import load_f16 as value_f16
from numflow.cpu.simd.vector import inline, load_at, load_f16, load_f32, store_f32
from numflow.cpu.state import kv_code as code
from numflow.cpu.state import kv_rows as rows
from numflow.cpu.state.cache import GROUP
from numflow.quant.kv import BLOCK

PART = BLOCK * GROUP  # bytes of the unpacked codes of a part, one byte each
_i64 = types.int64


@inline
def part_bytes(size, width):
    """Bytes of a part in the cache."""
    return GROUP * size * BLOCK // width


@inline
def unpack_keys(kind, width, keys, source, size, y, ahead):
    """Unpack the codes of `keys` keys to y, u8 [groups of 16][blocks][8][16 keys][4 columns].

    As many bytes as are read are prefetched from `ahead` on.
    """
    step = part_bytes(size, width)
    for part in range((keys + GROUP - 1) // GROUP * (width // BLOCK)):
        _keys(kind, source + part * step, y + part * PART, ahead + part * step)


@inline
def unpack_values(kind, width, keys, source, size, y, ahead):
    """Unpack the codes of `keys` values to y, u8 [groups of 16][blocks][4][32 columns][4 values]; as unpack_keys."""
    step = part_bytes(size, width)
    for part in range((keys + GROUP - 1) // GROUP * (width // BLOCK)):
        _values(kind, source + part * step, y + part * PART, ahead + part * step)


@inline
def decode_keys(kind, width, keys, source, size, buffer, y, ahead):
    """Decode `keys` keys to y, f32 [groups of 16][width][16]; `buffer` is memory for their codes."""
    groups = (keys + GROUP - 1) // GROUP
    if kind == rows.BF16:
        for i in range(0, width * groups * GROUP, 2 * GROUP):
            _pair_rows(source + 2 * i, y + 4 * i, 4 * GROUP)
        return
    if kind <= rows.F16:
        _copy_floats(kind, source, width * groups * GROUP, y)
        return
    unpack_keys(kind, width, keys, source, size, buffer, ahead)
    for part in range(groups * (width // BLOCK)):
        _key_floats(source + part * part_bytes(size, width), buffer + part * PART, y + 4 * PART * part)


@inline
def decode_values(kind, width, keys, source, size, buffer, y, ahead):
    """Decode `keys` values to y, f32 [keys][width]; `buffer` is memory for their codes."""
    if kind == rows.BF16:
        for i in range(0, (keys + 1) // 2 * width, 16):  # the memory of a chunk holds one more key
            _pair_rows(source + 4 * i, y + 4 * (i // width * width + i), 4 * width)
        return
    if kind <= rows.F16:
        _copy_floats(kind, source, width * keys, y)
        return
    unpack_values(kind, width, keys, source, size, buffer, ahead)
    blocks = width // BLOCK
    for part in range((keys + GROUP - 1) // GROUP * blocks):
        out = y + 4 * (part // blocks * GROUP * width + part % blocks * BLOCK)
        for quad in range(4):
            _value_floats(source + part * part_bytes(size, width) + 8 * quad, buffer + part * PART + 128 * quad,
                          out + 16 * width * quad, 4 * width)


@inline
def _copy_floats(kind, source, count, y):
    """Copy `count` float32 or float16 as float32; `count` is a multiple of 16."""
    for i in range(0, count, 16):
        store_f32(y + 4 * i, load_f32(source + 4 * i) if kind == rows.F32 else load_f16(source + 2 * i))


@staged(types.void, _i64, _i64, _i64)
def _pair_rows(source, y, row):
    """Split 16 pairs of bfloat16 into two rows f32 [16], `row` bytes apart, at y."""
    pairs = load(source, "i32", 16)
    save(y, (pairs << 16).as_("f32", 16))
    save(y + row, (pairs & -0x10000).as_("f32", 16))


@inline
def transpose_16x16(half, source, y, row):
    """Transpose 16 columns of 16 keys, float16 if `half`, to rows of f32 [16], `row` bytes apart, at y."""
    if half is None:
        _transpose_f32(source, y, row)
    else:
        _transpose_f16(source, y, row)


def _load_address(pointer):
    """Load an address from memory."""
    return Value(pointer.builder, load_at(pointer.builder, pointer.llvm, ir.IntType(64)))


@staged(types.void, _i64, _i64, _i64)
def transpose_rows(rows, offset, y):
    """Transpose 16 columns, from `offset` bytes on, of 16 rows of f32, whose addresses are at `rows`, to y."""
    vectors = [load(_load_address(rows + 8 * row) + offset, "f32", 16) for row in range(GROUP)]
    for column, vector in enumerate(transpose(vectors)):
        save(y + 64 * column, vector)


def _transposer(size, read):
    @staged(types.void, _i64, _i64, _i64)
    def transpose_columns(source, y, row):
        for key, vector in enumerate(transpose([read(source + GROUP * size * column) for column in range(16)])):
            save(y + row * key, vector)
    return transpose_columns


_transpose_f32 = _transposer(4, lambda address: load(address, "f32", 16))
_transpose_f16 = _transposer(2, value_f16)


@staged(types.void, _i64, _i64, _i64)
def _key_floats(block, codes, y):
    """Decode a part of keys to y, f32 [32][16]."""
    scale, minimum = load_bf16(block), load_bf16(block + 2 * GROUP)
    for word in range(8):
        columns = load(codes + 64 * word, "u8", 64)
        for column in range(4):
            save(y + 64 * (4 * word + column), fma(columns.byte_of_4(column).to_f32(), scale, minimum))


@staged(types.void, _i64, _i64, _i64, _i64)
def _value_floats(block, codes, y, row):
    """Decode 4 values of a part, with headers at `block`, to y, rows of f32 [32], `row` bytes apart."""
    halves = [load(codes + 64 * half, "u8", 64) for half in range(2)]
    for token in range(4):
        scale, minimum = (_bf16(block + 2 * token + offset) for offset in (0, 2 * GROUP))
        for half, columns in enumerate(halves):
            save(y + row * token + 64 * half, fma(columns.byte_of_4(token).to_f32(), scale, minimum))


def _bf16(address: Value) -> Value:
    return (load(address, "u16").widen() << 16).as_("f32", 1).splat()


@inline
def _keys(kind, block, y, ahead):
    if kind == rows.Q8:
        code.key_q8(block, y, ahead)
    elif kind == rows.Q6:
        code.key_q6(block, y, ahead)
    elif kind == rows.Q5:
        code.key_q5(block, y, ahead)
    elif kind == rows.Q4:
        code.key_q4(block, y, ahead)
    elif kind == rows.Q3H:
        code.key_q3h(block, y, ahead)
    elif kind == rows.Q3:
        code.key_q3(block, y, ahead)
    else:
        code.key_q2(block, y, ahead)


@inline
def _values(kind, block, y, ahead):
    if kind == rows.Q8:
        code.value_q8(block, y, ahead)
    elif kind == rows.Q6:
        code.value_q6(block, y, ahead)
    elif kind == rows.Q5:
        code.value_q5(block, y, ahead)
    elif kind == rows.Q4:
        code.value_q4(block, y, ahead)
    elif kind == rows.Q3H:
        code.value_q3h(block, y, ahead)
    elif kind == rows.Q3:
        code.value_q3(block, y, ahead)
    else:
        code.value_q2(block, y, ahead)
