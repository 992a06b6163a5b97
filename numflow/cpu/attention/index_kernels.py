"""The kernels of `index_select` and `index_tokens` (attention.py)."""

import numpy as np

from numflow.cpu.attention.coded import decode_keys
from numflow.cpu.attention.slots import INDEX, TOKENS
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import POSITIONS, SEQUENCE_OF, kernel
from numflow.cpu.simd.float32 import fma, load_part, maximum, sum_lanes
from numflow.cpu.simd.vector import inline, load_f16, load_f32, store_f32, zero_f32
from numflow.cpu.state.cache import GROUP
from numflow.cpu.state.kv_code import rotate
from numflow.cpu.state.kv_rows import BF16, F16
from numflow.quant.kv import BLOCK


@kernel
def index_select(args, thread, n_threads):
    """Threads share the rows. Per row: scores of all visible keys, the top_k-th largest score, then the bits."""
    header, scratch = i64(args, INDEX.header), i64(args, INDEX.scratch) + thread * i64(args, INDEX.scratch_bytes)
    positions, sequence_of = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, SEQUENCE_OF))
    begin, end = share(i64(header, i64(args, INDEX.rows)), thread, n_threads)
    for t in range(begin, end):
        every, keys = i64(args, INDEX.every), np.int64(positions[t]) + 1
        keys = min(keys // every if every else keys, 32 * i64(args, INDEX.words))
        table = i32_ptr(i64(header, i64(args, INDEX.table))
                        + 4 * np.int64(sequence_of[t]) * i64(header, i64(args, INDEX.table_stride)))
        if i64(args, INDEX.kind) > BF16:
            _rotate_queries(args, t, scratch + i64(args, INDEX.rotated))
        for entry in range(keys if every else 0):
            f32_ptr(scratch)[entry] = _score_of_entry(args, t, table, entry)
        for first in range(0, 0 if every else keys, GROUP):
            store_f32(scratch + 4 * first, _scores(args, scratch, t, table, first))
        bits = i32_ptr(i64(args, INDEX.y) + 4 * t * i64(args, INDEX.y_stride))
        for word in range(i64(args, INDEX.words)):
            bits[word] = 0
        _select(i32_ptr(scratch), bits, keys, i64(args, INDEX.top_k))


@kernel
def index_tokens(args, thread, n_threads):
    """Threads share the rows. A word of a row has the bits of 32 tokens."""
    header, every = i64(args, TOKENS.header), i64(args, TOKENS.every)
    positions = i32_ptr(i64(header, POSITIONS))
    begin, end = share(i64(header, i64(args, TOKENS.rows)), thread, n_threads)
    for t in range(begin, end):
        windows = i32_ptr(i64(args, TOKENS.x) + 4 * t * i64(args, TOKENS.x_stride))
        bits = i32_ptr(i64(args, TOKENS.y) + 4 * t * i64(args, TOKENS.y_stride))
        position = np.int64(positions[t])
        complete = (position + 1) // every
        for word in range(i64(args, TOKENS.words)):
            found = np.int64(0)
            for bit in range(max(0, min(32, position + 1 - 32 * word))):
                window = (32 * word + bit) // every
                chosen = window == complete or (np.int64(windows[window // 32]) >> (window % 32)) & 1 == 1
                found |= np.int64(chosen) << bit
            bits[word] = np.int32(found)


@inline
def _rotate_queries(args, t, y):
    """Write a row's queries to y, f32 [heads][width], padded with zeros and rotated block by block."""
    size, width = i64(args, INDEX.size), i64(args, INDEX.width)
    q, rotated = f32_ptr(i64(args, INDEX.q) + 4 * t * i64(args, INDEX.q_stride)), f32_ptr(y)
    for head in range(i64(args, INDEX.heads)):
        for e in range(width):
            rotated[head * width + e] = q[head * size + e] if e < size else np.float32(0)
    for block in range(i64(args, INDEX.heads) * width // BLOCK):
        rotate(y + 4 * BLOCK * block)


@inline
def _scores(args, scratch, t, table, first):
    """Scores of 16 keys from `first` on: sum over heads of weight * max(q . k, 0)."""
    block_size, kind, width = i64(args, INDEX.block_size), i64(args, INDEX.kind), i64(args, INDEX.width)
    key = np.int64(table[first // block_size]) * block_size + first % block_size
    k = i64(i64(args, INDEX.cache), 0) + key * i64(args, INDEX.row)
    q, columns = i64(args, INDEX.q) + 4 * t * i64(args, INDEX.q_stride), i64(args, INDEX.size)
    if kind > F16:
        codes = scratch + i64(args, INDEX.rotated)
        if kind > BF16:
            q, columns = codes, width
        codes = codes + 4 * width * i64(args, INDEX.heads)
        decode_keys(kind, width, np.int64(GROUP), k, i64(args, INDEX.row), codes, codes + GROUP * width, k)
        k = codes + GROUP * width
    q, weights = f32_ptr(q), f32_ptr(i64(args, INDEX.weights) + 4 * t * i64(args, INDEX.weights_stride))
    total = zero_f32()
    for head in range(i64(args, INDEX.heads)):
        product = zero_f32()
        for e in range(columns):
            column = load_f16(k + 2 * GROUP * e) if kind == F16 else load_f32(k + 4 * GROUP * e)
            product = fma(q[head * columns + e], column, product)
        total = fma(weights[head], maximum(zero_f32(), product), total)
    return total


@inline
def _score_of_entry(args, t, table, entry):
    """The score of one entry, the same sum."""
    tokens, every, columns = i64(args, INDEX.block_size), i64(args, INDEX.every), i64(args, INDEX.size)
    last = (entry + 1) * every - 1  # last token of the entry
    row = np.int64(table[last // tokens]) * ((tokens + every - 1) // every) + last % tokens // every
    k = i64(i64(args, INDEX.cache), 0) + row * i64(args, INDEX.row)
    q, weights = i64(args, INDEX.q) + 4 * t * i64(args, INDEX.q_stride), f32_ptr(
        i64(args, INDEX.weights) + 4 * t * i64(args, INDEX.weights_stride))
    total = np.float32(0)
    for head in range(i64(args, INDEX.heads)):
        product = zero_f32()
        for e in range(0, columns, 16):
            product = fma(load_part(q + 4 * (head * columns + e), columns - e), load_f32(k + 4 * e), product)
        total += weights[head] * max(sum_lanes(product), np.float32(0))
    return total


@inline
def _order(bits):
    """The bits of a float as an integer that is larger for a larger float."""
    return np.int64(bits) ^ ((np.int64(bits) >> 31) & np.int64(0x7FFFFFFF))


@inline
def _select(scores, bits, keys, top_k):
    """Set the bits of the top_k largest scores, of equal scores the first; of all keys if there are at most top_k."""
    low, high = -np.int64(2147483648), np.int64(2147483647)
    while keys > top_k and low < high:  # binary search of the largest threshold that top_k scores reach
        middle = (low + high + 1) >> 1
        reached = np.int64(0)
        for key in range(keys):
            reached += _order(scores[key]) >= middle
        if reached >= top_k:
            low = middle
        else:
            high = middle - 1
    left = min(top_k, keys)
    for key in range(keys):
        left -= _order(scores[key]) > low
    for key in range(keys):
        order = _order(scores[key])
        equal = order == low and left > 0
        if order > low or equal:
            left -= equal
            bits[key // 32] = np.int32(np.int64(bits[key // 32]) | (np.int64(1) << (key % 32)))
