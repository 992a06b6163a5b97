"""Decoding the packed layout (layout.py): emitters of kernel code for codes, scales and weights of 16 rows at once.

codes    address of a unit's codes
headers  result of `open_headers` for a tile's headers
unit     index of the unit in the tile
half     columns [16 * half, 16 * half + 16) of the unit
scheme, its `header`, `group` and `half` are constants of a compiled kernel.
"""

from collections.abc import Callable

from numflow.cpu.simd.bits import insert_bits, move_bits, shift_down
from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is
from numflow.cpu.simd.lookup import lookup16, lookup64, lookup_bits, within_6_bits
from numflow.cpu.simd.value import Value, fma, load, load_bf16, load_f16
from numflow.cpu.weights.decode_grid16 import Grid16Avx2, Grid16Avx512, Grid16Neon
from numflow.cpu.weights.decode_own import Grid, pair_codes, unpack_four, unpack_pair
from numflow.cpu.weights.layout import PIECES, ROWS, SHIFT_BITS, UNIT, Panel, Scheme
from numflow.cpu.weights.look_up import UnitCache, levels_of, looked_up, step_scales
from numflow.cpu.weights.tables import floats8, table_values
from numflow.quant.hub_types import SIZES
from numflow.quant.stored import (
    BASE,
    BF16,
    BYTES16,
    F16,
    FACTORED,
    GRID16,
    POWER,
    SCALE,
    SCALE16,
    SCALED,
    SIGNED,
    SIGNED16,
    SUPER,
)

Headers = Value | Grid


def open_headers(headers: Value, scheme: Scheme, hold: Keep = as_it_is) -> Headers:
    """The tile's headers at an address, in the form that the functions below take."""
    if not scheme.is_own or isinstance(scheme, Panel):
        return headers
    by_16 = {"avx512": Grid16Avx512, "avx2": Grid16Avx2, "avxvnni": Grid16Avx2, "neon": Grid16Neon}
    return (by_16.get(isa(), Grid) if scheme.header == GRID16 else Grid)(headers, scheme, hold)


