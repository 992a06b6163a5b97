"""Sparse attention's choice of visible keys for each query (op `index_select`), or of blocks of keys for each head (op
`block_select`): index scores, then the top_k of them.

The scores use a small key cache of the index. With a cache of entries, the choice is among entries whose windows have
ended.

    index_scores   one warp for 32 keys of a row: each lane has one key; the query of one head after the other is in
                   shared memory
    block_scores   one warp for a block of keys of a row and head, or for the blocks of 32 keys
    index_choose   one warp for a row, or for a head of a row: binary search, bit by bit, for the score of the top_k-th
                   key, entry or block, then the bitmap
    index_tokens   (op `index_tokens`) one warp for 32 words of a row: each lane has one word, the bits of 32 tokens
"""

import functools

from numflow.cuda.attention.entries import row_of
from numflow.cuda.attention.join import LOWEST
from numflow.cuda.attention.parameters import BatchTables
from numflow.cuda.device.call import N_TOKENS, Call, ceil, per_row
from numflow.cuda.device.device import Launch
from numflow.cuda.lang.arithmetic import bits_of, count_bits, fmax
from numflow.cuda.lang.hadamard import rotate
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import ballot, block_x, block_y, block_z, lane_index, load4, sync_warp
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import IntRows, Rows
from numflow.cuda.lang.reduce import warp_max
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.state.cache_code import PIECE, floats, pitch, region, width
from numflow.ops import Step, param
from numflow.quant.kv import BLOCK, CODED

HIGHEST = 3.0e38  # above every score


def index_select(step: Step, ctx) -> list[Call]:
    """q f32 [T, I * d], weights f32 [T, I], keys in a cache of one head -> y i32 [T, W], a bitmap of the keys."""
    (q, weights), (y,), batch = step.inputs, step.outputs, ctx.batch
    cache, heads = ctx.caches[param(step, "cache")], param(step, "heads")
    scores = ctx.scratch("scores of an index", 4 * ctx.room(y) * 32 * y.width)
    tables = _tables(batch, cache)
    size, every = cache.shape.k_dim, max(cache.shape.every, 1)
    args = (scores, 32 * y.width, ctx.view(q), ctx.view(weights), cache.k, tables, heads, size, cache.block_size,
            cache.block_rows, every)
    index_scores = _scores(cache.types[0], size, cache.shape.every > 0)
    return [Call(step, lambda sizes: Launch(index_scores, (sizes.rows[N_TOKENS], ceil(sizes.keys, 32 * every), 1),
                                            args)),
            per_row(step, _choose, N_TOKENS, 1, IntRows(*ctx.view(y)), scores, tables, y.width, param(step, "top_k"),
                    every, 1, 1)]


def block_select(step: Step, ctx) -> list[Call]:
    """q f32 [T, H * d], keys in a cache of one head -> y i32 [T, H * W], a bitmap of the blocks for each head."""
    (q,), (y,), batch, cache = step.inputs, step.outputs, ctx.batch, ctx.caches[param(step, "cache")]
    heads, block, size = param(step, "heads"), param(step, "block"), cache.shape.k_dim
    scores = ctx.scratch("scores of an index", 4 * ctx.room(y) * 32 * y.width)
    words, each, tables = y.width // heads, max(32 // block, 1), _tables(batch, cache)
    args = (scores, 32 * words, ctx.view(q), cache.k, tables, heads, size, cache.block_size, block, each,
            param(step, "local"))
    kernel = _block_scores(cache.types[0], size)
    return [Call(step, lambda sizes: Launch(kernel, (sizes.rows[N_TOKENS], ceil(sizes.keys, block * each), heads),
                                            args)),
            per_row(step, _choose, N_TOKENS, heads, IntRows(*ctx.view(y)), scores, tables, words, param(step, "top_k"),
                    block, block, heads)]


def index_tokens(step: Step, ctx) -> list[Call]:
    """x i32 [T, V], a bitmap of entries -> y i32 [T, W], the bitmap of their tokens."""
    (x,), (y,), batch = step.inputs, step.outputs, ctx.batch
    return [per_row(step, _tokens, N_TOKENS, 1, IntRows(*ctx.view(y)), IntRows(*ctx.view(x)), batch.ref("positions"),
                    batch.counts, y.width, param(step, "every"))]


def _tables(batch, cache) -> BatchTables:
    """Tokens of the batch, and the block table of a cache."""
    return BatchTables(
        positions=batch.ref("positions"), sequence_of=batch.ref("sequence_of"), starts=batch.ref("starts"),
        table=batch.ref(cache.table), table_stride=batch.stride, lengths=batch.ref(cache.lengths), counts=batch.counts)


