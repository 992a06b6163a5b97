"""Codes from grid tables: GGML's grid types in the packed layout (layout.py), about as large as in the file.

A unit holds, for 16 rows,

    indices    low 8 bits of the grid indices, 64 at a time, u8 [64] in the order of `_positions`
    high bits  for each bit of a grid index beyond 8: that bit of the 64 indices, as 8 bytes
    signs      bit g of byte 4 * r + c is the sign of row r, column 4 * g + c

A grid index stands for 8 columns with 2-bit codes, or for 4 columns with 3-bit codes. The sign is one more bit of a
code. So is the highest bit of an IQ1 grid index, which selects whether 1/8 is added or subtracted. One look-up in the
codebook then turns codes into levels.

AVX-512 looks up 64 indices at once, in tables of bytes that hold 4 codes of 2 bits or 2 codes of 3 bits. One
instruction then spreads the bits of a quadword over its bytes; the order of the indices makes a quadword hold the codes
of 2 rows. Other instruction sets look up one index after the other in a table of words.
"""

import functools

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from numflow.cpu.simd.bits import move_bits
from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is, in_order
from numflow.cpu.simd.lookup import lookup128, lookup_floats, lookup_words
from numflow.cpu.simd.value import Value, load, save
from numflow.cpu.weights.layout import ROWS, Scheme
from numflow.quant.grids import GridType, table

# Values already looked up for a unit: words by run of columns; by -1 and -2, stack addresses of whole indices.
UnitCache = dict[int, Value]
_AT_ONCE = 64    # grid indices
_ONES = 0x01010101  # bit 0 of each byte of a word
_HELD = 256      # most table entries that fit the registers
# Levels of IQ1 times 8, by code. Bit 2 of a code is the 1/8 bit: 0 subtracts 1/8 from -1, 0 and 1, 1 adds 1/8.
_EIGHTHS = (-9, -1, 7, 0, -7, 1, 9, 0)


def levels_of(scheme: Scheme) -> tuple[int, ...]:
    """The levels of the codes."""
    return _EIGHTHS if _has_eighths(_grid(scheme)) else scheme.book


def _grid(scheme: Scheme) -> GridType:
    if scheme.grid is None or not scheme.indexed:
        raise ValueError(f"{scheme.name} has codes of its own")
    return scheme.grid


def _has_eighths(grid: GridType) -> bool:
    return not grid.sign


def _index_bits(grid: GridType) -> int:
    """Bits of a grid index beyond 8, without the 1/8 bit of IQ1."""
    return grid.high - _has_eighths(grid)


