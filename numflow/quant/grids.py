"""GGML's types whose codes point into grids, as one code for each weight; nothing is lost.

A code of IQ1, IQ2 and IQ3 stands for 4 or 8 weights: a row of a grid, whose few distinct magnitudes get signs. Kernels
read codes of single weights, so each type has a carrier of blocks of 256 weights that `spread` writes:

    float16 d, int8 s[8] or s[16], then 128 bytes of nibbles, the lower one first
    weight = factor * d * s * book[code]
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

BLOCK = 256
_SMALL = 1 << 18  # bytes below which one thread spreads
Fields = tuple[np.ndarray, np.ndarray, np.ndarray]  # bytes of d, scales and codes, 8 nibbles in each, by block


@dataclass(frozen=True)
class GridType:
    """A type of grids as single codes.

    family: a name for all types of the same codes, book, factor and number of scales.
    bits:   of a code. book: the weights that codes stand for, as many as codes.
    factor: of every weight. scales: of a block of 256. fields: takes blocks as stored apart.
    """

    name: str
    family: str
    bits: int
    book: tuple[int, ...]
    factor: float
    scales: int
    fields: Callable[[np.ndarray], Fields]

    @property
    def carrier_bytes(self) -> int:
        """Bytes of a block that `spread` writes."""
        return 2 + self.scales + BLOCK // 2

    def blocks(self, rows: np.ndarray, columns: int) -> np.ndarray:
        """Rows as stored as one block a row."""
        return np.ascontiguousarray(rows).reshape(-1, rows.shape[1] // (columns // BLOCK))


def spread(rows: np.ndarray, name: str, columns: int, threads: int = 1) -> np.ndarray:
    """Rows of a type of GRIDS as rows of its carrier, uint8."""
    if threads == 1 or rows.nbytes < _SMALL:
        return _spread(rows, GRIDS[name], columns)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        parts = np.array_split(rows, threads)
        return np.concatenate(list(pool.map(lambda part: _spread(part, GRIDS[name], columns), parts)))


def _spread(rows: np.ndarray, grid: GridType, columns: int) -> np.ndarray:
    d, scales, codes = grid.fields(grid.blocks(rows, columns))
    parts = (d, scales.astype(np.int8).view(np.uint8), codes.astype("<u4", copy=False).view(np.uint8))
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


# Tables.

@functools.cache
def _grid(name: str) -> np.ndarray:
    """Places of a grid's values among its magnitudes, [entries][4 or 8]."""
    from gguf import quants

    grid = getattr(quants, name)
    grid.init_grid()
    return np.searchsorted(np.asarray(grid.grid_map), grid.grid.reshape(grid.grid_shape)).astype(np.uint32)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Rows of 4 or 8 codes as numbers of as many nibbles, the first one lowest."""
    width = codes.shape[1]
    places = 4 * np.arange(width, dtype=np.uint32)
    return np.bitwise_or.reduce(codes.astype(np.uint32) << places, axis=1).astype("<u2" if width == 4 else "<u4")


@functools.cache
def _entries(name: str) -> np.ndarray:
    """A grid's rows as nibbles."""
    return _nibbles(_grid(name))


@functools.cache
def _signs(bit: int) -> np.ndarray:
    """Of a byte of 8 signs: `bit` of each nibble."""
    return _nibbles(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << bit)


@functools.cache
def _even_signs(bit: int) -> np.ndarray:
    """Of 7 signs, whose eighth makes their number even."""
    numbers = np.arange(128)
    return _signs(bit)[numbers | (np.bitwise_count(numbers) & 1) << 7]


@functools.cache
def _thirds(odd: bool) -> np.ndarray:
    """Rows of IQ1's grid of -1, 0 and 1, first as they are with 1/8 less, then with 1/8 more.

    odd: as places in a book of all six values; else in one of those with 1/8 more, whose negatives the others are.
    """
    grid = _grid("IQ1_S")
    return np.concatenate([_nibbles(2 * grid if odd else 2 - grid), _nibbles(2 * grid + 1 if odd else grid)])


# Fields.

