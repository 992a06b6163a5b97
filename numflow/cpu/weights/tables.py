"""Numbers of codes that stand for floats (numflow.quant.hub_types.TABLES), as code to build kernels of."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.lookup import lookup16
from numflow.cpu.simd.value import Value, constant, llvm_type
from numflow.quant.hub_types import TABLES

FLOATS8 = ("e4m3", "e5m2")
_LARGEST = {"e4m3": 127, "e5m2": 124}  # the first magnitude that is no finite number


def table_numbers(codes: Value, table: str, pick: Callable[[Value], Value]) -> Value:
    """The numbers of some codes, f32. pick: takes the codes that are wanted out of u8 lanes, as i32."""
    if table in FLOATS8:
        return floats8(pick(codes), table)
    values = TABLES[table]
    if isa() == "avx512" and codes.lanes == 64:
        whole = constant(codes, "f32", 0)
        numbers = Value(codes.builder, whole.like(values.tolist()))
        return numbers.call("llvm.x86.avx512.permvar.sf.512", llvm_type("f32", 16), pick(codes))
    bytes_ = np.ascontiguousarray(values).view(np.uint8).reshape(16, 4)
    planes = [pick(lookup16(codes, bytes_[:, place].tolist())) << 8 * place for place in range(4)]
    word = planes[0] | planes[1] | planes[2] | planes[3]
    return word.as_("f32", word.lanes)


@dataclass(frozen=True)
class Planes:
    """Numbers of a table of 16 in -1 .. 1 as whole numbers of 14 bits, for products with int8.

    number = (128 * high + low - 8192) / 8191, rounded to 2^-14; 0 and 1 are exact.
    """

    high: list[int]
    low: list[int]

    @classmethod
    def of(cls, table: str) -> "Planes":
        """Those of a table."""
        whole = [round(float(number) * 8191) + 8192 for number in TABLES[table]]
        return cls([number >> 7 for number in whole], [number & 127 for number in whole])


class Floats8:
    """Groups of four columns of finite 8-bit floats, with few instructions.

    A number's exponent and mantissa are put where a float32 has them, which makes it smaller by `unit`.
    """

    def __init__(self, table: str):
        self.mantissa = 3 if table == "e4m3" else 2
        self.unit = _unit_of(self.mantissa)

    def columns(self, codes: Value) -> list[Value]:
        """Four f32x16 of the columns of u8x64, 4 bytes per row."""
        rows = codes.as_("i32", 16)
        return [self.of_words(rows << 24 - 8 * column if column < 3 else rows) for column in range(4)]

    def of_words(self, words: Value) -> Value:
        """Numbers of the codes in the highest bytes of i32."""
        kept = (127 << 23 - self.mantissa) - (1 << 31)  # the sign, and the number's exponent and mantissa
        return (words.sar(1 + self.mantissa) & kept).as_("f32", words.lanes)


def any_not_finite(codes: Value, table: str) -> Value:
    """i1: whether one of u8x16 is infinite or no number."""
    above = (codes & 127) + (128 - _LARGEST[table])  # bit 7
    return above.call("llvm.vector.reduce.or.v16i8", llvm_type("u8")).compare("<", 0)


def _unit_of(mantissa: int) -> float:
    """The factor from a float32 of the same exponent and mantissa to the number, also to the smallest."""
    return 2.0**(127 - ((1 << 6 - mantissa) - 1))


def floats8(codes: Value, table: str) -> Value:
    """Numbers of 8-bit floats, each in an i32."""
    floats, magnitude = Floats8(table), codes & 127
    numbers = floats.of_words(codes << 24) * floats.unit
    other = magnitude << 23 - floats.mantissa | (codes & 128) << 24 | 0x7F800000  # infinite, or no number
    return magnitude.compare("<", _LARGEST[table]).choose(numbers, other.as_("f32", codes.lanes))
