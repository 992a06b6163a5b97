"""Reading the packed layout (layout.py): codes, scales and weights of 16 rows at once, as code to build kernels of.

`codes` is the address of a unit's codes, `heads` what `open_heads` makes of a tile's headers, `unit` its index in the
tile; the scheme or its `header`, `group` and `half` (columns [16 * half, 16 * half + 16) of the unit) are known when a
kernel is compiled.
"""

from collections.abc import Callable

from numflow.cpu.simd.bits import moved, with_bits
from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is
from numflow.cpu.simd.lookup import lookup16
from numflow.cpu.simd.value import Value, fma, load, load_bf16, load_f16
from numflow.cpu.weights.decode_grid16 import Grid16Avx2, Grid16Avx512, Grid16Neon
from numflow.cpu.weights.decode_own import Grid, of_four, of_pair, pair_codes
from numflow.cpu.weights.layout import PIECES, UNIT, Panel, Scheme
from numflow.cpu.weights.look_up import Known, book_of, looked_up, step_values
from numflow.cpu.weights.tables import floats8, table_numbers
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

Heads = Value | Grid


def open_heads(heads: Value, scheme: Scheme, hold: Keep = as_it_is) -> Heads:
    """The tile's headers at address `heads`, as the functions below take them."""
    if not scheme.is_own or isinstance(scheme, Panel):
        return heads
    by_16 = {"avx512": Grid16Avx512, "avx2": Grid16Avx2, "avxvnni": Grid16Avx2, "neon": Grid16Neon}
    return (by_16.get(isa(), Grid) if scheme.header == GRID16 else Grid)(heads, scheme, hold)


