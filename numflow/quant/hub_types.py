"""Types of matrices that other programs have quantised: blocks of one header and codes, as GGML's are.

A header is a scale d, and in types with zeros a zero z of the same type, w = d * (code - z); others have one zero for
all codes, or a table of numbers, w = d * table[code]. Codes of 4 bits stand as in Q4_0, for each 32 columns the first
16 in the low nibbles of 16 bytes and the others in the high ones; codes of 8 bits stand one after the other. Where
E2M1 numbers have scales of 16 columns too, these stand between d and the codes, as floats of 4 + 3 bits, and
w = d * s * code.
"""

from dataclasses import dataclass

import numpy as np

_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
_FP4 = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)


def _floats8(exponent_bits: int, bias: int) -> np.ndarray:
    """Numbers of all codes of 8-bit floats, float32 [256]; of 4 bits of exponent there are no infinities."""
    if exponent_bits == 5:
        return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - bias), np.ldexp(mantissa / 8, 1 - bias))
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


# Numbers of codes by name, float32 [16] or [256].
TABLES = {"nf4": np.array(_NF4, np.float32), "fp4": np.array((*_FP4, *(-value for value in _FP4)), np.float32),
          "e4m3": _floats8(4, 7), "e5m2": _floats8(5, 15)}


@dataclass(frozen=True)
class HubType:
    """A type. kind: its row of stored.py. bits: of a code. block: columns of one header. scale: type of d (and z).

    zero: whether each header has one. table: name in TABLES. by_16: whether there are scales of 16 columns too.
    """

    name: str
    kind: str
    bits: int
    block: int
    scale: str
    zero: bool = False
    table: str = ""
    by_16: bool = False

    @property
    def header_bytes(self) -> int:
        """Bytes of d, of z where there is one, and of scales of 16 columns."""
        return {"F16": 2, "BF16": 2, "F32": 4}[self.scale] * (2 if self.zero else 1) + self.by_16 * self.block // 16

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return self.header_bytes + self.block * self.bits // 8


HUB_TYPES = {hub.name: hub for hub in (
    HubType("I4_BF16", "b4_power", 4, 32, "BF16"), HubType("I8_BF16", "b8_power", 8, 32, "BF16"),
    HubType("I8_F32", "b8_wide", 8, 64, "F32"),
    HubType("Z4_F16", "b4_zero64", 4, 64, "F16", zero=True), HubType("Z4_F16_32", "b4_zero", 4, 32, "F16", zero=True),
    HubType("Z4_BF16", "b4_zero64_bf16", 4, 64, "BF16", zero=True),
    HubType("Z4_BF16_32", "b4_zero_bf16", 4, 32, "BF16", zero=True),
    HubType("Z8_F16", "b8_zero", 8, 32, "F16", zero=True), HubType("Z8_BF16", "b8_zero_bf16", 8, 32, "BF16", zero=True),
    HubType("NF4", "nf4", 4, 64, "F32", table="nf4"), HubType("FP4", "fp4", 4, 64, "F32", table="fp4"),
    HubType("E4M3", "e4m3", 8, 64, "F32", table="e4m3"), HubType("E4M3_32", "e4m3_32", 8, 32, "F32", table="e4m3"),
    HubType("E5M2", "e5m2", 8, 64, "F32", table="e5m2"),
    HubType("E2M1_128", "e2m1_factored128", 4, 128, "F32", by_16=True),
    HubType("E2M1_64", "e2m1_factored64", 4, 64, "F32", by_16=True),
)}
