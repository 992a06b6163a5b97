"""The kernel of `pool` (cache.py)."""

import numpy as np

from numflow.cpu.runtime.access import i32_ptr, i64, share
from numflow.cpu.runtime.kernel import POSITIONS, SEQUENCE_OF, kernel
from numflow.cpu.simd.float32 import fma, load_part, maximum, splat, store_part
from numflow.cpu.simd.functions import exp_to_1
from numflow.cpu.simd.vector import inline, zero_f32
from numflow.cpu.state.cache import POOL

_MIN_SCORE = np.float32(-3e38)


@kernel
def pool(args, thread, n_threads):
    """Compute the entries that tokens of the batch complete; rows of other tokens are 0. Items: rows times vectors."""
    header, every, width = i64(args, POOL.header), i64(args, POOL.every), i64(args, POOL.width)
    positions, vectors = i32_ptr(i64(header, POSITIONS)), (width + 15) // 16
    begin, end = share(i64(header, i64(args, POOL.rows)) * vectors, thread, n_threads)
    for item in range(begin, end):
        t, column = item // vectors, item % vectors * 16
        y = i64(args, POOL.y) + 4 * (t * i64(args, POOL.y_stride) + column)
        length = np.int64(positions[t]) + 1
        if length % every:
            store_part(y, zero_f32(), width - column)
        else:
            store_part(y, _pooled(args, t, length, column), width - column)


@inline
def _pooled(args, t, length, column):
    """16 columns of the entry that token length - 1 completes: softmax-weighted sum of values, in the order of tokens.
    """
    every, series = i64(args, POOL.every), i64(args, POOL.series)
    first = max(length - series * every, length % every)
    peak = splat(_MIN_SCORE)
    for token in range(first, length):
        peak = maximum(_gate(args, t, token, length, column), peak)
    total, values = zero_f32(), zero_f32()
    for token in range(first, length):
        weight = exp_to_1(_gate(args, t, token, length, column) - peak)
        values = fma(weight, _load_columns(args, t, token, length, column, series), values)
        total = total + weight
    return values / total


@inline
def _gate(args, t, token, length, column):
    """Gates of a token plus the bias of its index in its window; lanes behind the columns are zeros."""
    every, series, width = i64(args, POOL.every), i64(args, POOL.series), i64(args, POOL.width)
    window = series - 1 - (length - 1 - token) // every
    bias = i64(args, POOL.bias) + 4 * (token % every * series * width + window * width + column)
    return _load_columns(args, t, token, length, column, 0) + load_part(bias, width - column)


@inline
def _load_columns(args, t, token, length, column, part):
    """16 columns of a token's cached row for this entry. part: 0 for gates, `series` for values."""
    header, tokens, width = i64(args, POOL.header), i64(args, POOL.tokens), i64(args, POOL.width)
    sequence = np.int64(i32_ptr(i64(header, SEQUENCE_OF))[t])
    table = i32_ptr(i64(header, i64(args, POOL.table)) + 4 * sequence * i64(header, i64(args, POOL.table_stride)))
    row = np.int64(table[token // tokens]) * tokens + token % tokens
    index = part + i64(args, POOL.series) - 1 - (length - 1 - token) // i64(args, POOL.every)
    return load_part(i64(i64(args, POOL.cache), 0) + row * i64(args, POOL.size) + 4 * (index * width + column),
                     width - column)
