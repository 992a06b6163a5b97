"""How a device keeps a matrix [N, K]: plain rows of floats, or planes of bits by units of 32 columns.

A lane of a warp takes a unit, so every plane is [N][K / 32][...] in memory of its own and neighbours read neighbouring
bytes. Of the codes of a unit, in groups of 4 columns (g = 0 .. 7), byte i of a word is column i of the group:

low    4 words: word j holds group 2j in its low nibbles, group 2j + 1 in its high ones. With a code-book of 16: nibble
       n of word j is column 8j + n. Of 8 bits: the bytes of groups 0 .. 3. Of pairs: see below.
high   4 words: of 8 bits, the bytes of groups 4 .. 7
two    2 words: bits 2i, 2i + 1 of word j belong to group 4j + i
one    1 word:  bit g belongs to group g

    1 bit   one, as bit 1 of a code: 0 or 2
    2 bits  two            4 bits  low              6 bits  low, then two as bits 4 and 5
    3 bits  two, one       5 bits  low, then one    8 bits  low, high

Pairs (3.5 bits, 11 levels): 7 bits of byte i of word j are 11 * (column i of group 2j + 1) + (column i of group 2j);
the top bits of word 0 are S, of word 1 are Z of the block: with its header a unit is 16 bytes, one load.

Headers say what the codes of a unit mean, w = A * code + C, with A and C for all 32 columns or for each 16:

kind      per unit            per 8 units ("above")   per row
SCALE     f16 d                                              A = d              C = -zero * d
SCALE16   f16 d[2]                                           the same by 16 columns
POWER     bf16 d                                             as SCALE
BASE      f16 d, f16 m                                       A = d              C = m
SUPER     u8 s, u8 m          f16 d, f16 e                   A = d s            C = -e m
SUPER16   u8 (s | m << 4)[2]  f16 d, f16 e                   the same by 16 columns
SIGNED    i8 s, -             f16 d                          A = d s            C = -zero A
SIGNED16  i8 s[2]             f16 d                          the same by 16 columns
GRID      u16 (S | Z << n)                            B, D, z, dz    A = float of the bits B + S D   C = -A (z + Z dz)
GRID16    u8 (S | Z << n)[2]                          the same by 16 columns
PAIR      in the codes                                       as GRID
"""

from dataclasses import dataclass, field

from numflow.cuda.device.device import Ref
from numflow.formats import grids
from numflow.quant.layout import ROW_SCHEMES, RowScheme

UNIT = 32
SCALE, SCALE16, POWER, BASE, SUPER, SUPER16, SIGNED, SIGNED16, GRID, GRID16, PAIR = range(11)
BY_16 = {SCALE16, SUPER16, SIGNED16, GRID16}
_ABOVE = {SUPER, SUPER16, SIGNED, SIGNED16}
_ROWS = {GRID, GRID16, PAIR}

# Tables of the code-books as signed bytes: the non-linear one of IQ4, and twice the values of the 4-bit float E2M1.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

_PLANES = {1: ("one",), 2: ("two",), 3: ("two", "one"), 4: ("low",), 5: ("low", "one"), 6: ("low", "two"), 7: ("low",),
           8: ("low", "high")}
PLANE_BYTES = {"low": 16, "high": 16, "two": 8, "one": 4}


