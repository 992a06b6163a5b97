"""Codes that are looked up: GGML's types of grids in the packed layout (layout.py), about as large as in the file.

A unit's codes are, for 16 rows,

    places   the lower 8 bits of places in the type's table, 64 at a time, u8 [64] in the order of `_positions`
    above    a bit of each of these 64 as one number of 8 bytes, for each bit that a place has beyond 8
    signs    bit g of byte 4 * r + c is the sign of row r, column 4 * g + c

A place is that of 8 columns, whose codes have 2 bits in the table, or of 4, with 3 bits. Signs are one bit more, and so
is the upper bit of places of IQ1, that says which eighth is added; one look-up in the code-book does the rest.

With AVX-512 64 places are looked up at once in tables of bytes, each with 4 codes of 2 bits or 2 of 3, and one
instruction spreads the bits of a quadword over its bytes: the order of places is such that these are those of 2 rows.
Others take one place after the other from a table of words.
"""

import functools

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from numflow.cpu.simd.bits import moved
from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import Keep, as_it_is, in_order
from numflow.cpu.simd.lookup import lookup128, lookup_words
from numflow.cpu.simd.value import Value, load, save
from numflow.cpu.weights.layout import ROWS, Scheme
from numflow.quant.grids import GridType, table

Known = dict[int, Value]  # what has been looked up of a unit: words by run of columns, addresses of places by -1, -2
_AT_ONCE = 64    # places
_ONES = 0x01010101  # bit 0 of each byte of a word
_HELD = 256      # entries of tables that registers have room for
# By code; the eighth of IQ1 is bit 2: without it levels are 1/8 less than -1, 0 and 1, else 1/8 more.
_EIGHTHS = (-9, -1, 7, 0, -7, 1, 9, 0)


def book_of(scheme: Scheme) -> tuple[int, ...]:
    """The levels that codes stand for."""
    return _EIGHTHS if _has_eighths(_grid(scheme)) else scheme.book


def _grid(scheme: Scheme) -> GridType:
    if scheme.grid is None:
        raise ValueError(f"{scheme.name} has codes of its own")
    return scheme.grid


def _has_eighths(grid: GridType) -> bool:
    return not grid.sign


def _index_bits(grid: GridType) -> int:
    """Bits of a place beyond 8 that say an entry of the table."""
    return grid.high - _has_eighths(grid)


