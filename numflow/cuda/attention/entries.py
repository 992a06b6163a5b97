"""Attention over entries, which summarise windows of tokens: the second phase of the kernel in exact.py.

The warp has processed the ordinary keys and continues its online softmax. An entry is one float32 row that is both key
and value. The warp takes 32 entries at a time: each lane computes the score of one entry, then the lanes share out the
columns of the values.
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
    """One step of a warp's online softmax, with one score in each lane.

    Returns the weight of the lane's score, the factor that rescales earlier sums, the new maximum and the new total.
    """
    larger = fmax(peak, warp_max(score))
    weight = exp(score - larger) if inside != 0 else f32(0)
    fade = exp(peak - larger)
    return weight, fade, larger, total * fade + warp_sum(weight)


@device
def row_of(entry, blocks, block_size, block_rows, every):
    """Index of an entry's row in the cache. The row is in the KV block of the window's last token."""
    last = u32(u32(entry + 1) * every - 1)
    return u32(u32(blocks[last // block_size]) * block_rows + last % block_size // every)


@functools.cache
def entry_walker(columns: int, has_cap: bool, has_chosen: bool) -> DeviceFunction:
    """Make walk(acc, query, p, row_ids, peak, total, rows, blocks, block_rows, width, every, block_size, length, bits,
    begin_bits, scale, cap, lane) -> peak, total.

    `walk` adds the entries of a sequence of `length` tokens, this part's share of them, to the online softmax.
    acc: the lane's sums of `columns` columns, 32 apart. query f32 [width], p f32 [32] and row_ids u32 [32] are in
    shared memory. bits: bitmap of the chosen entries, from word `begin_bits` on.
    """
    bias = biased(has_cap, False, False, 1.0)

    @device
    def walk(acc, query, p, row_ids, peak, total, rows, blocks, block_rows, width, every, block_size, length, bits,
             begin_bits, scale, cap, lane):
        # The range of entries of this part; a part has whole groups of 32.
        total_entries, parts = u32(u32(length) // every), u32(grid_z())
        share = u32(u32(total_entries + 32 * parts - 1) // u32(32 * parts) * 32)
        begin = u32(block_z() * share)
        end = u32(begin + share) if begin + share < total_entries else total_entries
        while begin < end:
            entry, n_entries = u32(begin + lane), u32(end - begin) if end - begin < 32 else u32(32)
            inside = u32(1) if entry < end else u32(0)
            word = u32(0xFFFFFFFF)
            if has_chosen:
                word = u32(bits[begin_bits + (begin >> u32(5))])
                inside = u32(inside & (word >> lane))
            if word != 0:
                # Scores: each lane computes the whole dot product of one entry.
                score, row = f32(LOWEST), u32(0)
                if inside != 0:
                    row = row_of(entry, blocks, block_size, block_rows, every)
                    source, dot, column = rows + row * width, f32(0), u32(0)
                    while column < width:
                        k0, k1, k2, k3 = load4(source, column)
                        q0, q1, q2, q3 = load4(query, column)
                        dot += (q0 * k0 + q1 * k1) + (q2 * k2 + q3 * k3)
                        column = u32(column + 4)
                    score = bias(dot, scale, cap, query, query, 0, 0, 0, 0, scale, 0)
                weight, fade, peak, total = weighed(score, inside, peak, total)
                p[lane], row_ids[lane] = weight, row
                for i in range(columns):
                    acc[i] *= fade
                # Barrier: the weights of all lanes are in shared memory. Then each lane sums its columns of the values.
                sync_warp()
                j = u32(0)
                while j < n_entries:
                    if p[j] > f32(0):
                        source = rows + row_ids[j] * width
                        for i in range(columns):
                            column = u32(lane + 32 * i)
                            if column < width:
                                acc[i] += p[j] * source[column]
                    j = u32(j + 1)
                sync_warp()
            begin = u32(begin + 32)
        return peak, total

    return walk
