"""Compiled kernels for bit planes (bits.py), with the same bytes."""

import numpy as np

from numflow.quant.bits import Plane
from numflow.quant.threads import kernel


def plane_table(planes: tuple[Plane, ...], codes: int, first: int = 0) -> np.ndarray:
    """Table of planes for the kernels below, int64 [planes, 5]; planes begin at byte `first`.

    A row is width, shift, byte offset, stride between the codes of one byte, stride between the codes of two bytes.
    """
    rows, offset = [], first
    for plane in planes:
        size = plane.bytes(codes)
        strides = (size, 1) if plane.split else (1, 8 // plane.width)
        rows.append((plane.width, plane.shift, offset, *strides))
        offset += size
    return np.array(rows, np.int64)


@kernel
def pack_block(codes, count, planes, out):
    """Pack `count` codes u8 to planes in `out` u8."""
    for p in range(planes.shape[0]):
        width, shift, offset, inner, outer = planes[p]
        mask = (1 << width) - 1
        for k in range(count * width // 8):
            byte = 0
            for j in range(8 // width):
                byte |= ((np.int64(codes[k * outer + j * inner]) >> shift) & mask) << (width * j)
            out[offset + k] = byte


@kernel
def unpack_block(raw, count, planes, codes):
    """Unpack planes in `raw` u8 to `count` codes of any integer type."""
    codes[:count] = 0
    for p in range(planes.shape[0]):
        width, shift, offset, inner, outer = planes[p]
        mask = (1 << width) - 1
        for k in range(count * width // 8):
            for j in range(8 // width):
                codes[k * outer + j * inner] |= ((np.int64(raw[offset + k]) >> (width * j)) & mask) << shift
