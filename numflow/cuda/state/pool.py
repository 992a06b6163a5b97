"""Entries of windows of tokens (op `pool`): by column a sum of values, weighed by the softmax of gates.

Gates and values of the last tokens are rows of a cache, of which each window that an entry is made of has columns of
its own. A thread has a column of a token that ends a window, and takes tokens in their order.
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
LOWEST = -3.0e38  # a gate that no token has


def pool(step: Step, ctx) -> list[Call]:
    """bias f32 [every, S * E], a cache of rows [gates S * E, values S * E] -> y f32 [T, E]; other rows are zeros."""
    (y,), cache, bias = step.outputs, ctx.caches[param(step, "cache")], ctx.vector(step.weights["bias"])
    places = ctx.batch.places(cache.table, N_TOKENS)
    return [per_row(step, _pool, N_TOKENS, ceil(y.width, THREADS), ctx.view(y), cache.k, bias, places, y.width,
                    width("f32", cache.shape.k_dim), cache.block_size, param(step, "every"), param(step, "series"))]


@kernel("pool", THREADS)
def _pool(y: Rows, cache: f32.ptr, bias: f32.ptr, places: Places, width: u32, row: u32, block_size: u32, every: u32,
          series: u32):
    t, column = block_x(), u32(block_y() * 128 + thread_index())
    if t >= places.counts[places.field] or column >= width:
        return
    length = u32(places.positions[t] + 1)
    if length % every != 0:
        y.data[t * y.stride + column] = f32(0)
        return
    blocks, span = places.table + places.sequence_of[t] * places.table_stride, u32(series * every)
    first = u32(length - span) if length > span else u32(0)
    # The largest gate.
    peak, token = f32(LOWEST), first
    while token < length:
        own = u32(u32(series - 1 - (length - 1 - token) // every) * width + column)
        gate = cache[_row(blocks, token, block_size) * row + own] + bias[token % every * u32(series * width) + own]
        peak = fmax(peak, gate)
        token = u32(token + 1)
    # Values, weighed by the gates.
    total, values, token = f32(0), f32(0), first
    while token < length:
        own = u32(u32(series - 1 - (length - 1 - token) // every) * width + column)
        place = _row(blocks, token, block_size) * row + own
        weight = exp(cache[place] + bias[token % every * u32(series * width) + own] - peak)
        total += weight
        values += weight * cache[place + u32(series * width)]
        token = u32(token + 1)
    y.data[t * y.stride + column] = values / total


@device
def _row(blocks, token, block_size):
    """Number of a token's row in the cache."""
    return u32(u32(blocks[token // block_size]) * block_size + token % block_size)
