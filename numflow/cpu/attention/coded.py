"""Chunks of keys and values of few bits from the cache, as bytes or float32 in a thread's own memory, just before use.

A chunk is unpacked where it stands in the first cache, and met by all rows of a tile: the cache in memory is read once,
in the few bits it has. `kind` is one of kv_rows.KINDS; addresses are of the first key (or value) of a chunk, `size` is
the bytes of a row, `width` its columns. A part is a block of 32 columns of 16 tokens.
"""

from llvmlite import ir
from numba import types

from numflow.cpu.simd.value import Value, fma, load, load_bf16, save, staged, turned
from numflow.cpu.simd.value import load_f16 as value_f16
from numflow.cpu.simd.vector import inline, load_at, load_f16, load_f32, store_f32
from numflow.cpu.state import kv_code as code
from numflow.cpu.state import kv_rows as rows
from numflow.cpu.state.cache import GROUP
from numflow.quant.kv import BLOCK

PART = BLOCK * GROUP  # bytes of the codes of a part, once each has one
_i64 = types.int64


@inline
def part_bytes(size, width):
    """Bytes of a part in the cache."""
    return GROUP * size * BLOCK // width


@inline
def unpack_keys(kind, width, keys, source, size, y, ahead):
    """Codes of `keys` keys, u8 [groups of 16][blocks][8][16 keys][4 columns], to y.

    The same bytes from `ahead` on are fetched into the cache.
    """
    step = part_bytes(size, width)
    for part in range((keys + GROUP - 1) // GROUP * (width // BLOCK)):
        _keys(kind, source + part * step, y + part * PART, ahead + part * step)


@inline
def unpack_values(kind, width, keys, source, size, y, ahead):
    """Codes of `keys` values, u8 [groups of 16][blocks][4][32 columns][4 values], to y; as unpack_keys."""
    step = part_bytes(size, width)
    for part in range((keys + GROUP - 1) // GROUP * (width // BLOCK)):
        _values(kind, source + part * step, y + part * PART, ahead + part * step)


@inline
def decode_keys(kind, width, keys, source, size, buffer, y, ahead):
    """`keys` keys -> f32 [groups of 16][width][16] at y; `buffer` is for their codes."""
    groups = (keys + GROUP - 1) // GROUP
    if kind == rows.BF16:
        for i in range(0, width * groups * GROUP, 2 * GROUP):
            _pair_rows(source + 2 * i, y + 4 * i, 4 * GROUP)
        return
    if kind <= rows.F16:
        _plain(kind, source, width * groups * GROUP, y)
        return
    unpack_keys(kind, width, keys, source, size, buffer, ahead)
    for part in range(groups * (width // BLOCK)):
        _key_floats(source + part * part_bytes(size, width), buffer + part * PART, y + 4 * PART * part)


@inline
def decode_values(kind, width, keys, source, size, buffer, y, ahead):
    """`keys` values -> f32 [keys][width] at y."""
    if kind == rows.BF16:
        for i in range(0, (keys + 1) // 2 * width, 16):  # a chunk has room for one key more
            _pair_rows(source + 4 * i, y + 4 * (i // width * width + i), 4 * width)
        return
    if kind <= rows.F16:
        _plain(kind, source, width * keys, y)
        return
    unpack_values(kind, width, keys, source, size, buffer, ahead)
    blocks = width // BLOCK
    for part in range((keys + GROUP - 1) // GROUP * blocks):
        out = y + 4 * (part // blocks * GROUP * width + part % blocks * BLOCK)
        for four in range(4):
            _value_floats(source + part * part_bytes(size, width) + 8 * four, buffer + part * PART + 128 * four,
                          out + 16 * width * four, 4 * width)


@inline
def _plain(kind, source, count, y):
    """`count` float32 or float16, a multiple of 16."""
    for i in range(0, count, 16):
        store_f32(y + 4 * i, load_f32(source + 4 * i) if kind == rows.F32 else load_f16(source + 2 * i))


@staged(types.void, _i64, _i64, _i64)
def _pair_rows(source, y, row):
    """16 pairs of bfloat16 -> two rows f32 [16], `row` bytes apart, at y."""
    pairs = load(source, "i32", 16)
    save(y, (pairs << 16).as_("f32", 16))
    save(y + row, (pairs & -0x10000).as_("f32", 16))


@inline
def turn(half, source, y, row):
    """16 columns of 16 keys side by side, float16 with `half` -> rows of f32 [16], `row` bytes apart, at y."""
    if half is None:
        _turn_f32(source, y, row)
    else:
        _turn_f16(source, y, row)


def _address(at):
    """The address that stands at another."""
    return Value(at.builder, load_at(at.builder, at.llvm, ir.IntType(64)))


@staged(types.void, _i64, _i64, _i64)
def turn_rows(rows, offset, y):
    """16 columns of 16 rows of f32, whose addresses are at `rows`, from `offset` bytes on, side by side at y."""
    vectors = [load(_address(rows + 8 * row) + offset, "f32", 16) for row in range(GROUP)]
    for column, vector in enumerate(turned(vectors)):
        save(y + 64 * column, vector)


def _turner(size, read):
    @staged(types.void, _i64, _i64, _i64)
    def turn_columns(source, y, row):
        for key, vector in enumerate(turned([read(source + GROUP * size * column) for column in range(16)])):
            save(y + row * key, vector)
    return turn_columns


_turn_f32 = _turner(4, lambda address: load(address, "f32", 16))
_turn_f16 = _turner(2, value_f16)


@staged(types.void, _i64, _i64, _i64)
def _key_floats(block, codes, y):
    """A part of keys -> f32 [32][16] at y."""
    scale, minimum = load_bf16(block), load_bf16(block + 2 * GROUP)
    for word in range(8):
        four = load(codes + 64 * word, "u8", 64)
        for column in range(4):
            save(y + 64 * (4 * word + column), fma(four.byte_of_4(column).to_f32(), scale, minimum))


@staged(types.void, _i64, _i64, _i64, _i64)
def _value_floats(block, codes, y, row):
    """4 values of a part, their headers at `block` -> rows of f32 [32], `row` bytes apart, at y."""
    halves = [load(codes + 64 * half, "u8", 64) for half in range(2)]
    for token in range(4):
        scale, minimum = (_bf16(block + 2 * token + at) for at in (0, 2 * GROUP))
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
