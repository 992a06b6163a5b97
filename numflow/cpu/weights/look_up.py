"""Codes that are looked up: GGML's types of grids in the packed layout (layout.py), about as large as in the file.

A unit's codes are, for 16 rows,

    places   of each 4 or 8 columns, u8 [32 / width][16]: the lower 8 bits of a place in the type's table
    above    the bits above of all places of a row, as one number: of 4 bits u8 [8] (rows r and r + 8), else [16]
    signs    bit g of byte 4 * r + c is the sign of row r, column 4 * g + c

and one 32-bit word of the table has the codes of a place: of 8 columns one byte for columns c and c + 4, nibbles of it;
of 4 columns a byte for each. Signs are a bit of the code, so that one look-up in the code-book does the rest.
"""

import functools

import numpy as np

from numflow.cpu.simd.bits import moved
from numflow.cpu.simd.llvm_barriers import Keep
from numflow.cpu.simd.lookup import lookup_words
from numflow.cpu.simd.value import Value, load, save
from numflow.cpu.weights.layout import ROWS, Scheme
from numflow.quant.grids import GridType, table

_ONES = 0x01010101  # bit 0 of each byte of a word


@functools.cache
def words_of(name: str) -> np.ndarray:
    """The table of a type, u32: a word of codes for each place."""
    codes = table(name)
    if codes.shape[1] == 8:
        codes = codes[:, :4] | codes[:, 4:] << 4
    return np.ascontiguousarray(codes).view("<u4")[:, 0]


def looked_up(codes: Value, scheme: Scheme, group: int, row: Value | None, hold: Keep) -> Value:
    """Codes of columns [4 * group, 4 * group + 4) of the unit at `codes`: u8x64, or u8x4 of one row."""
    grid = _grid(scheme)
    low, above, _ = scheme.unit_parts
    words = lookup_words(_place(codes, scheme, group * 4 // grid.width, row), words_of(grid.name), f"grid_{grid.name}")
    lanes = 64 if row is None else 4
    if grid.width == 8:
        words = (words >> 4 if group % 2 else words) & 0x0F0F0F0F
    found = words.as_("u8", lanes)
    if not grid.sign:
        return found
    signs = load(codes + (low + above) if row is None else codes + (low + above) + (row << 2), "u8", lanes)
    return found | moved(signs, group, grid.sign, 1, hold)


def _grid(scheme: Scheme) -> GridType:
    if scheme.grid is None:
        raise ValueError(f"{scheme.name} has codes of its own")
    return scheme.grid


def _place(codes: Value, scheme: Scheme, index: int, row: Value | None) -> Value:
    """Places of one of the runs of columns, i32x16, or of one row."""
    grid, (low, above, _) = _grid(scheme), scheme.unit_parts
    at = codes + ROWS * index
    place = load(at, "u8", ROWS) if row is None else load(at + row, "u8")
    if not above:
        return place.widen()
    shift, mask = grid.high * index, (1 << grid.high) - 1
    return place.widen() | (_above(codes + low, above, row) >> shift & mask) << 8


def _above(at: Value, size: int, row: Value | None) -> Value:
    """The upper bits of the places of rows, i32."""
    kind = "u16" if size == 2 * ROWS else "u8"
    if size >= ROWS:
        return (load(at, kind, ROWS) if row is None else load(at + row * (size // ROWS), kind)).widen()
    if row is None:
        half = load(at, "u8", ROWS // 2)
        return (half & 15).join(half >> 4).widen()
    return load(at + (row & 7), "u8").widen() >> ((row >> 3) << 2).narrow("i32")


def step_values(at: Value, grid: GridType, unit: Value, half: int) -> Value:
    """Scales of a unit, or of half of one, whole numbers i32x16, of the steps that begin at `at`."""
    if grid.scales == 16:
        steps = load(at + ((unit & 7) << 4), "u8", ROWS).widen() >> 4 * half & 15
    else:
        shift = ((unit & 1) << 2).narrow("i32").splat(ROWS)
        steps = load(at + ((unit & 7) >> 1 << 4), "u8", ROWS).widen() >> shift & 15
    if not grid.either:
        return (steps << 1) + 1
    values = ((steps & 7) << 1) + 1
    return steps.compare(">", 7).choose(-values, values)


def put_units(words: list[Value], scheme: Scheme, codes: Value) -> None:
    """Write a unit. words: 4 of i32x16, what a row's compact form has of it: two of lower bits, those above, signs."""
    low, above, signs = scheme.unit_parts
    for index in range(low // ROWS):
        save(codes + ROWS * index, (words[index // 4] >> 8 * (index % 4)).narrow("u8"))
    if above == 2 * ROWS:
        save(codes + low, words[2].narrow("u16"))
    elif above == ROWS:
        save(codes + low, words[2].narrow("u8"))
    elif above:
        save(codes + low, (words[2] | _from(words[2], ROWS // 2) << 4).narrow("u8").part(0, ROWS // 2))
    if signs:
        fours = [words[3] >> 4 * group & 15 for group in range(8)]
        bits = [((four | four << 7 | four << 14 | four << 21) & _ONES) << group for group, four in enumerate(fours)]
        save(codes + low + above, functools.reduce(Value.__or__, bits))


def _from(vector: Value, lane: int) -> Value:
    """The lanes from one on, then the others."""
    return vector.pick([(i + lane) % vector.lanes for i in range(vector.lanes)])
