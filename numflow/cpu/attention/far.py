"""Scores of one tile by the distances of its keys: products with learned vectors, found by numbers."""

import numpy as np

from numflow.cpu.attention.slots import HEAD, POSITION, SCORES, SLOTS, WHERE
from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64
from numflow.cpu.runtime.kernel import STARTS
from numflow.cpu.simd.vector import inline


@inline
def add_far(args, scratch, rows, sequence, base, keys):
    """Add the products of queries, and of keys base .. base + keys - 1, with the vectors of their distances.

    A key's products are a long row, of which neighbouring queries read neighbours: so keys are the outer loop.
    """
    begin = np.int64(i32_ptr(i64(i64(args, SLOTS.header), STARTS))[sequence])
    places, reach, scale = i32_ptr(i64(args, SLOTS.places)), i64(args, SLOTS.places_reach), f64(args, SLOTS.scale)
    own, other = 4 * i64(args, SLOTS.of_queries_stride), 4 * i64(args, SLOTS.of_keys_stride)
    at = 4 * i64(scratch + HEAD, 0) * i64(args, SLOTS.far)  # all rows of a tile are of one head
    queries = i64(args, SLOTS.of_queries) + begin * own + at
    for key in range(base, base + keys):
        of_key = f32_ptr(i64(args, SLOTS.of_keys) + (begin + key) * other + at)
        for r in range(rows):
            position, score = i64(scratch + POSITION, r), f32_ptr(scratch + SCORES + 256 * r)
            number = places[min(max(key - position, -reach), reach) + reach]
            score[key - base] += np.float32(scale) * (f32_ptr(queries + position * own)[number] + of_key[number])


@inline
def add_of_queries(args, scratch, rows, base, keys):
    """Add the products of queries alone with the vectors of their distances to keys base .. base + keys - 1."""
    places, reach, scale = i32_ptr(i64(args, SLOTS.places)), i64(args, SLOTS.places_reach), f64(args, SLOTS.scale)
    for r in range(rows):
        t = (i64(scratch + WHERE, r) - i64(args, SLOTS.y)) // (4 * i64(args, SLOTS.y_stride))
        at = t * i64(args, SLOTS.of_queries_stride) + i64(scratch + HEAD, r) * i64(args, SLOTS.far)
        own, position = f32_ptr(i64(args, SLOTS.of_queries) + 4 * at), i64(scratch + POSITION, r)
        score = f32_ptr(scratch + SCORES + 256 * r)
        for key in range(base, base + keys):
            number = places[min(max(key - position, -reach), reach) + reach]
            score[key - base] += np.float32(scale) * own[number]