@functools.cache
def _codes(name: str) -> np.ndarray:
    """Codes of each grid index without signs and eighths, u8 [entries][4 or 8]."""
    codes = table(name)
    if not name.startswith("IQ1"):
        return codes
    return codes[len(codes) // 2:] // (2 if name == "IQ1_M" else 1)


@functools.cache
def _words(name: str) -> np.ndarray:
    """A word of codes for each grid index, u32: of 8 columns, byte c has codes c and c + 4; of 4 columns, code c."""
    codes = _codes(name)
    if codes.shape[1] == 8:
        codes = codes[:, :4] | codes[:, 4:] << 4
    return np.ascontiguousarray(codes).view("<u4")[:, 0]


@functools.cache
def _bytes(name: str) -> np.ndarray:
    """Two bytes of codes for each grid index, u8 [2][entries]: 4 columns of 2 bits, or 2 columns of 4 bits."""
    codes = _codes(name)
    each = codes.shape[1] // 2
    shifts = (8 // each) * np.arange(each, dtype=np.uint8)
    return np.stack([np.bitwise_or.reduce(half << shifts, axis=1) for half in (codes[:, :each], codes[:, each:])])


def _positions(grid: GridType, index: int) -> list[int]:
    """Positions of the grid indices of 16 rows among 64, for run `index` of 4 runs of columns."""
    if grid.width == 8:
        return [8 * (row // 2) + 2 * index + row % 2 for row in range(ROWS)]
    return [16 * (row // 4) + 8 * (index // 2) + 4 * (row // 2 % 2) + 2 * (index % 2) + row % 2 for row in range(ROWS)]


def _position(grid: GridType, index: int, row: Value) -> Value:
    """The position for one row."""
    if grid.width == 8:
        return (row >> 1 << 3) + (row & 1) + 2 * index
    return (row >> 2 << 4) + ((row & 2) << 1) + (row & 1) + (8 * (index // 2) + 2 * (index % 2))


# Reading.

def looked_up(codes: Value, scheme: Scheme, group: int, row: Value | None, hold: Keep, cache: UnitCache) -> Value:
    """Codes of columns [4 * group, 4 * group + 4) of the unit at `codes`: u8x64, or u8x4 of one row."""
    grid, (low, high, _) = _grid(scheme), scheme.unit_parts
    at_once, index = divmod(group * 4 // grid.width, 4)
    indices, planes = codes + _AT_ONCE * at_once, codes + (low + 8 * grid.high * at_once)
    if row is None and isa() == "avx512":
        unsigned = _from_bytes(grid, indices, planes, group, hold)
    else:
        run = 4 * at_once + index
        if run not in cache:
            cache[run] = _words_of_rows(grid, indices, planes, run, cache) if row is None else _words_of_row(
                grid, indices, planes, index, row)
        words = cache[run]
        if grid.width == 8:
            words = (words >> 4 if group % 2 else words) & 0x0F0F0F0F
        unsigned = words.as_("u8", 4 * words.lanes)
    if not grid.sign:
        return unsigned
    signs = codes + (low + high)
    bits = load(signs, "u8", 64) if row is None else load(signs + (row << 2), "u8", 4)
    return unsigned | move_bits(bits, group, grid.sign, 1, hold)


def _from_bytes(grid: GridType, indices: Value, planes: Value, group: int, hold: Keep) -> Value:
    indices, tables = load(indices, "u8", _AT_ONCE), _bytes(grid.name)
    masks = [_mask(planes + 8 * bit) for bit in range(grid.high)]
    if grid.width == 8:
        half = _entries(indices, tables[group % 2], masks[:_index_bits(grid)], hold)
        bits = [8 * (group // 2 * 2 + row) + 2 * column for row in range(2) for column in range(4)]
        codes = _spread(half, bits, 3, hold)
        if not _has_eighths(grid):
            return codes
        eighths = masks[-1].choose(Value(indices.builder, indices.like(255)), 0)
        return codes | _spread(eighths, [bit - bit % 8 for bit in bits], 4, hold)
    first, second = (_entries(indices, half, masks, hold) for half in tables)
    pairs = [16 * (i // 16) + 8 * (group % 4 // 2) + i % 16 // 2 + _AT_ONCE * (i % 2) for i in range(64)]
    bits = [16 * (group % 2 * 2 + row) + 4 * column for row in range(2) for column in range(4)]
    return _spread(first.join(second).permute(pairs), bits, 7, hold)


def _entries(indices: Value, entries: np.ndarray, high_bits: list[Value], hold: Keep) -> Value:
    """entries[index], u8x64, for the low bits of indices, u8x64, and their high bits, i1x64 each."""
    keep = hold if len(entries) <= _HELD else as_it_is
    parts = [lookup128(indices, entries[first:first + 128].tolist(), keep) for first in range(0, len(entries), 128)]
    for bit in (indices.compare("<", 0), *high_bits):
        parts = [bit.choose(high, low) for low, high in zip(parts[::2], parts[1::2])]
    return parts[0]


def _spread(vector: Value, bits: list[int], mask: int, hold: Keep) -> Value:
    """The 8 bits that begin at each of these bit offsets of a quadword, masked, as its bytes; for each of u8x64."""
    offsets = hold(Value(vector.builder, vector.like(bits * 8)))
    fields = offsets.call("llvm.x86.avx512.pmultishift.qb.512", vector.llvm.type, vector)
    return fields & hold(Value(vector.builder, vector.like(mask)))


def _mask(address: Value) -> Value:
    """64 bits, i1x64."""
    bits = load(address, "u8", 8)
    return Value(address.builder, address.builder.bitcast(bits.llvm, ir.VectorType(ir.IntType(1), 64)))


def _words_of_row(grid: GridType, indices: Value, planes: Value, run: int, row: Value) -> Value:
    """The word of codes of one row, for run `run` of 4."""
    position = _position(grid, run, row)
    index, shift = load(indices + position, "u8").widen(), (position & 7).narrow("i32")
    high_bits = [load(planes + (position >> 3) + 8 * bit, "u8").widen() >> shift & 1 for bit in range(grid.high)]
    for bit in range(_index_bits(grid)):
        index = index | high_bits[bit] << 8 + bit
    word = lookup_words([index], _words(grid.name), f"grid_{grid.name}")
    return word | high_bits[-1] * (0x44 * _ONES) if _has_eighths(grid) else word


def _words_of_rows(grid: GridType, indices: Value, planes: Value, run: int, cache: UnitCache) -> Value:
    """The words of 16 rows, i32x16, for run `run` of the unit."""
    positions = _positions(grid, run % 4)
    words = lookup_words(_whole_indices(grid, indices, planes, positions, -1 - run // 4, cache), _words(grid.name),
                         f"grid_{grid.name}")
    if not _has_eighths(grid):
        return words
    return words | _bits_at(planes + 8 * (grid.high - 1), positions) * (0x44 * _ONES)


def _whole_indices(grid: GridType, indices: Value, planes: Value, positions: list[int], key: int,
                   cache: UnitCache) -> list[Value]:
    """Grid indices at these positions of 64, i32 each, read from memory one by one: extracting lanes is slower.

    Indices of more than 8 bits are assembled, 64 at once, on the stack; `cache` has the stack address by `key`.
    """
    if not _index_bits(grid):
        return [load(indices + position, "u8").widen() for position in positions]
    if key not in cache:
        whole = load(indices, "u8", _AT_ONCE).widen("u16")
        for bit in range(_index_bits(grid)):
            whole = whole | _mask(planes + 8 * bit).choose(Value(whole.builder, whole.like(1 << 8 + bit)), 0)
        builder = indices.builder
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(16), _AT_ONCE))
        address = Value(builder, builder.ptrtoint(memory, ir.IntType(64)))
        save(address, whole)
        cache[key], _ = in_order(address, [whole.part(0, 32)])  # else LLVM extracts lanes of `whole` instead of loading
    return [load(cache[key] + 2 * position, "u16").widen() for position in positions]


def _bits_at(address: Value, positions: list[int]) -> Value:
    """Bits at these positions of 64, as i32 lanes of 0 and 1."""
    bytes_ = load(address, "u8", 8).permute([position // 8 for position in positions])
    return bytes_.widen() >> [position % 8 for position in positions] & 1


def step_scales(steps: Value, scheme: Scheme, unit: Value, half: int) -> Value:
    """Scales of a unit or of its half, without d, f32x16: factor * (2 * s + 1) of the 4-bit (or 3-bit) fields s.

    The top bit of a 3-bit field's 4 bits is the sign of the scale for codes; for indices it is the 1/8 bit, which they
    have too.
    """
    grid = scheme.grid
    assert grid is not None
    if grid.scales == 16:
        fields = load(steps + ((unit & 7) << 4), "u8", ROWS).widen() >> 4 * half
    else:
        fields = load(steps + ((unit & 7) >> 1 << 4), "u8", ROWS).widen() >> (
            (unit & 1) << 2).narrow("i32").splat(ROWS)
    if isa() == "avx512":
        return lookup_floats(fields, [scheme.factor * _step(scheme, field) for field in range(16)])
    fields = fields & (7 if grid.either and scheme.indexed else 15)
    if not grid.either or scheme.indexed:
        return ((fields << 1) + 1).to_f32() * scheme.factor
    sizes = ((fields & 7) << 1) + 1
    return (fields & 8).compare("!=", 0).choose(-sizes, sizes).to_f32() * scheme.factor


def _step(scheme: Scheme, field: int) -> int:
    """The integer scale of a 4-bit field."""
    grid = scheme.grid
    assert grid is not None
    if not grid.either:
        return 2 * field + 1
    return (2 * (field & 7) + 1) * (-1 if field & 8 and not scheme.indexed else 1)


# Writing.

def put_units(words: list[Value], scheme: Scheme, codes: Value) -> None:
    """Write a unit. words: four i32x16 of the rows' compact form: two of low index bits, one of high bits, signs."""
    grid, (low, high, signs) = _grid(scheme), scheme.unit_parts
    order = [0] * _AT_ONCE
    for index in range(4):
        for row, position in enumerate(_positions(grid, index)):
            order[position] = 4 * row + index
    for at_once in range(low // _AT_ONCE):
        save(codes + _AT_ONCE * at_once, words[at_once].as_("u8", 64).permute(order))
        for bit in range(grid.high):
            fields = [(words[2] >> grid.high * (4 * at_once + i) + bit & 1) << 8 * i for i in range(4)]
            ones = functools.reduce(Value.__or__, fields).as_("u8", 64).permute(order).compare("!=", 0)
            save(codes + (low + 8 * (grid.high * at_once + bit)), _as_bytes(ones))
    if signs:
        fours = [words[3] >> 4 * group & 15 for group in range(8)]
        bits = [((four | four << 7 | four << 14 | four << 21) & _ONES) << group for group, four in enumerate(fours)]
        save(codes + low + high, functools.reduce(Value.__or__, bits))


def _as_bytes(ones: Value) -> Value:
    """i1x64 as u8x8."""
    return Value(ones.builder, ones.builder.bitcast(ones.llvm, ir.VectorType(ir.IntType(8), 8)))
