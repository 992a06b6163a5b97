"""Relative-position scores of one tile (disentangled attention): products of queries and keys with learned embeddings,
looked up by the bucket of the relative position.

c2p: products of queries with position embeddings (content to position); p2c: products of keys (position to content).
"""

import numpy as np

from numflow.cpu.attention.slots import HEAD, POSITION, SCORES, SLOTS, Y_ADDRESS
from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64
from numflow.cpu.runtime.kernel import STARTS
from numflow.cpu.simd.vector import inline


@inline
def add_relative_scores(args, scratch, rows, sequence, base, keys):
    """Add c2p and p2c to the scores of keys base .. base + keys - 1.

    The p2c products of a key are a long row, of which neighbouring queries read neighbours: so keys are the outer loop.
    """
    begin = np.int64(i32_ptr(i64(i64(args, SLOTS.header), STARTS))[sequence])
    buckets, reach = i32_ptr(i64(args, SLOTS.bucket_table)), i64(args, SLOTS.bucket_reach)
    scale = f64(args, SLOTS.scale)
    c2p_row, p2c_row = 4 * i64(args, SLOTS.c2p_stride), 4 * i64(args, SLOTS.p2c_stride)
    head = 4 * i64(scratch + HEAD, 0) * i64(args, SLOTS.n_buckets)  # byte offset; all rows of a tile are of one head
    c2p = i64(args, SLOTS.c2p) + begin * c2p_row + head
    for key in range(base, base + keys):
        p2c = f32_ptr(i64(args, SLOTS.p2c) + (begin + key) * p2c_row + head)
        for r in range(rows):
            position, score = i64(scratch + POSITION, r), f32_ptr(scratch + SCORES + 256 * r)
            bucket = buckets[min(max(key - position, -reach), reach) + reach]
            score[key - base] += np.float32(scale) * (f32_ptr(c2p + position * c2p_row)[bucket] + p2c[bucket])


@inline
def add_c2p_scores(args, scratch, rows, base, keys):
    """Add c2p alone to the scores of keys base .. base + keys - 1."""
    buckets, reach = i32_ptr(i64(args, SLOTS.bucket_table)), i64(args, SLOTS.bucket_reach)
    scale = f64(args, SLOTS.scale)
    for r in range(rows):
        t = (i64(scratch + Y_ADDRESS, r) - i64(args, SLOTS.y)) // (4 * i64(args, SLOTS.y_stride))
        offset = t * i64(args, SLOTS.c2p_stride) + i64(scratch + HEAD, r) * i64(args, SLOTS.n_buckets)
        c2p, position = f32_ptr(i64(args, SLOTS.c2p) + 4 * offset), i64(scratch + POSITION, r)
        score = f32_ptr(scratch + SCORES + 256 * r)
        for key in range(base, base + keys):
            bucket = buckets[min(max(key - position, -reach), reach) + reach]
            score[key - base] += np.float32(scale) * c2p[bucket]
