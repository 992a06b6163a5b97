"""Numbers of codes that stand for floats (numflow.quant.hub_types.TABLES), as code to build kernels of."""

from collections.abc import Callable

import numpy as np

from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.lookup import lookup16
from numflow.cpu.simd.value import Value, constant, llvm_type
from numflow.quant.hub_types import TABLES


def table_numbers(codes: Value, table: str, pick: Callable[[Value], Value]) -> Value:
    """The numbers of some codes, f32. pick: takes the codes that are wanted out of u8 lanes, as i32."""
    if table in ("e4m3", "e5m2"):
        return floats8(pick(codes), 3 if table == "e4m3" else 2)
    values = TABLES[table]
    if isa() == "avx512" and codes.lanes == 64:
        whole = constant(codes, "f32", 0)
        numbers = Value(codes.builder, whole.like(values.tolist()))
        return numbers.call("llvm.x86.avx512.permvar.sf.512", llvm_type("f32", 16), pick(codes))
    bytes_ = np.ascontiguousarray(values).view(np.uint8).reshape(16, 4)
    planes = [pick(lookup16(codes, bytes_[:, place].tolist())) << 8 * place for place in range(4)]
    word = planes[0] | planes[1] | planes[2] | planes[3]
    return word.as_("f32", word.lanes)


def floats8(codes: Value, mantissa: int) -> Value:
    """8-bit floats: a float32 of the same exponent and mantissa is a power of two of it, also of the smallest."""
    magnitude, bias, largest = codes & 127, (1 << 6 - mantissa) - 1, 127 if mantissa == 3 else 124
    bits = magnitude << 23 - mantissa | (codes & 128) << 24
    numbers = bits.as_("f32", codes.lanes) * 2.0**(127 - bias)
    other = (bits | 0x7F800000).as_("f32", codes.lanes)  # infinite, or no number
    return magnitude.compare("<", largest).choose(numbers, other)
