"""Kernels of rotary position embeddings (rope.py)."""

import math

import numpy as np

from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import FREQUENCIES, FREQUENCIES_STRIDE, POSITIONS, SEQUENCE_OF, kernel
from numflow.cpu.simd.float32 import evens, fma, load_part, odds, store_part, zipped_high, zipped_low
from numflow.cpu.simd.vector import inline

HEADER, ROWS, X, X_STRIDE, Y, Y_STRIDE, ANGLES, ANGLES_STRIDE, HEADS, HEAD_DIM, START, HALF = range(12)
TABLE, COUNT, SCALE, OFFSET = X, X_STRIDE, ANGLES, HEADS
FIRST = X


@kernel
def rope_angles(args, thread, n_threads):
    """The angle is a float32 product, as in published implementations; its cosine is taken in double precision."""
    positions = i32_ptr(i64(i64(args, HEADER), POSITIONS))
    frequencies, count, scale = f32_ptr(i64(args, TABLE)), i64(args, COUNT), np.float32(f64(args, SCALE))
    offset = i64(args, OFFSET)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for t in range(begin, end):
        y = f32_ptr(i64(args, Y) + 4 * t * i64(args, Y_STRIDE))
        for i in range(count):
            angle = np.float64(np.float32(positions[t] + offset) * frequencies[i])
            y[i] = np.float32(math.cos(angle)) * scale
            y[count + i] = np.float32(math.sin(angle)) * scale


@kernel
def rope_angles_by_length(args, thread, n_threads):
    """The same with frequencies, followed by a factor, of each row's sequence. FIRST: their first column."""
    positions = i32_ptr(i64(i64(args, HEADER), POSITIONS))
    sequence_of, stride = i32_ptr(i64(i64(args, HEADER), SEQUENCE_OF)), i64(i64(args, HEADER), FREQUENCIES_STRIDE)
    table, count = i64(i64(args, HEADER), FREQUENCIES) + 4 * i64(args, FIRST), i64(args, COUNT)
    offset = i64(args, OFFSET)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for t in range(begin, end):
        y = f32_ptr(i64(args, Y) + 4 * t * i64(args, Y_STRIDE))
        frequencies = f32_ptr(table + 4 * sequence_of[t] * stride)
        for i in range(count):
            angle = np.float64(np.float32(positions[t] + offset) * frequencies[i])
            y[i] = np.float32(math.cos(angle)) * frequencies[count]
            y[count + i] = np.float32(math.sin(angle)) * frequencies[count]


@kernel
def rope_half(args, thread, n_threads):
    """Pairs (i, i + F) of each head's columns from START. Items: rows times heads."""
    half = i64(args, HALF)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)) * i64(args, HEADS), thread, n_threads)
    for item in range(begin, end):
        x, y, cos, sin = _head(args, item)
        for i in range(0, half, 16):
            offset, n = 4 * i, half - i
            a, b = load_part(x + offset, n), load_part(x + 4 * half + offset, n)
            c, s = load_part(cos + offset, n), load_part(sin + offset, n)
            store_part(y + offset, _rotated_a(a, b, c, s), n)
            store_part(y + 4 * half + offset, _rotated_b(a, b, c, s), n)


@kernel
def rope_adjacent(args, thread, n_threads):
    """Pairs (2i, 2i + 1) of each head's columns from START. Items: rows times heads."""
    half = i64(args, HALF)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)) * i64(args, HEADS), thread, n_threads)
    for item in range(begin, end):
        x, y, cos, sin = _head(args, item)
        for i in range(0, half, 16):
            offset, n = 8 * i, 2 * (half - i)
            low, high = load_part(x + offset, n), load_part(x + offset + 64, n - 16)
            a, b = evens(low, high), odds(low, high)
            c, s = load_part(cos + 4 * i, half - i), load_part(sin + 4 * i, half - i)
            a, b = _rotated_a(a, b, c, s), _rotated_b(a, b, c, s)
            store_part(y + offset, zipped_low(a, b), n)
            store_part(y + offset + 64, zipped_high(a, b), n - 16)


@inline
def _rotated_a(a, b, cos, sin):
    return fma(a, cos, -(b * sin))


@inline
def _rotated_b(a, b, cos, sin):
    return fma(b, cos, a * sin)


@inline
def _head(args, item):
    """Addresses of the first rotated column of x and y, and of the row's cosines and sines. Copies all other columns.
    """
    heads, size, start, rotated = i64(args, HEADS), i64(args, HEAD_DIM), i64(args, START), 2 * i64(args, HALF)
    t, first = item // heads, 4 * size * (item % heads)
    x = i64(args, X) + 4 * t * i64(args, X_STRIDE) + first
    y = i64(args, Y) + 4 * t * i64(args, Y_STRIDE) + first
    if x != y:
        _copy(x, y, start)
        _copy(x + 4 * (start + rotated), y + 4 * (start + rotated), size - start - rotated)
    cos = i64(args, ANGLES) + 4 * t * i64(args, ANGLES_STRIDE)
    return x + 4 * start, y + 4 * start, cos, cos + 2 * rotated


@inline
def _copy(x, y, count):
    for i in range(0, count, 16):
        store_part(y + 4 * i, load_part(x + 4 * i, count - i), count - i)
