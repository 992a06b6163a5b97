"""Attention of few query rows over many keys, on tensor cores (decoding). The cache has any type but float32.

One block of the grid handles one sequence, one key head and one part of its keys. The rows are all pairs of a new token
and a query head of the key head's group (grouped-query attention). The block takes 8 or 16 rows at a time and reads
every key once for them. Its 4 warps take turns at steps of 32 keys (16 where registers are scarce). The warps combine
their sums in shared memory; join.py combines the parts.

Registers hold accumulators for 128 or 256 columns of the values. If values are wider (latent attention has 512
columns), a block computes one slice of the columns. If keys or values are wide, several blocks share out the rows of a
head, so these kernels serve prompts as well.

The keys are the A operand of mma.m16n8k16 and the queries the B operand. Then a lane's fragment consists of whole
pieces of 8 columns of two keys, which are contiguous in memory: keys and values are loaded from the cache to registers,
decoded and multiplied there, without shared memory. With g = lane // 4 and t = lane % 4:

    S^T [keys, rows] = K Q^T       a lane loads the pieces 4 r + t of keys g and g + 8. The order of the columns is
                                   free, because a dot product sums over all columns
    O^T [columns, rows] = V^T P^T  a lane loads the pieces 8 r + g of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9

Queries, weights and decoded values are rounded to float16; scores and sums are float32.
"""

import functools

from numflow.cuda.attention.bias import LOG2_E, biased, seen
from numflow.cuda.attention.join import LOWEST, warp_joiner
from numflow.cuda.attention.parameters import BatchTables, Biases, Halves, Heads, Scores
from numflow.cuda.device.call import N_SEQUENCES
from numflow.cuda.lang.arithmetic import exp2, fmax, mma_f16, pack_halves, prmt, transpose_matrix
from numflow.cuda.lang.hadamard import rotate_eight
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    block_x,
    block_y,
    block_z,
    grid_x,
    grid_z,
    lane_index,
    load4,
    prefetch,
    shuffle_xor,
    store4,
    stream1,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.state.cache_code import fetcher, halver, name_of_values, pitch, region, width
from numflow.cuda.weights.operand import finite, half_word
from numflow.quant.kv import CODED

WARPS = 4
LINE = 32         # 32-bit words of a cache line
WIDEST = 256      # most columns of a key or a value that is not wide
SLICE_ROUNDS = 4  # rounds of 64 value columns whose accumulators fit in registers; half as many where codes are decoded


