"""Stored types: one row for each tensor type that executors keep as a file has it, bit for bit.

A type's `fields(raw, columns)` takes stored rows apart: codes u8 [N, K] and the values of their headers, each [N, ...].
Its Kind says what these mean. Types of one kind are the same to every kernel but those that pack them. Where bits lie
in an executor's memory is said by its layout (cpu/weights/layout.py, cuda/weights/layout.py).

Values of headers, in their order, floats of 16 bits as those bits; z is the kind's zero:

    SCALE     f16 d by 32 columns or more (Kind.shared)         w = d * (code - z)
    SCALE16   f16 d by 16                                       the same
    POWER     bf16 d by 32                                      the same
    SCALED    d, z by 16 or more, or of the row (Kind.scale)    w = d * (code - z), or d * table[code]
    FACTORED  f32 d of the row; floats s of 4 + 3 bits by 16    w = d * s * (code - z)
    BASE      f16 d, m by 32                                    w = d * code + m
    SUPER     f16 d, e by 256; u8 s, m by 32                    w = d * s * code - e * m
    SUPER16   f16 d, e by 256; u8 s, m of 4 bits by 16          the same
    BYTES16   u8 s, b by 16                                     w = s * code / 1000 + b / 100 - 1
    SIGNED    f16 d by 256; i8 s by 32                          w = factor * d * s * (code - z)
    SIGNED16  f16 d by 256; i8 s by 16                          the same
    GRID      u16 of the row; u16 S | Z << scale_bits by 32     as numflow.quant.layout has it
    GRID16    the same by 16                                    the same
    F32, F16, BF16   none: codes are the bits of the numbers

Bits are those of a code in memory: 3.5 are two codes of 11 levels in 7 bits, 1 is one that stands for 0 or 2. With a
code-book, code - z is the book's entry: kernels look up entries + 128. A table has floats instead, which meet float32
activations; on the CPU those of 16 numbers meet int8 too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from numflow.quant import stored_fields as of
from numflow.quant.grids import GRIDS, GridType
from numflow.quant.hub_types import HUB_TYPES, TABLES, HubType
from numflow.quant.inferflow import INFERFLOW_SCHEMES
from numflow.quant.layout import ROW_SCHEMES, Fields, RowScheme

(SCALE, SCALE16, POWER, BASE, SUPER, SUPER16, BYTES16, SIGNED, SIGNED16, GRID, GRID16, SCALED, FACTORED, F32, F16,
 BF16) = range(16)
_BY_16 = {SCALE16, SUPER16, BYTES16, SIGNED16, GRID16, FACTORED}
_WITH_BASE = {BASE, SUPER, SUPER16, BYTES16, GRID, GRID16}
_BY_256 = {SUPER, SUPER16, SIGNED, SIGNED16}

# Tables of the code-books: the non-linear one of IQ4, and twice the values of the 4-bit float E2M1.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class Kind:
    """A family of matrices that one set of kernels serves.

    bits:   of a code in memory. header: how a header is kept, and what it says. book: values of the codes.
    factor: of all scales; SIGNED, SIGNED16 and SCALED of 1 bit have one. center: the code that stands for zero, where
            that is not the middle. shared: columns that a file has one header for; its values repeat it for every 32,
            but those of SCALED; 0: the row.
    levels: of codes, where they are fewer than their bits can tell apart.
    table:  of hub_types.TABLES, which has the numbers of the codes.
    scale, zeros: of SCALED the types of d and z, "" for no z.
    """

    name: str
    bits: float
    header: int
    book: tuple[int, ...] = ()
    factor: float = 1.0
    center: int = 0
    shared: int = 32
    levels: int = 0
    table: str = ""
    scale: str = ""
    zeros: str = ""

    @property
    def zero(self) -> int:
        """The code that stands for zero, where a header has none of its own: a power of two."""
        return 128 if self.book else 0 if self.table else self.center or 1 << (math.ceil(self.bits) - 1)

    @property
    def by_16(self) -> bool:
        """Whether there is a scale for each 16 columns."""
        return self.header in _BY_16 or (self.header == SCALED and self.shared == 16)

    @property
    def with_base(self) -> bool:
        """Whether headers say what is added to codes times scales."""
        return self.header in _WITH_BASE or bool(self.zeros)

    @property
    def paired(self) -> bool:
        """Whether two codes share their bits."""
        return self.bits == 3.5

    @property
    def is_own(self) -> bool:
        """Whether it is that of one of numflow's own schemes."""
        return self.header in (GRID, GRID16)

    @property
    def own(self) -> RowScheme:
        """That scheme."""
        return ROW_SCHEMES[self.name]

    @property
    def is_float(self) -> bool:
        """Whether it is plain numbers, of any number of columns."""
        return self.header >= F32

    @property
    def floats_only(self) -> bool:
        """Whether its numbers are floats, which meet float32 activations."""
        return self.is_float or bool(self.table)

    @property
    def block(self) -> int:
        """Columns that rows have a multiple of; rows of other lengths are expanded."""
        return 1 if self.is_float else 256 if self.header in _BY_256 else self.shared or 16


