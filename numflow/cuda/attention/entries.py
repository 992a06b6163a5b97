"""Attention over entries that stand for windows of tokens, by a warp that has seen its keys: exact.py's second half.

Entries are float32, keys and values in one, and their places are of tokens that end a window. As with keys, 32 are
looked at together: a lane has an entry of the scores, then columns of the values.
"""

import functools

from numflow.cuda.attention.bias import biased
from numflow.cuda.attention.join import LOWEST
from numflow.cuda.lang.arithmetic import exp, fmax
from numflow.cuda.lang.intrinsics import block_z, grid_z, load4, sync_warp
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.reduce import warp_max, warp_sum
from numflow.cuda.lang.scalar import f32, u32


@device
def weighed(score, inside, peak, total):
    """Online softmax of a warp: the weight of a lane's score, and the factor, peak and total of the sums so far."""
    larger = fmax(peak, warp_max(score))
    weight = exp(score - larger) if inside != 0 else f32(0)
    fade = exp(peak - larger)
    return weight, fade, larger, total * fade + warp_sum(weight)


@device
def row_of(entry, blocks, block_size, places, every):
    """Number of an entry's row in the cache: at the place of the last token of its window."""
    last = u32(u32(entry + 1) * every - 1)
    return u32(u32(blocks[last // block_size]) * places + last % block_size // every)


@functools.cache
def entry_walker(columns: int, has_cap: bool, has_chosen: bool) -> DeviceFunction:
    """walk(acc, query, p, at, peak, total, rows, blocks, places, width, every, block_size, length, bits, begin_bits,
    scale, cap, lane) -> peak, total: adds this part's share of the entries that a text of `length` tokens has.

    acc: sums of `columns` columns, 32 apart. query: f32 [width]; p, at: f32 [32], u32 [32], all of the warp. bits:
    words of the entries that are chosen, from `begin_bits` on.
    """
    bias = biased(has_cap, False, False, 1.0)

    @device
    def walk(acc, query, p, at, peak, total, rows, blocks, places, width, every, block_size, length, bits,
             begin_bits, scale, cap, lane):
        # The share of the entries that is this part's.
        count, shares = u32(u32(length) // every), u32(grid_z())
        share = u32(u32(count + 32 * shares - 1) // u32(32 * shares) * 32)
        begin = u32(block_z() * share)
        end = u32(begin + share) if begin + share < count else count
        while begin < end:
            entry, some = u32(begin + lane), u32(end - begin) if end - begin < 32 else u32(32)
            inside = u32(1) if entry < end else u32(0)
            word = u32(0xFFFFFFFF)
            if has_chosen:
                word = u32(bits[begin_bits + (begin >> u32(5))])
                inside = u32(inside & (word >> lane))
            if word != 0:
                # Scores: a lane has an entry, and multiplies its whole row.
                score, row = f32(LOWEST), u32(0)
                if inside != 0:
                    row = row_of(entry, blocks, block_size, places, every)
                    source, dot, column = rows + row * width, f32(0), u32(0)
                    while column < width:
                        k0, k1, k2, k3 = load4(source, column)
                        q0, q1, q2, q3 = load4(query, column)
                        dot += (q0 * k0 + q1 * k1) + (q2 * k2 + q3 * k3)
                        column = u32(column + 4)
                    score = bias(dot, scale, cap, query, query, 0, 0, 0, 0, scale, 0)
                weight, fade, peak, total = weighed(score, inside, peak, total)
                p[lane], at[lane] = weight, row
                for i in range(columns):
                    acc[i] *= fade
                # Barrier: weights of all lanes are in shared memory; then values: a lane has columns.
                sync_warp()
                j = u32(0)
                while j < some:
                    if p[j] > f32(0):
                        source = rows + at[j] * width
                        for i in range(columns):
                            column = u32(lane + 32 * i)
                            if column < width:
                                acc[i] += p[j] * source[column]
                    j = u32(j + 1)
                sync_warp()
            begin = u32(begin + 32)
        return peak, total

    return walk
