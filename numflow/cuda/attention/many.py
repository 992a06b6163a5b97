"""Attention of many query rows, on tensor cores (prompts), as in FlashAttention-2. The cache has any type but float32.

A block has 64 rows, 16 for each of its 4 warps. A row is a pair of a token and a query head of one group. The block
walks over the keys that its rows see, 64 at a time (32 if heads are wide). If values have more than 128 columns, the
accumulators of a warp cover half of the columns: a block has 32 rows, and two warps share each 16 rows. The running
maximum, the sum of weights and the weighted values of a row stay in registers; a larger maximum rescales the sums
(online softmax).

    S [rows, keys] = Q K^T      O [rows, columns] = rescale * O + exp2(S - maximum) V

Keys and values are float16 tiles in shared memory. Loads overlap with products: values load while scores are computed,
the next keys load while values are added. A float16 cache is copied by cp.async. Codes are fetched into registers
before a product and decoded into shared memory after it. Queries, weights and decoded values are rounded to float16;
scores and sums are float32. If the grid has few blocks, the keys are split into parts, which join.py combines.
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

ROWS = 64  # most rows of a block


def warps_across(v_type: str, v_dim: int) -> int:
    """Number of warps that share the value columns of the same 16 rows; a block has ROWS / warps_across rows."""
    return 2 if sixteens(v_type, v_dim) > 8 else 1


@functools.cache
def many_kernel(k_type: str, v_type: str, k_dim: int, v_dim: int, has_cap: bool, has_slopes: bool, has_sinks: bool,
                has_buckets: bool, v_row: int) -> Kernel:
    """Grid (row tiles of all sequences, key heads, parts). v_row: as in exact.py."""
    k_steps, v_steps = sixteens(k_type, k_dim), sixteens(v_type, v_dim)
    keys = 64 if max(k_steps, v_steps) <= 8 else 32
    across = warps_across(v_type, v_dim)
    most_rows, n_tiles, v_tiles = ROWS // across, keys // 8, -(-v_steps // (2 * across)) * 4
    k_pitch, v_pitch = 8 * k_steps + 4, 8 * v_steps + 4  # words of a row; 4 of padding avoid bank conflicts
    k_memory, v_memory = SharedArray(u32, keys * k_pitch), SharedArray(u32, keys * v_pitch)
    queries, scores, sums = LocalArray(u32, 4 * k_steps), LocalArray(f32, 4 * n_tiles), LocalArray(f32, 4 * v_tiles)
    eight, maxima_of, totals_of, rescales_of = (LocalArray(f32, n) for n in (8, 2, 2, 2))
    positions_of, firsts_of, ends_of, q_heads_of = (LocalArray(i32, 2) for _ in range(4))
    keys_at, values_at = region(k_type, k_dim), region(v_type, v_row)
    take_queries = query_taker(k_type, k_dim, keys, k_pitch, most_rows)
    write_sums = _write_sums(v_type in CODED, v_tiles)
    key_words, fetch_keys, put_keys = stager(k_type, k_dim, k_dim, keys, k_pitch)
    value_words, fetch_values, put_values = stager(v_type, v_dim, v_row, keys, v_pitch)
    products, weigh = _products(k_steps, n_tiles, k_pitch), _weigh(keys // 16, min(v_steps, v_tiles // 2), v_pitch)
    softmax = _softmax(n_tiles, biased(has_cap, has_slopes, has_buckets, LOG2_E))
    staged_k, staged_v = LocalArray(u32, key_words), LocalArray(u32, value_words)
    clear, rescale = _in_runs(4 * v_tiles, _clear), _in_runs(4 * v_tiles, _rescale)
    extras = "_softcap" * has_cap + "_slopes" * has_slopes + "_sinks" * has_sinks + "_buckets" * has_buckets
    k_name, v_name = f"{k_type}_{pitch(k_type, k_dim)}", name_of_values(v_type, v_dim, v_row)

    @kernel(f"attention_many_{k_name}_{v_name}{extras}", 128, blocks=2, exact=has_buckets)
    def _many(y: Rows, partial: f32.ptr, q: Rows, k: u32.ptr, v: u32.ptr, biases: Biases, batch: BatchTables,
              shape: Heads, rule: Scores, few_tokens: u32):
        # Find the sequence and the rows of this block's tile.
        thread, lane, kv_head = u32(thread_index()), u32(lane_index()), block_y()
        group, tile, sequence = u32(shape.heads // shape.kv_heads), u32(grid_x() - 1 - block_x()), u32(0)
        rows, sequences = u32(0), u32(batch.counts[N_SEQUENCES])
        while sequence < sequences:  # block 0 takes the last tile: it sees the most keys and should start first
            tokens = u32(batch.starts[sequence + 1] - batch.starts[sequence])
            tiles = u32(u32(tokens * group + u32(most_rows - 1)) // u32(most_rows)) if tokens > few_tokens else u32(0)
            if tile < tiles:
                rows = u32(tokens * group)
                break
            tile, sequence = u32(tile - tiles), u32(sequence + 1)
        if rows == 0:
            return
        # Registers and shared memory; the warp's rows and columns.
        begin_token, length = u32(batch.starts[sequence]), i32(batch.lengths[sequence])
        blocks = batch.table + sequence * batch.table_stride
        parts, first_row = u32(grid_z()), u32(tile * u32(most_rows))
        query, s, acc, x = queries(), scores(), sums(), eight()
        maxima, totals, rescales = maxima_of(), totals_of(), rescales_of()
        q_positions, first_keys, end_keys, q_heads = positions_of(), firsts_of(), ends_of(), q_heads_of()
        k_tile, v_tile, k_words, v_words = k_memory(), v_memory(), staged_k(), staged_v()
        warp, columns = u32((thread >> u32(5)) // u32(across)), u32((thread >> u32(5)) % u32(across) * (8 * v_tiles))
        row = u32(first_row + 16 * warp + (lane >> u32(2)))
        # Load queries to registers by way of shared memory. Initialise the online softmax of the lane's two rows.
        take_queries(query, k_tile, x, *q, begin_token, group, kv_head, first_row, rows, shape.k_dim, thread, warp,
                     lane)
        for i in range(2):
            lane_row = u32(row + 8 * i)
            valid = lane_row < rows
            token, q_heads[i] = u32(begin_token + lane_row // group), i32(kv_head * group + lane_row % group)
            q_positions[i] = i32(batch.positions[token]) if valid else i32(0)
            first_keys[i], end_keys[i] = seen(q_positions[i], length, rule.causal, rule.window, rule.chunk)
            end_keys[i] = end_keys[i] if valid else i32(0)
            maxima[i], totals[i] = f32(LOWEST), f32(0)
            if has_sinks and block_z() == 0 and valid:
                maxima[i] = biases.sinks[q_heads[i]] * f32(LOG2_E)
                totals[i] = f32(1) if lane & u32(3) == u32(0) else f32(0)
        clear(acc, rescales)
        # The keys that any row of the tile sees, and the range of them that this part takes.
        last_row = u32(first_row + u32(most_rows - 1)) if first_row + u32(most_rows - 1) < rows else u32(rows - 1)
        first, all_to = seen(i32(batch.positions[begin_token + first_row // group]), length, rule.causal, rule.window,
                             rule.chunk)
        all_from, end = seen(i32(batch.positions[begin_token + last_row // group]), length, rule.causal, rule.window,
                             rule.chunk)
        first = i32(u32(first) & u32(0xFFFFFFFF - keys + 1))
        part_keys = i32(u32(u32(end - first) + keys * parts - 1) // u32(keys * parts) * keys)
        first = i32(first + i32(block_z()) * part_keys)
        end = i32(first + part_keys) if first + part_keys < end else end
        # Load the first tile of keys to shared memory; barrier.
        if first < end:
            block, offset = u32(blocks[u32(first) // shape.block_size]), u32(u32(first) % shape.block_size)
            fetch_keys(k_words, k_tile, keys_at(k, block, shape.kv_heads, kv_head, shape.block_size), shape.block_size,
                       offset, u32(end - first - 1), thread)
            put_keys(k_words, k_tile, thread)
        copy_wait()
        sync_block()
        # For each tile of keys: load values while scores are computed (mma).
        begin = first
        while begin < end:
            block, offset = u32(blocks[u32(begin) // shape.block_size]), u32(u32(begin) % shape.block_size)
            fetch_values(v_words, v_tile, values_at(v, block, shape.kv_heads, kv_head, shape.block_size),
                         shape.block_size, offset, u32(end - begin - 1), thread)
            products(s, query, k_tile, lane)
            put_values(v_words, v_tile, thread)
            # Barrier: the values have arrived, and all warps have read the keys.
            copy_wait()
            sync_block()
            # Load the next keys while scores become weights and weighted values are added (mma).
            next_begin = i32(begin + keys)
            if next_begin < end:
                block = u32(blocks[u32(next_begin) // shape.block_size])
                offset = u32(u32(next_begin) % shape.block_size)
                fetch_keys(k_words, k_tile, keys_at(k, block, shape.kv_heads, kv_head, shape.block_size),
                           shape.block_size, offset, u32(end - next_begin - 1), thread)
            needs_mask = begin < all_from or next_begin > all_to
            softmax(s, maxima, totals, rescales, q_positions, first_keys, end_keys, q_heads, needs_mask, begin,
                    rule.scale, rule.cap, biases.slopes, biases.buckets, shape.heads, rule.n_buckets, rule.spread,
                    rule.causal, lane)
            rescale(acc, rescales)
            weigh(acc, s, v_tile, columns, lane)
            if next_begin < end:
                put_keys(k_words, k_tile, thread)
            # Barrier: the next keys have arrived, and all warps have read the values.
            copy_wait()
            sync_block()
            begin = next_begin
        # Epilogue: write y, or with several parts the partial results that attention_join combines.
        for i in range(2):
            totals[i] += shuffle_xor(totals[i], 1)
            totals[i] += shuffle_xor(totals[i], 2)
            token = u32(begin_token + u32(row + 8 * i) // group)
            head = u32(kv_head * group + u32(row + 8 * i) % group)
            part = partial + ((token * shape.heads + head) * parts + block_z()) * (shape.v_dim + 2)
            out = y.data + (token * y.stride + head * shape.v_dim)
            factor = f32(1) / totals[i] if totals[i] > f32(0) else f32(0)
            if parts > 1:
                out, factor = part + 2, f32(1)
                if row + 8 * i < rows and lane & u32(3) == u32(0) and columns == 0:
                    part[0], part[1] = maxima[i] * f32(1 / LOG2_E), totals[i]
            write_sums(out, x, acc, i, factor, row + 8 * i < rows, columns, shape.v_dim, lane)

    return _many


def _in_runs(count: int, make: Callable[[int], DeviceFunction]) -> DeviceFunction:
    """Chain functions that each handle 16 accumulators: the compiler would not unroll one loop over all of them, and
    an array indexed by a variable goes to local memory instead of registers."""

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


def _rescale(first: int) -> DeviceFunction:
    @device
    def rescale(acc, rescales):
        for i in range(16):
            acc[first + i] *= rescales[i // 2 % 2]
    return rescale


def _products(steps: int, n_tiles: int, row_pitch: int) -> DeviceFunction:
    """Make multiply(s, query, tile, lane): scores of a warp's 16 rows and all keys of the tile."""

    @device
    def multiply(s, query, tile, lane):
        # ldmatrix.x4: lane l gives the address of row l % 8 of 8x8 matrix l // 8. The four matrices are keys 0-7 x
        # columns 0-7 and 8-15, then keys 8-15 x columns 0-7 and 8-15.
        address = u32(((lane & u32(7)) + 8 * (lane >> u32(4))) * row_pitch + 4 * (lane >> u32(3) & u32(1)))
        for i in range(4 * n_tiles):
            s[i] = f32(0)
        for step in range(steps):
            n = 4 * step
            for pair in range(n_tiles // 2):
                a, b, c, d = load_matrices(tile, u32(address + 16 * row_pitch * pair + 8 * step))
                i = 8 * pair
                s[i], s[i + 1], s[i + 2], s[i + 3] = mma_f16(query[n], query[n + 1], query[n + 2], query[n + 3], a, b,
                                                             s[i], s[i + 1], s[i + 2], s[i + 3])
                s[i + 4], s[i + 5], s[i + 6], s[i + 7] = mma_f16(
                    query[n], query[n + 1], query[n + 2], query[n + 3], c, d, s[i + 4], s[i + 5], s[i + 6], s[i + 7])

    return multiply


def _softmax(n_tiles: int, bias: DeviceFunction) -> DeviceFunction:
    """Make softmax(...): online softmax of the tile, from scores to weights in place.

    needs_mask: some row does not see some key of the tile.
    """

    @device
    def softmax(s, maxima, totals, rescales, q_positions, first_keys, end_keys, q_heads, needs_mask, begin, scale, cap,
                slopes, buckets, heads, n_buckets, spread, causal, lane):
        for i in range(2):
            maximum = maxima[i]
            for n in range(2 * n_tiles):
                n_s = 4 * (n // 2) + 2 * i + n % 2
                key = i32(begin + 8 * (n // 2) + n % 2 + i32(2 * (lane & u32(3))))
                s[n_s] = bias(s[n_s], scale, cap, slopes, buckets, i32(key - q_positions[i]), u32(q_heads[i]), heads,
                                n_buckets, spread, causal)
            if needs_mask:
                for n in range(2 * n_tiles):
                    n_s = 4 * (n // 2) + 2 * i + n % 2
                    key = i32(begin + 8 * (n // 2) + n % 2 + i32(2 * (lane & u32(3))))
                    s[n_s] = s[n_s] if key >= first_keys[i] and key < end_keys[i] else f32(LOWEST)
            for n in range(2 * n_tiles):
                maximum = fmax(maximum, s[4 * (n // 2) + 2 * i + n % 2])
            maximum = fmax(maximum, shuffle_xor(maximum, 1))
            maximum = fmax(maximum, shuffle_xor(maximum, 2))
            rescales[i], maxima[i] = exp2(maxima[i] - maximum), maximum
            maximum = f32(0) if maximum == f32(LOWEST) else maximum  # no visible key yet: all weights become zero
            total = totals[i] * rescales[i]
            for n in range(2 * n_tiles):
                n_s = 4 * (n // 2) + 2 * i + n % 2
                s[n_s] = exp2(s[n_s] - maximum)
                total += s[n_s]
            totals[i] = total

    return softmax


def _weigh(steps: int, columns: int, row_pitch: int) -> DeviceFunction:
    """Make multiply(...): add the weighted values of the tile to acc, from a column on.

    steps: steps of 16 keys. columns: groups of 16 value columns.
    """

    @device
    def multiply(acc, s, tile, column, lane):
        # ldmatrix.x4.trans: lane l gives the address of row l % 8 of 8x8 matrix l // 8. The four matrices are keys 0-7
        # and 8-15 of columns 0-7, then of columns 8-15.
        row = u32((lane & u32(7)) + 8 * (lane >> u32(3) & u32(1)))
        address = u32(row * row_pitch + 4 * (lane >> u32(4)) + column // u32(2))
        for step in range(steps):
            n = 8 * step
            p0, p1 = pack_halves(s[n], s[n + 1]), pack_halves(s[n + 2], s[n + 3])
            p2, p3 = pack_halves(s[n + 4], s[n + 5]), pack_halves(s[n + 6], s[n + 7])
            for pair in range(columns):
                a, b, c, d = load_columns(tile, u32(address + 16 * row_pitch * step + 8 * pair))
                i = 8 * pair
                acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = mma_f16(p0, p1, p2, p3, a, b,
                                                                     acc[i], acc[i + 1], acc[i + 2], acc[i + 3])
                acc[i + 4], acc[i + 5], acc[i + 6], acc[i + 7] = mma_f16(
                    p0, p1, p2, p3, c, d, acc[i + 4], acc[i + 5], acc[i + 6], acc[i + 7])

    return multiply


def _write_sums(unrotate: bool, v_tiles: int) -> DeviceFunction:
    """Make put(...): write the weighted values of the lane's row `i` (0 or 1)."""

    def of(group: int) -> DeviceFunction:
        @device
        def put(out, x, acc, i, factor, valid, first_column, v_dim, lane):
            for n in range(8):
                x[n] = acc[4 * (4 * group + n // 2) + 2 * i + n % 2]
            if unrotate:
                rotate_eight(x, lane, 1, 2)
            for n in range(8):
                column = u32(first_column + 32 * group + 8 * (n // 2) + n % 2 + 2 * (lane & u32(3)))
                if valid and column < v_dim:
                    out[column] = x[n] * factor
        return put

    def both(first: DeviceFunction, second: DeviceFunction) -> DeviceFunction:
        @device
        def put(out, x, acc, i, factor, valid, first_column, v_dim, lane):
            first(out, x, acc, i, factor, valid, first_column, v_dim, lane)
            second(out, x, acc, i, factor, valid, first_column, v_dim, lane)
        return put

    return functools.reduce(both, map(of, range(v_tiles // 4)))
