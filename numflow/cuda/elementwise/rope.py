"""Rotary position embedding (ops `rope_angles`, `rope`), and `rope` fused with the `cache_write` that follows it."""

import functools
from typing import NamedTuple

from numflow.cuda.device.call import N_TOKENS, Call, ceil, per_row
from numflow.cuda.lang.arithmetic import cos, float_to_half, sin
from numflow.cuda.lang.intrinsics import after_previous, as_floats, as_u16, block_x, block_y, stream1, thread_index
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Places, Rows
from numflow.cuda.lang.scalar import f32, i32, u8, u32
from numflow.ops import Step, param

THREADS = 128


def rope_angles(step: Step, ctx) -> list[Call]:
    """inv_freq f32 [F], or one row for each sequence if frequencies depend on the length -> y f32 [T, 2F].

    A row of y has the cosines, then the sines.
    """
    y = step.outputs[0]
    half = y.width // 2
    if param(step, "border"):
        by_length = ctx.by_length
        return [per_row(step, _rope_angles_by_length, N_TOKENS, ceil(half, THREADS), *ctx.view(y),
                        ctx.batch.ref("frequencies") + 4 * by_length.start(step), by_length.width,
                        ctx.batch.ref("positions"), ctx.batch.ref("sequence_of"), ctx.batch.counts, half,
                        param(step, "offset"))]
    return [per_row(step, _rope_angles, N_TOKENS, ceil(half, THREADS), *ctx.view(y),
                    ctx.vector(step.weights["inv_freq"]), ctx.batch.ref("positions"), ctx.batch.counts, half,
                    param(step, "scale"), param(step, "offset"))]


def rope(step: Step, ctx) -> list[Call]:
    """x f32 [T, heads * head_dim], angles f32 [T, 2F] -> y as x."""
    (x, angles), (y,) = step.inputs, step.outputs
    half, adjacent = angles.width // 2, param(step, "pairing") == "adjacent"
    return [per_row(step, rope_kernel(adjacent), ctx.rows(x), ceil(x.width, THREADS), *ctx.view(y), *ctx.view(x),
                    *ctx.view(angles), ctx.batch.counts, ctx.rows(x), x.width, param(step, "head_dim"), half,
                    param(step, "start"))]


@kernel("rope_angles", THREADS, exact=True)
def _rope_angles(y: f32.ptr, y_stride: u32, inv_freq: f32.ptr, positions: i32.ptr, counts: i32.ptr, half: u32,
                 scale: f32, offset: i32):
    # float32 product and an accurate cosine: the error of cos.approx would be visible from position 4000 or so on.
    t, i = block_x(), block_y() * 128 + thread_index()
    if t < counts[N_TOKENS] and i < half:
        angle = f32(positions[t] + offset) * inv_freq[i]
        y[t * y_stride + i] = cos(angle) * scale
        y[t * y_stride + half + i] = sin(angle) * scale


@kernel("rope_angles_by_length", THREADS, exact=True)
def _rope_angles_by_length(y: f32.ptr, y_stride: u32, table: f32.ptr, table_stride: u32, positions: i32.ptr,
                           sequence_of: i32.ptr, counts: i32.ptr, half: u32, offset: i32):
    # A row of the table has a sequence's frequencies, then the factor of its cosines and sines.
    t, i = block_x(), block_y() * 128 + thread_index()
    if t < counts[N_TOKENS] and i < half:
        inv_freq = table + sequence_of[t] * table_stride
        angle = f32(positions[t] + offset) * inv_freq[i]
        y[t * y_stride + i] = cos(angle) * inv_freq[half]
        y[t * y_stride + half + i] = sin(angle) * inv_freq[half]


@functools.cache
def rope_kernel(adjacent: bool) -> Kernel:
    """One thread for each column. The thread of a pair's first column rotates both; other columns are copied."""

    @kernel(f"rope_{'adjacent' if adjacent else 'half'}", THREADS)
    def _rope(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, angles: f32.ptr, angles_stride: u32,
              counts: i32.ptr, rows: u32, width: u32, head_dim: u32, half: u32, start: u32):
        t, column = block_x(), u32(block_y() * 128 + thread_index())
        if t >= counts[rows] or column >= width:
            return
        head_column = u32(column % head_dim)
        source, out = x + (t * x_stride + column), y + (t * y_stride + column)
        if head_column < start or head_column >= start + 2 * half:
            out[0] = source[0]
            return
        rotary_column = u32(head_column - start)
        if adjacent:
            first, i, distance = rotary_column & u32(1) == 0, rotary_column >> u32(1), u32(1)
        else:
            first, i, distance = rotary_column < half, rotary_column, half
        if first:
            c, s = angles[t * angles_stride + i], angles[t * angles_stride + half + i]
            a, b = source[0], source[distance]
            out[0] = a * c - b * s
            out[distance] = b * c + a * s

    return _rope


