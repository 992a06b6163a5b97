"""Stored types: the tensor types that executors keep bit for bit, one row each.

A type's `fields(raw, columns)` unpacks stored rows: codes u8 [N, K] and header values, each [N, ...]. The type's Kind
defines their meaning. Kernels, except packing ones, depend on the kind only. The layout in an executor's memory is in
cpu/weights/layout.py and cuda/weights/layout.py.

Header values in their order, 16-bit floats as raw bits; z is the kind's fixed zero:

    SCALE     f16 d by 32 columns or more (Kind.shared)         w = d * (code - z)
    SCALE16   f16 d by 16                                       the same
    POWER     bf16 d by 32                                      the same
    SCALED    d, z by 16 or more, or per row (Kind.scale)    w = d * (code - z), or d * table[code]
    FACTORED  f32 d per row; E4M3 s by 16                       w = d * s * (code - z)
    BASE      f16 d, m by 32                                    w = d * code + m
    SUPER     f16 d, e by 256; u8 s, m by 32                    w = d * s * code - e * m
    SUPER16   f16 d, e by 256; u8 s, m of 4 bits by 16          the same
    BYTES16   u8 s, b by 16                                     w = s * code / 1000 + b / 100 - 1
    SIGNED    f16 d by 256; i8 s by 32                          w = factor * d * s * (code - z)
    SIGNED16  f16 d by 256; i8 s by 16                          the same
    GRID      u16 per row;    u16 S | Z << scale_bits by 32     see numflow.quant.layout
    GRID16    the same by 16                                    the same
    F32, F16, BF16   none: codes are the bits of the values

Bits are the bits of a code in memory: 3.5 stands for two codes of 11 levels in 7 bits; a 1-bit code stands for 0 or 2.
With a codebook, code - z is the codebook entry: kernels look up entry + 128. A table has float entries, which are
multiplied with float32 activations; on the CPU, tables of 16 entries also with int8 activations.
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

# Codebooks: the non-linear one of IQ4, and twice the values of the 4-bit float E2M1.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class Kind:
    """A class of stored types that share kernels.

    bits:   bits of a code in memory. header: one of the headers above. book: codebook, the values of the codes.
    factor: factor of all scales, for SIGNED, SIGNED16 and 1-bit SCALED. center: the code of value zero, if it is not
    the
            middle code. shared: columns per header in the file, 0 for the row; header values repeat it for every 32
            columns, except with SCALED.
    levels: number of levels, if less than 2^bits.
    table:  name in hub_types.TABLES, the float values of the codes.
    scale, zeros: types of d and z with SCALED, "" for no z.
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
        """The fixed zero point of headers without one: a power of two, or 0 with a table."""
        return 128 if self.book else 0 if self.table else self.center or 1 << (math.ceil(self.bits) - 1)

    @property
    def by_16(self) -> bool:
        """Whether there is a scale per 16 columns."""
        return self.header in _BY_16 or (self.header == SCALED and self.shared == 16)

    @property
    def with_base(self) -> bool:
        """Whether headers have an addend beside the scale."""
        return self.header in _WITH_BASE or bool(self.zeros)

    @property
    def paired(self) -> bool:
        """Whether two codes are packed in 7 bits."""
        return self.bits == 3.5

    @property
    def is_own(self) -> bool:
        """Whether this is the kind of one of numflow's own schemes."""
        return self.header in (GRID, GRID16)

    @property
    def own(self) -> RowScheme:
        """numflow's own scheme of this kind."""
        return ROW_SCHEMES[self.name]

    @property
    def is_float(self) -> bool:
        """Whether weights are plain floats, with any number of columns."""
        return self.header >= F32

    @property
    def floats_only(self) -> bool:
        """Whether weights are floats, which are multiplied with float32 activations."""
        return self.is_float or bool(self.table)

    @property
    def block(self) -> int:
        """Rows are a multiple of so many columns; other rows are expanded to floats."""
        return 1 if self.is_float else 256 if self.header in _BY_256 else self.shared or 16


@dataclass(frozen=True)
class Stored:
    """A tensor type. fields(raw, columns): unpacks stored rows uint8 [N, row_bytes] to codes and header values."""

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

# Conversion of other types at load: the smallest float type that holds all their values, else F32.
EXPANDED = dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), "F16")


def kept_as(stored: str, columns: int) -> Kind:
    """The kind in which executors keep rows of a tensor type.

    Plain floats for types that are expanded at load, and for rows that are no multiple of the kind's block.
    """
    kind = (STORED.get(stored) or STORED[EXPANDED.get(stored, "F32")]).kind
    return kind if columns % kind.block == 0 else KINDS["f32"]


def weights(kind: Kind, codes: np.ndarray, values: tuple[np.ndarray, ...]) -> np.ndarray:
    """Weights float32 [N, K] of unpacked fields, by the formulas above."""
    if kind.is_float:
        return (codes.astype(np.uint32) << 16 if kind.header == BF16 else codes).view(
            np.float16 if kind.header == F16 else np.float32).astype(np.float32)
    if kind.is_own:
        rows, blocks = values
        return Fields(kind.own, rows[:, 0], blocks, codes).values()
    headers = [np.repeat(header_numbers(value, kind), codes.shape[1] // value.shape[1], axis=1) for value in values]
    levels = codes.astype(np.float32)
    if kind.header == BASE:
        return headers[0] * levels + headers[1]
    if kind.header == BYTES16:
        return levels * (headers[0] / np.float32(1000)) + (headers[1] / np.float32(100) - np.float32(1))
    if kind.header in (SUPER, SUPER16):
        d, e, s, m = headers
        return d * s * levels - e * m
    if kind.zeros:
        return np.float32(kind.factor) * headers[0] * (levels - headers[1])
    if kind.table:
        return headers[0] * TABLES[kind.table][codes]
    levels = np.array(kind.book, np.float32)[codes] if kind.book else levels - np.float32(kind.zero)
    return (headers[0] if len(headers) == 1 else headers[0] * (np.float32(kind.factor) * headers[1])) * levels


def header_numbers(value: np.ndarray, kind: Kind) -> np.ndarray:
    """A header's value as float32."""
    if value.dtype != np.uint16:
        return value.astype(np.float32)
    bits = value.astype(np.uint32) << 16
    is_bf16 = kind.header == POWER or kind.scale == "BF16"
    return bits.view(np.float32) if is_bf16 else value.view(np.float16).astype(np.float32)
