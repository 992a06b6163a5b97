"""The keys that each query sees (op `index_select`): scores by small keys of their own, then the best of them.

Of a cache of entries the keys are these, in their order, of windows that have ended.

    index_scores   a warp for 32 keys of a row: a lane has a key, and the heads go round in shared memory
    index_choose   a warp for a row: the score of the last key that is chosen, bit by bit, then the bits
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
    """q f32 [T, I * d], weights f32 [T, I], keys in a cache of one head -> y i32 [T, W], bits of the keys."""
    (q, weights), (y,), batch = step.inputs, step.outputs, ctx.batch
    cache, heads = ctx.caches[param(step, "cache")], param(step, "heads")
    scores = ctx.scratch("scores of an index", 4 * ctx.room(y) * 32 * y.width)
    tables = BatchTables(
        positions=batch.ref("positions"), sequence_of=batch.ref("sequence_of"), starts=batch.ref("starts"),
        table=batch.ref(cache.table), table_stride=batch.stride, lengths=batch.ref(cache.lengths), counts=batch.counts)
    size, every = cache.shape.k_dim, max(cache.shape.every, 1)
    args = (scores, 32 * y.width, ctx.view(q), ctx.view(weights), cache.k, tables, heads, size, cache.block_size,
            cache.block_rows, every)
    found = _scores(cache.types[0], size, cache.shape.every > 0)
    return [Call(step, lambda sizes: Launch(found, (sizes.rows[N_TOKENS], ceil(sizes.keys, 32 * every), 1), args)),
            per_row(step, _choose, N_TOKENS, 1, IntRows(*ctx.view(y)), scores, tables, y.width, param(step, "top_k"),
                    every)]


@functools.cache
def _scores(k_type: str, size: int, of_entries: bool) -> Kernel:
    """Grid (rows, keys / 32)."""
    k_width, turned = width(k_type, size), k_type in CODED
    queries, key_of, keys_at = SharedArray(f32, -(-k_width // 32) * 32), floats(k_type, size), region(k_type, size)
    step, unit, is_wide = pitch(k_type, size), BLOCK if turned else PIECE, k_width > 64

    @kernel(f"index_scores_{k_type}_{step}{'_entries' * of_entries}", 32)
    def _index_scores(scores: f32.ptr, most: u32, q: Rows, weights: Rows, k: u32.ptr, batch: BatchTables, heads: u32,
                      size: u32, block_size: u32, block_rows: u32, every: u32):
        # Place in the grid: a row and 32 of the keys that it sees.
        t, lane = block_x(), u32(lane_index())
        key = u32(32 * block_y() + lane)
        if t >= batch.counts[N_TOKENS] or 32 * block_y() >= most:
            return
        visible = u32(u32(batch.positions[t] + 1) // every) if of_entries else u32(batch.positions[t] + 1)
        if 32 * block_y() >= visible:
            return
        query, seen = queries(), key if key < visible else u32(visible - 1)
        blocks = batch.table + batch.sequence_of[t] * batch.table_stride
        if of_entries:
            keys, place = k + row_of(seen, blocks, block_size, block_rows, every) * step, u32(0)
        else:
            keys = keys_at(k, u32(blocks[seen // block_size]), u32(1), u32(0), block_size)
            place = u32(seen % block_size)
        # For each head: its query to shared memory, then products with the keys.
        total, head = f32(0), u32(0)
        while head < heads:
            # The query of a head to shared memory, rotated where keys are.
            column = lane
            while column < k_width:
                value = q.data[t * q.stride + head * size + column] if column < size else f32(0)
                query[column] = rotate(value, lane) if turned else value
                column = u32(column + 32)
            sync_warp()
            dot, piece = f32(0), u32(0)
            # A number of the launch where rows are wide: the compiler would unroll a known one out of registers.
            count = u32((size + unit - 1) // u32(unit) * u32(unit) // u32(8)) if is_wide else u32(k_width // 8)
            while piece < count:
                k0, k1, k2, k3, k4, k5, k6, k7 = key_of(keys, block_size, place, piece)
                q0, q1, q2, q3 = load4(query, u32(8 * piece))
                q4, q5, q6, q7 = load4(query, u32(8 * piece + 4))
                dot += (q0 * k0 + q1 * k1) + (q2 * k2 + q3 * k3)
                dot += (q4 * k4 + q5 * k5) + (q6 * k6 + q7 * k7)
                piece = u32(piece + 1)
            total += weights.data[t * weights.stride + head] * fmax(dot, f32(0))
            # Barrier: all lanes have read the query.
            sync_warp()
            head = u32(head + 1)
        scores[t * most + key] = total

    return _index_scores


@device
def _order(value):
    """The bits of a float as a word that is larger for a larger float."""
    bits = u32(bits_of(value))
    return u32(bits ^ (u32(0xFFFFFFFF) if bits >> u32(31) != 0 else u32(0x80000000)))


@kernel("index_choose", 32)
def _choose(y: IntRows, scores: f32.ptr, batch: BatchTables, words: u32, top_k: u32, every: u32):
    """Grid (rows). Of equal scores the first keys are chosen."""
    t, lane = block_x(), u32(lane_index())
    if t >= batch.counts[N_TOKENS]:
        return
    keys = u32(u32(batch.positions[t] + 1) // every)
    keys = keys if keys < 32 * words else u32(32 * words)
    own = scores + t * u32(32 * words)
    # The largest word that top_k scores reach: bit by bit.
    least, bit = u32(0), u32(32)
    while bit > 0 and keys > top_k:
        bit = u32(bit - 1)
        tried, reached, begin = u32(least | (u32(1) << bit)), u32(0), u32(0)
        while begin < keys:
            at = u32(begin + lane)
            reached = u32(reached + count_bits(ballot(at < keys and _order(own[at]) >= tried)))
            begin = u32(begin + 32)
        least = tried if reached >= top_k else least
    above, begin = u32(0), u32(0)
    while begin < keys:
        at = u32(begin + lane)
        above = u32(above + count_bits(ballot(at < keys and _order(own[at]) > least)))
        begin = u32(begin + 32)
    # The bits: what is above, and as many of the equal ones as are left.
    left, word, used = u32(top_k - above) if top_k > above else u32(0), u32(0), u32(u32(keys + 31) >> u32(5))
    while word < used:
        at = u32(32 * word + lane)
        order = _order(own[at]) if at < keys else u32(0)
        larger = u32(ballot(at < keys and order > least))
        equal = u32(ballot(at < keys and order == least))
        before = u32(count_bits(u32(equal & u32((u32(1) << lane) - u32(1)))))
        taken = u32(ballot(at < keys and order == least and before < left))
        left = u32(left - count_bits(taken))
        if lane == 0:
            y.data[t * y.stride + word] = i32(larger | taken)
        word = u32(word + 1)
    word = u32(used + lane)
    while word < words:
        y.data[t * y.stride + word] = i32(0)
        word = u32(word + 32)
