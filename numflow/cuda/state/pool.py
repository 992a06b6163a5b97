"""Entries that summarise windows of tokens (op `pool`): in each column, the mean of values under a softmax of gates.

A cache holds a row of gates and values for each of the last tokens. An entry covers `series` windows of `every` tokens;
each of the windows has its own columns of the row. A thread computes one column of the entry of a token that ends a
window, and takes the tokens in order.
"""

from numflow.cuda.device.call import N_TOKENS, Call, ceil, per_row
from numflow.cuda.lang.arithmetic import exp, fmax
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import device, kernel
from numflow.cuda.lang.parameters import Places, Rows
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.state.cache_code import width
from numflow.ops import Step, param

THREADS = 128
LOWEST = -3.0e38  # below every gate


def pool(step: Step, ctx) -> list[Call]:
    """bias f32 [every, S * E], a cache of rows [gates S * E, values S * E] -> y f32 [T, E].

    Rows of tokens that end no window are zero.
    """
    (y,), cache, bias = step.outputs, ctx.caches[param(step, "cache")], ctx.vector(step.weights["bias"])
    cache_rows = ctx.batch.places(cache.table, N_TOKENS)
    return [per_row(step, _pool, N_TOKENS, ceil(y.width, THREADS), ctx.view(y), cache.k, bias, cache_rows, y.width,
                    width("f32", cache.shape.k_dim), cache.block_size, param(step, "every"), param(step, "series"))]


@kernel("pool", THREADS)
def _pool(y: Rows, cache: f32.ptr, bias: f32.ptr, cache_rows: Places, width: u32, row: u32, block_size: u32, every: u32,
          series: u32):
    t, column = block_x(), u32(block_y() * 128 + thread_index())
    if t >= cache_rows.counts[cache_rows.field] or column >= width:
        return
    length = u32(cache_rows.positions[t] + 1)
    if length % every != 0:
        y.data[t * y.stride + column] = f32(0)
        return
    blocks, span = cache_rows.table + cache_rows.sequence_of[t] * cache_rows.table_stride, u32(series * every)
    first = u32(length - span) if length > span else u32(0)
    # The maximum of the gates.
    maximum, token = f32(LOWEST), first
    while token < length:
        start = u32(u32(series - 1 - (length - 1 - token) // every) * width + column)
        gate = cache[_row(blocks, token, block_size) * row + start] + bias[token % every * u32(series * width) + start]
        maximum = fmax(maximum, gate)
        token = u32(token + 1)
    # Softmax of the gates, and the weighted values.
    total, values, token = f32(0), f32(0), first
    while token < length:
        start = u32(u32(series - 1 - (length - 1 - token) // every) * width + column)
        address = _row(blocks, token, block_size) * row + start
        weight = exp(cache[address] + bias[token % every * u32(series * width) + start] - maximum)
        total += weight
        values += weight * cache[address + u32(series * width)]
        token = u32(token + 1)
    y.data[t * y.stride + column] = values / total


@device
def _row(blocks, token, block_size):
    """Index of a token's row in the cache."""
    return u32(u32(blocks[token // block_size]) * block_size + token % block_size)