@dataclass(frozen=True)
class Stored:
    """A tensor type. fields(raw, columns): its stored rows uint8 [N, row_bytes] as codes and the values of headers."""

    type: str
    kind: Kind
    fields: Callable[[np.ndarray, int], of.Fields] = field(repr=False)


def _of_grids(grid: GridType) -> Kind:
    return Kind(grid.name.lower(), grid.bits, SIGNED16 if grid.scales == 16 else SIGNED, grid.book, grid.factor)


def _of_hub(hub: HubType) -> Kind:
    if hub.by_16:
        return Kind(hub.kind, hub.bits, FACTORED, E2M1, shared=hub.block)
    return Kind(hub.kind, hub.bits, SCALED, factor=0.5 if hub.bits == 1 else 1.0, shared=hub.block, table=hub.table,
                scale=hub.scale, zeros=hub.zeros)


def _own(scheme: RowScheme) -> Kind:
    return Kind(scheme.name, 3.5 if scheme.paired else scheme.unit_bytes // 4, GRID16 if scheme.block == 16 else GRID)


KINDS = {kind.name: kind for kind in (
    Kind("b4_scale", 4, SCALE), Kind("b5_scale", 5, SCALE), Kind("b8_scale", 8, SCALE),
    Kind("b2_base", 2, BASE), Kind("b3_base", 3, BASE), Kind("b3h_base", 3.5, BASE), Kind("b4_base", 4, BASE),
    Kind("b5_base", 5, BASE), Kind("b6_base", 6, BASE), Kind("b8_base", 8, BASE),
    Kind("b4_super", 4, SUPER), Kind("b5_super", 5, SUPER), Kind("b2_super16", 2, SUPER16),
    Kind("b4_bytes16", 4, BYTES16), Kind("b3_signed16", 3, SIGNED16), Kind("b6_signed16", 6, SIGNED16),
    Kind("iq4_scale", 4, SCALE, IQ4), Kind("iq4_signed", 4, SIGNED, IQ4),
    Kind("e2m1_power", 4, POWER, E2M1), Kind("e2m1_scale16", 4, SCALE16, E2M1),
    Kind("b1_scale128", 1, SCALE, center=1, shared=128), Kind("b2_scale64", 2, SCALE, center=1, shared=64),
    Kind("b2_scale128", 2, SCALE, center=1, shared=128), Kind("b2_scale256", 2, SCALE, center=1, shared=256),
    Kind("trits_scale256", 2, SCALE, center=1, shared=256, levels=3),
    *map(_of_grids, GRIDS.values()), *map(_own, ROW_SCHEMES.values()),
    *map(_of_hub, HUB_TYPES.values()),
    Kind("f32", 32, F32), Kind("f16", 16, F16), Kind("bf16", 16, BF16),
)}

_ROWS = (
    ("Q4_0", "b4_scale", of.q4_0), ("Q4_1", "b4_base", of.q4_1), ("Q5_0", "b5_scale", of.q5_0),
    ("Q5_1", "b5_base", of.q5_1), ("Q8_0", "b8_scale", of.q8_0),
    ("Q2_K", "b2_super16", of.q2_k), ("Q3_K", "b3_signed16", of.q3_k), ("Q4_K", "b4_super", of.q4_k),
    ("Q5_K", "b5_super", of.q5_k), ("Q6_K", "b6_signed16", of.q6_k),
    ("IQ4_NL", "iq4_scale", of.q4_0), ("IQ4_XS", "iq4_signed", of.iq4_xs),
    ("MXFP4", "e2m1_power", of.mxfp4), ("NVFP4", "e2m1_scale16", of.nvfp4),
    ("Q1_0", "b1_scale128", of.q1_0), ("Q2_0", "b2_scale64", of.q2_0(64)), ("Q2_0_128", "b2_scale128", of.q2_0(128)),
    ("TQ1_0", "trits_scale256", of.tq1_0), ("TQ2_0", "b2_scale256", of.tq2_0),
    *((grid.name, grid.name.lower(), of.of_grids(grid)) for grid in GRIDS.values()),
    *((name, name, of.own(scheme)) for name, scheme in ROW_SCHEMES.items()),
    *((name, kind, of.inferflow(INFERFLOW_SCHEMES[name])) for name, kind in {
        "q8_b32t1": "b8_base", "q8_b32t2": "b8_scale", "q6_b64t1": "b6_base", "q5_b64t1": "b5_base",
        "q5_b32t1": "b5_base", "q4_b64t1": "b4_base", "q4_b32t1a": "b4_base", "q4_b32t1b": "b4_base",
        "q3h_b64t1": "b3h_base", "q3_b32t1a": "b3_base", "q3_b32t1b": "b3_base", "q2_b32t1a": "b2_base",
        "q2_b32t1b": "b2_base", "q4_b16": "b4_bytes16"}.items()),
    *((hub.name, hub.kind, of.of_hub(hub)) for hub in HUB_TYPES.values()),
    ("F32", "f32", of.plain("<u4")), ("F16", "f16", of.plain("<u2")), ("BF16", "bf16", of.plain("<u2")),
)
STORED = {name: Stored(name, KINDS[kind], fields) for name, kind, fields in _ROWS}

# What other types become at load: the smallest plain type that holds all their numbers, else F32.
EXPANDED = dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), "F16")


