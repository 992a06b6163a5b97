"""Types of matrices that other programs quantised: blocks of a header and codes, or rows with one header.

A header is a scale d, in types with zero points also a zero point z: w = d * (code - z). Types without zero points have
one fixed zero, or a table: w = d * table[code]. Names encode the layout. I4_BF16_32: 4-bit codes, a bfloat16 scale per
32 columns. U4_F16_128: a float16 scale and a one-byte zero point per 128. Z4_BF16_64: zero points are bfloat16 too.
E4M3_ROW: one float32 scale per row, before the codes. Codes are in bit planes (bits.py) of 16 columns. 1-bit codes are
0 and 2, z is twice the zero point, and w is halved.

Rows of E2M1_ROW also have an E4M3 scale s per 16 columns, before their codes: w = d * s * code.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from numflow.quant.bits import Plane
from numflow.quant.layout import CODE_PLANES

UNIT = 16  # columns of a set of planes
ROW = 0    # value of `block`: the whole row
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
_FP4 = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
SIZES = {"": 0, "U8": 1, "F16": 2, "BF16": 2, "F32": 4}  # bytes of scales and zeros


def _floats8(exponent_bits: int, bias: int) -> np.ndarray:
    """Values of all codes of an 8-bit float type, float32 [256]. With 4 exponent bits there are no infinities."""
    if exponent_bits == 5:
        with np.errstate(invalid="ignore"):  # signalling NaNs, which Arm's conversion reports
            return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - bias), np.ldexp(mantissa / 8, 1 - bias))
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


# Codebooks by name, float32 [16] or [256].
TABLES = {"nf4": np.array(_NF4, np.float32), "fp4": np.array((*_FP4, *(-value for value in _FP4)), np.float32),
          "e4m3": _floats8(4, 7), "e5m2": _floats8(5, 15)}


@dataclass(frozen=True)
class HubType:
    """A type. bits: of a code. block: columns per header, or ROW. scale, zeros: types of d and z, "" for no z.

    table: name in TABLES. by_16: whether there is also a scale per 16 columns.
    """

    name: str
    bits: int
    block: int
    scale: str
    zeros: str = ""
    table: str = ""
    by_16: bool = False

    @property
    def kind(self) -> str:
        """Name of its Kind in stored.py."""
        return self.name.lower()

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Bit planes of a unit."""
        return CODE_PLANES[self.bits]

    @property
    def unit_bytes(self) -> int:
        """Bytes of 16 columns, with their scale."""
        return UNIT * self.bits // 8 + self.by_16

    @property
    def header_bytes(self) -> int:
        """Bytes of d and z."""
        return SIZES[self.scale] + SIZES[self.zeros]

    @property
    def columns(self) -> int:
        """Rows are a multiple of so many columns."""
        return self.block or UNIT

    @property
    def size(self) -> int:
        """Bytes of so many columns, without a row header."""
        return self.columns // UNIT * self.unit_bytes + (self.header_bytes if self.block else 0)

    @property
    def row_header(self) -> int:
        """Bytes before the blocks of a row."""
        return 0 if self.block else self.header_bytes


def _all() -> Iterator[HubType]:
    for block in (128, 64, 32, 16, ROW):
        end = f"_{block}" if block else "_ROW"
        for scale in ("F16", "BF16", "F32"):
            for letter, zeros, widths in (("I", "", (2, 3, 4, 5, 6, 7, 8)), ("U", "U8", (1, 2, 3, 4, 5, 6, 7, 8)),
                                          ("Z", scale, (1, 2, 3, 4, 8))):
                for bits in widths:
                    yield HubType(f"{letter}{bits}_{scale}{end}", bits, block, scale, zeros)
        for table in TABLES:
            yield HubType(f"{table.upper()}{end}", 8 if table in ("e4m3", "e5m2") else 4, block, "F32", table=table)
    yield HubType("E2M1_ROW", 4, ROW, "F32", by_16=True)


HUB_TYPES = {hub.name: hub for hub in _all()}
