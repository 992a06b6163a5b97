"""Planes of codes (bits.py) in compiled kernels: the same bytes."""

import numpy as np

from numflow.quant.bits import Plane
from numflow.quant.threads import kernel


def plane_table(planes: tuple[Plane, ...], codes: int, first: int = 0) -> np.ndarray:
    """int64 [planes, 5] for the kernels below, for blocks of `codes` codes whose planes begin at byte `first`.

    A row is width, shift, first byte, and how far apart the codes of one byte, and of two bytes in turn, are.
    """
    rows, at = [], first
    for plane in planes:
        size = plane.bytes(codes)
        apart = (size, 1) if plane.split else (1, 8 // plane.width)
        rows.append((plane.width, plane.shift, at, *apart))
        at += size
    return np.array(rows, np.int64)


@kernel
def pack_block(codes, count, planes, out):
    """`count` codes u8 -> their planes in `out` u8."""
    for p in range(planes.shape[0]):
        width, shift, at, inner, outer = planes[p]
        mask = (1 << width) - 1
        for k in range(count * width // 8):
            byte = 0
            for j in range(8 // width):
                byte |= ((np.int64(codes[k * outer + j * inner]) >> shift) & mask) << (width * j)
            out[at + k] = byte


@kernel
def unpack_block(raw, count, planes, codes):
    """The planes in `raw` u8 -> `count` codes, of any integer type."""
    codes[:count] = 0
    for p in range(planes.shape[0]):
        width, shift, at, inner, outer = planes[p]
        mask = (1 << width) - 1
        for k in range(count * width // 8):
            for j in range(8 // width):
                codes[k * outer + j * inner] |= ((np.int64(raw[at + k]) >> (width * j)) & mask) << shift