def kept_as(stored: str, columns: int) -> Kind:
    """The kind that rows of so many numbers of a tensor type are kept in.

    Plain numbers where they are expanded: types without a row, and blocks of 16 columns that do not make whole units.
    """
    kind = (STORED.get(stored) or STORED[EXPANDED.get(stored, "F32")]).kind
    return kind if columns % kind.block == 0 else KINDS["f32"]


def weights(kind: Kind, codes: np.ndarray, values: tuple[np.ndarray, ...]) -> np.ndarray:
    """Weights of the fields, float32 [N, K]: the formulas above, in their order."""
    if kind.is_float:
        return (codes.astype(np.uint32) << 16 if kind.header == BF16 else codes).view(
            np.float16 if kind.header == F16 else np.float32).astype(np.float32)
    if kind.is_own:
        rows, blocks = values
        return Fields(kind.own, rows[:, 0], blocks, codes).values()
    by = [np.repeat(header_numbers(value, kind), codes.shape[1] // value.shape[1], axis=1) for value in values]
    numbers = codes.astype(np.float32)
    if kind.header == BASE:
        return by[0] * numbers + by[1]
    if kind.header == BYTES16:
        return numbers * (by[0] / np.float32(1000)) + (by[1] / np.float32(100) - np.float32(1))
    if kind.header in (SUPER, SUPER16):
        d, e, s, m = by
        return d * s * numbers - e * m
    if kind.zeros:
        return np.float32(kind.factor) * by[0] * (numbers - by[1])
    if kind.table:
        return by[0] * TABLES[kind.table][codes]
    numbers = np.array(kind.book, np.float32)[codes] if kind.book else numbers - np.float32(kind.zero)
    return (by[0] if len(by) == 1 else by[0] * (np.float32(kind.factor) * by[1])) * numbers


def header_numbers(value: np.ndarray, kind: Kind) -> np.ndarray:
    """A header's value as float32."""
    if value.dtype != np.uint16:
        return value.astype(np.float32)
    bits = value.astype(np.uint32) << 16
    is_bf16 = kind.header == POWER or kind.scale == "BF16"
    return bits.view(np.float32) if is_bf16 else value.view(np.float16).astype(np.float32)
