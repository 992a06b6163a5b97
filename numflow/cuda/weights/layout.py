"""Layout of a matrix [N, K] on a device: rows of floats, or bit planes of units of 32 columns.

A lane processes one unit at a time. Each plane is a separate array [N][K / 32][...], so that adjacent lanes read
adjacent bytes (coalesced loads). The codes of a unit form 8 groups of 4 columns (g = 0 .. 7); byte i of a word is
column i of a group:

low    4 words: word j holds group 2j in its low nibbles, group 2j + 1 in its high ones. With a code-book of 16: nibble
       n of word j is column 8j + n. Of 8 bits: the bytes of groups 0 .. 3. Of pairs: see below.
high   4 words: of 8 bits, the bytes of groups 4 .. 7
two    2 words: bits 2i, 2i + 1 of word j belong to group 4j + i
one    1 word:  bit g belongs to group g

    1 bit   one, as bit 1 of a code: 0 or 2
    2 bits  two            4 bits  low              6 bits  low, then two as bits 4 and 5
    3 bits  two, one       5 bits  low, then one    7 bits  low, two as bits 4 and 5, one as bit 6
                                                    8 bits  low, high

Pairs (3.5 bits, 11 levels): the low 7 bits of byte i of word j are 11 * (column i of group 2j + 1) + (column i of group
2j). In numflow's own scheme, the top bits of word 0 are S and those of word 1 are Z of the block header: a unit with
its header is 16 bytes, one load.

Headers (numflow/quant/stored.py) define the values of codes, w = A * code + C, with one A and C for all 32 columns or
for each 16:

kind      per unit            per 8 units ("above")   per row
SCALE     f16 d                                              A = d              C = -zero * d
SCALE16   f16 d[2]                                           the same by 16 columns
POWER     bf16 d                                             as SCALE
BASE      f16 d, f16 m                                       A = d              C = m
SCALED    d, z in their types, for as many columns as share them; z of one byte "above", side by side. Or per row f32 d,
          z, or d alone without zeros
                                                             A = d              C = -z d, or -zero * d; 0 of tables
FACTORED  u8 s[2], floats of 4 + 3 bits               f32 d  A = d s            C = -zero A, by 16 columns
SUPER     u8 s, u8 m          f16 d, f16 e                   A = d s            C = -e m
SUPER16   u8 (s | m << 4)[2]  f16 d, f16 e                   the same by 16 columns
BYTES16   u8 (s, b)[2]                                       A = s / 1000       C = b / 100 - 1
SIGNED    i8 s, -             f16 d                          A = d s            C = -zero A
SIGNED16  i8 s[2]             f16 d                          the same by 16 columns
GRID      u16 (S | Z << n)                            B, D, z, dz    A = float of the bits B + S D   C = -A (z + Z dz)
GRID16    u8 (S | Z << n)[2]                          the same by 16 columns
"""

from dataclasses import dataclass, field

from numflow.cuda.device.device import Ref
from numflow.quant.hub_types import SIZES
from numflow.quant.stored import (
    BASE,
    BYTES16,
    KINDS,
    SCALE16,
    SCALED,
    SIGNED,
    SIGNED16,
    SUPER,
    SUPER16,
    Kind,
)

UNIT = 32
_WIDE, _ABOVE = {SCALE16, BASE, BYTES16}, {SUPER, SUPER16, SIGNED, SIGNED16}

_PLANES = {1: ("one",), 2: ("two",), 3: ("two", "one"), 3.5: ("low",), 4: ("low",), 5: ("low", "one"),
           6: ("low", "two"), 7: ("low", "two", "one"), 8: ("low", "high")}
PLANE_BYTES = {"low": 16, "high": 16, "two": 8, "one": 4}


@dataclass(frozen=True)
class Scheme(Kind):
    """A kind of quantised matrices, with the layout of its planes and headers."""

    @property
    def in_codes(self) -> bool:
        """Whether block headers are stored in unused bits of the code words."""
        return self.is_own and self.paired

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the scheme's code planes."""
        return _PLANES[self.bits]

    @property
    def words(self) -> tuple[int, int]:
        """Sizes, in 16-bit words, of d and z of a SCALED header."""
        return SIZES[self.scale] // 2, SIZES[self.zeros] // 2

    @property
    def row_words(self) -> int:
        """Size of a row header in 32-bit words."""
        return 4 if self.is_own else 0 if self.shared else 2 if self.zeros else 1

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """The parts by name: (bytes, number of columns that they are for; 0: the whole row)."""
        sizes = {plane: (PLANE_BYTES[plane], UNIT) for plane in self.planes}
        if self.header == SCALED and self.shared:
            sizes["head"] = (2 * sum(self.words), self.shared)
            if SIZES[self.zeros] == 1:
                sizes["above"] = (1, self.shared)
        elif self.header != SCALED and not self.in_codes:
            sizes["head"] = (4 if self.header in _WIDE else 2, UNIT)
        if self.header in _ABOVE:
            sizes["above"] = (4, 8 * UNIT)
        if self.row_words:
            sizes["row"] = (4 * self.row_words, 0)
        return sizes

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of whole units, with headers."""
        columns = -(-columns // UNIT) * UNIT
        return sum(size * (columns // per if per else 1) for size, per in self.parts.values())


SCHEMES = {name: Scheme(**vars(kind)) for name, kind in KINDS.items() if not kind.is_float}


class Kept:
    """The properties that determine the kernels for a matrix: of a matrix in memory (Matrix), or of a planned one.

    kind: "f32", "f16", "bf16" or the name of a scheme. outliers: slots of a row; for a planned matrix 0 or 1.
    """

    kind: str
    outliers: int

    @property
    def is_float(self) -> bool:
        """Whether the matrix has floats instead of codes."""
        return KINDS[self.kind].is_float

    @property
    def floats_only(self) -> bool:
        """Whether kernels multiply the matrix by float32 activations only."""
        return KINDS[self.kind].floats_only


@dataclass(frozen=True)
class Planned(Kept):
    """The kind that a matrix will have in memory, known from its stored type."""

    kind: str
    outliers: int = 0


@dataclass(frozen=True)
class Matrix(Kept):
    """A matrix [N, K] in device memory.

    kind:   determines the kernels. type: as in the file.
    groups: number of equally shaped matrices stacked along N (experts).
    pitch:  columns of a row with padding.
    parts:  address of each part: "codes" for floats, else the names of Scheme.parts; "outliers", if there are any.
    outliers: number of outlier slots of each row (outliers.py).
    expanded_from: the type in the file, if it has no kernels and was converted to floats at load; else None.
    """

    kind: str
    type: str
    shape: tuple[int, int]
    groups: int
    pitch: int
    nbytes: int
    parts: dict[str, Ref] = field(repr=False)
    expanded_from: str | None = None
    outliers: int = 0

    @property
    def scheme(self) -> Scheme:
        """The scheme of a quantised matrix."""
        return SCHEMES[self.kind]
