"""Writing of keys and values into the KV cache (op `cache_write`): floats, or codes that the kernel quantises.

The codes are bit for bit those of quant/kv.py. A warp quantises a unit of 32 columns, one for each lane. Every
operation rounds once, in the order of quant/kv.py: no fused multiply-add.
"""

import functools

import numpy as np

from numflow.cuda.device.call import Call, ceil, per_row
from numflow.cuda.lang.arithmetic import (
    add_exactly,
    bits_of,
    divide_exactly,
    float_of,
    float_to_half,
    fmin,
    multiply_exactly,
    round_to_int,
)
from numflow.cuda.lang.hadamard import rotate
from numflow.cuda.lang.intrinsics import (
    as_floats,
    as_u16,
    ballot,
    block_x,
    block_y,
    lane_index,
    shuffle,
    shuffle_xor,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Places, Rows
from numflow.cuda.lang.reduce import warp_max, warp_sum
from numflow.cuda.lang.scalar import f32, i32, u16, u32
from numflow.cuda.state.cache_code import pitch, planes, region, width
from numflow.ops import Step, param
from numflow.quant.bits import Plane
from numflow.quant.kv import CODED, PAIR_LEVELS, SMALLEST

THREADS = 128


def cache_write(step: Step, ctx) -> list[Call]:
    """k f32 [T, G * E], v f32 [T, G * E_v] if values are stored: write each token's row at its position."""
    cache, batch = ctx.caches[param(step, "cache")], ctx.batch
    if cache.shape.every:
        return _entries(step, ctx)
    calls = []
    stored = list(zip(step.inputs, cache.types, (cache.shape.k_dim, cache.shape.v_dim)))
    for target, (view, kind, size) in (pair for targets in cache.write_targets for pair in zip(targets, stored)):
        columns = cache.shape.kv_heads * width(kind, size)
        write = code_kernel(kind, width(kind, size)) if kind in CODED else write_kernel(kind)
        calls.append(per_row(step, write, ctx.rows(view), ceil(columns, THREADS), target, ctx.view(view),
                             batch.places(cache.table, ctx.rows(view)), size, width(kind, size), cache.shape.kv_heads,
                             cache.block_size))
    return calls


def _entries(step: Step, ctx) -> list[Call]:
    """k f32 [T, E]: write the rows of the tokens that end a window."""
    (k,), cache = step.inputs, ctx.caches[param(step, "cache")]
    columns, rows = width("f32", k.width), ctx.batch.places(cache.table, ctx.rows(k))
    return [per_row(step, _write_entries, ctx.rows(k), ceil(columns, THREADS), target, ctx.view(k), rows, k.width,
                    columns, cache.block_size, cache.block_rows, cache.shape.every)
            for target, _ in cache.write_targets]


@kernel("cache_write_entries", THREADS)
def _write_entries(cache: f32.ptr, x: Rows, rows: Places, size: u32, width: u32, block_size: u32, block_rows: u32,
                   every: u32):
    """One thread for each element. Columns beyond `size` become zero."""
    t, column = block_x(), u32(block_y() * 128 + thread_index())
    if t >= rows.counts[rows.field] or column >= width:
        return
    position = u32(rows.positions[t])
    if u32(position + 1) % every != 0:
        return
    block = u32(rows.table[rows.sequence_of[t] * rows.table_stride + position // block_size])
    value = x.data[t * x.stride + column] if column < size else f32(0)
    cache[(block * block_rows + position % block_size // every) * width + column] = value


@functools.cache
def write_kernel(kind: str) -> Kernel:
    """One thread for each element. Columns beyond `size` become zero."""
    half = kind == "f16"

    @kernel(f"cache_write_{kind}", THREADS)
    def _cache_write(cache: u32.ptr, x: Rows, rows: Places, size: u32, width: u32, heads: u32, block_size: u32):
        t, column = block_x(), u32(block_y() * 128 + thread_index())
        if t >= rows.counts[rows.field] or column >= heads * width:
            return
        position = u32(rows.positions[t])
        block = rows.table[rows.sequence_of[t] * rows.table_stride + position // block_size]
        head, head_column = u32(column // width), u32(column % width)
        address = ((block * heads + head) * block_size + position % block_size) * width + head_column
        value = x.data[t * x.stride + head * size + head_column] if head_column < size else f32(0)
        if half:
            as_u16(cache)[address] = float_to_half(value)
        else:
            as_floats(cache)[address] = value

    return _cache_write


@functools.cache
def code_kernel(kind: str, columns: int) -> Kernel:
    """One warp for each unit of 32 columns."""
    step, encode, put, region_of = pitch(kind, columns), _encoder(kind), _putter(kind), region(kind, columns)

    @kernel(f"cache_write_{kind}_{step}", THREADS)
    def _cache_write_codes(cache: u32.ptr, x: Rows, rows: Places, size: u32, width: u32, heads: u32, block_size: u32):
        t, lane = block_x(), u32(lane_index())
        unit_index = u32(block_y() * 4 + (thread_index() >> u32(5)))
        if t >= rows.counts[rows.field] or unit_index >= heads * step:
            return
        position = u32(rows.positions[t])
        block = u32(rows.table[rows.sequence_of[t] * rows.table_stride + position // block_size])
        head, unit = u32(unit_index // step), u32(unit_index % step)
        column = u32(unit * 32 + lane)
        value = x.data[t * x.stride + head * size + column] if column < size else f32(0)
        code, header = encode(value, lane)
        put(region_of(cache, block, heads, head, block_size), u32(block_size * step),
            u32(position % block_size * step + unit), code, header, lane)

    return _cache_write_codes


@functools.cache
def _encoder(kind: str) -> DeviceFunction:
    """encode(value, lane) -> the lane's code, and the unit's header. The range with the least squared error wins."""
    levels, insets = CODED[kind].levels, CODED[kind].insets
    first, several = _quantiser(levels, insets[0]), len(insets) == 3
    second, third = (_quantiser(levels, insets[1]), _quantiser(levels, insets[2])) if several else (first, first)

    @device
    def encode(value, lane):
        t = rotate(value, lane)
        high, low = warp_max(t), -warp_max(-t)
        code, header, least = first(t, low, high)
        if several:
            new_code, new_header, error = second(t, low, high)
            code, header = (new_code, new_header) if error < least else (code, header)
            least = fmin(error, least)
            new_code, new_header, error = third(t, low, high)
            code, header = (new_code, new_header) if error < least else (code, header)
        return u32(code), header

    return encode


def _quantiser(levels: int, inset_share: float) -> DeviceFunction:
    """quantise(t, low, high) -> the lane's code, the header, and the sum of squared errors.

    share: part of high - low by which the range is narrowed at both ends.
    """
    per_level, inset = float(np.float32(1 / (levels - 1))), float(np.float32(inset_share))

    @device
    def quantise(t, low, high):
        margin = multiply_exactly(add_exactly(high, -low), f32(inset))
        bits = bits_of(add_exactly(low, margin))
        floor_bits = u32(u32(bits + (u32(0xFFFF) if bits >> u32(31) != u32(0) else u32(0))) & u32(0xFFFF0000))
        floor = float_of(floor_bits)
        span = add_exactly(add_exactly(high, -margin), -floor)
        scale_bits = u32(u32(bits_of(multiply_exactly(span, f32(per_level))) + u32(0xFFFF)) & u32(0xFFFF0000))
        scale = float_of(scale_bits)
        inverse = divide_exactly(f32(1), scale) if scale > f32(SMALLEST) else f32(0)
        code = round_to_int(multiply_exactly(add_exactly(t, -floor), inverse))
        code = i32(0) if code < 0 else code
        code = i32(levels - 1) if code > levels - 1 else code
        error = add_exactly(t, -add_exactly(multiply_exactly(f32(code), scale), floor))
        return code, u32(scale_bits >> u32(16) | floor_bits), warp_sum(multiply_exactly(error, error))

    return quantise


def _putter(kind: str) -> DeviceFunction:
    """put(region, units, unit, code, header, lane): write the planes and the header of a unit (cache_code.py)."""
    whole, header_at = planes(kind)
    paired, several = CODED[kind].levels == PAIR_LEVELS, len(whole) > 1
    first = _plane_putter(kind, *whole[0])
    second = _plane_putter(kind, *whole[-1])

    @device
    def put(region, units, unit, code, header, lane):
        if paired:  # lanes 0 .. 15 get one pair of codes each
            source = u32(8 * (lane >> u32(2) & u32(3)) + (lane & u32(3)))
            low_code, high_code = shuffle(code, source), shuffle(code, u32(source + 4))
            code = u32(low_code + high_code * PAIR_LEVELS) if lane < u32(16) else u32(0)
            top = ballot(code & u32(64) != u32(0))
            if lane == 0:
                as_u16(region)[u32(2 * units * (header_at + 1) + unit)] = u16(top)
        if lane == 0:
            region[u32(units * header_at + unit)] = header
        first(region, units, unit, code, lane)
        if several:
            second(region, units, unit, code, lane)

    return put


def _plane_putter(kind: str, plane: Plane, words_before: int) -> DeviceFunction:
    """Write the words of a plane. Each lane has a field; the first of the lanes that share a word writes the word."""
    width, shift, count = plane.width, plane.shift, CODED[kind].codes
    per_word, words = 32 // width, plane.bytes(count) // 4

    @device
    def put_plane(region, units, unit, code, lane):
        position = u32(8 * (lane & u32(3)) + width * (lane >> u32(2) & u32(8 // width - 1)))
        field = u32((code >> u32(shift) & u32((1 << width) - 1)) << position)
        field = u32(field | shuffle_xor(field, 1))
        field = u32(field | shuffle_xor(field, 2))
        if per_word >= 8:
            field = u32(field | shuffle_xor(field, 4))
        if per_word >= 16:
            field = u32(field | shuffle_xor(field, 8))
        if per_word >= 32:
            field = u32(field | shuffle_xor(field, 16))
        if lane % u32(per_word) == 0 and lane < u32(count):
            region[u32(units * words_before + unit * words + lane // u32(per_word))] = field

    return put_plane