def slices_of(v_type: str, v_dim: int) -> int:
    """Number of slices into which the columns of a value are cut."""
    rounds = -(-width(v_type, v_dim) // 64)
    return 1 if rounds <= SLICE_ROUNDS else -(-rounds // (SLICE_ROUNDS // 2 if v_type in CODED else SLICE_ROUNDS))


@functools.cache
def few_kernel(k_type: str, v_type: str, k_dim: int, v_dim: int, tiles: int, has_cap: bool,
               has_slopes: bool, has_sinks: bool, has_buckets: bool, v_row: int) -> Kernel:
    """Grid (key heads, sequences, parts). tiles: tiles of 8 rows at a time, 1 or 2. v_row: as in exact.py.

    Wide keys or values: grid (turns * key heads * slices, sequences, parts). Block `turn` takes every turns-th step of
    rows.
    """
    wide, slices = max(k_dim, v_dim) > WIDEST, slices_of(v_type, v_dim)
    key_tiles = 2 if tiles == 1 and max(k_dim, v_dim) <= 128 else 1  # tiles of 16 keys that a warp takes at a time
    step, s_count = 16 * key_tiles, 4 * key_tiles * tiles
    rounds, v_rounds = -(-width(k_type, k_dim) // 32), -(-width(v_type, v_dim) // (64 * slices))
    unrotate = v_type in CODED
    queries, scores = SharedArray(u32, 128 * tiles * rounds), LocalArray(f32, s_count)
    sums, eight = LocalArray(f32, v_rounds * 16 * tiles), LocalArray(f32, 8)
    maxima_of, totals_of, factors = (LocalArray(f32, 2 * tiles) for _ in range(3))
    positions_of, firsts_of, ends_of, q_heads_of = (LocalArray(i32, 2 * tiles) for _ in range(4))
    shared = SharedArray(f32, 2 * 32 * (v_rounds * 16 * tiles + 4 * tiles))
    keys_at, values_at = region(k_type, k_dim), region(v_type, v_row)
    bias = biased(has_cap, has_slopes, has_buckets, LOG2_E)
    make_queries = _queries(k_type in CODED, rounds, tiles)
    key_products = _key_products(k_type, k_dim, tiles, key_tiles)
    value_products = _value_products(v_type, v_dim, v_row, v_rounds, slices, tiles, key_tiles)
    prefetches = "f16" in (k_type, v_type)  # before the wait for earlier kernels; codes leave no registers for it
    load_batch, part_range = stream1 if prefetches else _load, _part_range(step)
    join_warps, prefetch_cache = warp_joiner(v_rounds * 16, tiles), _cache_prefetch(k_type, v_type, k_dim, v_row, step)
    extras = "_softcap" * has_cap + "_slopes" * has_slopes + "_sinks" * has_sinks + "_buckets" * has_buckets
    k_name, v_name = f"{k_type}_{pitch(k_type, k_dim)}", name_of_values(v_type, v_dim, v_row)

    @kernel(f"attention_few_{k_name}_{v_name}_{8 * tiles}{extras}", 32 * WARPS, blocks=2 if rounds < 8 else 1,
            exact=has_buckets)
    def _few(y: Rows, partial: f32.ptr, q: Rows, k: u32.ptr, v: u32.ptr, biases: Biases, batch: BatchTables,
             shape: Heads, rule: Scores, max_tokens: u32, halves: Halves):
        # Block indices: a sequence and a key head; for wide values also a slice of columns and a turn of the rows.
        lane, warp, sequence, kv_head = u32(lane_index()), u32(thread_index() >> u32(5)), u32(block_y()), block_x()
        first_column, turn, turns = u32(0), u32(0), u32(1)
        if wide:
            first_column, kv_head = u32(block_x() % slices * (64 * v_rounds)), u32(block_x() // slices % shape.kv_heads)
            turn, turns = u32(block_x() // slices // shape.kv_heads), u32(grid_x() // (slices * shape.kv_heads))
        # The sequence. No earlier kernel of the step writes the batch tables: read them before after_previous()
        # (programmatic dependent launch: earlier kernels may still run).
        if sequence >= u32(load_batch(batch.counts, N_SEQUENCES)):
            if prefetches:
                after_previous()
            return
        begin_token, group = u32(load_batch(batch.starts, sequence)), u32(shape.heads // shape.kv_heads)
        rows = u32((u32(load_batch(batch.starts, sequence + 1)) - begin_token) * group)
        length = i32(load_batch(batch.lengths, sequence))
        blocks, parts = batch.table + sequence * batch.table_stride, u32(grid_z())
        if prefetches:
            prefetch_cache(k, v, blocks, shape.kv_heads, kv_head, shape.block_size, length, rule.causal, rule.window,
                           rule.chunk, lane, warp)
            after_previous()
        if rows > max_tokens * group:
            return
        # Registers and shared memory.
        query, s, acc, rescales, x = queries(), scores(), sums(), factors(), eight()
        maxima, totals, q_positions, q_heads = maxima_of(), totals_of(), positions_of(), q_heads_of()
        first_keys, end_keys = firsts_of(), ends_of()
        # For each step of 8 * tiles rows: write the queries to shared memory and initialise the online softmax.
        first_row = u32(8 * tiles * turn)
        while first_row < rows:
            make_queries(query, x, q.data, q.stride, begin_token, group, kv_head, first_row, rows, shape.k_dim, warp,
                         lane)
            for i in range(2 * tiles):
                row = u32(first_row + 8 * (i // 2) + 2 * (lane & u32(3)) + i % 2)
                valid = row < rows
                token, q_heads[i] = u32(begin_token + row // group), i32(kv_head * group + row % group)
                q_positions[i] = i32(batch.positions[token]) if valid else i32(0)
                first_keys[i], end_keys[i] = seen(q_positions[i], length, rule.causal, rule.window, rule.chunk)
                end_keys[i] = end_keys[i] if valid else i32(0)
                maxima[i], totals[i] = f32(LOWEST), f32(0)
                if has_sinks and block_z() == 0 and warp == 0 and valid:
                    maxima[i], totals[i] = biases.sinks[q_heads[i]] * f32(LOG2_E), f32(1) if lane < 4 else f32(0)
            # The keys that any of the rows sees, and the range of them that this part takes.
            for i in range(v_rounds * 16 * tiles):
                acc[i] = f32(0)
            last_row = u32(first_row + 8 * tiles - 1) if first_row + 8 * tiles - 1 < rows else u32(rows - 1)
            first, _ = seen(i32(batch.positions[begin_token + first_row // group]), length, rule.causal, rule.window,
                            rule.chunk)
            _, end = seen(i32(batch.positions[begin_token + last_row // group]), length, rule.causal, rule.window,
                            rule.chunk)
            first, part_keys = part_range(first, end)
            end = i32(first + part_keys) if first + part_keys < end else end
            # The warps take steps of keys in turn. Scores by mma on tensor cores, from keys decoded in registers.
            begin = i32(first + step * i32(warp))
            while begin < end:
                block, offset = u32(blocks[u32(begin) // shape.block_size]), u32(u32(begin) % shape.block_size)
                for n in range(s_count):
                    s[n] = f32(0)
                last = u32(end - begin - 1)
                keys = keys_at(k, block, shape.kv_heads, kv_head, shape.block_size)
                key_products(s, query, keys, shape.block_size, offset, last, lane)
                # Online softmax: bias and mask, new maxima, weights, factors that rescale older sums.
                for i in range(2 * tiles):
                    maximum = f32(LOWEST)
                    for key in range(2 * key_tiles):  # the lane's keys are 16 m + 8 h + g; h is the lowest bit of `key`
                        n = 4 * (tiles * (key // 2) + i // 2) + 2 * (key % 2) + i % 2
                        position = i32(begin + 8 * key + i32(lane >> u32(2)))
                        score = bias(s[n], rule.scale, rule.cap, biases.slopes, biases.buckets,
                                     i32(position - q_positions[i]), u32(q_heads[i]), shape.heads, rule.n_buckets,
                                     rule.spread, rule.causal)
                        s[n] = score if position >= first_keys[i] and position < end_keys[i] else f32(LOWEST)
                        maximum = fmax(maximum, s[n])
                    maximum = fmax(maximum, shuffle_xor(maximum, 4))
                    maximum = fmax(maximum, shuffle_xor(maximum, 8))
                    maximum = fmax(fmax(maximum, shuffle_xor(maximum, 16)), maxima[i])
                    rescales[i], maxima[i] = exp2(maxima[i] - maximum), maximum
                    totals[i] *= rescales[i]
                    for key in range(2 * key_tiles):
                        n = 4 * (tiles * (key // 2) + i // 2) + 2 * (key % 2) + i % 2
                        s[n] = exp2(s[n] - maximum) if s[n] > f32(LOWEST) else f32(0)
                        totals[i] += s[n]
                # Weighted values on tensor cores, added to the rescaled sums.
                values = values_at(v, block, shape.kv_heads, kv_head, shape.block_size)
                value_products(acc, rescales, s, values, shape.block_size, offset, last, lane, first_column)
                begin = i32(begin + step * WARPS)
            # Reduce the totals over the 8 lanes that share a row, then everything over the warps in shared memory.
            for i in range(2 * tiles):
                totals[i] += shuffle_xor(totals[i], 4)
                totals[i] += shuffle_xor(totals[i], 8)
                totals[i] += shuffle_xor(totals[i], 16)
            join_warps(acc, maxima, totals, shared(), warp, lane)
            # Epilogue: warp 0 writes y, or with several parts the partial results that attention_join combines.
            if warp == 0:
                for i in range(2 * tiles):
                    row = u32(first_row + 8 * (i // 2) + 2 * (lane & u32(3)) + i % 2)
                    token, head = u32(begin_token + row // group), u32(kv_head * group + row % group)
                    part = partial + ((token * shape.heads + head) * parts + block_z()) * (shape.v_dim + 2)
                    out = y.data + (token * y.stride + head * shape.v_dim)
                    factor = f32(1) / totals[i] if totals[i] > f32(0) else f32(0)
                    if parts > 1:
                        out, factor = part + 2, f32(1)
                        if row < rows and lane < 4:
                            part[0], part[1] = maxima[i] * f32(1 / LOG2_E), totals[i]
                    for r in range(v_rounds):
                        for d in range(8):
                            x[d] = acc[((4 * r + d // 2) * tiles + i // 2) * 4 + 2 * (d % 2) + i % 2]
                        if unrotate:
                            rotate_eight(x, lane, 8, 4)
                        column = u32(first_column + 64 * r + 8 * (lane >> u32(2)))
                        for d in range(8):
                            if row < rows and column + d < shape.v_dim:
                                out[column + d] = x[d] * factor
                        # The float16 operand of the next `linear`. A weighted mean of float16 values needs no scale.
                        if v_type == "f16" and halves.wanted != 0 and row < rows and column < shape.v_dim:
                            offset = u32(head * shape.v_dim + column)
                            if offset == 0:
                                halves.scales[token] = f32(1)
                            for d in range(8):
                                x[d] = finite(x[d] * factor)
                            offset = half_word(u32(token), offset, u32(shape.heads * shape.v_dim) >> u32(5))
                            store4(halves.words, offset, pack_halves(x[0], x[1]), pack_halves(x[2], x[3]),
                                   pack_halves(x[4], x[5]), pack_halves(x[6], x[7]))
            first_row = u32(first_row + 8 * tiles * turns)

    return _few


@functools.cache
def _part_range(step: int) -> DeviceFunction:
    """Make share_of(first, end) -> first, count: this part's range of the keys first .. end, in whole steps of keys."""

    @device
    def part_range(first, end):
        first, parts = i32(u32(first) & u32(0xFFFFFFFF - step + 1)), u32(grid_z())
        part_keys = i32(u32(u32(end - first) + step * parts - 1) // u32(step * parts) * step)
        return i32(first + i32(block_z()) * part_keys), part_keys

    return part_range


@device
def _load(pointer, index):
    return pointer[index]


def _cache_prefetch(k_type: str, v_type: str, k_dim: int, v_row: int, step: int) -> DeviceFunction:
    """Make ask(k, v, blocks, kv_heads, kv_head, block_size, length, causal, window, chunk, lane, warp).

    A warp prefetches into L2 its first `step` keys and values, those of the sequence's last row. An earlier kernel may
    not have written the newest yet; a prefetch returns no data, and the loads come later. Only float16 rows: a coded
    row is small and spread over several planes.
    """
    keys_at, values_at, part_range = region(k_type, k_dim), region(v_type, v_row), _part_range(step)
    k_pitch, v_pitch = (pitch(kind, dim) if kind == "f16" else 0 for kind, dim in ((k_type, k_dim), (v_type, v_row)))

    @device
    def prefetch_cache(k, v, blocks, kv_heads, kv_head, block_size, length, causal, window, chunk, lane, warp):
        first, end = seen(i32(length - 1), length, causal, window, chunk)
        first, _ = part_range(first, end)
        key = i32(first + step * i32(warp) + i32(lane))
        if lane < step and key < end:
            block, offset = u32(stream1(blocks, u32(key) // block_size)), u32(u32(key) % block_size)
            keys, values = (keys_at(k, block, kv_heads, kv_head, block_size),
                            values_at(v, block, kv_heads, kv_head, block_size))
            for i in range(0, k_pitch, LINE):
                prefetch(keys, u32(offset * k_pitch + i))
            for i in range(0, v_pitch, LINE):
                prefetch(values, u32(offset * v_pitch + i))

    return prefetch_cache


def _queries(rotated: bool, rounds: int, tiles: int) -> DeviceFunction:
    """Make make(...): write the query rows to shared memory as B fragments of mma; a lane has piece 4 r + t of row g.

    Queries are rotated (Hadamard) if the keys are. The warps share out the fragments.
    """

    @device
    def make(memory, x, q, q_stride, begin_token, group, kv_head, first_row, rows, k_dim, warp, lane):
        fragment = warp
        while fragment < tiles * rounds:
            row = u32(first_row + fragment // u32(rounds) * 8 + (lane >> u32(2)))
            column = u32(fragment % u32(rounds) * 32 + 8 * (lane & u32(3)))
            last = u32(row if row < rows else u32(rows - 1))
            source = q + ((begin_token + last // group) * q_stride + (kv_head * group + last % group) * k_dim)
            for d in range(8):
                x[d] = source[column + d] if column + d < k_dim else f32(0)
            if rotated:
                rotate_eight(x, lane, 2, 1)
            store4(memory, u32(4 * (32 * fragment + lane)), pack_halves(x[0], x[1]), pack_halves(x[2], x[3]),
                   pack_halves(x[4], x[5]), pack_halves(x[6], x[7]))
            fragment = u32(fragment + WARPS)
        sync_block()

    return make


def _key_products(k_type: str, k_dim: int, tiles: int, key_tiles: int) -> DeviceFunction:
    """Make multiply(...): add the products of 16 or 32 keys and all rows. Keys beyond `last` repeat key `last`."""
    pieces = width(k_type, k_dim) // 8
    rounds, whole = -(-pieces // 4), pieces % 4 == 0
    fetch, halves, words = fetcher(k_type, k_dim), halver(k_type), LocalArray(u32, 4 * tiles)

    def of(r: int) -> DeviceFunction:  # unrolled by hand: in a loop, each round would wait for the loads of its keys
        @device
        def multiply(s, query, keys, block_size, offset, last, lane):
            b, piece = words(), u32(4 * r + (lane & u32(3)))
            for j in range(tiles):
                at = 4 * j
                b[at], b[at + 1], b[at + 2], b[at + 3] = load4(query, u32(4 * (32 * (j * rounds + r) + lane)))
            for m in range(key_tiles):
                row_g, row_g8 = u32(16 * m + (lane >> u32(2))), u32(16 * m + 8 + (lane >> u32(2)))
                row_g = u32(offset + (row_g if row_g < last else last))
                row_g8 = u32(offset + (row_g8 if row_g8 < last else last))
                n0, n1, n2, n3 = u32(0), u32(0), u32(0), u32(0)
                f0, f1, f2, f3 = u32(0), u32(0), u32(0), u32(0)
                if whole or piece < pieces:
                    n0, n1, n2, n3 = fetch(keys, block_size, row_g, piece)
                    f0, f1, f2, f3 = fetch(keys, block_size, row_g8, piece)
                    n0, n1, n2, n3 = halves(n0, n1, n2, n3, piece)
                    f0, f1, f2, f3 = halves(f0, f1, f2, f3, piece)
                for j in range(tiles):
                    at, c = 4 * j, 4 * (m * tiles + j)
                    s[c], s[c + 1], s[c + 2], s[c + 3] = mma_f16(n0, f0, n1, f1, b[at], b[at + 1],
                                                                 s[c], s[c + 1], s[c + 2], s[c + 3])
                    s[c], s[c + 1], s[c + 2], s[c + 3] = mma_f16(n2, f2, n3, f3, b[at + 2], b[at + 3],
                                                                 s[c], s[c + 1], s[c + 2], s[c + 3])
        return multiply

    def both(first: DeviceFunction, second: DeviceFunction) -> DeviceFunction:
        @device
        def multiply(s, query, keys, block_size, offset, last, lane):
            first(s, query, keys, block_size, offset, last, lane)
            second(s, query, keys, block_size, offset, last, lane)
        return multiply

    return functools.reduce(both, map(of, range(rounds)))


def _value_products(v_type: str, v_dim: int, v_row: int, rounds: int, slices: int, tiles: int,
                    key_tiles: int) -> DeviceFunction:
    """Make multiply(...): rescale the sums, then add the values of 16 or 32 keys, weighted by the softmax weights in s.

    The sums have `rounds` times 64 columns of the values, from `first_column` on.
    """
    pieces = width(v_type, v_dim) // 8
    whole = pieces == 8 * rounds * slices
    fetch, halves = fetcher(v_type, v_row), halver(v_type)
    weights, words = LocalArray(u32, 2 * tiles), LocalArray(u32, 16)

    @device
    def multiply(acc, rescales, s, values, block_size, offset, last, lane, first_column):
        w, p = words(), weights()
        for m in range(key_tiles):
            for j in range(tiles):
                c = 4 * (m * tiles + j)
                p[2 * j] = transpose_matrix(pack_halves(s[c], s[c + 1]))
                p[2 * j + 1] = transpose_matrix(pack_halves(s[c + 2], s[c + 3]))
            for r in range(rounds):
                piece = u32((first_column >> u32(3)) + 8 * r + (lane >> u32(2)))
                for i in range(4):
                    key = u32(16 * m + 2 * (lane & u32(3)) + i % 2 + 8 * (i // 2))
                    key = u32(offset + (key if key < last else last))
                    a, b, c, d = u32(0), u32(0), u32(0), u32(0)
                    if whole or piece < pieces:
                        a, b, c, d = fetch(values, block_size, key, piece)
                        a, b, c, d = halves(a, b, c, d, piece)
                    w[i], w[4 + i], w[8 + i], w[12 + i] = a, b, c, d
                for u in range(4):
                    a, b = prmt(w[4 * u], w[4 * u + 1], u32(0x5410)), prmt(w[4 * u], w[4 * u + 1], u32(0x7632))
                    c, d = prmt(w[4 * u + 2], w[4 * u + 3], u32(0x5410)), prmt(w[4 * u + 2], w[4 * u + 3], u32(0x7632))
                    for j in range(tiles):
                        n = ((4 * r + u) * tiles + j) * 4
                        if m == 0:
                            for i in range(4):
                                acc[n + i] *= rescales[2 * j + i % 2]
                        acc[n], acc[n + 1], acc[n + 2], acc[n + 3] = mma_f16(
                            a, b, c, d, p[2 * j], p[2 * j + 1], acc[n], acc[n + 1], acc[n + 2], acc[n + 3])

    return multiply
