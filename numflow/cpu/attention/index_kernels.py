"""The kernels of `index_select`, `block_select` and `index_tokens` (attention.py); their bits, read by attention."""

import numpy as np

from numflow.cpu.attention.coded import decode_keys
from numflow.cpu.attention.slots import HEAD, INDEX, SELECTED, SLOTS, TOKENS, Y_ADDRESS
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, i64_ptr, share
from numflow.cpu.runtime.kernel import POSITIONS, SEQUENCE_OF, kernel
from numflow.cpu.simd.float32 import fma, keep_lanes, load_part, max_lanes, maximum, sum_lanes
from numflow.cpu.simd.vector import inline, load_f16, load_f32, store_f32, zero_f32
from numflow.cpu.state.cache import CHUNK, GROUP
from numflow.cpu.state.kv_code import rotate
from numflow.cpu.state.kv_rows import BF16, F16
from numflow.quant.kv import BLOCK

_LOWEST, _HIGHEST = np.float32(-np.inf), np.float32(np.inf)


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
def block_select(args, thread, n_threads):
    """Threads share the rows. Per row: the largest score of each block, by head, then the bits of each head."""
    header, scratch = i64(args, INDEX.header), i64(args, INDEX.scratch) + thread * i64(args, INDEX.scratch_bytes)
    positions, sequence_of = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, SEQUENCE_OF))
    begin, end = share(i64(header, i64(args, INDEX.rows)), thread, n_threads)
    block, words, heads = i64(args, INDEX.block), i64(args, INDEX.words), i64(args, INDEX.heads)
    for t in range(begin, end):
        position = np.int64(positions[t])
        blocks = min(position // block + 1, 32 * words)
        table = i32_ptr(i64(header, i64(args, INDEX.table))
                        + 4 * np.int64(sequence_of[t]) * i64(header, i64(args, INDEX.table_stride)))
        if i64(args, INDEX.kind) > BF16:
            _rotate_queries(args, t, scratch + i64(args, INDEX.rotated))
        for head in range(heads):
            for index in range(blocks):
                f32_ptr(scratch)[head * 32 * words + index] = _LOWEST
        for first in range(0, min(position + 1, blocks * block), GROUP):
            _raise_scores(args, scratch, t, table, first, position)
        bits = i32_ptr(i64(args, INDEX.y) + 4 * t * i64(args, INDEX.y_stride))
        for word in range(heads * words):
            bits[word] = 0
        for head in range(heads):
            scores = scratch + 4 * 32 * words * head
            for index in range(max(blocks - i64(args, INDEX.local), 0), blocks):
                f32_ptr(scores)[index] = _HIGHEST
            _select(i32_ptr(scores), i32_ptr(i64(args, INDEX.y) + 4 * (t * i64(args, INDEX.y_stride) + words * head)),
                    blocks, i64(args, INDEX.top_k))


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
def select_chunk(args, scratch, rows, base, max_key):
    """Store the visible keys of the chunk from `base` on for each row of a tile of attention, as bits.

    Returns whether a row sees a key. Keys that no row sees add exactly 0.
    """
    block, last, found = i64(args, SLOTS.selected_block), min(base + CHUNK - 1, max_key), np.int64(0)
    for r in range(rows):
        t = (i64(scratch + Y_ADDRESS, r) - i64(args, SLOTS.y)) // (4 * i64(args, SLOTS.y_stride))
        head = i64(scratch + HEAD, r) // i64(args, SLOTS.queries_per_key)
        words = i32_ptr(i64(args, SLOTS.selected) + 4 * (t * i64(args, SLOTS.selected_stride)
                                                        + head * i64(args, SLOTS.selected_words)))
        bits = np.int64(0)
        if block == 0:
            for word in range((last - base) // 32 + 1):
                bits |= (np.int64(words[base // 32 + word]) & 0xFFFFFFFF) << (32 * word)
        else:
            for index in range(base // block, last // block + 1):
                begin, end = max(index * block - base, 0), min((index + 1) * block - base, np.int64(CHUNK))
                ones = np.int64(-1) if end - begin == CHUNK else (np.int64(1) << (end - begin)) - 1
                bits |= (ones << begin) * _bit(words, index)
        i64_ptr(scratch + SELECTED)[r] = bits
        found |= bits
    return found != 0


@inline
def _bit(words, index):
    return (np.int64(words[index // 32]) >> (index % 32)) & 1


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
def _raise_scores(args, scratch, t, table, first, position):
    """Raise the scores of blocks, by head, to those of 16 keys from `first` on, up to the row's position."""
    q, columns, k = _operands(args, scratch, t, table, first)
    kind, heads, head = i64(args, INDEX.kind), i64(args, INDEX.heads), np.int64(0)
    while head + 4 <= heads:  # four sums at a time hide the latency of the additions
        a, b, c, d = _four_products(kind, q, columns, k, head)
        _raise_head(args, scratch, head, first, position, a)
        _raise_head(args, scratch, head + 1, first, position, b)
        _raise_head(args, scratch, head + 2, first, position, c)
        _raise_head(args, scratch, head + 3, first, position, d)
        head += 4
    for rest in range(head, heads):
        _raise_head(args, scratch, rest, first, position, _product(kind, q, columns, k, rest))


@inline
def _raise_head(args, scratch, head, first, position, product):
    """Raise the scores of blocks of one head to products with 16 keys."""
    block, words = i64(args, INDEX.block), i64(args, INDEX.words)
    scores, lanes = f32_ptr(scratch + 4 * 32 * words * head), scratch + 4 * 32 * words * i64(args, INDEX.heads)
    product = keep_lanes(product, np.int64(0), position - first, _LOWEST)
    if block % GROUP == 0:
        scores[first // block] = max(scores[first // block], max_lanes(product))
    else:
        store_f32(lanes, product)
        for lane in range(min(np.int64(GROUP), position + 1 - first)):
            index = (first + lane) // block
            if index < 32 * words:
                scores[index] = max(scores[index], f32_ptr(lanes)[lane])


@inline
def _operands(args, scratch, t, table, first):
    """The queries of a row and their columns; 16 keys from `first` on, decoded where needed."""
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
    return q, columns, k


@inline
def _product(kind, q, columns, k, head):
    """Products of the query of a head and 16 keys."""
    q, product = f32_ptr(q), zero_f32()
    for e in range(columns):
        column = load_f16(k + 2 * GROUP * e) if kind == F16 else load_f32(k + 4 * GROUP * e)
        product = fma(q[head * columns + e], column, product)
    return product


@inline
def _four_products(kind, q, columns, k, head):
    """_product of four heads from `head` on."""
    q, a, b, c, d = f32_ptr(q), zero_f32(), zero_f32(), zero_f32(), zero_f32()
    for e in range(columns):
        column, at = load_f16(k + 2 * GROUP * e) if kind == F16 else load_f32(k + 4 * GROUP * e), head * columns + e
        a, b = fma(q[at], column, a), fma(q[at + columns], column, b)
        c, d = fma(q[at + 2 * columns], column, c), fma(q[at + 3 * columns], column, d)
    return a, b, c, d


@inline
def _scores(args, scratch, t, table, first):
    """Scores of 16 keys from `first` on: sum over heads of weight * max(q . k, 0)."""
    q, columns, k = _operands(args, scratch, t, table, first)
    weights = f32_ptr(i64(args, INDEX.weights) + 4 * t * i64(args, INDEX.weights_stride))
    total = zero_f32()
    for head in range(i64(args, INDEX.heads)):
        product = _product(i64(args, INDEX.kind), q, columns, k, head)
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
