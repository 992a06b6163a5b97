"""Attention of many rows, on tensor cores: prompts, over the paged cache in any type but float32.

A block has 64 rows, pairs of a token and a query head of one group, 16 for each of its 4 warps, and walks over the keys
that they see, 64 at a time (32 where heads are wide). Where values have more than 128 columns, registers hold half of
them: a block has 32 rows, and two warps work for the same 16. The sums of
a row stay in registers: the largest score so far, the sum of weights, the weighted values; a larger score fades what
was there (online softmax).

    S [rows, keys] = Q K^T      O [rows, columns] = fade * O + exp2(S - peak) V

Keys and values go through shared memory, as float16, each while the other is worked with: by cp.async from a float16
cache; codes are fetched into registers before a product and decoded into shared memory after it. Queries, weights and
decoded numbers are rounded to float16; scores and sums are float32. Where there are few blocks, several share the keys,
and join.py joins what they leave.
"""

import functools
from collections.abc import Callable

from numflow.cuda.attention.bias import LOG2_E, biased, seen
from numflow.cuda.attention.join import LOWEST
from numflow.cuda.attention.parameters import BatchTables, Biases, Heads, Scores
from numflow.cuda.attention.tile import query_taker, sixteens, stager
from numflow.cuda.device.call import N_SEQUENCES
from numflow.cuda.lang.arithmetic import exp2, fmax, load_columns, load_matrices, mma_f16, pack_halves
from numflow.cuda.lang.hadamard import rotate_eight
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    block_x,
    block_y,
    block_z,
    copy_wait,
    grid_x,
    grid_z,
    lane_index,
    shuffle_xor,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.state.cache_code import name_of_values, pitch, region
from numflow.quant.kv import CODED

ROWS = 64  # of a block, at most


def warps_across(v_type: str, v_dim: int) -> int:
    """Warps that share the columns of 16 rows; a block has ROWS / warps_across rows."""
    return 2 if sixteens(v_type, v_dim) > 8 else 1


