"""GGML's grid types (IQ1, IQ2, IQ3), converted losslessly to two forms that executors read.

A grid index of these types stands for 4 or 8 weights, which have a few distinct magnitudes and separate signs. Both
forms have blocks of 256 weights:

    spread   float16 d, int8 s[8] or s[16], then 128 bytes of nibbles, the lower one first
             weight = factor * d * s * book[code]
    compact  float16 d, 4 bits for each s (Parts.steps), the low 8 bits of each grid index, the high bits of the indices
    of
             32 weights in a u16, and a byte of signs for 8 weights; `table` has the codes of each grid index
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

BLOCK = 256
_SMALL = 1 << 18  # fewer bytes are converted by one thread
Fields = tuple[np.ndarray, np.ndarray, np.ndarray]  # by block: bytes of d; scales; codes, 8 nibbles per u32


@dataclass(frozen=True)
class Parts:
    """Fields of stored blocks.

    d:       u8 [blocks, 2], a float16. steps: u8 [blocks, scales], a 4-bit scale code each.
    indices: u16 [blocks, 32 or 64], grid indices of 8 or 4 weights each. signs: u8 [blocks, 32] for 8 weights each, or
             None.
    """

    d: np.ndarray
    steps: np.ndarray
    indices: np.ndarray
    signs: np.ndarray | None = None


@dataclass(frozen=True)
class GridType:
    """A grid type.

    bits:   bits of a code. book: codebook, the value of each code.
    factor: factor of all weights. scales: number of scales in a block of 256.
    width:  weights per grid index. high: bits of an index beyond the low 8. sign: the bit of a code that holds the
            weight's sign, 0 for none. either: whether bit 3 of a scale code is the sign of the scale.
    apart:  function that splits stored blocks into Parts.
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
        """Bytes of a block in the spread form."""
        return 2 + self.scales + BLOCK // 2

    @property
    def compact_bytes(self) -> int:
        """Bytes of a block in the compact form."""
        return 2 + self.scales // 2 + BLOCK // self.width + (16 if self.high else 0) + (32 if self.sign else 0)

    def blocks(self, rows: np.ndarray, columns: int) -> np.ndarray:
        """Stored rows reshaped to one block per row."""
        return np.ascontiguousarray(rows).reshape(-1, rows.shape[1] // (columns // BLOCK))

    def fields(self, blocks: np.ndarray) -> Fields:
        """d, scales and a code per weight of stored blocks."""
        parts = self.apart(blocks)
        steps = 2 * (parts.steps & (7 if self.either else 15)).astype(np.int8) + 1
        scales = np.where(parts.steps & 8, -steps, steps) if self.either else steps
        codes = _entries(self.name)[parts.indices].view("<u4")
        return parts.d, scales, codes if parts.signs is None else codes | _signs(self.sign)[parts.signs]


def spread(rows: np.ndarray, name: str, columns: int, threads: int = 1) -> np.ndarray:
    """Convert stored rows to the spread form, uint8."""
    return _by_threads(_spread, rows, GRIDS[name], columns, threads)


def compact(rows: np.ndarray, name: str, columns: int, threads: int = 1) -> np.ndarray:
    """Convert stored rows to the compact form, uint8."""
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
    fields = grid.apart(grid.blocks(rows, columns))
    indices = fields.indices.reshape(len(fields.d), 8, -1)
    shifts = grid.high * np.arange(indices.shape[2], dtype=np.uint16)
    high = np.bitwise_or.reduce((indices >> 8) << shifts, axis=2).astype("<u2").view(np.uint8)
    parts = [fields.d, fields.steps[:, 0::2] | fields.steps[:, 1::2] << 4, (fields.indices & 255).astype(np.uint8),
             *([high] if grid.high else []), *([] if fields.signs is None else [fields.signs])]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


# Tables.

@functools.cache
def _grid(name: str) -> np.ndarray:
    """A grid as indices into its sorted magnitudes, u8 [entries][4 or 8]."""
    from gguf import quants

    grid = getattr(quants, name)
    grid.init_grid()
    return np.searchsorted(np.asarray(grid.grid_map), grid.grid.reshape(grid.grid_shape)).astype(np.uint8)


@functools.cache
def table(name: str) -> np.ndarray:
    """The codes of each grid index of a type, without signs, u8 [indices][4 or 8].

    Codes of IQ1 stand for -1, 0 and 1, in the first half of the table with 1/8 subtracted, in the second with 1/8
    added. In IQ1_S the first half is negated, because its scales are stored negative.
    """
    if not name.startswith("IQ1"):
        return _grid(name)
    grid = _grid("IQ1_S")
    return np.concatenate([2 * grid, 2 * grid + 1] if name == "IQ1_M" else [2 - grid, grid])


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Rows of 4 or 8 codes packed to an integer of nibbles, the first code lowest."""
    width = codes.shape[1]
    shifts = 4 * np.arange(width, dtype=np.uint32)
    return np.bitwise_or.reduce(codes.astype(np.uint32) << shifts, axis=1).astype("<u2" if width == 4 else "<u4")


@functools.cache
def _entries(name: str) -> np.ndarray:
    """Rows of `table` packed to nibbles."""
    return _nibbles(table(name))


@functools.cache
def _signs(bit: int) -> np.ndarray:
    """For each byte of 8 signs: a u32 with the signs in `bit` of each nibble."""
    return _nibbles(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << bit)


@functools.cache
def _even() -> np.ndarray:
    """7 sign bits extended by the eighth for even parity, u8 [128]."""
    signs = np.arange(128, dtype=np.uint8)
    return signs | (np.bitwise_count(signs) & 1) << 7


# Fields of stored blocks.

def _u16(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<u2")


def _u32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<u4")


def _fields(words: np.ndarray, *shifts: int) -> np.ndarray:
    """Each word shifted right by each of the shifts, by block."""
    return (words[..., None] >> np.array(shifts, words.dtype)).reshape(len(words), -1)


def _with_high(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high.astype(np.uint16) << 8


def _steps(bytes_: np.ndarray) -> np.ndarray:
    return _fields(bytes_, 0, 4) & 15


def _steps_and_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale codes and signs of words with 4 times 7 signs and a scale code in the top 4 bits."""
    return (words >> 28).astype(np.uint8), _even()[_fields(words, 0, 7, 14, 21) & 127]


def _iq2_xxs(blocks: np.ndarray) -> Parts:
    pairs = _u32(blocks[:, 2:]).reshape(-1, 8, 2)
    steps, signs = _steps_and_signs(pairs[..., 1])
    return Parts(blocks[:, :2], steps, np.ascontiguousarray(pairs[..., 0]).view(np.uint8).astype(np.uint16), signs)


def _iq2_xs(blocks: np.ndarray) -> Parts:
    words = _u16(blocks[:, 2:66])
    return Parts(blocks[:, :2], _steps(blocks[:, 66:]), words & 511, _even()[words >> 9])


def _iq2_s(blocks: np.ndarray) -> Parts:
    indices = _with_high(blocks[:, 2:34], _fields(blocks[:, 66:74], 0, 2, 4, 6) & 3)
    return Parts(blocks[:, :2], _steps(blocks[:, 74:]), indices, blocks[:, 34:66])


def _iq3_xxs(blocks: np.ndarray) -> Parts:
    steps, signs = _steps_and_signs(_u32(blocks[:, 66:]))
    return Parts(blocks[:, :2], steps, blocks[:, 2:66].astype(np.uint16), signs)


def _iq3_s(blocks: np.ndarray) -> Parts:
    indices = _with_high(blocks[:, 2:66], _fields(blocks[:, 66:74], *range(8)) & 1)
    return Parts(blocks[:, :2], _steps(blocks[:, 106:]), indices, blocks[:, 74:106])


def _iq1_s(blocks: np.ndarray) -> Parts:
    high = _u16(blocks[:, 34:])
    positive = (high < 0x8000).astype(np.uint16)
    indices = _with_high(blocks[:, 2:34], _fields(high, 0, 3, 6, 9) & 7 | np.repeat(positive, 4, axis=1) << 3)
    return Parts(blocks[:, :2], (high >> 12 & 7 | (1 - positive) << 3).astype(np.uint8), indices)


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
