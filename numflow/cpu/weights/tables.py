"""Values of codes that stand for floats (numflow.quant.hub_types.TABLES), as emitters of kernel code."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.lookup import lookup16
from numflow.cpu.simd.value import Value, constant, llvm_type
from numflow.quant.hub_types import TABLES

FLOATS8 = ("e4m3", "e5m2")
_LARGEST = {"e4m3": 127, "e5m2": 124}  # the smallest magnitude bits that are not finite


def table_values(codes: Value, table: str, pick: Callable[[Value], Value]) -> Value:
    """Table values of some codes, f32. pick: selects the wanted codes out of u8 lanes, as i32."""
    if table in FLOATS8:
        return floats8(pick(codes), table)
    values = TABLES[table]
    if isa() == "avx512" and codes.lanes == 64:
        whole = constant(codes, "f32", 0)
        entries = Value(codes.builder, whole.like(values.tolist()))
        return entries.call("llvm.x86.avx512.permvar.sf.512", llvm_type("f32", 16), pick(codes))
    bytes_ = np.ascontiguousarray(values).view(np.uint8).reshape(16, 4)
    planes = [pick(lookup16(codes, bytes_[:, i].tolist())) << 8 * i for i in range(4)]
    word = planes[0] | planes[1] | planes[2] | planes[3]
    return word.as_("f32", word.lanes)


@dataclass(frozen=True)
class Planes:
    """A table of 16 floats in -1 .. 1 as 14-bit integers, for products with int8.

    value = (128 * high + low - 8192) / 8191, rounded to 2^-14; 0 and 1 are exact.
    """

    high: list[int]
    low: list[int]

    @classmethod
    def of(cls, table: str) -> "Planes":
        """The planes of a table."""
        whole = [round(float(value) * 8191) + 8192 for value in TABLES[table]]
        return cls([integer >> 7 for integer in whole], [integer & 127 for integer in whole])


class Floats8:
    """Column groups of finite 8-bit floats, decoded with few instructions.

    Sign, exponent and mantissa are shifted to their positions in a float32. The exponent's bias is not corrected: the
    float32 times `unit` is the value.
    """

    def __init__(self, table: str):
        self.mantissa = 3 if table == "e4m3" else 2
        self.unit = _unit_of(self.mantissa)

    def columns(self, codes: Value) -> list[Value]:
        """Four f32x16, one per column of u8x64, 4 bytes per row."""
        rows = codes.as_("i32", 16)
        return [self.of_words(rows << 24 - 8 * column if column < 3 else rows) for column in range(4)]

    def of_words(self, words: Value) -> Value:
        """Float32 of the codes in the highest bytes of i32 lanes, too small by `unit`."""
        mask = (127 << 23 - self.mantissa) - (1 << 31)  # sign, exponent and mantissa
        return (words.sar(1 + self.mantissa) & mask).as_("f32", words.lanes)


def any_not_finite(codes: Value, table: str) -> Value:
    """i1: whether one of u8x16 is infinite or NaN."""
    flags = (codes & 127) + (128 - _LARGEST[table])  # in bit 7
    return flags.call("llvm.vector.reduce.or.v16i8", llvm_type("u8")).compare("<", 0)


def _unit_of(mantissa: int) -> float:
    """The factor from a float32 with the same exponent and mantissa to the value, subnormal values included."""
    return 2.0**(127 - ((1 << 6 - mantissa) - 1))


def floats8(codes: Value, table: str) -> Value:
    """Values, f32, of 8-bit floats, one per i32 lane."""
    floats, magnitude = Floats8(table), codes & 127
    finite = floats.of_words(codes << 24) * floats.unit
    special = magnitude << 23 - floats.mantissa | (codes & 128) << 24 | 0x7F800000  # infinity or NaN
    return magnitude.compare("<", _LARGEST[table]).choose(finite, special.as_("f32", codes.lanes))
