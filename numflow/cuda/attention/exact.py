"""Attention in float32 throughout, for keys and values of any type (activations "f32" and float32 caches).

One warp, alone in its block, computes one query head of one row. It takes 32 keys at a time: each lane computes the
score of one key, then each lane sums its columns of the values. With few rows and many keys, the keys of a head are
split into parts, one block each, and join.py combines the partial results. Entries come after the keys (entries.py) and
are split in the same way.
"""

import functools

from numflow.cuda.attention.bias import biased, seen
from numflow.cuda.attention.entries import entry_walker, weighed
from numflow.cuda.attention.join import LOWEST
from numflow.cuda.attention.parameters import BatchTables, Biases, Chosen, Entries, Heads, RelativeScores, Scores
from numflow.cuda.device.call import N_TOKENS
from numflow.cuda.lang.hadamard import rotate
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    ballot,
    block_x,
    block_y,
    block_z,
    grid_z,
    lane_index,
    load4,
    sync_warp,
)
from numflow.cuda.lang.kernel import Kernel, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.state.cache_code import PIECE, element, floats, name_of_values, pitch, region, width
from numflow.quant.kv import BLOCK, CODED


@functools.cache
def exact_kernel(k_type: str, v_type: str, k_dim: int, v_dim: int, has_cap: bool, has_slopes: bool,
                 has_sinks: bool, has_buckets: bool, v_row: int, has_chosen: bool = False,
                 has_relative: bool = False, has_entries: bool = False, has_blocks: bool = False) -> Kernel:
    """Grid (heads, rows, parts).

    v_row: columns of a row in the value cache; a value is its first v_dim columns. has_chosen: only keys whose bits are
    set are visible; with entries, only entries whose bits are set; with blocks, only keys of blocks whose bits are set
    for the key head. has_far: the scores have relative-position terms.
    """
    k_width, columns = width(k_type, k_dim), -(-width(v_type, v_dim) // 32)
    pieces, v_width = k_width // 8, width(v_type, v_dim)
    rotated, unrotate = k_type in CODED, v_type in CODED
    step, is_wide = BLOCK if rotated else PIECE, k_width > 256  # step: rows are padded to a multiple of these columns
    sums, queries = LocalArray(f32, columns), SharedArray(f32, -(-k_width // 32) * 32)
    weights, block_ids_of, offsets_of = SharedArray(f32, 32), SharedArray(u32, 32), SharedArray(u32, 32)
    key_of, value_of = floats(k_type, k_dim), element(v_type, v_row)
    keys_at, values_at = region(k_type, k_dim), region(v_type, v_row)
    bias = biased(has_cap, has_slopes, has_buckets, 1.0)
    extras = "_softcap" * has_cap + "_slopes" * has_slopes + "_sinks" * has_sinks + "_buckets" * has_buckets
    extras += "_entries" * has_entries + "_chosen" * has_chosen + "_blocks" * has_blocks
    extras += "_far" * has_relative
    walk = entry_walker(columns, has_cap, has_chosen) if has_entries else None
    k_name, v_name = f"{k_type}_{pitch(k_type, k_dim)}", name_of_values(v_type, v_dim, v_row)

    @kernel(f"attention_{k_name}_{v_name}{extras}", 32, blocks=8 if is_wide else 12,
            exact=has_buckets)
    def _attention(y: Rows, partial: f32.ptr, q: Rows, k: u32.ptr, v: u32.ptr, biases: Biases, batch: BatchTables,
                   shape: Heads, rule: Scores, chosen: Chosen, relative: RelativeScores, entries: Entries):
        # Block indices: a query head and a row. Then the range of keys that the row sees.
        head, t, lane = block_x(), block_y(), u32(lane_index())
        if t >= batch.counts[N_TOKENS]:
            return
        sequence, position = batch.sequence_of[t], i32(batch.positions[t])
        first, end = seen(position, i32(batch.lengths[sequence]), rule.causal, rule.window, rule.chunk)
        blocks, kv_head = batch.table + sequence * batch.table_stride, u32(head // (shape.heads // shape.kv_heads))
        query, acc, p, block_ids, offsets = queries(), sums(), weights(), block_ids_of(), offsets_of()
        # Load the query to shared memory, rotated (Hadamard) if the keys are.
        column = lane
        while column < k_width:
            value = q.data[t * q.stride + head * shape.k_dim + column] if column < shape.k_dim else f32(0)
            query[column] = rotate(value, lane) if rotated else value
            column = u32(column + 32)
        sync_warp()
        # Running maximum and sum of the online softmax. A sink is one more term of the sum.
        for i in range(columns):
            acc[i] = f32(0)
        peak, total = f32(LOWEST), f32(0)
        if has_sinks and block_z() == 0:
            peak, total = biases.sinks[head], f32(1)
        # The range of keys of this part; a part has whole groups of 32.
        n_parts = u32(grid_z())
        if n_parts > 1 and first < end:
            part_keys = u32(u32(u32(end - first) + 32 * n_parts - 1) // u32(32 * n_parts) * 32)
            first = i32(first + block_z() * part_keys)
            end = i32(first + part_keys) if first + part_keys < end else end
        # Scores of 32 keys: each lane computes the whole dot product of one key.
        begin = first
        while begin < end:
            key = i32(begin + lane)
            score, block, offset = f32(LOWEST), u32(0), u32(0)
            inside = u32(1) if key < end else u32(0)
            if has_chosen and not has_entries and inside != 0:
                bit = u32(u32(key) // chosen.block) if has_blocks else u32(key)
                words = u32(t * chosen.stride + kv_head * chosen.words) if has_blocks else u32(t * chosen.stride)
                word = u32(chosen.data[words + (bit >> u32(5))])
                inside = u32(u32(word >> u32(bit & u32(31))) & u32(1))
            if has_blocks and ballot(inside != 0) == 0:  # no key of the group is in a visible block
                begin = i32(begin + 32)
                continue
            if key < end:  # also for keys that are not chosen: the values phase reads them with weight 0
                block, offset = u32(blocks[u32(key) // shape.block_size]), u32(u32(key) % shape.block_size)
            if inside != 0:
                keys = keys_at(k, block, shape.kv_heads, kv_head, shape.block_size)
                dot, piece = f32(0), u32(0)
                # For wide rows the trip count comes from a kernel parameter: with a constant, the compiler would
                # unroll the loop and run out of registers.
                count = u32((shape.k_dim + step - 1) // u32(step) * u32(step) // u32(8)) if is_wide else u32(pieces)
                while piece < count:
                    k0, k1, k2, k3, k4, k5, k6, k7 = key_of(keys, shape.block_size, offset, piece)
                    q0, q1, q2, q3 = load4(query, u32(8 * piece))
                    q4, q5, q6, q7 = load4(query, u32(8 * piece + 4))
                    dot += (q0 * k0 + q1 * k1) + (q2 * k2 + q3 * k3)
                    dot += (q4 * k4 + q5 * k5) + (q6 * k6 + q7 * k7)
                    piece = u32(piece + 1)
                if has_relative:
                    distance = i32(key - position)
                    distance = relative.max_distance if distance > relative.max_distance else distance
                    distance = i32(-relative.max_distance) if distance < -relative.max_distance else distance
                    embedding = u32(relative.buckets[u32(distance + relative.max_distance)])
                    embedding = u32(head * relative.count + embedding)
                    dot += relative.queries[t * relative.queries_stride + embedding]
                    if relative.keys_stride != 0:
                        row = u32(u32(batch.starts[sequence]) + u32(key))
                        dot += relative.keys[row * relative.keys_stride + embedding]
                score = bias(dot, rule.scale, rule.cap, biases.slopes, biases.buckets, i32(key - position), head,
                             shape.heads, rule.n_buckets, rule.spread, rule.causal)
            # Online softmax: rescale the sums by exp(old maximum - new maximum).
            weight, fade, peak, total = weighed(score, inside, peak, total)
            p[lane], block_ids[lane], offsets[lane] = weight, block, offset
            # Barrier: the weights of all lanes are in shared memory. Then each lane sums its columns of the values.
            sync_warp()
            n_keys = u32(end - begin) if end - begin < 32 else u32(32)
            for i in range(columns):
                acc[i] *= fade
            j = u32(0)
            while j < n_keys:
                values = values_at(v, block_ids[j], shape.kv_heads, kv_head, shape.block_size)
                for i in range(columns):
                    column = u32(lane + 32 * i)
                    if column < v_width:
                        acc[i] += p[j] * value_of(values, shape.block_size, offsets[j], column)
                j = u32(j + 1)
            sync_warp()
            begin = i32(begin + 32)
        # Entries are not rotated: rotate the sums back, and load the query again without rotation.
        if has_entries:
            for i in range(columns):
                acc[i] = rotate(acc[i], lane) if unrotate else acc[i]
            column = lane
            while rotated and column < k_width:
                query[column] = q.data[t * q.stride + head * shape.k_dim + column] if column < shape.k_dim else f32(0)
                column = u32(column + 32)
            sync_warp()
            peak, total = walk(acc, query, p, block_ids, peak, total, entries.rows,
                               entries.table + sequence * batch.table_stride, entries.block_rows, entries.width,
                               entries.every, shape.block_size, u32(position + 1), chosen.data, u32(t * chosen.stride),
                               rule.scale, rule.cap, lane)
        # Epilogue: write y, or with several parts the partial results that attention_join combines.
        out = partial + ((t * shape.heads + head) * n_parts + block_z()) * (shape.v_dim + 2)
        if n_parts > 1 and lane == 0:
            out[0], out[1] = peak, total
        for i in range(columns):
            column = u32(lane + 32 * i)
            value = rotate(acc[i], lane) if unrotate and not has_entries else acc[i]
            if column < shape.v_dim and n_parts > 1:
                out[column + 2] = value
            elif column < shape.v_dim:
                y.data[t * y.stride + head * shape.v_dim + column] = value / total

    return _attention