@functools.cache
def many_kernel(k_type: str, v_type: str, k_dim: int, v_dim: int, has_cap: bool, has_slopes: bool, has_sinks: bool,
                has_buckets: bool, v_row: int) -> Kernel:
    """Grid (tiles of all sequences, key heads, parts); v_row: as in exact.py."""
    k_steps, v_steps = sixteens(k_type, k_dim), sixteens(v_type, v_dim)
    keys = 64 if max(k_steps, v_steps) <= 8 else 32
    across = warps_across(v_type, v_dim)
    most_rows, n_tiles, v_tiles = ROWS // across, keys // 8, -(-v_steps // (2 * across)) * 4
    k_pitch, v_pitch = 8 * k_steps + 4, 8 * v_steps + 4  # words of a row: 4 more, so that no banks collide
    k_memory, v_memory = SharedArray(u32, keys * k_pitch), SharedArray(u32, keys * v_pitch)
    queries, scores, sums = LocalArray(u32, 4 * k_steps), LocalArray(f32, 4 * n_tiles), LocalArray(f32, 4 * v_tiles)
    eight, peaks_of, totals_of, fades_of = (LocalArray(f32, n) for n in (8, 2, 2, 2))
    spots_of, lows_of, highs_of, heads_of = (LocalArray(i32, 2) for _ in range(4))
    keys_at, values_at = region(k_type, k_dim), region(v_type, v_row)
    take_queries = query_taker(k_type, k_dim, keys, k_pitch, most_rows)
    put_sums = _put_sums(v_type in CODED, v_tiles)
    key_words, fetch_keys, put_keys = stager(k_type, k_dim, k_dim, keys, k_pitch)
    value_words, fetch_values, put_values = stager(v_type, v_dim, v_row, keys, v_pitch)
    products, weigh = _products(k_steps, n_tiles, k_pitch), _weigh(keys // 16, min(v_steps, v_tiles // 2), v_pitch)
    soften = _soften(n_tiles, biased(has_cap, has_slopes, has_buckets, LOG2_E))
    staged_k, staged_v = LocalArray(u32, key_words), LocalArray(u32, value_words)
    clear, fade = _in_runs(4 * v_tiles, _clear), _in_runs(4 * v_tiles, _fade)
    extras = "_softcap" * has_cap + "_slopes" * has_slopes + "_sinks" * has_sinks + "_buckets" * has_buckets
    k_name, v_name = f"{k_type}_{pitch(k_type, k_dim)}", name_of_values(v_type, v_dim, v_row)

    @kernel(f"attention_many_{k_name}_{v_name}{extras}", 128, blocks=2, exact=has_buckets)
    def _many(y: Rows, partial: f32.ptr, q: Rows, k: u32.ptr, v: u32.ptr, biases: Biases, batch: BatchTables,
              shape: Heads, rule: Scores, most: u32):
        # Find the tile: its sequence and its rows.
        thread, lane, kv_head = u32(thread_index()), u32(lane_index()), block_y()
        group, tile, sequence = u32(shape.heads // shape.kv_heads), u32(grid_x() - 1 - block_x()), u32(0)
        rows, sequences = u32(0), u32(batch.counts[N_SEQUENCES])
        while sequence < sequences:  # the last tiles come first: they see the most keys
            tokens = u32(batch.starts[sequence + 1] - batch.starts[sequence])
            tiles = u32(u32(tokens * group + u32(most_rows - 1)) // u32(most_rows)) if tokens > most else u32(0)
            if tile < tiles:
                rows = u32(tokens * group)
                break
            tile, sequence = u32(tile - tiles), u32(sequence + 1)
        if rows == 0:
            return
        # Registers and shared memory; the warp's rows and columns.
        begin_token, length = u32(batch.starts[sequence]), i32(batch.lengths[sequence])
        blocks = batch.table + sequence * batch.table_stride
        shares, first_row = u32(grid_z()), u32(tile * u32(most_rows))
        query, s, acc, x = queries(), scores(), sums(), eight()
        peaks, totals, fades = peaks_of(), totals_of(), fades_of()
        spots, lows, highs, own = spots_of(), lows_of(), highs_of(), heads_of()
        k_tile, v_tile, k_words, v_words = k_memory(), v_memory(), staged_k(), staged_v()
        warp, columns = u32((thread >> u32(5)) // u32(across)), u32((thread >> u32(5)) % u32(across) * (8 * v_tiles))
        row = u32(first_row + 16 * warp + (lane >> u32(2)))
        # Load queries to registers, by way of shared memory; begin the online softmax of both rows of a lane.
        take_queries(query, k_tile, x, *q, begin_token, group, kv_head, first_row, rows, shape.k_dim, thread, warp,
                     lane)
        for i in range(2):
            mine = u32(row + 8 * i)
            there = mine < rows
            token, own[i] = u32(begin_token + mine // group), i32(kv_head * group + mine % group)
            spots[i] = i32(batch.positions[token]) if there else i32(0)
            lows[i], highs[i] = seen(spots[i], length, rule.causal, rule.window, rule.chunk)
            highs[i] = highs[i] if there else i32(0)
            peaks[i], totals[i] = f32(LOWEST), f32(0)
            if has_sinks and block_z() == 0 and there:
                peaks[i], totals[i] = biases.sinks[own[i]] * f32(LOG2_E), f32(1) if lane & u32(3) == u32(0) else f32(0)
        clear(acc, fades)
        # The keys that any row of the tile sees, and the share of them that is this part's.
        last_row = u32(first_row + u32(most_rows - 1)) if first_row + u32(most_rows - 1) < rows else u32(rows - 1)
        first, all_to = seen(i32(batch.positions[begin_token + first_row // group]), length, rule.causal, rule.window,
                             rule.chunk)
        all_from, end = seen(i32(batch.positions[begin_token + last_row // group]), length, rule.causal, rule.window,
                             rule.chunk)
        first = i32(u32(first) & u32(0xFFFFFFFF - keys + 1))
        share = i32(u32(u32(end - first) + keys * shares - 1) // u32(keys * shares) * keys)
        first = i32(first + i32(block_z()) * share)
        end = i32(first + share) if first + share < end else end
        # Load the first tile of keys to shared memory; barrier.
        if first < end:
            block, place = u32(blocks[u32(first) // shape.block_size]), u32(u32(first) % shape.block_size)
            fetch_keys(k_words, k_tile, keys_at(k, block, shape.kv_heads, kv_head, shape.block_size), shape.block_size,
                       place, u32(end - first - 1), thread)
            put_keys(k_words, k_tile, thread)
        copy_wait()
        sync_block()
        # For each tile of keys: load values while scores are computed (mma).
        at = first
        while at < end:
            block, place = u32(blocks[u32(at) // shape.block_size]), u32(u32(at) % shape.block_size)
            fetch_values(v_words, v_tile, values_at(v, block, shape.kv_heads, kv_head, shape.block_size),
                         shape.block_size, place, u32(end - at - 1), thread)
            products(s, query, k_tile, lane)
            put_values(v_words, v_tile, thread)
            # Barrier: values are there, keys are used up.
            copy_wait()
            sync_block()
            # Load the next keys while scores become weights and values are added (mma).
            following = i32(at + keys)
            if following < end:
                block, place = u32(blocks[u32(following) // shape.block_size]), u32(u32(following) % shape.block_size)
                fetch_keys(k_words, k_tile, keys_at(k, block, shape.kv_heads, kv_head, shape.block_size),
                           shape.block_size, place, u32(end - following - 1), thread)
            edge = at < all_from or following > all_to
            soften(s, peaks, totals, fades, spots, lows, highs, own, edge, at, rule.scale, rule.cap, biases.slopes,
                   biases.buckets, shape.heads, rule.n_buckets, rule.spread, rule.causal, lane)
            fade(acc, fades)
            weigh(acc, s, v_tile, columns, lane)
            if following < end:
                put_keys(k_words, k_tile, thread)
            # Barrier: the next keys are there, values are used up.
            copy_wait()
            sync_block()
            at = following
        # Epilogue: y, or for several parts what attention_join joins.
        for i in range(2):
            totals[i] += shuffle_xor(totals[i], 1)
            totals[i] += shuffle_xor(totals[i], 2)
            token = u32(begin_token + u32(row + 8 * i) // group)
            head = u32(kv_head * group + u32(row + 8 * i) % group)
            part = partial + ((token * shape.heads + head) * shares + block_z()) * (shape.v_dim + 2)
            to = y.data + (token * y.stride + head * shape.v_dim)
            factor = f32(1) / totals[i] if totals[i] > f32(0) else f32(0)
            if shares > 1:
                to, factor = part + 2, f32(1)
                if row + 8 * i < rows and lane & u32(3) == u32(0) and columns == 0:
                    part[0], part[1] = peaks[i] * f32(1 / LOG2_E), totals[i]
            put_sums(to, x, acc, i, factor, row + 8 * i < rows, columns, shape.v_dim, lane)

    return _many


def _in_runs(count: int, make: Callable[[int], DeviceFunction]) -> DeviceFunction:
    """Functions for runs of 16 sums, called one after the other; a loop over all sums would leave the registers."""

    def both(first: DeviceFunction, second: DeviceFunction) -> DeviceFunction:
        @device
        def run(a, b):
            first(a, b)
            second(a, b)
        return run

    return functools.reduce(both, map(make, range(0, count, 16)))


def _clear(first: int) -> DeviceFunction:
    @device
    def clear(acc, unused):
        for i in range(16):
            acc[first + i] = f32(0)
    return clear


def _fade(first: int) -> DeviceFunction:
    @device
    def fade(acc, fades):
        for i in range(16):
            acc[first + i] *= fades[i // 2 % 2]
    return fade


def _products(steps: int, n_tiles: int, row_pitch: int) -> DeviceFunction:
    """Products of a warp's queries and all keys of the tile."""

    @device
    def multiply(s, query, tile, lane):
        # Lane l names row l % 8 of matrix l // 8: of keys (0, 8) x columns (0, 8), columns first.
        mine = u32(((lane & u32(7)) + 8 * (lane >> u32(4))) * row_pitch + 4 * (lane >> u32(3) & u32(1)))
        for i in range(4 * n_tiles):
            s[i] = f32(0)
        for step in range(steps):
            n = 4 * step
            for pair in range(n_tiles // 2):
                a, b, c, d = load_matrices(tile, u32(mine + 16 * row_pitch * pair + 8 * step))
                i = 8 * pair
                s[i], s[i + 1], s[i + 2], s[i + 3] = mma_f16(query[n], query[n + 1], query[n + 2], query[n + 3], a, b,
                                                             s[i], s[i + 1], s[i + 2], s[i + 3])
                s[i + 4], s[i + 5], s[i + 6], s[i + 7] = mma_f16(
                    query[n], query[n + 1], query[n + 2], query[n + 3], c, d, s[i + 4], s[i + 5], s[i + 6], s[i + 7])

    return multiply


def _soften(n_tiles: int, bias: DeviceFunction) -> DeviceFunction:
    """Scores become weights; `edge`: some of the keys are not for some of the rows."""

    @device
    def soften(s, peaks, totals, fades, spots, lows, highs, own, edge, at, scale, cap, slopes, buckets, heads,
               n_buckets, spread, causal, lane):
        for i in range(2):
            largest = peaks[i]
            for n in range(2 * n_tiles):
                place = 4 * (n // 2) + 2 * i + n % 2
                key = i32(at + 8 * (n // 2) + n % 2 + i32(2 * (lane & u32(3))))
                s[place] = bias(s[place], scale, cap, slopes, buckets, i32(key - spots[i]), u32(own[i]), heads,
                                n_buckets, spread, causal)
            if edge:
                for n in range(2 * n_tiles):
                    place = 4 * (n // 2) + 2 * i + n % 2
                    key = i32(at + 8 * (n // 2) + n % 2 + i32(2 * (lane & u32(3))))
                    s[place] = s[place] if key >= lows[i] and key < highs[i] else f32(LOWEST)
            for n in range(2 * n_tiles):
                largest = fmax(largest, s[4 * (n // 2) + 2 * i + n % 2])
            largest = fmax(largest, shuffle_xor(largest, 1))
            largest = fmax(largest, shuffle_xor(largest, 2))
            fades[i], peaks[i] = exp2(peaks[i] - largest), largest
            largest = f32(0) if largest == f32(LOWEST) else largest  # no key seen yet: all weights are zero
            total = totals[i] * fades[i]
            for n in range(2 * n_tiles):
                place = 4 * (n // 2) + 2 * i + n % 2
                s[place] = exp2(s[place] - largest)
                total += s[place]
            totals[i] = total

    return soften


def _weigh(steps: int, columns: int, row_pitch: int) -> DeviceFunction:
    """Adds values of the tile, weighted, from a column on; steps: of 16 keys, columns: of 16."""

    @device
    def multiply(acc, s, tile, column, lane):
        # Lane l names row l % 8 of matrix l // 8: of keys (0, 8) x columns (0, 8), keys first.
        row = u32((lane & u32(7)) + 8 * (lane >> u32(3) & u32(1)))
        mine = u32(row * row_pitch + 4 * (lane >> u32(4)) + column // u32(2))
        for step in range(steps):
            n = 8 * step
            p0, p1 = pack_halves(s[n], s[n + 1]), pack_halves(s[n + 2], s[n + 3])
            p2, p3 = pack_halves(s[n + 4], s[n + 5]), pack_halves(s[n + 6], s[n + 7])
            for pair in range(columns):
                a, b, c, d = load_columns(tile, u32(mine + 16 * row_pitch * step + 8 * pair))
                i = 8 * pair
                acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = mma_f16(p0, p1, p2, p3, a, b,
                                                                     acc[i], acc[i + 1], acc[i + 2], acc[i + 3])
                acc[i + 4], acc[i + 5], acc[i + 6], acc[i + 7] = mma_f16(
                    p0, p1, p2, p3, c, d, acc[i + 4], acc[i + 5], acc[i + 6], acc[i + 7])

    return multiply


def _put_sums(turned: bool, v_tiles: int) -> DeviceFunction:
    """Writes the values of row `i` of the lane's two."""

    def of(four: int) -> DeviceFunction:
        @device
        def put(to, x, acc, i, factor, there, first_column, v_dim, lane):
            for n in range(8):
                x[n] = acc[4 * (4 * four + n // 2) + 2 * i + n % 2]
            if turned:
                rotate_eight(x, lane, 1, 2)
            for n in range(8):
                column = u32(first_column + 32 * four + 8 * (n // 2) + n % 2 + 2 * (lane & u32(3)))
                if there and column < v_dim:
                    to[column] = x[n] * factor
        return put

    def both(first: DeviceFunction, second: DeviceFunction) -> DeviceFunction:
        @device
        def put(to, x, acc, i, factor, there, first_column, v_dim, lane):
            first(to, x, acc, i, factor, there, first_column, v_dim, lane)
            second(to, x, acc, i, factor, there, first_column, v_dim, lane)
        return put

    return functools.reduce(both, map(of, range(v_tiles // 4)))