def column_group(codes: Value, scheme: Scheme, group: int, row: Value | None = None, hold: Keep = as_it_is,
                 known: Known | None = None) -> Value:
    """Codes of columns [4 * group, 4 * group + 4) of a unit: u8x64, 4 bytes per row, or u8x4 of one row.

    hold: what constants pass through. known: empty for the first group of a unit, and the same for its others.
    """
    if isinstance(scheme, Panel):
        return load(codes + 64 * group, "u8", 64)
    if scheme.bits == 3.5:
        return of_pair(pair_codes(codes, group // 2, row, hold), group % 2, hold)
    if scheme.in_fours:
        return of_four(pair_codes(codes, group // 4, row, hold), group % 4, hold)
    if scheme.grid:
        found = looked_up(codes, scheme, group, row, hold, {} if known is None else known)
        return _of_book(found, book_of(scheme), scheme.zero)
    codes, lanes = (codes, 64) if row is None else (codes + (row << 2), 4)
    pieces = PIECES[scheme.bits][group]
    first, *others = (load(codes + 64 * piece[0], "u8", lanes) for piece in pieces)
    code = moved(first, *pieces[0][1:], hold)
    for vector, (_, begin, to, bits) in zip(others, pieces[1:]):
        code = with_bits(code, vector, begin, to, bits, hold)
    return _of_book(code, scheme.book, scheme.zero) if scheme.book else code


def _of_book(code: Value, book: tuple[int, ...], zero: int) -> Value:
    """Entries of the code-book + zero."""
    return lookup16(code, [entry + zero for entry in (*book, *[0] * (16 - len(book)))])


def scale(heads: Heads, unit: Value, half: int, scheme: Scheme) -> Value:
    """Factors of the codes, f32x16."""
    header = scheme.header
    if isinstance(heads, Grid):
        return heads.scale(unit, half)
    if isinstance(scheme, Panel):
        return load(scheme.head(heads, unit, half), "f32", 16)
    block = _block(heads, unit, half, scheme)
    if header == SCALED:
        scales = _typed(block, scheme.scale)
        return scales if scheme.factor == 1 else scales * scheme.factor
    if header == FACTORED:
        return load(heads, "f32", 16) * floats8(load(heads + 64 + (unit << 5) + 16 * half, "u8", 16).widen(), "e4m3")
    if header in (SCALE, BASE, SCALE16):
        return load_f16(block + (32 * half if header == SCALE16 else 0))
    if header == POWER:
        return load_bf16(block)
    if header == BYTES16:
        return load(block + 16 * half, "u8", 16).widen().to_f32() / 1000.0
    if scheme.grid:
        return load_f16(block) * (step_values(block + 32, scheme.grid, unit, half).to_f32() * scheme.factor)
    if header in (SIGNED, SIGNED16):
        sub = block + 32 + (_by_32(unit) if header == SIGNED else _by_16(unit, half))
        steps = load(sub, "u8", 16).widen_signed().to_f32()
        return load_f16(block) * (steps if scheme.factor == 1 else steps * scheme.factor)
    if header == SUPER:
        return load_f16(block) * load(block + 64 + _by_32(unit), "u8", 16).widen().to_f32()
    return load_f16(block) * (load(block + 64 + _by_16(unit, half), "u8", 16) & 15).widen().to_f32()


def zero(heads: Heads, unit: Value, half: int, scheme: Scheme) -> Value:
    """Codes that stand for zero, f32x16, of numflow's own schemes."""
    if isinstance(heads, Grid):
        return heads.zero(unit, half)
    assert isinstance(scheme, Panel)
    return load(scheme.head(heads, unit, half) + 64, "f32", 16)


def base(heads: Heads, unit: Value, half: int, scheme: Scheme) -> Value:
    """Terms added to code * scale, f32x16, for the kinds that have one (Kind.with_base)."""
    if isinstance(heads, Grid):
        return -(heads.scale(unit, half) * heads.zero(unit, half))
    if isinstance(scheme, Panel):
        return load(scheme.head(heads, unit, half) + 64, "f32", 16)
    header, block = scheme.header, _block(heads, unit, half, scheme)
    if header == BASE:
        return load_f16(block + 32)
    if header == SCALED:
        return -(scale(heads, unit, half, scheme) * _typed(block + 16 * SIZES[scheme.scale], scheme.zeros))
    if header == BYTES16:
        hundredths = load(block + 32 + 16 * half, "u8", 16).widen().to_f32()
        return hundredths / 100.0 - 1.0
    if header == SUPER:
        return -(load_f16(block + 32) * load(block + 192 + _by_32(unit), "u8", 16).widen().to_f32())
    return -(load_f16(block + 32) * (load(block + 64 + _by_16(unit, half), "u8", 16) >> 4).widen().to_f32())


def _block(heads: Value, unit: Value, half: int, scheme: Scheme) -> Value:
    """Address of the header of a unit, or of its half."""
    if not scheme.shared:
        return heads
    units = scheme.block // UNIT
    place = unit if units == 1 else (unit << 1) + half if not units else unit >> units.bit_length() - 1
    return heads + place * scheme.header_bytes


def _typed(address: Value, kind: str) -> Value:
    """16 numbers of a type of scales or zeros, f32x16."""
    if kind == "U8":
        return load(address, "u8", 16).widen().to_f32()
    return load(address, "f32", 16) if kind == "F32" else load_f16(address) if kind == "F16" else load_bf16(address)


def _by_32(unit: Value) -> Value:
    """Offset of a unit's 16 bytes among those of its 8."""
    return (unit & 7) << 4


def _by_16(unit: Value, half: int) -> Value:
    return ((unit & 7) << 5) + 16 * half


def scale_and_offset(heads: Heads, unit: Value, half: int, scheme: Scheme) -> tuple[Value, Value]:
    """Scale and offset with which `weights` makes weights of codes, f32x16 each.

    (code - zero) * scale is code * scale + base, rounded in the same place, where the zero is a power of two.
    """
    scales = scale(heads, unit, half, scheme)
    if isinstance(heads, Grid):
        return scales, heads.zero(unit, half)
    if scheme.with_base:
        return scales, base(heads, unit, half, scheme)
    return scales, scales * -float(scheme.zero)


def code_numbers(codes: Value, scheme: Scheme, pick: Callable[[Value], Value]) -> Value:
    """Codes as float32, or the numbers they stand for in a table. pick: as of table_numbers."""
    return table_numbers(codes, scheme.table, pick) if scheme.table else pick(codes).to_f32()


def weights(codes: Value, scales: Value, offsets: Value, scheme: Scheme) -> Value:
    """Weights of codes as float32; of a GRID, whose code - zero is exact, those of numflow.quant.decode."""
    return (codes - offsets) * scales if scheme.is_own else fma(codes, scales, offsets)


def numbers(address: Value, header: int) -> Value:
    """16 plain numbers as float32."""
    if header == F16:
        return load_f16(address)
    return load_bf16(address) if header == BF16 else load(address, "f32", 16)
