"""GGML's types whose codes point into grids: taken apart as stored, and as one code for each weight; nothing is lost.

A place in the grid of IQ1, IQ2 and IQ3 stands for 4 or 8 weights, whose few distinct magnitudes get signs. Executors
read them in two ways, each from a carrier of blocks of 256 weights that a function here writes:

    spread   float16 d, int8 s[8] or s[16], then 128 bytes of nibbles, the lower one first
             weight = factor * d * s * book[code]
    compact  float16 d, 4 bits of each s (Parts.steps), 8 bits of each place, the bits above of those of 32 weights in a
             u16, and a byte of signs for 8 weights; `table` has the codes of each place
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

BLOCK = 256
_SMALL = 1 << 18  # bytes below which one thread works
Fields = tuple[np.ndarray, np.ndarray, np.ndarray]  # bytes of d, scales and codes, 8 nibbles in each, by block


@dataclass(frozen=True)
class Parts:
    """Blocks as stored, taken apart.

    d:      u8 [blocks, 2], a float16. steps: u8 [blocks, scales], 4 bits that say a scale.
    places: u16 [blocks, 32 or 64], of 8 or 4 weights each. signs: u8 [blocks, 32], of 8 weights each, or None.
    """

    d: np.ndarray
    steps: np.ndarray
    places: np.ndarray
    signs: np.ndarray | None = None


@dataclass(frozen=True)
class GridType:
    """A type of grids.

    bits:   of the code of a weight. book: the weights that codes stand for, as many as codes.
    factor: of every weight. scales: of a block of 256.
    width:  weights that a place is for. high: bits of a place above the lower 8. sign: the bit of a code that is the
            weight's sign, 0 where none is. either: whether bit 3 of a step is the sign of its scale.
    apart:  takes blocks as stored apart.
    """

    name: str
    bits: int
    book: tuple[int, ...]
    factor: float
    scales: int
    width: int
    high: int
    apart: Callable[[np.ndarray], Parts] = field(repr=False)
    sign: int = 0
    either: bool = False

    @property
    def spread_bytes(self) -> int:
        """Bytes of a block that `spread` writes."""
        return 2 + self.scales + BLOCK // 2

    @property
    def compact_bytes(self) -> int:
        """Bytes of a block that `compact` writes."""
        return 2 + self.scales // 2 + BLOCK // self.width + (16 if self.high else 0) + (32 if self.sign else 0)

    def blocks(self, rows: np.ndarray, columns: int) -> np.ndarray:
        """Rows as stored as one block a row."""
        return np.ascontiguousarray(rows).reshape(-1, rows.shape[1] // (columns // BLOCK))

    def fields(self, blocks: np.ndarray) -> Fields:
        """Blocks as stored as d, scales and a code for each weight."""
        parts = self.apart(blocks)
        steps = 2 * (parts.steps & (7 if self.either else 15)).astype(np.int8) + 1
        scales = np.where(parts.steps & 8, -steps, steps) if self.either else steps
        codes = _entries(self.name)[parts.places].view("<u4")
        return parts.d, scales, codes if parts.signs is None else codes | _signs(self.sign)[parts.signs]


def spread(rows: np.ndarray, name: str, columns: int, threads: int = 1) -> np.ndarray:
    """Rows of a type of GRIDS as rows of one code for each weight, uint8."""
    return _by_threads(_spread, rows, GRIDS[name], columns, threads)


def compact(rows: np.ndarray, name: str, columns: int, threads: int = 1) -> np.ndarray:
    """Rows of a type of GRIDS as rows of places in its table, uint8."""
    return _by_threads(_compact, rows, GRIDS[name], columns, threads)


def _by_threads(change: Callable[..., np.ndarray], rows: np.ndarray, grid: GridType, columns: int,
                threads: int) -> np.ndarray:
    if threads == 1 or rows.nbytes < _SMALL:
        return change(rows, grid, columns)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        parts = np.array_split(rows, threads)
        return np.concatenate(list(pool.map(lambda part: change(part, grid, columns), parts)))


def _spread(rows: np.ndarray, grid: GridType, columns: int) -> np.ndarray:
    d, scales, codes = grid.fields(grid.blocks(rows, columns))
    parts = (d, scales.astype(np.int8).view(np.uint8), codes.astype("<u4", copy=False).view(np.uint8))
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


def _compact(rows: np.ndarray, grid: GridType, columns: int) -> np.ndarray:
    found = grid.apart(grid.blocks(rows, columns))
    places = found.places.reshape(len(found.d), 8, -1)
    shifts = grid.high * np.arange(places.shape[2], dtype=np.uint16)
    above = np.bitwise_or.reduce((places >> 8) << shifts, axis=2).astype("<u2").view(np.uint8)
    parts = [found.d, found.steps[:, 0::2] | found.steps[:, 1::2] << 4, (found.places & 255).astype(np.uint8),
             *([above] if grid.high else []), *([] if found.signs is None else [found.signs])]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


# Tables.

@functools.cache
def _grid(name: str) -> np.ndarray:
    """Places of a grid's values among its magnitudes, u8 [entries][4 or 8]."""
    from gguf import quants

    grid = getattr(quants, name)
    grid.init_grid()
    return np.searchsorted(np.asarray(grid.grid_map), grid.grid.reshape(grid.grid_shape)).astype(np.uint8)