def column_group(codes: Value, scheme: Scheme, group: int, row: Value | None = None, hold: Keep = as_it_is,
                 cache: UnitCache | None = None) -> Value:
    """Codes of columns [4 * group, 4 * group + 4) of a unit: u8x64, 4 bytes per row, or u8x4 of one row.

    hold: function that keeps constants in registers. cache: a dictionary per unit, empty for its first group.
    """
    if isinstance(scheme, Panel):
        return load(codes + 64 * group, "u8", 64)
    if scheme.bits == 3.5:
        return unpack_pair(pair_codes(codes, group // 2, row, hold), group % 2, hold)
    if scheme.in_fours:
        return unpack_four(pair_codes(codes, group // 4, row, hold), group % 4, hold)
    if scheme.indexed:
        grid_codes = looked_up(codes, scheme, group, row, hold, {} if cache is None else cache)
        return _book_entries(grid_codes, levels_of(scheme), scheme.zero)
    if scheme.shifted:
        return _shifted(codes, group, row, scheme, hold)
    codes, lanes = (codes, 64) if row is None else (codes + (row << 2), 4)
    pieces = PIECES[scheme.bits][group]
    first, *high_vectors = (load(codes + 64 * piece[0], "u8", lanes) for piece in pieces)
    if scheme.book and lanes == 64 and isa() == "avx512":
        return _looked_up_in_place(first, high_vectors, pieces, scheme, hold)
    code = move_bits(first, *pieces[0][1:], hold)
    for vector, (_, begin, to, bits) in zip(high_vectors, pieces[1:]):
        code = insert_bits(code, vector, begin, to, bits, hold)
    return _book_entries(code, scheme.book, scheme.zero) if scheme.book else code


def _looked_up_in_place(first: Value, high_vectors: list[Value], pieces: list[tuple[int, int, int, int]],
                        scheme: Scheme, hold: Keep) -> Value:
    """Entries of the codebook + zero by one look-up that ignores the bits of other codes."""
    begin, bits = pieces[0][1], pieces[0][3]
    for vector, (_, other, to, more) in zip(high_vectors, pieces[1:]):
        low, high = shift_down(first, begin), shift_down(vector, other - to)
        keep = hold(Value(first.builder, first.like((1 << to) - 1)))
        first, begin, bits = low & keep | high & ~keep, 0, to + more
    return lookup_bits(first, begin, bits, [entry + scheme.zero for entry in _padded(scheme.book, 1 << bits)], hold)


def _shifted(codes: Value, group: int, row: Value | None, scheme: Scheme, hold: Keep) -> Value:
    """Entries of a shifted scheme's codebook + zero, u8x64, or u8x4 of one row, by codes of 2 bits and the shift bit of
    these 8 columns."""
    (vector, begin, _, bits), = PIECES[2][group]
    at, address, shifts = SHIFT_BITS[group // 2], codes + 64 * vector, codes + 4 * 64
    if row is not None:
        word, shift = load(address + (row << 2), "u8", 4), load(shifts + row, "u8").splat(4)
    else:
        word, shift = load(address, "u8", 64), load(shifts, "u8", ROWS).permute([i // 4 for i in range(64)])
    if row is not None or isa() != "avx512":
        code = move_bits(word, begin, 1, bits, hold) | move_bits(shift, at, 0, 1, hold)
        return _book_entries(code, scheme.book, scheme.zero)
    word, begin = within_6_bits(word, begin, bits)
    if at > 5:
        shift, at = shift_down(shift, 4), at - 4
    keep = hold(Value(word.builder, word.like(255 - (1 << at))))
    table = [_padded(scheme.book, 8)[(i >> begin & 3) << 1 | i >> at & 1] + scheme.zero for i in range(64)]
    return lookup64(word & keep | shift & ~keep, table, hold)


def _book_entries(code: Value, book: tuple[int, ...], zero: int) -> Value:
    """Entries of the codebook + zero."""
    return lookup16(code, [entry + zero for entry in _padded(book, 16)])


def _padded(book: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (*book, *[0] * (size - len(book)))


def scale(headers: Headers, unit: Value, half: int, scheme: Scheme) -> Value:
    """Scales, f32x16."""
    header = scheme.header
    if isinstance(headers, Grid):
        return headers.scale(unit, half)
    if isinstance(scheme, Panel):
        return load(scheme.header_address(headers, unit, half), "f32", 16)
    block = _block(headers, unit, half, scheme)
    if header == SCALED:
        scales = _typed(block, scheme.scale)
        return scales if scheme.factor == 1 else scales * scheme.factor
    if header == FACTORED:
        bytes_ = load(headers + 64 + (unit << 5) + 16 * half, "u8", 16)
        return load(headers, "f32", 16) * floats8(bytes_.widen(), "e4m3")
    if header in (SCALE, BASE, SCALE16):
        return load_f16(block + (32 * half if header == SCALE16 else 0))
    if header == POWER:
        return load_bf16(block)
    if header == BYTES16:
        return load(block + 16 * half, "u8", 16).widen().to_f32() / 1000.0
    if scheme.grid:
        return load_f16(block) * step_scales(block + 32, scheme, unit, half)
    if header in (SIGNED, SIGNED16):
        sub_block = block + 32 + (_by_32(unit) if header == SIGNED else _by_16(unit, half))
        sub_scales = load(sub_block, "u8", 16).widen_signed().to_f32()
        return load_f16(block) * (sub_scales if scheme.factor == 1 else sub_scales * scheme.factor)
    if header == SUPER:
        return load_f16(block) * load(block + 64 + _by_32(unit), "u8", 16).widen().to_f32()
    return load_f16(block) * (load(block + 64 + _by_16(unit, half), "u8", 16) & 15).widen().to_f32()


def zero(headers: Headers, unit: Value, half: int, scheme: Scheme) -> Value:
    """Zero points, f32x16, of numflow's own schemes."""
    if isinstance(headers, Grid):
        return headers.zero(unit, half)
    assert isinstance(scheme, Panel)
    return load(scheme.header_address(headers, unit, half) + 64, "f32", 16)


def base(headers: Headers, unit: Value, half: int, scheme: Scheme) -> Value:
    """Bases, f32x16: the term added to code * scale, of kinds that have one (Kind.with_base)."""
    if isinstance(headers, Grid):
        return -(headers.scale(unit, half) * headers.zero(unit, half))
    if isinstance(scheme, Panel):
        return load(scheme.header_address(headers, unit, half) + 64, "f32", 16)
    header, block = scheme.header, _block(headers, unit, half, scheme)
    if header == BASE:
        return load_f16(block + 32)
    if header == SCALED:
        return -(scale(headers, unit, half, scheme) * _typed(block + 16 * SIZES[scheme.scale], scheme.zeros))
    if header == BYTES16:
        hundredths = load(block + 32 + 16 * half, "u8", 16).widen().to_f32()
        return hundredths / 100.0 - 1.0
    if header == SUPER:
        return -(load_f16(block + 32) * load(block + 192 + _by_32(unit), "u8", 16).widen().to_f32())
    return -(load_f16(block + 32) * (load(block + 64 + _by_16(unit, half), "u8", 16) >> 4).widen().to_f32())


def _block(headers: Value, unit: Value, half: int, scheme: Scheme) -> Value:
    """Address of the header of a unit or of its half."""
    if not scheme.shared:
        return headers
    units = scheme.block // UNIT
    index = unit if units == 1 else (unit << 1) + half if not units else unit >> units.bit_length() - 1
    return headers + index * scheme.header_bytes


def _typed(address: Value, kind: str) -> Value:
    """16 scales or zero points of a type, as f32x16."""
    if kind == "U8":
        return load(address, "u8", 16).widen().to_f32()
    return load(address, "f32", 16) if kind == "F32" else load_f16(address) if kind == "F16" else load_bf16(address)


def _by_32(unit: Value) -> Value:
    """Offset of a unit's 16 bytes within its superblock of 8 units."""
    return (unit & 7) << 4


def _by_16(unit: Value, half: int) -> Value:
    """Offset of the 16 bytes of half of a unit within its superblock."""
    return ((unit & 7) << 5) + 16 * half


def scale_and_offset(headers: Headers, unit: Value, half: int, scheme: Scheme) -> tuple[Value, Value]:
    """Scale and offset that `weights` takes, f32x16 each.

    If zero is a power of two, (code - zero) * scale equals code * scale + base in every bit, with base = -zero * scale.
    """
    scales = scale(headers, unit, half, scheme)
    if isinstance(headers, Grid):
        return scales, headers.zero(unit, half)
    if scheme.with_base:
        return scales, base(headers, unit, half, scheme)
    return scales, scales * -float(scheme.zero)


def code_values(codes: Value, scheme: Scheme, pick: Callable[[Value], Value]) -> Value:
    """Codes as float32, or their values in a table. pick: as table_values takes it."""
    return table_values(codes, scheme.table, pick) if scheme.table else pick(codes).to_f32()


def weights(codes: Value, scales: Value, offsets: Value, scheme: Scheme) -> Value:
    """Weights, float32: (code - zero) * scale for GRID headers, whose code - zero is exact, as in numflow.quant.decode;
    fma(code, scale, offset) for others."""
    return (codes - offsets) * scales if scheme.is_own else fma(codes, scales, offsets)


def load_floats(address: Value, header: int) -> Value:
    """16 float weights as float32."""
    if header == F16:
        return load_f16(address)
    return load_bf16(address) if header == BF16 else load(address, "f32", 16)