@functools.cache
def _codes(name: str) -> np.ndarray:
    """Codes of each place without signs and eighths, u8 [entries][4 or 8]."""
    codes = table(name)
    if not name.startswith("IQ1"):
        return codes
    return codes[len(codes) // 2:] // (2 if name == "IQ1_M" else 1)


@functools.cache
def _words(name: str) -> np.ndarray:
    """A word of codes for each place, u32: of 8 columns byte c has codes c and c + 4, of 4 columns one."""
    codes = _codes(name)
    if codes.shape[1] == 8:
        codes = codes[:, :4] | codes[:, 4:] << 4
    return np.ascontiguousarray(codes).view("<u4")[:, 0]


@functools.cache
def _bytes(name: str) -> np.ndarray:
    """Two bytes of codes for each place, u8 [2][entries]: of 2 bits those of 4 columns, of 4 bits those of 2."""
    codes = _codes(name)
    each = codes.shape[1] // 2
    shifts = (8 // each) * np.arange(each, dtype=np.uint8)
    return np.stack([np.bitwise_or.reduce(half << shifts, axis=1) for half in (codes[:, :each], codes[:, each:])])


def _positions(grid: GridType, index: int) -> list[int]:
    """Positions of the places of 16 rows among 64, for run `index` of 4 runs of columns."""
    if grid.width == 8:
        return [8 * (row // 2) + 2 * index + row % 2 for row in range(ROWS)]
    return [16 * (row // 4) + 8 * (index // 2) + 4 * (row // 2 % 2) + 2 * (index % 2) + row % 2 for row in range(ROWS)]


def _position(grid: GridType, index: int, row: Value) -> Value:
    """The same of one row."""
    if grid.width == 8:
        return (row >> 1 << 3) + (row & 1) + 2 * index
    return (row >> 2 << 4) + ((row & 2) << 1) + (row & 1) + (8 * (index // 2) + 2 * (index % 2))


# Reading.

def looked_up(codes: Value, scheme: Scheme, group: int, row: Value | None, hold: Keep, known: Known) -> Value:
    """Codes of columns [4 * group, 4 * group + 4) of the unit at `codes`: u8x64, or u8x4 of one row."""
    grid, (low, above, _) = _grid(scheme), scheme.unit_parts
    at_once, index = divmod(group * 4 // grid.width, 4)
    places, planes = codes + _AT_ONCE * at_once, codes + (low + 8 * grid.high * at_once)
    if row is None and isa() == "avx512":
        found = _from_bytes(grid, places, planes, group, hold)
    else:
        run = 4 * at_once + index
        if run not in known:
            known[run] = _words_of_rows(grid, places, planes, run, known) if row is None else _words_of_row(
                grid, places, planes, index, row)
        words = known[run]
        if grid.width == 8:
            words = (words >> 4 if group % 2 else words) & 0x0F0F0F0F
        found = words.as_("u8", 4 * words.lanes)
    if not grid.sign:
        return found
    signs = codes + (low + above)
    bits = load(signs, "u8", 64) if row is None else load(signs + (row << 2), "u8", 4)
    return found | moved(bits, group, grid.sign, 1, hold)


def _from_bytes(grid: GridType, places: Value, planes: Value, group: int, hold: Keep) -> Value:
    indices, tables = load(places, "u8", _AT_ONCE), _bytes(grid.name)
    masks = [_mask(planes + 8 * bit) for bit in range(grid.high)]
    if grid.width == 8:
        half = _entries(indices, tables[group % 2], masks[:_index_bits(grid)], hold)
        bits = [8 * (group // 2 * 2 + row) + 2 * column for row in range(2) for column in range(4)]
        found = _spread(half, bits, 3, hold)
        if not _has_eighths(grid):
            return found
        eighths = masks[-1].choose(Value(indices.builder, indices.like(255)), 0)
        return found | _spread(eighths, [bit - bit % 8 for bit in bits], 4, hold)
    first, second = (_entries(indices, half, masks, hold) for half in tables)
    pairs = [16 * (i // 16) + 8 * (group % 4 // 2) + i % 16 // 2 + _AT_ONCE * (i % 2) for i in range(64)]
    bits = [16 * (group % 2 * 2 + row) + 4 * column for row in range(2) for column in range(4)]
    return _spread(first.join(second).pick(pairs), bits, 7, hold)


def _entries(indices: Value, entries: np.ndarray, above: list[Value], hold: Keep) -> Value:
    """entries[index], u8x64, for indices u8x64 and their bits above, i1x64 each."""
    keep = hold if len(entries) <= _HELD else as_it_is
    parts = [lookup128(indices, entries[first:first + 128].tolist(), keep) for first in range(0, len(entries), 128)]
    for bit in (indices.compare("<", 0), *above):
        parts = [bit.choose(high, low) for low, high in zip(parts[::2], parts[1::2])]
    return parts[0]


def _spread(vector: Value, bits: list[int], mask: int, hold: Keep) -> Value:
    """Bytes of each quadword of u8x64: what begins at these bits of it, masked."""
    places = hold(Value(vector.builder, vector.like(bits * 8)))
    found = places.call("llvm.x86.avx512.pmultishift.qb.512", vector.llvm.type, vector)
    return found & hold(Value(vector.builder, vector.like(mask)))


def _mask(at: Value) -> Value:
    """64 bits, i1x64."""
    bits = load(at, "u8", 8)
    return Value(at.builder, at.builder.bitcast(bits.llvm, ir.VectorType(ir.IntType(1), 64)))


def _words_of_row(grid: GridType, places: Value, planes: Value, index: int, row: Value) -> Value:
    """The word of codes of one row, for run `index` of 4."""
    position = _position(grid, index, row)
    place, shift = load(places + position, "u8").widen(), (position & 7).narrow("i32")
    above = [load(planes + (position >> 3) + 8 * bit, "u8").widen() >> shift & 1 for bit in range(grid.high)]
    for bit in range(_index_bits(grid)):
        place = place | above[bit] << 8 + bit
    word = lookup_words([place], _words(grid.name), f"grid_{grid.name}")
    return word | above[-1] * (0x44 * _ONES) if _has_eighths(grid) else word


def _words_of_rows(grid: GridType, places: Value, planes: Value, run: int, known: Known) -> Value:
    """The words of 16 rows, i32x16, for run `run` of a unit's."""
    positions = _positions(grid, run % 4)
    words = lookup_words(_places(grid, places, planes, positions, -1 - run // 4, known), _words(grid.name),
                         f"grid_{grid.name}")
    if not _has_eighths(grid):
        return words
    return words | _bits_at(planes + 8 * (grid.high - 1), positions) * (0x44 * _ONES)


def _places(grid: GridType, places: Value, planes: Value, positions: list[int], key: int, known: Known) -> list[Value]:
    """Places at these positions of 64, i32 each. They are read from memory, one after the other: taking lanes of a
    vector is slower.

    Places of more than 8 bits are put together, 64 at once, on the stack; `known` has the address by `key`.
    """
    if not _index_bits(grid):
        return [load(places + position, "u8").widen() for position in positions]
    if key not in known:
        whole = load(places, "u8", _AT_ONCE).widen("u16")
        for bit in range(_index_bits(grid)):
            whole = whole | _mask(planes + 8 * bit).choose(Value(whole.builder, whole.like(1 << 8 + bit)), 0)
        builder = places.builder
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(16), _AT_ONCE))
        address = Value(builder, builder.ptrtoint(memory, ir.IntType(64)))
        save(address, whole)
        known[key], _ = in_order(address, [whole.part(0, 32)])  # else LLVM takes lanes of what it knows is there
    return [load(known[key] + 2 * position, "u16").widen() for position in positions]


def _bits_at(at: Value, positions: list[int]) -> Value:
    """Bits of these numbers, of 64, as i32 lanes of 0 and 1."""
    bytes_ = load(at, "u8", 8).pick([position // 8 for position in positions])
    return bytes_.widen() >> [position % 8 for position in positions] & 1


def step_values(at: Value, grid: GridType, unit: Value, half: int) -> Value:
    """Scales of a unit, or of half of one, whole numbers i32x16, of the steps that begin at `at`."""
    mask = 7 if grid.either else 15  # which eighth is added is a bit of places too
    if grid.scales == 16:
        steps = load(at + ((unit & 7) << 4), "u8", ROWS).widen() >> 4 * half & mask
    else:
        shift = ((unit & 1) << 2).narrow("i32").splat(ROWS)
        steps = load(at + ((unit & 7) >> 1 << 4), "u8", ROWS).widen() >> shift & mask
    return (steps << 1) + 1


# Writing.

def put_units(words: list[Value], scheme: Scheme, codes: Value) -> None:
    """Write a unit. words: 4 of i32x16, what a row's compact form has of it: two of lower bits, those above, signs."""
    grid, (low, above, signs) = _grid(scheme), scheme.unit_parts
    order = [0] * _AT_ONCE
    for index in range(4):
        for row, position in enumerate(_positions(grid, index)):
            order[position] = 4 * row + index
    for at_once in range(low // _AT_ONCE):
        save(codes + _AT_ONCE * at_once, words[at_once].as_("u8", 64).pick(order))
        for bit in range(grid.high):
            fields = [(words[2] >> grid.high * (4 * at_once + i) + bit & 1) << 8 * i for i in range(4)]
            ones = functools.reduce(Value.__or__, fields).as_("u8", 64).pick(order).compare("!=", 0)
            save(codes + (low + 8 * (grid.high * at_once + bit)), _as_bytes(ones))
    if signs:
        fours = [words[3] >> 4 * group & 15 for group in range(8)]
        bits = [((four | four << 7 | four << 14 | four << 21) & _ONES) << group for group, four in enumerate(fours)]
        save(codes + low + above, functools.reduce(Value.__or__, bits))


def _as_bytes(ones: Value) -> Value:
    """i1x64 as u8x8."""
    return Value(ones.builder, ones.builder.bitcast(ones.llvm, ir.VectorType(ir.IntType(8), 8)))