@dataclass(frozen=True)
class Scheme:
    """A family of quantised matrices that one set of kernels serves.

    bits: of a code in memory; header: its kind; book: values of the codes, which become those + 128.
    own:  numflow's own scheme it comes from. factor: of all scales; only SIGNED and SIGNED16 have one.
    center: the code that stands for zero, where it is not the middle.
    """

    name: str
    bits: int
    header: int
    book: tuple[int, ...] = ()
    own: RowScheme | None = None
    factor: float = 1.0
    center: int = 0

    @property
    def zero(self) -> int:
        """The code that stands for zero, where a header has none of its own."""
        return 128 if self.book else self.center or 1 << (self.bits - 1)

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of its planes of codes."""
        return _PLANES[self.bits]

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Memory by name: bytes, and columns that they are for (0: the row)."""
        sizes = {plane: (PLANE_BYTES[plane], UNIT) for plane in self.planes}
        if self.header != PAIR:
            sizes["head"] = (4 if self.header in (SCALE16, BASE) else 2, UNIT)
        if self.header in _ABOVE:
            sizes["above"] = (4, 8 * UNIT)
        if self.header in _ROWS:
            sizes["row"] = (16, 0)
        return sizes

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row, headers included."""
        return sum(size * (columns // per if per else 1) for size, per in self.parts.values())


def _own(name: str) -> Scheme:
    scheme = ROW_SCHEMES[name]
    bits = {11: 7}.get(scheme.levels) or (scheme.levels - 1).bit_length()
    header = PAIR if scheme.paired else GRID16 if scheme.block == 16 else GRID
    return Scheme(name, bits, header, own=scheme)


def _of_grids(grid: grids.GridType) -> Scheme:
    return Scheme(grid.family, grid.bits, SIGNED16 if grid.scales == 16 else SIGNED, grid.book, factor=grid.factor)


SCHEMES = {s.name: s for s in (
    Scheme("b4_scale", 4, SCALE), Scheme("b5_scale", 5, SCALE), Scheme("b8_scale", 8, SCALE),
    Scheme("b4_base", 4, BASE), Scheme("b5_base", 5, BASE),
    Scheme("b4_super", 4, SUPER), Scheme("b5_super", 5, SUPER), Scheme("b2_super16", 2, SUPER16),
    Scheme("b3_signed16", 3, SIGNED16), Scheme("b6_signed16", 6, SIGNED16),
    Scheme("iq4_scale", 4, SCALE, IQ4), Scheme("iq4_signed", 4, SIGNED, IQ4),
    Scheme("e2m1_power", 4, POWER, E2M1), Scheme("e2m1_scale16", 4, SCALE16, E2M1),
    Scheme("b1_scale", 1, SCALE, center=1), Scheme("b2_scale", 2, SCALE, center=1),
    *map(_of_grids, grids.GRIDS.values()),
    *map(_own, ROW_SCHEMES),
)}

# The scheme of each tensor type that is kept as the file has it, bit for bit.
NATIVE = {
    "Q4_0": "b4_scale", "Q5_0": "b5_scale", "Q8_0": "b8_scale", "Q4_1": "b4_base", "Q5_1": "b5_base",
    "Q2_K": "b2_super16", "Q3_K": "b3_signed16", "Q4_K": "b4_super", "Q5_K": "b5_super", "Q6_K": "b6_signed16",
    "IQ4_NL": "iq4_scale", "IQ4_XS": "iq4_signed", "MXFP4": "e2m1_power", "NVFP4": "e2m1_scale16",
    "Q1_0": "b1_scale", **dict.fromkeys(("Q2_0", "Q2_0_128", "TQ1_0", "TQ2_0"), "b2_scale"),
    **{name: grid.family for name, grid in grids.GRIDS.items()},
    **{name: name for name in ROW_SCHEMES},
}
FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K] in device memory.

    kind:   "f32", "f16", "bf16" or the name of a scheme: which kernels serve it. type: as in the file.
    groups: number of equal matrices stacked along N (experts).
    pitch:  columns of a row with padding.
    parts:  where each part is: "codes" of floats, else those of Scheme.parts; "outliers", if there are any.
    outliers: slots that each row has for them (outliers.py).
    expanded_from: the file's type where it has no kernels of its own and was expanded at load, else None.
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
    def is_float(self) -> bool:
        """Whether it holds plain numbers."""
        return self.kind in FLOATS.values()

    @property
    def scheme(self) -> Scheme:
        """Its scheme, if it is quantised."""
        return SCHEMES[self.kind]