@functools.cache
def table(name: str) -> np.ndarray:
    """The codes of each place of a type, without signs, u8 [places][4 or 8].

    Those of IQ1 are of -1, 0 and 1, first with 1/8 less, then with 1/8 more. The first ones of IQ1_S have signs turned
    around, so that scales below 0 make them what they are.
    """
    if not name.startswith("IQ1"):
        return _grid(name)
    grid = _grid("IQ1_S")
    return np.concatenate([2 * grid, 2 * grid + 1] if name == "IQ1_M" else [2 - grid, grid])


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Rows of 4 or 8 codes as numbers of as many nibbles, the first one lowest."""
    width = codes.shape[1]
    places = 4 * np.arange(width, dtype=np.uint32)
    return np.bitwise_or.reduce(codes.astype(np.uint32) << places, axis=1).astype("<u2" if width == 4 else "<u4")


@functools.cache
def _entries(name: str) -> np.ndarray:
    """A table's rows as nibbles."""
    return _nibbles(table(name))


@functools.cache
def _signs(bit: int) -> np.ndarray:
    """Of a byte of 8 signs: `bit` of each nibble."""
    return _nibbles(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << bit)


@functools.cache
def _even() -> np.ndarray:
    """7 signs with the eighth that makes their number even, u8 [128]."""
    numbers = np.arange(128, dtype=np.uint8)
    return numbers | (np.bitwise_count(numbers) & 1) << 7


# Blocks taken apart.

def _u16(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<u2")


def _u32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<u4")


def _fields(words: np.ndarray, *shifts: int) -> np.ndarray:
    """Each word shifted by each of the shifts, by block."""
    return (words[..., None] >> np.array(shifts, words.dtype)).reshape(len(words), -1)


def _with_high(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high.astype(np.uint16) << 8


def _steps(bytes_: np.ndarray) -> np.ndarray:
    return _fields(bytes_, 0, 4) & 15


def _above_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps and signs of words that have 4 times 7 signs, then a step."""
    return (words >> 28).astype(np.uint8), _even()[_fields(words, 0, 7, 14, 21) & 127]


def _iq2_xxs(blocks: np.ndarray) -> Parts:
    pairs = _u32(blocks[:, 2:]).reshape(-1, 8, 2)
    steps, signs = _above_signs(pairs[..., 1])
    return Parts(blocks[:, :2], steps, np.ascontiguousarray(pairs[..., 0]).view(np.uint8).astype(np.uint16), signs)


def _iq2_xs(blocks: np.ndarray) -> Parts:
    words = _u16(blocks[:, 2:66])
    return Parts(blocks[:, :2], _steps(blocks[:, 66:]), words & 511, _even()[words >> 9])


def _iq2_s(blocks: np.ndarray) -> Parts:
    places = _with_high(blocks[:, 2:34], _fields(blocks[:, 66:74], 0, 2, 4, 6) & 3)
    return Parts(blocks[:, :2], _steps(blocks[:, 74:]), places, blocks[:, 34:66])


def _iq3_xxs(blocks: np.ndarray) -> Parts:
    steps, signs = _above_signs(_u32(blocks[:, 66:]))
    return Parts(blocks[:, :2], steps, blocks[:, 2:66].astype(np.uint16), signs)


def _iq3_s(blocks: np.ndarray) -> Parts:
    places = _with_high(blocks[:, 2:66], _fields(blocks[:, 66:74], *range(8)) & 1)
    return Parts(blocks[:, :2], _steps(blocks[:, 106:]), places, blocks[:, 74:106])


def _iq1_s(blocks: np.ndarray) -> Parts:
    high = _u16(blocks[:, 34:])
    more = (high < 0x8000).astype(np.uint16)
    places = _with_high(blocks[:, 2:34], _fields(high, 0, 3, 6, 9) & 7 | np.repeat(more, 4, axis=1) << 3)
    return Parts(blocks[:, :2], (high >> 12 & 7 | (1 - more) << 3).astype(np.uint8), places)


def _iq1_m(blocks: np.ndarray) -> Parts:
    high, steps = _fields(blocks[:, 32:48], 0, 4) & 15, _u16(blocks[:, 48:])
    d = np.bitwise_or.reduce((steps & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1).astype("<u2")
    return Parts(d[:, None].view(np.uint8), (_fields(steps, 0, 3, 6, 9) & 7).astype(np.uint8),
                 _with_high(blocks[:, :32], high ^ 8))


_TWO = (8, 25, 43, 0, -8, -25, -43, 0)
_THREE = (4, 12, 20, 28, 36, 44, 52, 62)
_ODD = (1, 3, 5, 7, 9, 11, 13, 15)

GRIDS = {grid.name: grid for grid in (
    GridType("IQ1_S", 2, (-7, 1, 9, 0), 1 / 8, 8, 8, 4, _iq1_s, either=True),
    GridType("IQ1_M", 3, (-9, -7, -1, 1, 7, 9, 0, 0), 1 / 8, 16, 8, 4, _iq1_m),
    GridType("IQ2_XXS", 3, _TWO, 1 / 8, 8, 8, 0, _iq2_xxs, 2),
    GridType("IQ2_XS", 3, _TWO, 1 / 8, 16, 8, 1, _iq2_xs, 2),
    GridType("IQ2_S", 3, _TWO, 1 / 8, 16, 8, 2, _iq2_s, 2),
    GridType("IQ3_XXS", 4, (*_THREE, *(-value for value in _THREE)), 1 / 4, 8, 4, 0, _iq3_xxs, 3),
    GridType("IQ3_S", 4, (*_ODD, *(-value for value in _ODD)), 1.0, 8, 4, 1, _iq3_s, 3),
)}
