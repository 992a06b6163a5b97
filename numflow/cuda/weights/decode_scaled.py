"""Decoding of row headers, and of headers that are stored as in the file (SCALED, layout.py)."""

import functools

from numflow.cuda.lang.arithmetic import float_of, half_to_float
from numflow.cuda.lang.intrinsics import stream1, stream4
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.weights.layout import Scheme


@functools.cache
def row_header(scheme: Scheme) -> DeviceFunction:
    """row_header(per_row, row) -> base, step, z, dz: a row's arguments for `decode.header`."""
    words = scheme.row_words

    @device
    def of_grid(per_row, row):
        base, step, z, dz = stream4(per_row, u32(4 * row))
        return base, step, float_of(z), float_of(dz)

    @device
    def of_row(per_row, row):
        d, z = float_of(stream1(per_row, u32(words * row))), f32(0)
        if words == 2:
            z = float_of(stream1(per_row, u32(2 * row + 1)))
        return u32(0), u32(0), d, z

    @device
    def nothing(per_row, row):
        return u32(0), u32(0), f32(0), f32(0)

    return {4: of_grid, 0: nothing}.get(words, of_row)


def scaled(scheme: Scheme) -> DeviceFunction:
    """`decode.header` for SCALED headers."""
    (d_words, z_words), factor, zero = scheme.words, scheme.factor, float(scheme.zero)
    d_of, z_of = _typed(scheme.scale), _typed(scheme.zeros if z_words else scheme.scale)
    halves, whole = scheme.shared == 16, not scheme.shared
    shift = max(0, scheme.shared // 32).bit_length() - 1 if scheme.shared >= 32 else 0
    with_zeros, in_bytes, size = bool(scheme.zeros), bool(scheme.zeros) and not z_words, d_words + z_words

    @device
    def one_of(head, above, block):
        a = d_of(head, u32(block * size))
        if factor != 1.0:
            a = a * f32(factor)
        if in_bytes:
            return a, -a * f32(u32(stream1(above, block >> u32(2)) >> u32(u32(block & u32(3)) << u32(3))) & u32(255))
        if with_zeros:
            return a, -a * z_of(head, u32(block * size + d_words))
        return a, -f32(zero) * a

    @device
    def of_row(head, above, place, base, step, z, dz):
        a = z * f32(factor)
        if with_zeros:
            return a, -a * dz, a, -a * dz
        return a, -f32(zero) * a, a, -f32(zero) * a

    @device
    def of_blocks(head, above, place, base, step, z, dz):
        a, c = one_of(head, above, place >> u32(shift))
        return a, c, a, c

    @device
    def of_halves(head, above, place, base, step, z, dz):
        a, c = one_of(head, above, u32(2 * place))
        b, d = one_of(head, above, u32(2 * place + 1))
        return a, c, b, d

    return of_row if whole else of_halves if halves else of_blocks


@functools.cache
def _typed(kind: str) -> DeviceFunction:
    """read(head, at): a value of a type whose 16 bits, or first 16 of 32 bits, are at index `at`."""

    @device
    def half(head, at):
        return half_to_float(stream1(head, at))

    @device
    def bfloat(head, at):
        return float_of(u32(u32(stream1(head, at)) << u32(16)))

    @device
    def full(head, at):
        return float_of(u32(u32(stream1(head, at)) | u32(stream1(head, u32(at + 1))) << u32(16)))

    return {"F16": half, "BF16": bfloat, "F32": full}[kind]
