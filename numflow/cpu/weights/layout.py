"""Layout of a matrix [N, K] on the CPU: rows interleaved 16 at a time, so that a 32-bit lane of a vector is a row.

A tile is 16 rows, a unit 32 columns. Quantised matrices keep codes and headers in two arrays, [tile][unit][...]:

codes    8 column groups of 4 columns. A group is a 64-byte vector [16 rows][4 columns] of unsigned codes. A unit has as
         many vectors as codes have bits (PIECES): the first groups fill the low bits of the bytes, the bits of the
         other groups are spread over the high bits
           8 bits  vector g = group g
           4 bits  low nibble of vector j = group 2j, high nibble = group 2j + 1
           2 bits  two units together, a strip: bits 2b and 2b + 1 of vector j = group 4b + j, b = 0 .. 3, so that a
                   block of 16 columns has one bit position; the high bits of a strip of one unit are 0
           6 bits  low bits of vector g = group g; groups 6 and 7 in the top 2 bits of 3 vectors each
           5 bits  low bits of vector g = group g; groups 5 to 7 in the top 3 bits of the 5 vectors
           3 bits  as nibbles for 6 groups; groups 6 and 7 in the top 2 bits of the 3 vectors
           7 bits  low bits of vector g = group g; group 7 in the top bits of the 7 vectors
           1 bit   bit g of one vector = group g, as bit 1 of a code: 0 or 2
           grids   grid indices instead of codes (look_up.py); a table has the codes of each index. With the suffix
                   _spread: codes. IQ1_M then has codes of 2 bits, -1, 0 and 1, and behind the 4 vectors of a strip a
                   byte of each row with a bit for each two groups (SHIFT_BITS): 0 subtracts 1/8, 1 adds 1/8
           3.5     two codes of 11 levels in 7 bits, x + 11 * y for groups 2p and 2p + 1: 3 vectors, whose low 7 bits
                   are pairs p = 0 .. 2, then half a vector of nibbles (row r, row r + 8), the low 4 bits of pair 3;
                   the 3 high bits of pair 3 are the top bits of the 3 vectors
           1.75    two units together: four codes of 3 levels in 7 bits, a + 3 b + 9 c + 27 d for groups 4p .. 4p + 3,
                   stored as pairs are
headers  by kind (numflow/quant/stored.py explains their values), [16] is one value per row:
           SCALE    per unit, or per block of units   f16 d[16]
           SCALE16  per unit  f16 d[2][16]
           POWER    per unit  bf16 d[16]
           BASE     per unit  f16 d[16], m[16]
           SCALED   per block                         d[16], z[16] in their types; d alone without zero points
           FACTORED per row   f32 d[16], u8 s[columns / 16][16]
           SUPER    per 8     f16 d[16], e[16], u8 s[8][16], u8 m[8][16]
           SUPER16  per 8     f16 d[16], e[16], u8 (s | m << 4)[16][16]
           BYTES16  per unit  u8 s[2][16], b[2][16]
           SIGNED   per 8     f16 d[16], i8 s[8][16]
           SIGNED16 per 8     f16 d[16], i8 s[16][16]
                    of grids  f16 d[16], and as many 4-bit scales: u8 (s[2i] | s[2i + 1] << 4)[i][16]
           GRID     per unit  the block headers of numflow.quant's schemes (decode_own.py)
           GRID16   per unit  the same, by 16 columns

Schemes with a codebook store its indices; reading turns them into entry + Scheme.zero.

F32, F16 and BF16 matrices are [tile][K][16 rows] in the file's own type, with any K. The last tile of a group (an
expert, or the whole matrix) is padded with rows of zeros. SCALED and FACTORED allow a K that is a multiple of 16 but
not of 32: the second half of the last unit is then empty, and the matrix takes float32 activations only.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numflow.cpu.simd.isa import isa, token_tile
from numflow.quant.grids import GRIDS, GridType
from numflow.quant.hub_types import SIZES
from numflow.quant.stored import (
    BASE,
    BF16,
    BYTES16,
    FACTORED,
    KINDS,
    POWER,
    SCALE,
    SCALE16,
    SCALED,
    SIGNED,
    SIGNED16,
    SUPER,
    SUPER16,
    Kind,
)

ROWS, UNIT = 16, 32
PACK_SCRATCH = 16 * 256  # scratch bytes of a thread that packs
ROW_HEADERS = 2 * ROWS  # bytes of a tile's row headers, of the GRID kinds
SPREAD = "_spread"  # suffix of the schemes of grid types that have a code per weight
AUX_BYTES = 24  # bytes of the scales and sums of a token's int8 activations, per unit (activations.py)

# Bytes of a header, for 16 rows.
_HEADER = {SCALE: 32, SCALE16: 64, POWER: 32, BASE: 64, SUPER: 320, SUPER16: 320, BYTES16: 64, SIGNED: 160,
           SIGNED16: 288}

# Bits of each column group, by bits per code: pieces (vector, first bit in its bytes, first bit of the code, bits).
PIECES: dict[float, list[list[tuple[int, int, int, int]]]] = {
    8: [[(g, 0, 0, 8)] for g in range(8)],
    7: [*([(g, 0, 0, 7)] for g in range(7)), [(j, 7, j, 1) for j in range(7)]],
    6: [*([(g, 0, 0, 6)] for g in range(6)), *([(3 * i + j, 6, 2 * j, 2) for j in range(3)] for i in range(2))],
    5: [*([(g, 0, 0, 5)] for g in range(5)), [(0, 5, 0, 3), (1, 5, 3, 2)], [(2, 5, 0, 3), (3, 5, 3, 2)],
        [(4, 5, 0, 3), (1, 7, 3, 1), (3, 7, 4, 1)]],
    4: [[(g // 2, 4 * (g % 2), 0, 4)] for g in range(8)],
    3: [*([(g // 2, 3 * (g % 2), 0, 3)] for g in range(6)), [(0, 6, 0, 2), (1, 6, 2, 1)], [(2, 6, 0, 2), (1, 7, 2, 1)]],
    2: [[(g % 4, 2 * (g // 4), 0, 2)] for g in range(16)],
    1: [[(0, g, 1, 1)] for g in range(8)],
}
SHIFT_BITS = (2, 3, 4, 5, 0, 1, 6, 7)  # the bit for each two groups of a strip; the codes beside it have other bits


@dataclass(frozen=True)
class Scheme(Kind):
    """A kind of quantised or float matrix, and its memory layout."""

    @property
    def grid(self) -> GridType | None:
        """The grid type, or None."""
        return GRIDS.get(self.name.removesuffix(SPREAD).upper())

    @property
    def indexed(self) -> bool:
        """Whether memory holds the indices of a grid type; its table has the codes."""
        return self.grid is not None and not self.name.endswith(SPREAD)

    @property
    def shifted(self) -> bool:
        """Whether levels are shifted by 1/8, up or down for each 8 columns of a row (IQ1_M with codes)."""
        return self.grid is not None and not self.indexed and self.bits < self.grid.bits

    @property
    def grid_width(self) -> int:
        """Columns of a grid index in memory; 0 for codes."""
        return self.grid.width if self.grid is not None and self.indexed else 0

    @property
    def unit_parts(self) -> tuple[int, int, int]:
        """Bytes of a unit of a grid type: low 8 bits of the grid indices, their high bits, signs."""
        grid = self.grid
        if grid is None or not self.indexed:
            raise ValueError(f"{self.name} has codes of its own")
        indices = UNIT // grid.width
        return ROWS * indices, ROWS * indices * grid.high // 8, UNIT * ROWS // 8 if grid.sign else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of the codes of a unit of a tile."""
        if self.indexed:
            return sum(self.unit_parts)
        return int(2 * UNIT * (1.75 if self.in_fours else self.bits)) + (8 if self.shifted else 0)

    @property
    def header_bytes(self) -> int:
        """Bytes of a header for 16 rows, not for numflow's own schemes; of FACTORED without the scales of columns."""
        if self.header in (SCALED, FACTORED):
            return ROWS * (SIZES[self.scale or "F32"] + SIZES[self.zeros])
        return 2 * ROWS + ROWS * self.grid.scales // 2 if self.grid else _HEADER[self.header]

    @property
    def ends_in_halves(self) -> bool:
        """Whether rows may end with half a unit."""
        return self.header in (SCALED, FACTORED)

    @property
    def floats_only(self) -> bool:
        """Whether it takes float32 (or bfloat16) activations only: float weights and codes that are 8-bit floats."""
        return self.is_float or (bool(self.table) and self.bits == 8)

    @property
    def in_fours(self) -> bool:
        """Whether four codes of 3 levels share 7 bits."""
        return self.levels == 3

    @property
    def strip(self) -> int:
        """Units that share vectors of codes."""
        return 2 if self.bits == 2 and not self.indexed else 1

    @property
    def code_bits(self) -> int:
        """Bits of a code after reading."""
        return self.zero.bit_length() if self.book else 2 if self.bits == 1 else math.ceil(self.bits)

    @property
    def zero(self) -> int:
        """The code of zero; of a codebook, the least power of two that added to the entries leaves none negative."""
        return 1 << max(map(abs, self.book)).bit_length() if self.book else super().zero

    @property
    def largest(self) -> int:
        """The largest code."""
        return self.own.levels - 1 if self.is_own else 10 if self.paired else (1 << self.code_bits) - 1

    def tile_bytes(self, columns: int) -> tuple[int, int]:
        """Bytes of codes and of headers of one tile of `columns` columns."""
        strip = UNIT * self.strip
        codes = (columns if self.is_float else -(-columns // strip) * strip) * self.unit_bytes // UNIT
        if self.is_own:
            return codes, columns // self.own.block * 2 * self.own.header_bits + ROW_HEADERS
        if self.header == FACTORED:
            return codes, self.header_bytes + columns
        return codes, 0 if self.is_float else (columns // self.block if self.shared else 1) * self.header_bytes


SCHEMES = {name: Scheme(**vars(kind)) for name, kind in KINDS.items()}
SCHEMES |= {(name := grid.lower() + SPREAD): Scheme(**vars(KINDS[grid.lower()]) | {
    "name": name, "bits": 2 if grid == "IQ1_M" else type_.bits}) for grid, type_ in GRIDS.items()}


def scheme_of(kind: Kind, spread: bool) -> Scheme:
    """The scheme of a kind. spread: grid types with a code per weight, not as indices."""
    return SCHEMES[kind.name + SPREAD if spread and kind.name + SPREAD in SCHEMES else kind.name]


@dataclass(frozen=True)
class Panel(Scheme):
    """A scheme with one byte per code and float32 headers (panel.py)."""

    @property
    def halves(self) -> int:
        """Headers per unit."""
        return 2 if self.by_16 else 1

    @property
    def unit_bytes(self) -> int:
        """Bytes of the codes of a unit of a tile."""
        return ROWS * UNIT

    @property
    def strip(self) -> int:
        """One unit."""
        return 1

    def tile_bytes(self, columns: int) -> tuple[int, int]:
        """Bytes of codes and of headers of one tile of `columns` columns."""
        return ROWS * columns, columns // UNIT * self.halves * 2 * 4 * ROWS

    def header_address(self, headers: Any, unit: Any, half: int) -> Any:
        """Address of the scale of a unit or of its half; the zero or base is 64 bytes behind."""
        return headers + unit * (self.halves * 2 * 4 * ROWS) + half * (2 * 4 * ROWS)


class Pairs(Panel):
    """Float weights as pairs of bfloat16 (simd/bfloat16.py), for an operand of pairs of bfloat16."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a tile."""
        return 2 * ROWS * UNIT

    def tile_bytes(self, columns: int) -> tuple[int, int]:
        """Bytes of one tile of `columns` columns; there are no headers."""
        return 2 * ROWS * columns, 0


def _pays(scheme: Scheme) -> bool:
    """Whether a panel is faster: not for 8-bit codes, nor for tables. With register tiles of 8 tokens, only for codes
    that take many instructions to decode."""
    if scheme.is_float or scheme.table or scheme.bits == 8:
        return False
    return isa() in ("avx2", "avxvnni") or (isa() == "avx512" and bool(scheme.indexed or scheme.bits == 3.5))


PANELS = {name: Panel(**vars(scheme)) for name, scheme in SCHEMES.items() if _pays(scheme)}
PAIRS = {name: Pairs(**vars(scheme)) for name, scheme in SCHEMES.items()
         if scheme.is_float and scheme.header != BF16}
PANEL_ROWS = 8 if token_tile() == 4 else 48  # least operand rows with which a panel is faster


def panel_bytes(name: str, columns: int, pairs: bool = False) -> int:
    """Bytes of the panel of a tile of `columns` columns; 0 for schemes without. pairs: for an operand of bfloat16."""
    panels = PAIRS if pairs else PANELS
    return sum(panels[name].tile_bytes(columns)) if name in panels else 0


class _Form:
    """Properties that follow from the kind and the shape of a matrix."""

    kind: str
    shape: tuple[int, int]

    @property
    def is_float(self) -> bool:
        """Whether the weights are floats, not codes."""
        return self.scheme.is_float

    @property
    def floats_only(self) -> bool:
        """Whether kernels multiply the matrix with float32 (or bfloat16) activations only."""
        return self.scheme.floats_only or self.is_ragged

    @property
    def is_ragged(self) -> bool:
        """Whether the rows end with half a unit of codes."""
        return not self.is_float and self.shape[1] % UNIT != 0

    @property
    def scheme(self) -> Scheme:
        """Scheme of the matrix."""
        return SCHEMES[self.kind]


@dataclass(frozen=True)
class Planned(_Form):
    """A matrix [N, K] that is not packed yet: its scheme's name, and its outliers' scheme or None."""

    kind: str
    shape: tuple[int, int]
    outliers: Any = None


@dataclass(frozen=True)
class Packed(_Form):
    """A matrix [N, K] in the layout above.

    kind:          name of its scheme; which kernels serve it.
    type:          tensor type in the file, such as "Q4_K".
    groups:        number of equal matrices stacked along N (experts); each starts at a tile of its own.
    expanded_from: the file's type, if that has no kernels of its own and was expanded to `kind` at load, else None.
    outliers:      outliers.PackedOutliers, added to some of the weights, or None.
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


def tiles_of(rows: int) -> int:
    """Tiles that `rows` rows take."""
    return -(-rows // ROWS)
