"""Sparse attention's choice of visible keys for each query (op `index_select`): index scores, then the top_k of them.

The scores use a small key cache of the index. With a cache of entries, the choice is among entries whose windows have
ended.

    index_scores   one warp for 32 keys of a row: each lane has one key; the query of one head after the other is in
                   shared memory
    index_choose   one warp for a row: binary search, bit by bit, for the score of the top_k-th key, then the bitmap
    index_tokens   (op `index_tokens`) one warp for 32 words of a row: each lane has one word, the bits of 32 tokens
"""

import functools

from numflow.cuda.attention.entries import row_of
from numflow.cuda.attention.parameters import BatchTables
from numflow.cuda.device.call import N_TOKENS, Call, ceil, per_row
from numflow.cuda.device.device import Launch
from numflow.cuda.lang.arithmetic import bits_of, count_bits, fmax
from numflow.cuda.lang.hadamard import rotate
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import ballot, block_x, block_y, lane_index, load4, sync_warp
from numflow.cuda.lang.kernel import Kernel, device, kernel
from numflow.cuda.lang.parameters import IntRows, Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.state.cache_code import PIECE, floats, pitch, region, width
from numflow.ops import Step, param
from numflow.quant.kv import BLOCK, CODED


def index_select(step: Step, ctx) -> list[Call]:
    """q f32 [T, I * d], weights f32 [T, I], keys in a cache of one head -> y i32 [T, W], a bitmap of the keys."""
    (q, weights), (y,), batch = step.inputs, step.outputs, ctx.batch
    cache, heads = ctx.caches[param(step, "cache")], param(step, "heads")
    scores = ctx.scratch("scores of an index", 4 * ctx.room(y) * 32 * y.width)
    tables = BatchTables(
        positions=batch.ref("positions"), sequence_of=batch.ref("sequence_of"), starts=batch.ref("starts"),
        table=batch.ref(cache.table), table_stride=batch.stride, lengths=batch.ref(cache.lengths), counts=batch.counts)
    size, every = cache.shape.k_dim, max(cache.shape.every, 1)
    args = (scores, 32 * y.width, ctx.view(q), ctx.view(weights), cache.k, tables, heads, size, cache.block_size,
            cache.block_rows, every)
    index_scores = _scores(cache.types[0], size, cache.shape.every > 0)
    return [Call(step, lambda sizes: Launch(index_scores, (sizes.rows[N_TOKENS], ceil(sizes.keys, 32 * every), 1),
                                            args)),
            per_row(step, _choose, N_TOKENS, 1, IntRows(*ctx.view(y)), scores, tables, y.width, param(step, "top_k"),
                    every)]


def index_tokens(step: Step, ctx) -> list[Call]:
    """x i32 [T, V], a bitmap of entries -> y i32 [T, W], the bitmap of their tokens."""
    (x,), (y,), batch = step.inputs, step.outputs, ctx.batch
    return [per_row(step, _tokens, N_TOKENS, 1, IntRows(*ctx.view(y)), IntRows(*ctx.view(x)), batch.ref("positions"),
                    batch.counts, y.width, param(step, "every"))]


@functools.cache
def _scores(k_type: str, size: int, of_entries: bool) -> Kernel:
    """score = sum over heads of weight * max(q k, 0). Grid (rows, keys / 32)."""
    k_width, rotated = width(k_type, size), k_type in CODED
    queries, key_of, keys_at = SharedArray(f32, -(-k_width // 32) * 32), floats(k_type, size), region(k_type, size)
    step, unit, is_wide = pitch(k_type, size), BLOCK if rotated else PIECE, k_width > 64

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
            # Load the query of the head, rotated (Hadamard) if the keys are.
            column = lane
            while column < k_width:
                value = q.data[t * q.stride + head * size + column] if column < size else f32(0)
                query[column] = rotate(value, lane) if rotated else value
                column = u32(column + 32)
            sync_warp()
            dot, piece = f32(0), u32(0)
            # For wide rows the trip count comes from a kernel parameter: with a constant, the compiler would unroll
            # the loop and run out of registers.
            count = u32((size + unit - 1) // u32(unit) * u32(unit) // u32(8)) if is_wide else u32(k_width // 8)
            while piece < count:
                k0, k1, k2, k3, k4, k5, k6, k7 = key_of(keys, block_size, offset, piece)
                q0, q1, q2, q3 = load4(query, u32(8 * piece))
                q4, q5, q6, q7 = load4(query, u32(8 * piece + 4))
                dot += (q0 * k0 + q1 * k1) + (q2 * k2 + q3 * k3)
                dot += (q4 * k4 + q5 * k5) + (q6 * k6 + q7 * k7)
                piece = u32(piece + 1)
            total += weights.data[t * weights.stride + head] * fmax(dot, f32(0))
            # Barrier: all lanes have read the query, before the next one overwrites it.
            sync_warp()
            head = u32(head + 1)
        scores[t * most + key] = total

    return _index_scores


@device
def _order(value):
    """Map a float's bit pattern to a u32 so that unsigned comparison of words orders the floats."""
    bits = u32(bits_of(value))
    return u32(bits ^ (u32(0xFFFFFFFF) if bits >> u32(31) != 0 else u32(0x80000000)))


@kernel("index_choose", 32)
def _choose(y: IntRows, scores: f32.ptr, batch: BatchTables, words: u32, top_k: u32, every: u32):
    """Grid (rows). Among equal scores, the earliest keys are chosen."""
    t, lane = block_x(), u32(lane_index())
    if t >= batch.counts[N_TOKENS]:
        return
    keys = u32(u32(batch.positions[t] + 1) // every)
    keys = keys if keys < 32 * words else u32(32 * words)
    row_scores = scores + t * u32(32 * words)
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
            y.data[t * y.stride + word] = i32(larger | taken)
        word = u32(word + 1)
    word = u32(live_words + lane)
    while word < words:
        y.data[t * y.stride + word] = i32(0)
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
