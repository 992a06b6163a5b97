"""Conversions between types (cvt)."""

import numpy as np

from .operands import getter, wide
from .parse import TYPES, Register
from .values import saturating, value

U32, F32 = np.uint32, np.float32
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@value("cvt")
def _convert(step):
    to, of = step.parts[-2:]
    source = step.operands[1]
    if to in ("f16x2", "bf16x2"):
        high, low = (wide(operand, "f32") for operand in step.operands[1:3])
        pack = half_bits if to == "f16x2" else bfloat_bits
        return lambda machine: pack(low(machine)) | pack(high(machine)) << U32(16)
    if to == "e4m3x2":
        high, low = (wide(operand, "f32") for operand in step.operands[1:3])
        return lambda machine: (e4m3_bits(low(machine)) | e4m3_bits(high(machine)) << U32(8)).astype(np.uint16)
    if to == "e2m1x2":
        high, low = (wide(operand, "f32") for operand in step.operands[1:3])
        return lambda machine: e2m1_bits(low(machine)) | e2m1_bits(high(machine)) << np.uint8(4)
    if of in ("f16", "bf16"):
        get = wide(source, "b16")
        number = _from_half if of == "f16" else _from_bfloat
        return lambda machine: _to(step, number(get(machine)), to)
    if to in ("f16", "bf16"):
        get = wide(source, "f32")
        pack = half_bits if to == "f16" else bfloat_bits
        return lambda machine: pack(get(machine)).astype(np.uint16)
    get = getter(source, of)
    if isinstance(source, Register) and np.dtype(TYPES[source.type]).itemsize < np.dtype(TYPES[of]).itemsize:
        get = getter(source, source.type)
    if of in ("f32", "f64"):
        return saturating(step, lambda machine: _to(step, get(machine), to))
    return lambda machine: get(machine).astype(TYPES[to])


def _from_half(bits):
    return bits.view(np.float16).astype(F32)


def _from_bfloat(bits):
    return (bits.astype(U32) << U32(16)).view(F32)


def half_bits(number) -> np.ndarray:
    """Bits of float16, as uint32."""
    return number.astype(np.float16).view(np.uint16).astype(U32)


def bfloat_bits(number) -> np.ndarray:
    """Bits of bfloat16, rounded to nearest even, as uint32."""
    bits = number.view(U32).astype(np.int64)
    near = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(U32)
    return np.where(np.isnan(number), U32(0x7FFF), near)


def e4m3_bits(number) -> np.ndarray:
    """Bits of E4M3 floats, rounded to nearest even and saturated to 448, as uint32."""
    size = np.nan_to_num(np.minimum(np.abs(number.astype(np.float64)), 448))
    exponent = np.where(size, np.clip(np.frexp(size)[1] - 1, -6, 8), -6)
    bits = (exponent + 6 << 3) + np.rint(np.ldexp(size, 3 - exponent)).astype(np.int64)  # 8 .. 16 eighths, or fewer
    return np.where(np.isnan(number), 127, bits | np.signbit(number) * 128).astype(U32)


def e2m1_bits(number) -> np.ndarray:
    """The E2M1 codes of floats, ties to even, one in each byte. Values above 6, and NaN, become 6."""
    size = np.minimum(np.nan_to_num(np.abs(number.astype(np.float64)), nan=6), 6)
    step = np.where(size < 2, 0.5, np.where(size < 4, 1, 2))     # distance to the next E2M1 number
    bits = np.rint(size / step) + np.where(size < 2, 0, np.where(size < 4, 2, 4))
    return (bits.astype(np.uint8) | (np.signbit(number) & ~np.isnan(number)) * np.uint8(8)).astype(np.uint8)


def float8_values(exponent_bits: int) -> np.ndarray:
    """float32 [256]: the values of all codes of an 8-bit float, E4M3 (4 exponent bits, no infinities) or E5M2 (5)."""
    code, mantissa_bits, bias = np.arange(256), 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = code >> mantissa_bits & 2 ** exponent_bits - 1, code & 2 ** mantissa_bits - 1
    size = np.ldexp(mantissa + (exponent > 0) * 2.0 ** mantissa_bits, np.maximum(exponent, 1) - bias - mantissa_bits)
    top = exponent == 2 ** exponent_bits - 1
    if exponent_bits == 5:
        size = np.where(top, np.where(mantissa, np.nan, np.inf), size)
    else:
        size = np.where(top & (mantissa == 7), np.nan, size)
    return np.where(code & 128, -size, size).astype(F32)


def _to(step, number, to: str):
    """Convert floats to another type. Conversion to integers saturates; NaN becomes 0."""
    rounding = next((function for name, function in ROUND.items() if name in step.parts), None)
    if to in ("f32", "f64"):
        return (rounding(number) if rounding else number).astype(TYPES[to])
    limits = np.iinfo(TYPES[to])
    exact = rounding(np.nan_to_num(np.asarray(number, np.float64), posinf=np.inf, neginf=-np.inf))
    inside = (exact > float(limits.min)) & (exact < float(limits.max))
    whole = np.where(inside, exact, 0).astype(TYPES[to])
    return np.where(exact >= float(limits.max), limits.max, np.where(exact <= float(limits.min), limits.min, whole)
                    ).astype(TYPES[to])