def rope_write(query: Step, key: Step, write: Step, ctx) -> list[Call]:
    """`rope` of queries and keys and `cache_write` of keys and values in one kernel. Keys go to the cache only."""
    (q, angles), (y,), (k, _), (_, v) = query.inputs, query.outputs, key.inputs, write.inputs
    cache, batch = ctx.caches[param(write, "cache")], ctx.batch
    rope_store = rope_write_kernel(param(query, "pairing") == "adjacent", *cache.types)
    head = RotatedColumns(size=param(query, "head_dim"), v_size=cache.shape.v_dim, half=angles.width // 2,
                          start=param(query, "start"))
    cache_rows, widths = batch.places(cache.table, ctx.rows(q)), Widths(q.width, k.width, v.width)
    return [per_row(write, rope_store, ctx.rows(q), ceil(sum(widths), THREADS), ctx.view(y), ctx.view(q), ctx.view(k),
                    ctx.view(v), ctx.view(angles), cache.k, cache.v, cache_rows, widths, head, cache.shape.kv_heads,
                    cache.block_size)]


class Widths(NamedTuple):
    """Columns of queries, of keys and of values."""

    q: u32
    k: u32
    v: u32


class RotatedColumns(NamedTuple):
    """Columns of a query or key head, and of a value head. `half` pairs are rotated, from column `start` on."""

    size: u32
    v_size: u32
    half: u32
    start: u32


@functools.cache
def rope_write_kernel(adjacent: bool, k_type: str, v_type: str) -> Kernel:
    """One thread for each column of queries, keys and values. The thread of a pair's first column rotates both."""
    store_key, store_value = _cache_store(k_type), _cache_store(v_type)

    @kernel(f"rope_{'adjacent' if adjacent else 'half'}_write_{k_type}_{v_type}", THREADS)
    def _rope_write(y: Rows, q: Rows, k: Rows, v: Rows, angles: Rows, keys: u8.ptr, values: u8.ptr, cache_rows: Places,
                    widths: Widths, head: RotatedColumns, heads: u32, block_size: u32):
        # Block indices: a row, and a column of the queries, keys and values side by side.
        t, column = block_x(), u32(block_y() * 128 + thread_index())
        # The row's KV block and offset. No earlier kernel of the step writes the batch: read it before after_previous()
        # (programmatic dependent launch: earlier kernels may still run).
        position, first_row = u32(0), u32(0)
        valid = t < stream1(cache_rows.counts, cache_rows.field) and column < widths.q + widths.k + widths.v
        if valid:
            position, sequence = u32(stream1(cache_rows.positions, t)), stream1(cache_rows.sequence_of, t)
            block = stream1(cache_rows.table, sequence * cache_rows.table_stride + position // block_size)
            first_row = u32(block * heads)
        offset = u32(position % block_size)
        after_previous()
        if not valid:
            return
        # Values are written to the cache unrotated.
        if column >= widths.q + widths.k:
            column = u32(column - widths.q - widths.k)
            row = u32((first_row + column // head.v_size) * block_size + offset)
            store_value(values, row, head.v_size, column % head.v_size, v.data[t * v.stride + column])
            return
        # Queries and keys: the pair to which the column belongs.
        is_key = column >= widths.q
        column = u32(column - widths.q) if is_key else column
        source = k.data + (t * k.stride + column) if is_key else q.data + (t * q.stride + column)
        head_column, distance, b = u32(column % head.size), u32(0), f32(0)
        is_rotated = head_column >= head.start and head_column < head.start + 2 * head.half
        rotary_column = u32(head_column - head.start)
        if adjacent:
            first, i = rotary_column & u32(1) == 0, rotary_column >> u32(1)
        else:
            first, i = rotary_column < head.half, rotary_column
        if is_rotated and not first:
            return  # before the load: the thread of the first column may write there already
        # Load the pair and rotate it.
        a = source[0]
        if is_rotated:
            distance = u32(1) if adjacent else head.half
            c, s = angles.data[t * angles.stride + i], angles.data[t * angles.stride + head.half + i]
            b = source[distance]
            a, b = a * c - b * s, b * c + a * s
        # Write keys to the cache, queries to y.
        if is_key:
            row = u32((first_row + column // head.size) * block_size + offset)
            store_key(keys, row, head.size, head_column, a)
            if distance > 0:
                store_key(keys, row, head.size, u32(head_column + distance), b)
        else:
            out = y.data + (t * y.stride + column)
            out[0] = a
            if distance > 0:
                out[distance] = b

    return _rope_write


@functools.cache
def _cache_store(kind: str) -> DeviceFunction:
    """store(cache, row, size, column, value): write one value of a row of a cache of "f32" or "f16"."""

    @device
    def store_float(cache, row, size, column, value):
        as_floats(cache)[row * size + column] = value

    @device
    def store_half(cache, row, size, column, value):
        as_u16(cache)[row * size + column] = float_to_half(value)

    return store_half if kind == "f16" else store_float