@functools.cache
def _scores(k_type: str, size: int, of_entries: bool) -> Kernel:
    """score = sum over heads of weight * max(q k, 0). Grid (rows, keys / 32)."""
    queries, keys_at = SharedArray(f32, -(-width(k_type, size) // 32) * 32), region(k_type, size)
    load, product, step = _query_loader(k_type, size), _product(k_type, size, 64), pitch(k_type, size)

    @kernel(f"index_scores_{k_type}_{step}{'_entries' * of_entries}", 32)
    def _index_scores(scores: f32.ptr, most: u32, q: Rows, weights: Rows, k: u32.ptr, batch: BatchTables, heads: u32,
                      size: u32, block_size: u32, block_rows: u32, every: u32):
        # Block indices: a row and 32 of the keys that it sees.
        t, lane = block_x(), u32(lane_index())
        key = u32(32 * block_y() + lane)
        if t >= batch.counts[N_TOKENS] or 32 * block_y() >= most:
            return
        visible = u32(u32(batch.positions[t] + 1) // every) if of_entries else u32(batch.positions[t] + 1)
        if 32 * block_y() >= visible:
            return
        query, read_key = queries(), key if key < visible else u32(visible - 1)
        blocks = batch.table + batch.sequence_of[t] * batch.table_stride
        if of_entries:
            keys, offset = k + row_of(read_key, blocks, block_size, block_rows, every) * step, u32(0)
        else:
            keys = keys_at(k, u32(blocks[read_key // block_size]), u32(1), u32(0), block_size)
            offset = u32(read_key % block_size)
        # For each head: load its query to shared memory, then multiply it with the keys.
        total, head = f32(0), u32(0)
        while head < heads:
            load(query, q.data, u32(t * q.stride + head * size), size, lane)
            dot = product(query, keys, block_size, offset, size)
            total += weights.data[t * weights.stride + head] * fmax(dot, f32(0))
            # Barrier: all lanes have read the query, before the next one overwrites it.
            sync_warp()
            head = u32(head + 1)
        scores[t * most + key] = total

    return _index_scores


@functools.cache
def _block_scores(k_type: str, size: int) -> Kernel:
    """score = the largest q k of a block's visible keys. Grid (rows, blocks / each, heads)."""
    queries, keys_at = SharedArray(f32, -(-width(k_type, size) // 32) * 32), region(k_type, size)
    load, product, step = _query_loader(k_type, size), _product(k_type, size, 32), pitch(k_type, size)

    @kernel(f"block_scores_{k_type}_{step}", 32)
    def _of_blocks(scores: f32.ptr, most: u32, q: Rows, k: u32.ptr, batch: BatchTables, heads: u32, size: u32,
                   block_size: u32, block: u32, each: u32, local: u32):
        # Block indices: a row, the first of `each` blocks of keys, and a head.
        t, lane, head, index = block_x(), u32(lane_index()), u32(block_z()), u32(block_y() * each)
        last = u32(index + each) if index + each < most else most
        if t >= batch.counts[N_TOKENS] or index >= last:
            return
        visible = u32(batch.positions[t] + 1)
        if index * block >= visible:
            return
        blocks = batch.table + batch.sequence_of[t] * batch.table_stride
        query = queries()
        load(query, q.data, u32(t * q.stride + head * size), size, lane)
        while index < last and index * block < visible:
            # Each lane takes every 32nd key of the block.
            score, key, end = f32(LOWEST), u32(index * block + lane), u32(index * block + block)
            end = end if end < visible else visible
            while key < end:
                keys = keys_at(k, u32(blocks[key // block_size]), u32(1), u32(0), block_size)
                score = fmax(score, product(query, keys, block_size, u32(key % block_size), size))
                key = u32(key + 32)
            score = warp_max(score)
            if lane == 0:
                is_local = index + local > u32(visible - 1) // block
                scores[(t * heads + head) * most + index] = f32(HIGHEST) if is_local else score
            index = u32(index + 1)

    return _of_blocks


def _query_loader(k_type: str, size: int) -> DeviceFunction:
    """Make load(query, q, first, size, lane): copy a query from q[first] on to shared memory, rotated (Hadamard) if the
    keys are."""
    k_width, rotated = width(k_type, size), k_type in CODED

    @device
    def load(query, q, first, size, lane):
        column = lane
        while column < k_width:
            value = q[first + column] if column < size else f32(0)
            query[column] = rotate(value, lane) if rotated else value
            column = u32(column + 32)
        sync_warp()

    return load


def _product(k_type: str, size: int, unrolled: int) -> DeviceFunction:
    """Make product(query, keys, block_size, offset, size): the product of the query and the key at `offset`.

    unrolled: most columns for which the compiler unrolls the loop.
    """
    key_of, unit, k_width = floats(k_type, size), BLOCK if k_type in CODED else PIECE, width(k_type, size)
    is_wide = k_width > unrolled

    @device
    def product(query, keys, block_size, offset, size):
        dot, piece = f32(0), u32(0)
        # For wide rows the trip count comes from a kernel parameter: with a constant, the compiler would unroll the
        # loop and run out of registers.
        count = u32((size + unit - 1) // u32(unit) * u32(unit) // u32(8)) if is_wide else u32(k_width // 8)
        while piece < count:
            k0, k1, k2, k3, k4, k5, k6, k7 = key_of(keys, block_size, offset, piece)
            q0, q1, q2, q3 = load4(query, u32(8 * piece))
            q4, q5, q6, q7 = load4(query, u32(8 * piece + 4))
            dot += (q0 * k0 + q1 * k1) + (q2 * k2 + q3 * k3)
            dot += (q4 * k4 + q5 * k5) + (q6 * k6 + q7 * k7)
            piece = u32(piece + 1)
        return dot

    return product


@device
def _order(value):
    """Map a float's bit pattern to a u32 so that unsigned comparison of words orders the floats."""
    bits = u32(bits_of(value))
    return u32(bits ^ (u32(0xFFFFFFFF) if bits >> u32(31) != 0 else u32(0x80000000)))


@kernel("index_choose", 32)
def _choose(y: IntRows, scores: f32.ptr, batch: BatchTables, words: u32, top_k: u32, every: u32, plus: u32, heads: u32):
    """Grid (rows, heads). The choice is among (position + plus) / every keys, entries or blocks. Among equal scores,
    the earliest are chosen."""
    t, head, lane = block_x(), u32(block_y()), u32(lane_index())
    if t >= batch.counts[N_TOKENS]:
        return
    keys = u32(u32(batch.positions[t] + plus) // every)
    keys = keys if keys < 32 * words else u32(32 * words)
    row_scores, begin_bits = scores + (t * heads + head) * u32(32 * words), u32(t * y.stride + head * words)
    # The largest threshold that at least top_k scores reach, from the highest bit down.
    threshold, bit = u32(0), u32(32)
    while bit > 0 and keys > top_k:
        bit = u32(bit - 1)
        candidate, n_reaching, begin = u32(threshold | (u32(1) << bit)), u32(0), u32(0)
        while begin < keys:
            key = u32(begin + lane)
            n_reaching = u32(n_reaching + count_bits(ballot(key < keys and _order(row_scores[key]) >= candidate)))
            begin = u32(begin + 32)
        threshold = candidate if n_reaching >= top_k else threshold
    n_above, begin = u32(0), u32(0)
    while begin < keys:
        key = u32(begin + lane)
        n_above = u32(n_above + count_bits(ballot(key < keys and _order(row_scores[key]) > threshold)))
        begin = u32(begin + 32)
    # The bitmap: all scores above the threshold, and the earliest of those equal to it, up to top_k in all.
    remaining, word = u32(top_k - n_above) if top_k > n_above else u32(0), u32(0)
    live_words = u32(u32(keys + 31) >> u32(5))
    while word < live_words:
        key = u32(32 * word + lane)
        order = _order(row_scores[key]) if key < keys else u32(0)
        larger = u32(ballot(key < keys and order > threshold))
        equal = u32(ballot(key < keys and order == threshold))
        n_equal_before = u32(count_bits(u32(equal & u32((u32(1) << lane) - u32(1)))))
        taken = u32(ballot(key < keys and order == threshold and n_equal_before < remaining))
        remaining = u32(remaining - count_bits(taken))
        if lane == 0:
            y.data[begin_bits + word] = i32(larger | taken)
        word = u32(word + 1)
    word = u32(live_words + lane)
    while word < words:
        y.data[begin_bits + word] = i32(0)
        word = u32(word + 32)


@kernel("index_tokens", 32)
def _tokens(y: IntRows, x: IntRows, positions: i32.ptr, counts: i32.ptr, words: u32, every: u32):
    """Grid (rows). Bit p of a row is that of window p // every; the tokens of the incomplete window are added."""
    t, word = block_x(), u32(lane_index())
    if t >= counts[N_TOKENS]:
        return
    seen = u32(positions[t] + 1)
    complete = u32(seen // every)
    while word < words:
        found, bit = u32(0), u32(0)
        while bit < 32 and u32(32 * word + bit) < seen:
            window = u32(u32(32 * word + bit) // every)
            chosen = u32(u32(x.data[t * x.stride + u32(window >> u32(5))]) >> u32(window & u32(31))) & u32(1)
            chosen = u32(1) if window == complete else chosen
            found = u32(found | u32(chosen << bit))
            bit = u32(bit + 1)
        y.data[t * y.stride + word] = i32(found)
        word = u32(word + 32)
