"""How the CPU keeps a matrix [N, K]: rows interleaved 16 at a time, so that a 32-bit lane of a vector is a row.

A tile is 16 rows, a unit 32 columns. Quantised matrices keep codes and headers in two arrays, [tile][unit][...]:

codes    8 column groups of 4 columns, each a 64-byte vector [16 rows][4 columns] of unsigned codes, in as many vectors
         as codes have bits (PIECES): as many groups as fit stand whole in bytes, the others in the bits above them
           8 bits  vector g = group g
           4 bits  low nibble of vector j = group 2j, high nibble = group 2j + 1
           2 bits  of two units together, a strip: bits 2b of vector j = group 4b + j, b = 0 .. 3, so that 16 columns
                   have the same bits; where the last unit is alone, the upper bits are 0
           6 bits  low bits of vector g = group g; groups 6 and 7 in the top 2 bits of 3 vectors each
           5 bits  low bits of vector g = group g; groups 5 to 7 in the top 3 bits of the 5 vectors
           3 bits  as nibbles for 6 groups; groups 6 and 7 in the top 2 bits of the 3 vectors
           1 bit   bit g of one vector = group g, as bit 1 of a code: 0 or 2
           3.5     pairs of weights of 11 levels, x + 11 * y for groups 2p and 2p + 1, in 7 bits: 3 vectors whose low 7
                   bits are pairs p = 0 .. 2, then half a vector of nibbles (row r, row r + 8), the low 4 bits of
                   pair 3, whose 3 high ones are the top bits of the other vectors
headers  by kind, [16] is one value per row; z is the scheme's zero point:
           SCALE    per unit  f16 d[16]                                       w = d * (code - z)
           SCALE16  per unit  f16 d[2][16]                                    the same, by 16 columns
           POWER    per unit  bf16 d[16]                                      as SCALE
           BASE     per unit  f16 d[16], m[16]                                w = d * code + m
           SUPER    per 8     f16 d[16], e[16], u8 s[8][16], u8 m[8][16]      w = d * s * code - e * m, by 32 columns
           SUPER16  per 8     f16 d[16], e[16], u8 (s | m << 4)[16][16]       the same, by 16 columns
           BYTES16  per unit  u8 s[2][16], b[2][16]                           w = s * code / 1000 + b / 100 - 1, by 16
           SIGNED   per 8     f16 d[16], i8 s[8][16]                          w = d * s * (code - z), by 32 columns
           SIGNED16 per 8     f16 d[16], i8 s[16][16]                         the same, by 16 columns
           GRID     per unit  the block headers of numflow.quant's schemes    w = scale * (code - zero)
           GRID16   per unit  the same, by 16 columns                         decode_own.py says how

A scheme with a code-book has 2 to 4 bits in memory, which stand for the entry of a table of signed bytes; its codes are
those entries + 128. The zero point is 2^(bits - 1) of the codes, so 128 with a code-book, unless the scheme has another
one; it may have a factor of all its scales as well.

F32, F16 and BF16 matrices are [tile][K][16 rows] in the file's own type, with any K. Rows after the last of a group
(an expert, or the whole matrix) fill its last tile with zeros.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numflow.formats import grids
from numflow.formats.types import EXPANDED
from numflow.quant.layout import ROW_SCHEMES, RowScheme

ROWS, UNIT = 16, 32
PACK_SCRATCH = 16 * 256  # bytes that a thread needs to pack
ROW_HEADERS = 2 * ROWS  # bytes of the row headers of a tile, of the GRID kinds
AUX_BYTES = 24  # of the scales and sums that go with a token's int8 activations of a unit (activations.py)
# Kinds of headers; the last three have none.
SCALE, SCALE16, POWER, BASE, SUPER, SUPER16, BYTES16, SIGNED, SIGNED16, GRID, GRID16, F32, F16, BF16 = range(14)
GRIDS, BY_16 = {GRID, GRID16}, {SCALE16, SUPER16, BYTES16, SIGNED16, GRID16}
WITH_BASE = {BASE, SUPER, SUPER16, BYTES16, GRID, GRID16}

# Bytes of a header, and how many units share it.
_HEADER = {SCALE: (32, 1), SCALE16: (64, 1), POWER: (32, 1), BASE: (64, 1), SUPER: (320, 8), SUPER16: (320, 8),
           BYTES16: (64, 1), SIGNED: (160, 8), SIGNED16: (288, 8)}

# Tables of the code-books: the non-linear one of IQ4, and twice the values of the 4-bit float E2M1.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


# Where a group's codes are, by bits and group: pieces (vector, from bit, to bit of the code, how many bits).
PIECES: dict[float, list[list[tuple[int, int, int, int]]]] = {
    8: [[(g, 0, 0, 8)] for g in range(8)],
    6: [*([(g, 0, 0, 6)] for g in range(6)), *([(3 * i + j, 6, 2 * j, 2) for j in range(3)] for i in range(2))],
    5: [*([(g, 0, 0, 5)] for g in range(5)), [(0, 5, 0, 3), (1, 5, 3, 2)], [(2, 5, 0, 3), (3, 5, 3, 2)],
        [(4, 5, 0, 3), (1, 7, 3, 1), (3, 7, 4, 1)]],
    4: [[(g // 2, 4 * (g % 2), 0, 4)] for g in range(8)],
    3: [*([(g // 2, 3 * (g % 2), 0, 3)] for g in range(6)), [(0, 6, 0, 2), (1, 6, 2, 1)], [(2, 6, 0, 2), (1, 7, 2, 1)]],
    2: [[(g % 4, 2 * (g // 4), 0, 2)] for g in range(16)],
    1: [[(0, g, 1, 1)] for g in range(8)],
}


@dataclass(frozen=True)
class Scheme:
    """A family of matrices that one set of kernels serves: stored `bits` per number, `header` kind, code-book.

    factor: of all scales; only SIGNED and SIGNED16 have one. center: the zero point, where it is not the middle.
    """

    name: str
    bits: float
    header: int
    book: tuple[int, ...] = ()
    factor: float = 1.0
    center: int = 0

    @property
    def own(self) -> RowScheme:
        """The scheme of numflow.quant whose codes and headers it has; for GRID and GRID16."""
        return ROW_SCHEMES[self.name]

    @property
    def column_bytes(self) -> int:
        """Bytes of the codes of one column of a tile."""
        return int(2 * self.bits)

    @property
    def strip(self) -> int:
        """Units whose codes share vectors."""
        return 2 if self.bits == 2 else 1

    @property
    def code_bits(self) -> int:
        """Bits of a code once it is read."""
        return 8 if self.book else 2 if self.bits == 1 else math.ceil(self.bits)

    @property
    def largest(self) -> int:
        """The largest code."""
        return self.own.levels - 1 if self.header in GRIDS else 10 if self.bits == 3.5 else (1 << self.code_bits) - 1

    @property
    def zero(self) -> int:
        """The code that stands for zero, where there is no base: a power of two."""
        return self.center or 1 << (self.code_bits - 1)

    @property
    def is_float(self) -> bool:
        """Whether it is plain numbers: no headers, any K, float32 activations only."""
        return self.header >= F32

    @property
    def block(self) -> int:
        """Columns that one header is for; K is a multiple of it."""
        return 1 if self.is_float else UNIT if self.header in GRIDS else _HEADER[self.header][1] * UNIT

    def tile_bytes(self, columns: int) -> tuple[int, int]:
        """Bytes of codes and of headers of one tile of `columns` columns."""
        strip = UNIT * self.strip
        codes = (columns if self.is_float else -(-columns // strip) * strip) * self.column_bytes
        if self.header in GRIDS:
            return codes, columns // self.own.block * 2 * self.own.header_bits + ROW_HEADERS
        return (codes, 0) if self.is_float else (codes, columns // self.block * _HEADER[self.header][0])

def _of_grids(grid: grids.GridType) -> Scheme:
    return Scheme(grid.family, grid.bits, SIGNED16 if grid.scales == 16 else SIGNED, grid.book, grid.factor)


SCHEMES = {s.name: s for s in (
    Scheme("b4_scale", 4, SCALE), Scheme("b5_scale", 5, SCALE), Scheme("b8_scale", 8, SCALE),
    Scheme("b2_base", 2, BASE), Scheme("b3_base", 3, BASE), Scheme("b3h_base", 3.5, BASE), Scheme("b4_base", 4, BASE),
    Scheme("b5_base", 5, BASE), Scheme("b6_base", 6, BASE), Scheme("b8_base", 8, BASE),
    Scheme("b4_super", 4, SUPER), Scheme("b5_super", 5, SUPER), Scheme("b2_super16", 2, SUPER16),
    Scheme("b4_bytes16", 4, BYTES16), Scheme("b3_signed16", 3, SIGNED16), Scheme("b6_signed16", 6, SIGNED16),
    Scheme("iq4_scale", 4, SCALE, IQ4), Scheme("iq4_signed", 4, SIGNED, IQ4),
    Scheme("e2m1_power", 4, POWER, E2M1), Scheme("e2m1_scale16", 4, SCALE16, E2M1),
    Scheme("b1_scale", 1, SCALE, center=1), Scheme("b2_scale", 2, SCALE, center=1),
    *map(_of_grids, grids.GRIDS.values()),
    *(Scheme(name, 3.5 if own.paired else own.unit_bytes // 4, GRID16 if own.block == 16 else GRID)
      for name, own in ROW_SCHEMES.items()),
    Scheme("f32", 32, F32), Scheme("f16", 16, F16), Scheme("bf16", 16, BF16),
)}

# The scheme of each tensor type that is kept as the file has it, bit for bit.
NATIVE = {
    "Q4_0": "b4_scale", "Q5_0": "b5_scale", "Q8_0": "b8_scale", "Q4_1": "b4_base", "Q5_1": "b5_base",
    "Q2_K": "b2_super16", "Q3_K": "b3_signed16", "Q4_K": "b4_super", "Q5_K": "b5_super", "Q6_K": "b6_signed16",
    "IQ4_NL": "iq4_scale", "IQ4_XS": "iq4_signed", "MXFP4": "e2m1_power", "NVFP4": "e2m1_scale16",
    "Q1_0": "b1_scale", **dict.fromkeys(("Q2_0", "Q2_0_128", "TQ1_0", "TQ2_0"), "b2_scale"),
    **{name: grid.family for name, grid in grids.GRIDS.items()},
    **{name: name for name in ROW_SCHEMES},
    # Inferflow's; blocks of 64 become two of 32 with the same header, and blocks of 16 share one.
    "q8_b32t1": "b8_base", "q8_b32t2": "b8_scale", "q6_b64t1": "b6_base", "q5_b64t1": "b5_base", "q5_b32t1": "b5_base",
    "q4_b64t1": "b4_base", "q4_b32t1a": "b4_base", "q4_b32t1b": "b4_base", "q3h_b64t1": "b3h_base",
    "q3_b32t1a": "b3_base", "q3_b32t1b": "b3_base", "q2_b32t1a": "b2_base", "q2_b32t1b": "b2_base",
    "q4_b16": "b4_bytes16",
    "F32": "f32", "F16": "f16", "BF16": "bf16",
}


@dataclass(frozen=True)
class Packed:
    """A matrix [N, K] in the layout above.

    kind:          name of its scheme; which kernels serve it.
    type:          tensor type in the file, such as "Q4_K".
    groups:        number of equal matrices stacked along N (experts); each starts at a tile of its own.
    expanded_from: the file's type where it has no kernels of its own and was expanded to `kind` at load, else None.
    outliers:      what is added to some weights, an outliers.PackedOutliers, or None.
    """

    kind: str
    type: str
    shape: tuple[int, int]
    groups: int
    codes: np.ndarray = field(repr=False)
    headers: np.ndarray = field(repr=False)
    expanded_from: str | None = None
    outliers: Any = None

    @property
    def group_tiles(self) -> int:
        """Tiles of one group."""
        return tiles_of(self.shape[0] // self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, headers, padding and outliers included."""
        return self.codes.nbytes + self.headers.nbytes + (self.outliers.nbytes if self.outliers is not None else 0)

    @property
    def is_float(self) -> bool:
        """Whether it holds plain numbers, which kernels multiply with float32 activations only."""
        return self.scheme.is_float

    @property
    def scheme(self) -> Scheme:
        """Its scheme."""
        return SCHEMES[self.kind]


def kept_as(stored: str, columns: int) -> str:
    """The scheme that rows of so many numbers of a tensor type are kept in.

    Plain numbers where they are expanded: types that are not NATIVE, and blocks of 16 columns that do not make whole
    units.
    """
    name = NATIVE.get(stored) or NATIVE[EXPANDED.get(stored, "F32")]
    return name if columns % SCHEMES[name].block == 0 else "f32"


def tiles_of(rows: int) -> int:
    """Tiles that `rows` rows take."""
    return -(-rows // ROWS)


def header_bytes(header: int) -> int:
    """Bytes of one header of a kind, for 16 rows."""
    return _HEADER[header][0]