def _u16(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<u2")


def _u32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<u4")


def _parts(fields: np.ndarray, *shifts: int) -> np.ndarray:
    """Each field shifted by each of the shifts, by block."""
    return (fields[..., None] >> np.array(shifts, fields.dtype)).reshape(len(fields), -1)


def _steps(fields: np.ndarray) -> np.ndarray:
    """Scales of 4 bits, two in a byte, as 2 s + 1."""
    return 2 * (_parts(fields, 0, 4) & 15) + 1


def _iq2_xxs(blocks: np.ndarray) -> Fields:
    pairs = _u32(blocks[:, 2:]).reshape(-1, 8, 2)
    places, above = np.ascontiguousarray(pairs[..., 0]).view(np.uint8), pairs[..., 1]
    signs = _even_signs(2)[_parts(above, 0, 7, 14, 21) & 127]
    return blocks[:, :2], 2 * (above >> 28) + 1, _entries("IQ2_XXS")[places] | signs


def _iq2_xs(blocks: np.ndarray) -> Fields:
    codes = _u16(blocks[:, 2:66])
    return blocks[:, :2], _steps(blocks[:, 66:]), _entries("IQ2_XS")[codes & 511] | _even_signs(2)[codes >> 9]


def _iq2_s(blocks: np.ndarray) -> Fields:
    places = blocks[:, 2:34] | (_parts(blocks[:, 66:74], 0, 2, 4, 6) & 3).astype(np.uint16) << 8
    return blocks[:, :2], _steps(blocks[:, 74:]), _entries("IQ2_S")[places] | _signs(2)[blocks[:, 34:66]]


def _iq3_xxs(blocks: np.ndarray) -> Fields:
    above = _u32(blocks[:, 66:])
    signs = _even_signs(3)[_parts(above, 0, 7, 14, 21) & 127]
    return blocks[:, :2], 2 * (above >> 28) + 1, _u32_of(_entries("IQ3_XXS")[blocks[:, 2:66]]) | signs


def _iq3_s(blocks: np.ndarray) -> Fields:
    places = blocks[:, 2:66] | (_parts(blocks[:, 66:74], *range(8)) & 1).astype(np.uint16) << 8
    return blocks[:, :2], _steps(blocks[:, 106:]), _u32_of(_entries("IQ3_S")[places]) | _signs(3)[blocks[:, 74:106]]


def _u32_of(halves: np.ndarray) -> np.ndarray:
    return halves.view("<u4")


def _iq1_s(blocks: np.ndarray) -> Fields:
    high = _u16(blocks[:, 34:])
    more = high < 0x8000
    places = blocks[:, 2:34] | (_parts(high, 0, 3, 6, 9) & 7) << 8 | np.repeat(more, 4, axis=1).astype(np.uint16) << 11
    steps = (2 * (high >> 12 & 7) + 1).astype(np.int8)
    return blocks[:, :2], np.where(more, steps, -steps), _thirds(False)[places]


def _iq1_m(blocks: np.ndarray) -> Fields:
    high, steps = _parts(blocks[:, 32:48], 0, 4).astype(np.uint16), _u16(blocks[:, 48:])
    places = blocks[:, :32] | (high & 7) << 8 | (high & 8 ^ 8) << 8
    d = np.bitwise_or.reduce((steps & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1).astype("<u2")
    return d[:, None].view(np.uint8), 2 * (_parts(steps, 0, 3, 6, 9) & 7) + 1, _thirds(True)[places]


_TWO = (8, 25, 43, 0, -8, -25, -43, 0)
_THREE = (4, 12, 20, 28, 36, 44, 52, 62)
_ODD = (1, 3, 5, 7, 9, 11, 13, 15)

GRIDS = {grid.name: grid for grid in (
    GridType("IQ1_S", "iq1_signed", 2, (-7, 1, 9, 0), 1 / 8, 8, _iq1_s),
    GridType("IQ1_M", "iq1_signed16", 3, (-9, -7, -1, 1, 7, 9, 0, 0), 1 / 8, 16, _iq1_m),
    GridType("IQ2_XXS", "iq2_signed", 3, _TWO, 1 / 8, 8, _iq2_xxs),
    GridType("IQ2_XS", "iq2_signed16", 3, _TWO, 1 / 8, 16, _iq2_xs),
    GridType("IQ2_S", "iq2_signed16", 3, _TWO, 1 / 8, 16, _iq2_s),
    GridType("IQ3_XXS", "iq3_signed", 4, (*_THREE, *(-value for value in _THREE)), 1 / 4, 8, _iq3_xxs),
    GridType("IQ3_S", "iq3_odd", 4, (*_ODD, *(-value for value in _ODD)), 1.0, 8, _iq3_s),
)}
